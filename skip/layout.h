#pragma once

#include <torch/nn/modules/container/sequential.h>

#include <memory>
#include <string>
#include <vector>

#include "skip/context.h"

namespace gpipe {

/// One skip of a model: the indices of the layers that stash and pop it (from <= to).
struct SkipLink {
  SkipKey key;
  int from = 0;
  int to = 0;
};

/// A layer, and its name for messages.
struct NamedLayer {
  std::string name;
  std::shared_ptr<torch::nn::Module> module;
};

/// Returns the skips of a model, in the order of their stashing layers. A skip of a nested layer counts as a skip of
/// its outer layer. Nested layers are taken to run in the order in which they were registered, as in a Sequential. The
/// order is not checked if one end of a skip is nested in the layer with the other end.
///
/// Errors: std::invalid_argument that lists every fault with its layer and name: a name that is stashed twice, popped
/// twice, popped without or before its stash, or never popped.
std::vector<SkipLink> skip_links(const std::vector<NamedLayer>& layers);

/// Checks a model's skips, as the constructor of GPipe does. Errors: as skip_links().
void verify_skippables(const torch::nn::Sequential& model);

}  // namespace gpipe
