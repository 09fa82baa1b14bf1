// Runs a driver once over every file in a folder: run_corpus FOLDER. It stands in for libFuzzer's main.

#include <sys/resource.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

/// The most memory that one small file may cost.
constexpr long kMegabytes = 512;

long peak_megabytes() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss / 1024;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "Usage: " << argv[0] << " FOLDER\n";
    return EXIT_FAILURE;
  }
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(argv[1])) {
    // Said first, because a driver that finds a fault ends the process.
    std::cout << entry.path().filename().string() << std::endl;
    std::ifstream file(entry.path(), std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(file), {}};
    const auto before = peak_megabytes();
    LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
    if (const auto used = peak_megabytes() - before; used > kMegabytes) {
      std::cerr << "it took " << used << " MB of memory\n";
      return EXIT_FAILURE;
    }
    ++files;
  }
  std::cout << files << " files\n";
  return files > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
