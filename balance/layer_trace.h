#pragma once

#include <limits>
#include <set>

#include "balance/profile.h"
#include "gpipe/autograd/layer.h"
#include "gpipe/tensors/byte_counter.h"
#include "gpipe/tensors/parcel.h"
#include "skip/layout.h"

namespace gpipe {

/// Records when each layer's part of an action begins inside a pipeline. Where installed as an allocation listener, it
/// also records the memory that this part allocates and frees. Thread-safe.
///
/// Puts an identity node between consecutive layers of a graph. In the backward, one layer's part ends and the previous
/// layer's begins at this node, because the engine runs all nodes of a layer before those of earlier layers.
class LayerTrace : public AllocationListener, public std::enable_shared_from_this<LayerTrace> {
 public:
  /// `recomputes`: the pipeline checkpoints every micro-batch. The layers run on `device`.
  LayerTrace(int layers, bool recomputes, c10::Device device);

  /// Wraps a pipeline's layers so that they report to this trace.
  std::vector<std::unique_ptr<Layer>> wrap(std::vector<std::unique_ptr<Layer>> layers);

  /// The part of an action that belongs to one layer.
  struct Part {
    Kind kind = Kind::F;
    bool graph = false;  ///< F only: builds an autograd graph
    int layer = 0;
    int micro_batch = 0;

    friend bool operator==(const Part&, const Part&) = default;
  };
  struct Mark {
    Part part;
    double start = 0;  ///< in seconds, on the clock of timelines
  };
  /// Returns the parts that began since the last call, in order of time.
  std::vector<Mark> take_marks();

  // Memory. The functions below REQUIRE that this trace was a listener while a pipeline with one worker ran its first
  // mini-batch, of several micro-batches, the last one's backward first; and that take_marks() was not called.

  /// Memory that a forward allocated, in order. `kept` if a W freed it.
  struct Saved {
    std::int64_t bytes = 0;
    bool kept = false;
  };
  /// Returns what the forward of a micro-batch allocated. The timeline is of the mini-batch.
  std::vector<Saved> saved_for_weights(const Timeline& timeline) const;

  /// Fills in the memory fields of the profile: with `recomputes` those of forwards without a graph, else those of
  /// forwards and whole backwards. `saved` tells which memory a W frees if backwards are split.
  void read_memory(Profile& profile, const std::vector<Saved>& saved);
  /// Adds the skips to the profile.
  void read_skips(Profile& profile, const std::vector<SkipLink>& links);
  /// Fills in the memory fields of split backwards, but none of forwards.
  void read_split_memory(Profile& profile, const Timeline& timeline);

  // Reports of the wrapped layers. begins(): a part begins on this thread, if it has not. reaches(): an activation is
  // the input of `layer`, or the model's output if that is the number of layers. reads(): a layer reads a skip.
  void begins(const Part& part);
  void reaches(int layer, int micro_batch, const std::vector<at::Tensor>& activation);
  void reads(int layer, int micro_batch, const SkipKey& key, const at::Tensor& skip);
  /// The gradients of a layer's outputs, at the beginning of its part of a backward.
  void passes_back(int layer, const std::vector<at::Tensor>& gradients);

 private:
  struct Allocation {
    Part born;
    std::int64_t bytes = 0;
    int reaches = 0;
    std::set<int> readers = {};
    std::optional<Part> freed_by = {};                          ///< none if the caller frees it, or it is not freed
    double born_at = 0;                                         ///< in seconds, on the clock of timelines
    double freed_at = std::numeric_limits<double>::infinity();  ///< likewise
    int passes_back_to = 0;                                     ///< of a backward: the last layer whose part gets it
  };

  void allocated(const void* data, std::int64_t bytes) override;
  void freed(const void* data, std::int64_t) override;
  /// The most bytes in use in an interval, above those at its start. `as_last`: earlier gradients count to its end.
  std::int64_t peak_between(double start, double end, bool as_last) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Raises the peaks of the layers' parts, up to the end of their actions if there is a timeline.
  void read_peaks(Profile& profile, const Timeline* split) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Allocation* find(const at::Tensor& tensor) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  const Part* part_of_this_thread() const;

  const std::uint64_t id_;
  const bool recomputes_;
  const c10::Device device_;
  mutable Mutex mutex_;
  std::vector<Mark> marks_ ABSL_GUARDED_BY(mutex_);
  std::vector<Allocation> allocations_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<const void*, std::size_t> live_ ABSL_GUARDED_BY(mutex_);  // index, by address
  std::vector<std::int64_t> output_bytes_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::pair<int, VersionWatch>> inputs_ ABSL_GUARDED_BY(mutex_);  // by layer
  struct Skip {
    std::int64_t bytes = 0;
    VersionWatch version;  // as it was read last
    bool wants_gradient = false;
  };
  std::map<SkipKey, Skip> skips_ ABSL_GUARDED_BY(mutex_);
};

/// Bytes of a tensor's elements; 0 for an undefined or sparse tensor.
std::int64_t bytes_of(const at::Tensor& tensor);

}  // namespace gpipe
