#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "gpipe/autograd/parcel.h"
#include "gpipe/autograd/value.h"

namespace gpipe {

/// Samples in each micro-batch of a mini-batch of `samples`: at most `chunks` equal ones, the last one smaller (as
/// torch::chunk cuts); or, with split_size > 0, that many each. At least one micro-batch, empty for an empty
/// mini-batch. Errors: std::invalid_argument for numbers that are negative, for chunks of 0 without a split_size, and
/// for more than kMostCells micro-batches.
std::vector<std::int64_t> micro_batch_sizes(std::int64_t samples, std::int64_t chunks, std::int64_t split_size);

/// The common size of dimension 0. Errors: std::invalid_argument for no tensors, an undefined or 0-dimensional one, or
/// unequal sizes.
std::int64_t batch_size(const Value& input);

/// Cuts every tensor along dimension 0 into views without history. A parcel wants gradients where its input requires
/// grad.
std::vector<Parcel> scatter(const Value& input, const std::vector<std::int64_t>& sizes);

/// Micro-batches joined again: what they make up, and of each of its tensors whether a gradient is wanted for any part
/// of it, and the sizes of its parts along dimension 0.
struct Gathered {
  Value value;
  std::vector<bool> wants_gradient;
  std::vector<std::vector<std::int64_t>> sizes;
};

/// Joins the parts along dimension 0, output by output. Passes a single part on without a copy, except a tensor that
/// shares memory with another output or an input.
/// Errors: std::runtime_error when the parts differ in number or form, or have no dimension to be joined along.
Gathered gather(const std::vector<Parcel>& parts);

/// The pieces of a gathered output's gradient, one a part of the given sizes along dimension 0; undefined for an
/// undefined gradient.
std::vector<at::Tensor> scatter_gradient(const at::Tensor& gradient, const std::vector<std::int64_t>& sizes);

/// Joins the micro-batches' gradients of one input, zero where a part is undefined; undefined when all are.
at::Tensor gather_gradient(std::vector<at::Tensor> parts, const std::vector<std::int64_t>& sizes);

}  // namespace gpipe
