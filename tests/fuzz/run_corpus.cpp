// A replacement for libFuzzer's main: run_corpus FOLDER runs the driver once on every file in the folder.

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

/// Limit on the memory used for one file.
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
    // Prints the name first, because a driver that finds a fault ends the process.
    std::cout << entry.path().filename().string() << std::endl;
    std::ifstream file(entry.path(), std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(file), {}};
    const auto before = peak_megabytes();
    LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
    if (const auto used = peak_megabytes() - before; used > kMegabytes) {
      std::cerr << "used " << used << " MB of memory; the limit is " << kMegabytes << " MB\n";
      return EXIT_FAILURE;
    }
    ++files;
  }
  std::cout << files << " files\n";
  return files > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
