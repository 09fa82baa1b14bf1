#pragma once

#include <c10/core/Device.h>
#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "balance/profile.h"
#include "gpipe/autograd/layer.h"
#include "gpipe/runtime/allocation_listener.h"
#include "gpipe/runtime/mutex.h"
#include "gpipe/schedule/action.h"
#include "skip/context.h"

namespace gpipe {

/// Watches the layers of a pipeline from the inside: when each layer's part of an action begins and, where it is
/// installed as the PROFILER_STATE of c10::DebugInfoGuard, what that part allocates and frees. Thread-safe.
///
/// Between two layers, where a graph is built, stands an identity node, which says in the backward where one layer's
/// part ends and that of the layer before it begins: the engine runs all nodes of a layer before those of earlier ones.
class LayerTrace : public AllocationListener, public std::enable_shared_from_this<LayerTrace> {
 public:
  /// With `recomputes`, a forward that builds a graph is an R. The layers run on `device`.
  LayerTrace(int layers, bool recomputes, c10::Device device);

  /// The layers, which now tell when they run.
  std::vector<std::unique_ptr<Layer>> watch(std::vector<std::unique_ptr<Layer>> layers);

  /// What an action does to one layer.
  struct Part {
    Kind kind = Kind::F;
    bool graph = false;  ///< of an F: whether it builds one
    int layer = 0;
    int micro_batch = 0;

    friend bool operator==(const Part&, const Part&) = default;
  };
  struct Mark {
    Part part;
    double start = 0;  ///< seconds, by the clock of timelines
  };
  /// The parts that began since the last call, in the order of their beginnings.
  std::vector<Mark> take_marks();

  /// What was allocated, by a pipeline of one stage in its first mini-batch, of several micro-batches, which is over:
  /// fills in what the profile says of memory, with `recomputes` the stored forwards' part of it, else all else.
  void read_memory(Profile& profile);

  // What watched layers tell: a part begins on this thread; a micro-batch's activation reaches a layer, or with the
  // number of layers the end; a layer pops a skip.
  void begins(const Part& part);
  void reaches(int layer, int micro_batch, const std::vector<at::Tensor>& activation);
  void pops(int layer, int micro_batch, const SkipKey& key, const at::Tensor& skip);

  /// Each skip as it was popped: its bytes, and whether it has been changed in place since.
  struct Skip {
    std::int64_t bytes = 0;
    bool changed = false;
  };
  std::map<SkipKey, Skip> skips() const;

 private:
  struct Allocation {
    Part born;
    std::int64_t bytes = 0;
    int reaches = 0;
    int popped_by = -1;
    enum class End { kNone, kPart, kCaller } end = End::kNone;
    Part freed_by;
  };
  /// A tensor's version counter, which does not keep its memory.
  struct Version {
    c10::VariableVersion counter;
    std::uint32_t was;

    explicit Version(const at::Tensor& tensor);
    bool changed() const { return counter.current_version() != was; }
  };

  void allocated(const void* data, std::int64_t bytes) override;
  void freed(const void* data, std::int64_t) override;
  void close_part() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Allocation* find(const at::Tensor& tensor) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  const Part* part_of_this_thread() const;

  const std::uint64_t id_;
  const bool recomputes_;
  const c10::Device device_;
  mutable Mutex mutex_;
  std::vector<Mark> marks_ ABSL_GUARDED_BY(mutex_);
  std::vector<Allocation> allocations_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<const void*, std::size_t> live_ ABSL_GUARDED_BY(mutex_);  // index, by address
  std::int64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::int64_t bytes_before_ ABSL_GUARDED_BY(mutex_) = 0;
  std::int64_t peak_ ABSL_GUARDED_BY(mutex_) = 0;
  Part open_ ABSL_GUARDED_BY(mutex_);
  std::vector<bool> backward_seen_ ABSL_GUARDED_BY(mutex_);  // by layer
  std::vector<std::int64_t> output_bytes_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::int64_t> forward_extra_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::int64_t> backward_extra_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::pair<int, Version>> inputs_ ABSL_GUARDED_BY(mutex_);  // by layer
  std::map<SkipKey, std::pair<std::int64_t, std::optional<Version>>> skips_ ABSL_GUARDED_BY(mutex_);
};

/// The memory of a tensor's elements; 0 for an undefined or sparse one.
std::int64_t bytes_of(const at::Tensor& tensor);

}  // namespace gpipe
