#include "gpipe/snapshot.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/from_blob.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <mutex>
#include <sstream>
#include <system_error>

#include "absl/strings/escaping.h"
#include "gpipe/base/checks.h"
#include "gpipe/snapshot/capture.h"

namespace gpipe {
namespace {

namespace optim = torch::optim;
using nlohmann::json;

void check_writable(const std::string& name, const at::Tensor& tensor) {
  if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
    refuse_argument("cannot restore '", name, "' of this model: some of its elements share memory; clone it first");
  }
  if (tensor.is_meta()) refuse_argument("cannot restore '", name, "' of this model: it is on the meta device");
  if (tensor.is_inference() && !c10::InferenceMode::is_enabled()) {
    refuse_argument("cannot restore '", name, "' of this model: it was made in inference mode; clone it first");
  }
}

void check_same_kind(const std::string& name, const std::string& saved, const std::string& own) {
  if (saved != own) {
    refuse_argument("the snapshot is of another model: '", name, "' is ", saved, " in the snapshot and ", own,
                    " in this model");
  }
}

std::string generator_state() {
  const auto state = capture_random();
  return absl::Base64Escape(absl::string_view(static_cast<const char*>(state.const_data_ptr()), state.nbytes()));
}

void set_generator_state(const json& random, const OwnState& own) {
  if (!random.is_array() || random.empty()) return;
  const auto& saved = random[static_cast<int>(random.size()) == own.ranks ? own.rank : 0];
  std::string bytes;
  absl::Base64Unescape(saved.at("torch").get<std::string>(), &bytes);
  const auto size = static_cast<std::int64_t>(bytes.size());
  restore_random(at::from_blob(bytes.data(), {size}, at::kByte));
}

/// Errors: std::invalid_argument for a snapshot that the model's tensors cannot be loaded from.
void check_model(SnapshotReader& reader, const OwnState& own) {
  for (const auto& item : own.tensors) {
    if (!reader.contains(item.key())) check_same_kind(item.key(), "missing", description_of(item.value()));
    check_writable(item.key(), item.value());
  }
  for (const auto& name : reader.weights()) {
    if (own.elsewhere.contains(name) && !own.tensors.contains(name)) continue;
    const auto* found = own.tensors.find(name);
    check_same_kind(name, reader.describe(name), found == nullptr ? "missing" : description_of(*found));
  }
}

Progress progress_of(const json& manifest) {
  return {.step = manifest.value("step", std::int64_t{0}), .extra = manifest.value("extra", json()).dump()};
}

template <class Read>
auto reading(const std::filesystem::path& path, Read read) {
  std::string reason;
  try {
    return read();
  } catch (const std::invalid_argument&) {
    throw;
  } catch (const std::system_error& error) {
    reason = error.code().message();
  } catch (const std::exception& error) {
    reason = reason_of(error.what());
  }
  throw_error("cannot read '", path.string(), "': ", reason);
}

}  // namespace

at::Tensor capture_random() {
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void restore_random(const at::Tensor& saved) {
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  try {
    generator.set_state(saved);
  } catch (const c10::Error& error) {
    refuse_argument("not a state of the CPU's random number generator: ", error.what_without_backtrace());
  }
}

std::string description_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return "undefined";
  std::ostringstream text;
  text << tensor.scalar_type() << tensor.sizes();
  if (tensor.layout() != at::kStrided) text << ' ' << tensor.layout();
  if (tensor.is_quantized()) text << ' ' << c10::toString(tensor.qscheme());
  return text.str();
}

OwnState state_of(const torch::nn::Module& model) {
  OwnState own;
  own.parameters = model.named_parameters();
  own.tensors.update(own.parameters);
  own.tensors.update(model.named_buffers());
  return own;
}

SnapshotPart capture(const OwnState& own, const optim::Optimizer* optimizer, const Progress& progress) {
  SnapshotPart part;
  for (const auto& item : own.tensors) part.weights.emplace(item.key(), item.value());
  try {
    part.manifest = {{"step", progress.step}, {"extra", parse_json(progress.extra)}};
  } catch (const json::exception&) {
    refuse_argument("the progress has an extra that is not JSON: ", progress.extra);
  }
  part.manifest["random"] = {{"torch", generator_state()}};
  if (optimizer != nullptr) capture_optimizer(part, *optimizer, own.parameters);
  return part;
}

Progress restore(const std::filesystem::path& folder, const OwnState& own, optim::Optimizer* optimizer) {
  return reading(folder, [&] {
    SnapshotReader reader(folder);
    check_model(reader, own);
    const auto set_optimizer =
        optimizer == nullptr ? std::function<void()>([] {}) : optimizer_of(reader, own, *optimizer);
    const c10::AutoGradMode no_gradients(false);
    for (const auto& item : own.tensors) at::Tensor(item.value()).copy_(reader.read(item.key()));
    set_optimizer();
    set_generator_state(reader.manifest().value("random", json()), own);
    return progress_of(reader.manifest());
  });
}

Progress load_snapshot(const std::filesystem::path& folder, torch::nn::Module& model, optim::Optimizer* optimizer) {
  return restore(folder, state_of(model), optimizer);
}

Progress read_progress(const std::filesystem::path& folder) {
  return reading(folder, [&] { return progress_of(SnapshotReader(folder).manifest()); });
}

NamedTensors read_weights(const std::filesystem::path& path) {
  return reading(path, [&] {
    NamedTensors weights("Tensor");
    if (std::filesystem::is_directory(path)) {
      SnapshotReader reader(path);
      for (const auto& name : reader.weights()) weights.insert(name, reader.read(name));
      return weights;
    }
    for (auto& [name, tensor] : read_safetensors(path).tensors) {
      if (!name.starts_with('.')) weights.insert(name, tensor);
    }
    return weights;
  });
}

}  // namespace gpipe
