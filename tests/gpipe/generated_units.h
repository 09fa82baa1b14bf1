// The units that generated models are made of.
#pragma once

#include "tests/gpipe/layers.h"

namespace gpipe {

/// Builds a model unit by unit.
class Builder {
 public:
  explicit Builder(std::int64_t of_width) : width(of_width) {}

  /// Makes or adds a tensor or module that the next layer will own.
  Tensor parameter(torch::IntArrayRef shape, bool requires_grad = true);
  Tensor buffer(Tensor tensor) { return buffers_.emplace_back(std::move(tensor)); }
  template <class Holder>
  Holder module(Holder holder) {
    modules_.push_back(holder.ptr());
    return holder;
  }
  /// The next layer will share a matrix with the other layer of the pair.
  Tensor shared_matrix();

  /// Adds a layer that calls a function of one tensor, tuple or vector.
  template <class Function>
  void add(Function function) {
    push(function_layer(std::move(function)));
  }
  template <class Layer>
  void push(Layer layer) {
    own(*layer);
    model->push_back(std::move(layer));
  }

  const std::int64_t width;  ///< a unit maps [samples, width] to the same shape
  int variant = 0;           ///< of the unit
  std::string pair;          ///< the name of the unit's pair
  Sequential model;

 private:
  void own(torch::nn::Module& layer);

  std::vector<std::pair<Tensor, bool>> parameters_;
  std::vector<Tensor> buffers_;
  std::vector<std::shared_ptr<torch::nn::Module>> modules_;
  std::map<std::string, Tensor> shared_;
};

/// The number of variants of a unit. Some units have fewer, and treat several as one.
inline constexpr int kVariants = 4;

struct Unit {
  /// A unit of one kind belongs to a pair with a later one of the next kind.
  enum Role { kWhole, kStash, kPop, kStashOdd, kPopOdd, kOwnMatrix, kShareMatrix };
  enum Flags {
    kChanges = 1,  ///< changes a tensor in place that it is given
    kAliases = 2,  ///< passes on, or stashes, several tensors that share memory
    kDouble = 4,   ///< needs double precision: PyTorch has another kernel for a forward without a graph
    kHost = 8,     ///< runs on the CPU only
  };

  const char* name;
  std::function<void(Builder& builder)> build;
  int flags = 0;
  Role role = kWhole;
};

const std::vector<Unit>& units();

}  // namespace gpipe
