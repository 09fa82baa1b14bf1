// Random cases of transparency: a model, a cut, a schedule, micro-batches and a checkpoint mode, compared with the reference.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/gpipe/helpers.h"

namespace gpipe {

/// A layer of a generated model, or several that belong together.
enum class UnitKind {
  kLinear,
  kNorm,
  kDropout,
  kInPlaceDropout,
  kInPlaceRelu,
  kTanh,
  kPeak,  // counts the graphs that are alive
  kConvolve,
  kNested,
  kSeveralTensors,  // five layers, with integers, in-place operations and a tensor returned twice
  kStash,
  kPop,
  kStashOdd,  // integers, an undefined tensor, and a tensor that is not used
  kPopOdd,
};

struct Unit {
  UnitKind kind;
  int skip = 0;  // the number of the skip, for a stash or pop
};

struct Spec {
  std::uint64_t seed = 0;
  std::vector<Unit> units;
  int workers = 1;
  int loops = 1;  // stages per worker
  int batch = 1;
  int chunks = 1;
  Checkpoint checkpoint = Checkpoint::kNever;
  std::string schedule = {};  // of step(); empty: forward() and backward
  bool wide = false;          // wide layers, so that W has work
};

std::string to_string(const Spec& spec);
Spec generate(std::uint64_t seed);

/// Returns the simpler cases to try in place of one that fails.
std::vector<Spec> smaller(const Spec& spec);

/// The features of a case, to be counted.
std::vector<std::string> features(const Spec& spec);
extern const std::size_t kFeatures;

/// Where a case runs. The reference runs on `reference`.
struct Devices {
  std::vector<torch::Device> workers;  // as many as Spec::workers, or more
  torch::Device input;
  torch::Device target;
  torch::Device reference;
};

/// Runs a case, on the CPU if no devices are given. Returns the first result that differs from the reference's, or the text
/// of an error; empty if there is none. Results on the CPU must be bit-equal. Those of other devices may differ by 1e-4
/// (wide: 1e-3), because a convolution's sums depend on the strides of its input. With ranks, every rank must call this
/// with the same case, and compares what it has.
std::string difference(const Spec& spec, const std::optional<Devices>& devices = std::nullopt,
                       const std::shared_ptr<Ranks>& ranks = nullptr);

/// The number of workers of the case, which its layers may limit.
int workers_of(const Spec& spec);

}  // namespace gpipe
