#pragma once

#include <torch/nn/module.h>

#include <string>
#include <utility>
#include <vector>

#include "skip/context.h"
#include "skip/namespace.h"

namespace gpipe {

/// Mixin of a layer that stashes tensors for a later layer, or pops those of an earlier one:
///
///   struct Encode : torch::nn::Module, gpipe::Skippable {
///     Encode() : Skippable({.stash = {"features"}}) {}
///     torch::Tensor forward(torch::Tensor x) { stash("features", x); return x; }
///   };
///   struct Decode : torch::nn::Module, gpipe::Skippable {
///     Decode() : Skippable({.pop = {"features"}}) {}
///     torch::Tensor forward(torch::Tensor x) { return x + pop("features"); }
///   };
///
/// Inside a pipeline a skip goes straight from the stage that stashes to the stage that pops; in a plain Sequential the
/// same layers hand it over on the calling thread. A name is stashed once and popped once in each forward; any dtype,
/// and undefined tensors, may be stashed. A stashed tensor must not be changed in place before it is popped by another
/// stage: that is an error, for its gradient would be wrong.
class Skippable {
 public:
  struct Names {
    std::vector<std::string> stash = {};
    std::vector<std::string> pop = {};
  };

  virtual ~Skippable() = default;

  /// Moves the names of this layer, and of Skippable layers nested in it, into a namespace, so that the same layers can
  /// be used twice in one model; names that were isolated before move too. With `only`, those names alone. To be called
  /// before the model is put into a pipeline. Errors: std::invalid_argument when `only` has a name that none of them
  /// declares; then nothing has moved.
  void isolate(Namespace ns, const std::vector<std::string>& only = {});

  /// The declared names as they stand, in the order given.
  const std::vector<SkipKey>& stashes() const { return stashes_; }
  const std::vector<SkipKey>& pops() const { return pops_; }

 protected:
  /// Errors: std::invalid_argument for an empty or repeated name, or one that is both stashed and popped.
  explicit Skippable(Names names);

  /// For use inside forward(). Errors: std::invalid_argument when the name was not declared so; std::runtime_error when
  /// it is popped before it was stashed and, in a pipeline, when it is stashed twice in one forward. In a plain
  /// Sequential a second stash replaces the first.
  void stash(const std::string& name, torch::Tensor tensor);
  torch::Tensor pop(const std::string& name);

 private:
  friend void isolate(torch::nn::Module& module, Namespace ns, const std::vector<std::string>& only);

  std::vector<SkipKey> stashes_;
  std::vector<SkipKey> pops_;
};

/// The same over a whole module: isolates every Skippable found in it.
void isolate(torch::nn::Module& module, Namespace ns, const std::vector<std::string>& only = {});

}  // namespace gpipe
