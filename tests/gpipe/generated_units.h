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
  Tensor buffer(Tensor tensor) { return own_->register_buffer(new_name(), std::move(tensor)); }
  template <class Holder>
  Holder module(Holder holder) {
    own_->register_module(new_name(), holder);
    return holder;
  }
  /// The next layer will share a matrix, which may be frozen, with the other layer of the pair.
  Tensor shared_matrix();

  /// Adds a layer that calls a function of one tensor, tuple or vector.
  template <class Function>
  void add(Function function) {
    push(function_layer(std::move(function)));
  }
  template <class Layer>
  void push(Layer layer) {
    if (owned_ > 0) layer->register_module("own", std::exchange(own_, std::make_shared<torch::nn::Module>()));
    owned_ = 0;
    model->push_back(std::move(layer));
  }

  const std::int64_t width;  ///< a unit maps [samples, width] to the same shape
  int variant = 0;           ///< of the unit
  std::string pair;          ///< the name of the unit's pair
  Sequential model;

 private:
  std::string new_name() { return "own" + std::to_string(owned_++); }

  std::shared_ptr<torch::nn::Module> own_ = std::make_shared<torch::nn::Module>();  ///< a part of the next layer
  int owned_ = 0;
  std::map<std::string, Tensor> shared_;
};

/// The number of variants of a unit. Some units have fewer, and treat several as one.
inline constexpr int kVariants = 4;

struct Unit {
  /// A unit of one kind belongs to a pair with a later one of the next kind.
  enum Role { kWhole, kStash, kPop, kPeek, kStashOdd, kPopOdd, kOwnMatrix, kShareMatrix };
  enum Flags {
    kChanges = 1,      ///< changes a tensor in place that it is given
    kAliases = 2,      ///< passes on, or stashes, several tensors that share memory
    kDouble = 4,       ///< needs double precision: PyTorch has another kernel for a forward without a graph
    kHost = 8,         ///< runs on the CPU only
    kDrops = 16,       ///< its output may not depend on its input, whose graph is freed then before a backward
    kOnce = 32,        ///< cannot be recomputed
    kBackward = 64,    ///< its backward writes to a buffer
    kUnordered = 128,  ///< the order of its sums of gradients depends on the place of the sum, or on the thread
    kAlone = 256,      ///< replicas refuse its sparse gradients, or what it writes to a parameter
  };

  const char* name;
  std::function<void(Builder& builder)> build;
  int flags = 0;
  Role role = kWhole;
};

const std::vector<Unit>& units();

}  // namespace gpipe
