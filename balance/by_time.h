#pragma once

#include <torch/nn/modules/container/sequential.h>
#include <torch/types.h>

#include <cstdint>
#include <vector>

#include "gpipe/autograd/value.h"

namespace gpipe {

/// Seconds of forward plus backward of each layer on this machine, in training mode, for one micro-batch: the medians
/// of `repeats` runs after one to warm up. The sample has the size of a micro-batch, which moves the figures. CPU
/// layers run with `intraop_threads` threads. The model's mode, parameters, gradients and buffers, and the default
/// generator, are left as they were, but the parameters move to the sample's device.
/// Errors: std::invalid_argument for an empty sample or repeats < 1, and where GPipe refuses the model with one layer a
/// stage, as it does tied weights; what the layers throw.
std::vector<double> time_layers(const torch::nn::Sequential& model, const Value& sample, int intraop_threads = 1,
                                int repeats = 5);

/// The balance over `partitions` stages whose slowest stage is fastest, by time_layers(). Errors: those of
/// time_layers() and partition().
std::vector<std::int64_t> balance_by_time(int partitions, const torch::nn::Sequential& model, const Value& sample,
                                          int intraop_threads = 1);

}  // namespace gpipe
