#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <string>
#include <vector>

#include "gpipe/api.h"

namespace gpipe {

/// Distinguishes skips of the same name. The default constructor makes a new namespace; a copy equals its original.
/// Construction and comparison are thread-safe.
class GPIPE_API Namespace {
 public:
  Namespace();

  friend auto operator<=>(const Namespace&, const Namespace&) = default;

  /// The namespace of names that are not isolated.
  static Namespace global() { return Namespace(0); }

  std::uint64_t id() const { return id_; }

 private:
  explicit Namespace(std::uint64_t id) : id_(id) {}

  std::uint64_t id_;
};

/// Identifies a skip by its namespace and name.
struct SkipKey {
  Namespace ns = Namespace::global();
  std::string name;

  friend auto operator<=>(const SkipKey&, const SkipKey&) = default;
};

/// Returns "'name'", or "'name' (namespace 3)" for an isolated name.
GPIPE_API std::string to_string(const SkipKey& key);

/// Mixin for a layer that stashes tensors for later layers, or pops or peeks at tensors of earlier ones:
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
/// pop() takes a skip out: a skip has at most one, and no later layer reads it. peek() leaves it for later layers: any
/// number of them may read it. In a pipeline a skip goes from the stage that stashes it to the workers that read it,
/// once to each worker and micro-batch, and is freed after its last reader. In a plain Sequential it is passed on the
/// calling thread, and is freed by its pop or the next stash.
///
/// Each layer stashes, pops or peeks at each name that it declares once in every forward. Tensors of any dtype and
/// undefined tensors can be stashed. Changing a stashed tensor in place before its last reader has it is an error,
/// because its gradient would be wrong.
class GPIPE_API Skippable {
 public:
  struct Names {
    std::vector<std::string> stash = {};
    std::vector<std::string> pop = {};
    std::vector<std::string> peek = {};
  };

  virtual ~Skippable() = default;

  /// Moves the names of this layer and of its nested Skippable layers into a namespace, so that a model can contain the
  /// same layers twice. Also moves names isolated before. If `only` is not empty, moves only those names.
  /// REQUIRES: called before the model becomes a pipeline.
  /// Errors: std::invalid_argument if `only` contains a name that none of the layers declares. Then no name is moved.
  void isolate(Namespace ns, const std::vector<std::string>& only = {});

  /// The declared names with their current namespaces, in the order of the declaration.
  const std::vector<SkipKey>& stashes() const { return stashes_; }
  const std::vector<SkipKey>& pops() const { return pops_; }
  const std::vector<SkipKey>& peeks() const { return peeks_; }

 protected:
  /// Errors: std::invalid_argument for an empty or repeated name.
  explicit Skippable(Names names);

  /// REQUIRES: called inside forward(). Errors: std::invalid_argument for a name that the layer does not declare;
  /// std::runtime_error for a name that is read before it is stashed and, in a pipeline, for a name that is stashed
  /// twice in one forward. In a plain Sequential a second stash replaces the first.
  void stash(const std::string& name, torch::Tensor tensor);
  torch::Tensor pop(const std::string& name);
  torch::Tensor peek(const std::string& name);

 private:
  friend GPIPE_API void isolate(torch::nn::Module& module, Namespace ns, const std::vector<std::string>& only);

  std::vector<SkipKey> stashes_;
  std::vector<SkipKey> pops_;
  std::vector<SkipKey> peeks_;
};

/// The same for a module and its submodules: isolates every Skippable among them.
GPIPE_API void isolate(torch::nn::Module& module, Namespace ns, const std::vector<std::string>& only = {});

/// Implements stash(), pop() and peek() for the calling thread. A pipeline sets a context for each cell. Outside a
/// pipeline each thread has a default context, so that skippable layers also work in a plain Sequential.
///
/// The default context keeps a stashed tensor until it is popped or until the same key is stashed again, so a failed
/// forward does not affect the next one. Its pop() and peek() throw std::runtime_error if nothing is stashed under the
/// key.
class GPIPE_API SkipContext {
 public:
  virtual ~SkipContext() = default;

  virtual void stash(const SkipKey& key, at::Tensor tensor) = 0;
  virtual at::Tensor pop(const SkipKey& key) = 0;
  virtual at::Tensor peek(const SkipKey& key) = 0;

  /// Returns the calling thread's context.
  static SkipContext& current();
};

/// Makes a context current on this thread for a scope. Scopes nest.
/// REQUIRES: the context outlives the guard; the guard is destroyed on the thread that created it.
class GPIPE_API SkipContextGuard {
 public:
  explicit SkipContextGuard(SkipContext& context);
  ~SkipContextGuard();
  SkipContextGuard(const SkipContextGuard&) = delete;

 private:
  SkipContext* const previous_;
};

}  // namespace gpipe
