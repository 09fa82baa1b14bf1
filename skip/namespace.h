#pragma once

#include <cstdint>

namespace gpipe {

/// Tells apart equal names of stashed tensors: a skip is identified by (namespace, name). Two Namespace objects made by
/// the default constructor are different; a copy equals its original. Thread-safe to make and to compare.
class Namespace {
 public:
  Namespace();

  friend auto operator<=>(const Namespace&, const Namespace&) = default;

  /// The namespace of layers that were never isolated.
  static Namespace global() { return Namespace(0); }

  std::uint64_t id() const { return id_; }

 private:
  explicit Namespace(std::uint64_t id) : id_(id) {}

  std::uint64_t id_;
};

}  // namespace gpipe
