#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>

#include <cstdint>
#include <random>

namespace gpipe::examples {

/// Random numbers for drawing and augmenting. Different streams of one seed are independent.
class Random {
 public:
  explicit Random(std::uint64_t seed, std::uint64_t stream = 0) {
    std::seed_seq seeds{seed, seed >> 32, stream, stream >> 32};
    engine_.seed(seeds);
  }

  double between(double low, double high) { return std::uniform_real_distribution(low, high)(engine_); }
  /// A whole number from 0 to count - 1.
  int below(int count) { return std::uniform_int_distribution(0, count - 1)(engine_); }
  bool chance(double probability) { return between(0, 1) < probability; }
  std::uint64_t seed() { return engine_(); }

 private:
  std::mt19937_64 engine_;
};

/// Returns the numbers from 0 to count - 1 in random order.
inline at::Tensor random_order(std::int64_t count, Random random) {
  return at::randperm(count, at::detail::createCPUGenerator(random.seed()));
}

}  // namespace gpipe::examples
