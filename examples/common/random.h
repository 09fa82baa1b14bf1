#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>

#include <cstdint>
#include <random>

namespace gpipe::examples {

/// Random numbers for order and drawing. Different streams of one seed are independent.
inline at::Generator make_generator(std::uint64_t seed, std::uint64_t stream = 0) {
  std::seed_seq seeds{seed, seed >> 32, stream, stream >> 32};
  return at::detail::createCPUGenerator(std::mt19937_64(seeds)());
}

/// Returns the numbers from 0 to count - 1 in random order.
inline at::Tensor random_order(std::int64_t count, std::uint64_t seed, std::uint64_t stream = 0) {
  return at::randperm(count, make_generator(seed, stream));
}

}  // namespace gpipe::examples
