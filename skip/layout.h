#pragma once

#include <torch/nn/modules/container/sequential.h>

#include <memory>
#include <string>
#include <vector>

#include "gpipe/api.h"
#include "skip/skippable.h"

namespace gpipe {

/// One skip of a model: the index of the layer that stashes it, and for each module that reads it the index of its
/// layer, ascending (from <= readers).
struct SkipLink {
  SkipKey key;
  int from = 0;
  std::vector<int> readers;
};

/// The layers that read a skip, each once.
GPIPE_API std::vector<int> distinct_readers(const SkipLink& skip);

/// A layer, and its name for messages.
struct NamedLayer {
  std::string name;
  std::shared_ptr<torch::nn::Module> module;
};

/// The skips that one module declares.
struct SkipDeclaration {
  int layer = 0;     ///< index of the layer that is this module or contains it
  std::string path;  ///< the layer's name, then the names of nested modules: "layer.child"
  std::vector<SkipKey> stashes;
  std::vector<SkipKey> pops;
  std::vector<SkipKey> peeks;
};

/// Matches the stashes of a model with their readers. The declarations are in the order in which the modules run. The
/// order of a module and one nested in it is not checked. Returns the skips in the order of their stashes. Errors:
/// std::invalid_argument that lists every fault with layer and name: a name stashed or popped twice, read without or
/// before its stash or after its pop, or stashed and never read.
GPIPE_API std::vector<SkipLink> match_skips(const std::vector<SkipDeclaration>& declarations);

/// The skips that a layer declares, and those of Skippable modules nested in it. `index` is the layer's.
GPIPE_API std::vector<SkipDeclaration> skip_declarations(const NamedLayer& layer, int index);

/// The skips of a model. Modules nested in a layer run in the order in which they were registered, as in a Sequential.
/// Errors: as match_skips().
GPIPE_API std::vector<SkipLink> skip_links(const std::vector<NamedLayer>& layers);

/// Checks a model's skips, as the constructor of GPipe does. Errors: as skip_links().
GPIPE_API void verify_skippables(const torch::nn::Sequential& model);

}  // namespace gpipe
