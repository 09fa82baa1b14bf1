#pragma once

#include <torch/nn/modules/container/sequential.h>

#include <memory>
#include <string>
#include <vector>

#include "skip/context.h"

namespace gpipe {

/// One skip of a model, by the indices of the layers that hold its ends (from <= to).
struct SkipLink {
  SkipKey key;
  int from = 0;
  int to = 0;
};

/// A layer as the user named it, for messages.
struct NamedLayer {
  std::string name;
  std::shared_ptr<torch::nn::Module> module;
};

/// The skips of a model, in the order of their stashing layers. Skippable layers nested in a layer count as that
/// layer's and run in the order in which they were registered, as in a Sequential; where one of a skip's ends is nested
/// in the layer that holds the other, the order is that layer's own affair. Errors: std::invalid_argument that lists
/// every fault, each with layer and name: a name stashed or popped twice, popped without or before its stash, stashed
/// and never popped.
std::vector<SkipLink> skip_links(const std::vector<NamedLayer>& layers);

/// Checks a model's skips as GPipe does when it is made. Errors: as skip_links().
void verify_skippables(const torch::nn::Sequential& model);

}  // namespace gpipe
