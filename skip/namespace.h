#pragma once

#include <cstdint>
#include <string>

namespace gpipe {

/// Distinguishes skips of the same name. The default constructor makes a new namespace; a copy equals its original.
/// Construction and comparison are thread-safe.
class Namespace {
 public:
  Namespace();

  friend auto operator<=>(const Namespace&, const Namespace&) = default;

  /// The namespace of names that are not isolated.
  static Namespace global() { return Namespace(0); }

  std::uint64_t id() const { return id_; }

 private:
  explicit Namespace(std::uint64_t id) : id_(id) {}

  std::uint64_t id_;
};

/// Identifies a skip by its namespace and name.
struct SkipKey {
  Namespace ns = Namespace::global();
  std::string name;

  friend auto operator<=>(const SkipKey&, const SkipKey&) = default;
};

/// Returns "'name'", or "'name' (namespace 3)" for an isolated name.
std::string to_string(const SkipKey& key);

}  // namespace gpipe
