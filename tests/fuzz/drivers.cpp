// Each driver passes its input to a reader of files. The reader must accept the input or throw an exception that its
// header documents. Crashes, sanitizer reports, hangs and excessive memory use are faults. ./test gives each driver its
// inputs in corpus.txt. `tests/long fuzz` searches for new faults (needs clang): minimise a found input with
// -minimize_crash=1 and add it to corpus.txt, where \xHH stands for a byte.

#include <c10/core/CPUAllocator.h>
#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <new>
#include <sstream>
#include <stdexcept>
#include <string>

#include "gpipe/model.h"
#include "gpipe/snapshot.h"
#include "gpipe/snapshot/folder.h"
#include "tests/support/support.h"

namespace gpipe {
namespace {

void require(bool condition, const std::string& what) {
  if (condition) return;
  std::cerr << what << "\n";
  std::abort();
}

/// Calls a reader, which can refuse the input with an Error whose message begins with a text.
template <class Error, class Read>
void read(const std::string& begin, Read call) {
  try {
    call();
  } catch (const Error& error) {
    require(std::string(error.what()).starts_with(begin), std::string("another error: ") + error.what());
  }
}

/// A safetensors file, or the manifest of a snapshot if it begins with "{".
void safetensors(const std::string& bytes) {
  static const TemporaryDirectory folder;
  read<std::runtime_error>("", [&] {
    if (bytes.starts_with('{')) {
      const auto manifest = json_or_null(bytes);
      std::ofstream(folder / kManifest) << (manifest.is_object() ? with_checksum(manifest).dump() : bytes);
      torch::nn::Linear model(1, 1);
      torch::optim::SGD optimizer(model->parameters(), 0.1);
      read<std::invalid_argument>("", [&] { load_snapshot(folder.path(), *model, &optimizer); });
      return;
    }
    SafetensorsFile file(std::make_unique<std::istringstream>(bytes), bytes.size());
    for (const auto& name : file.names()) file.read(name);
  });
}

/// Gives tensors little memory, because a model may ask for any.
class LittleMemory : public c10::Allocator {
 public:
  LittleMemory() { c10::SetCPUAllocator(this, /*priority=*/1); }

  c10::DataPtr allocate(std::size_t size) override {
    constexpr std::size_t kMost = std::size_t{1} << 22;
    if (size > kMost) throw std::bad_alloc();
    return before_->allocate(size);
  }
  c10::DeleterFnPtr raw_deleter() const override { return before_->raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t size) const override { before_->copy_data(to, from, size); }

 private:
  c10::Allocator* const before_ = c10::GetCPUAllocator();
};

/// The JSON of a model file with a few tensors. An accepted one runs in both modes, as far as its operators let it, and
/// is saved.
void model(const std::string& json) {
  static const TemporaryDirectory folder;
  static LittleMemory memory;
  const auto path = folder / "model";
  Safetensors content{.model = json};
  content.tensors = {{"w", torch::full({4, 4}, 0.5)}, {"b", torch::arange(4.0)}, {".n", torch::arange(3)}};
  std::string file;
  const auto append = [&](const void* data, std::size_t size) { file.append(static_cast<const char*>(data), size); };
  read<std::runtime_error>("", [&] { write_safetensors(content, append); });  // refuses text that is not UTF-8
  std::ofstream(path, std::ios::binary) << file;
  read<std::runtime_error>("[gpipe] cannot load the model", [&] {
    auto layers = load_model(path);
    for (const bool training : {true, false}) {
      layers->train(training);
      read<std::exception>("", [&] { layers->forward<Value>(Value(torch::ones({2, 4}))); });
      read<std::exception>("", [&] { layers->forward<Value>(Value({torch::ones({2, 4}), torch::arange(2)})); });
    }
    read<std::exception>("", [&] { layers->clone(); });
    save_model(path, *layers);
    load_model(path);
  });
}

}  // namespace
}  // namespace gpipe

#ifdef GPIPE_FUZZ_DRIVER

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  gpipe::GPIPE_FUZZ_DRIVER(std::string(reinterpret_cast<const char*>(data), size));
  return 0;
}

#else

namespace {

std::string unescaped(const std::string& text) {
  std::string bytes;
  for (std::size_t at = 0; at < text.size(); ++at) {
    const bool is_escape = text[at] == '\\';
    bytes += is_escape ? static_cast<char>(std::stoi(text.substr(at + 2, 2), nullptr, 16)) : text[at];
    if (is_escape) at += 3;
  }
  return bytes;
}

}  // namespace

/// fuzz_corpus FILE: runs each line's driver once.
int main(int, char** argv) {
  const std::map<std::string, void (*)(const std::string&)> drivers = {{"safetensors", gpipe::safetensors},
                                                                       {"model", gpipe::model}};
  std::ifstream corpus(argv[1]);
  int inputs = 0;
  std::string driver, name, text;
  for (; corpus >> driver >> name && std::getline(corpus >> std::ws, text); ++inputs) {
    std::cout << driver << " " << name << std::endl;  // first, because a driver that finds a fault ends the process
    drivers.at(driver)(unescaped(text));
  }
  std::cout << inputs << " inputs\n";
  return inputs > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

#endif
