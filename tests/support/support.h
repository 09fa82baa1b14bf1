#pragma once

#include <stdlib.h>  // mkdtemp is not in <cstdlib>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <stdexcept>
#include <string>
#include <system_error>

namespace gpipe {

/// A new directory for one test. The destructor removes it and its contents.
class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string name = (std::filesystem::temp_directory_path() / "gpipe-test-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("cannot create the directory " + name);
    path_ = name;
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(const std::filesystem::path& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

/// Returns the message of the Error that the call throws, or "" if it throws nothing. Other exceptions pass through.
template <class Error = std::runtime_error, class Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

/// The seeds of the cases to try.
struct Seeds {
  std::uint64_t first = 1;
  std::uint64_t count = 0;
};

/// Seeds 1 to `count`, or those that GPIPE_GENERATED_SEED (the first) and GPIPE_GENERATED_CASES (the count) ask for.
inline Seeds seeds_from_environment(std::uint64_t count) {
  const auto read = [](const char* name, std::uint64_t otherwise) {
    const char* text = std::getenv(name);
    return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
  };
  return {read("GPIPE_GENERATED_SEED", 1), read("GPIPE_GENERATED_CASES", count)};
}

/// A number from `low` to `high`, the same with every standard library.
inline int draw(std::mt19937_64& random, int low, int high) {
  return low + static_cast<int>(random() % static_cast<std::uint64_t>(high - low + 1));
}

}  // namespace gpipe
