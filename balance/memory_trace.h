#pragma once

#include <limits>
#include <map>
#include <set>
#include <thread>

#include "absl/container/flat_hash_map.h"
#include "balance/profile.h"
#include "gpipe/autograd/layer.h"
#include "gpipe/tensors/byte_counter.h"
#include "gpipe/tensors/parcel.h"
#include "skip/layout.h"

namespace gpipe {

/// The bytes of a dense tensor's elements.
std::int64_t bytes_of(const at::Tensor& tensor);

/// Records the memory that a pipeline allocates and frees, while installed as the listener of the thread that calls the
/// pipeline. That thread makes this object. The pipeline's stages are the finest that the model allows, all on one
/// worker, so the action that runs when memory is allocated or freed tells the layer. Thread-safe.
class MemoryTrace : public AllocationListener, public std::enable_shared_from_this<MemoryTrace> {
 public:
  /// Wraps a pipeline's layers. Each then notes its input and its skips in its first forward, which is micro-batch 0's.
  std::vector<std::unique_ptr<Layer>> wrap(std::vector<std::unique_ptr<Layer>> layers);

  /// The layers that a step tells about: of each stage, the index after its last layer in the model; and the step's
  /// spans. The spans must outlive it.
  struct Step {
    std::vector<int> ends;
    const std::vector<Span>& spans;

    /// Whether an action is of the model, not of an identity behind it.
    bool is_of_model(const Action& action) const { return action.stage < std::ssize(ends); }
    /// The last layer of an action's stage; behind the model, the model's last layer.
    int layer_of(const Action& action) const { return (is_of_model(action) ? ends[action.stage] : ends.back()) - 1; }
  };

  /// Memory that a forward of micro-batch 0 allocated, in order. `kept` if a W freed it.
  struct Saved {
    std::int64_t bytes = 0;
    bool kept = false;
  };
  std::vector<Saved> saved_for_weights(const Step& step) const;

  // Each adds to the profile what one kind of step tells about micro-batch 0, whose backward must be the last.

  /// A step of forwards with graphs and of whole backwards. `saved` is of a step with split backwards.
  void read_whole(Profile& profile, const Step& step, const std::vector<Saved>& saved) const;
  /// A step of forwards without graphs.
  void read_stored(Profile& profile, const Step& step) const;
  /// A step of split backwards.
  void read_split(Profile& profile, const Step& step) const;
  /// Adds the skips, after a step of forwards with graphs.
  void read_skips(Profile& profile, const std::vector<SkipLink>& links) const;

  // Reports of the wrapped layers, in their first forwards.
  void gets_input(int layer, const std::vector<at::Tensor>& input);
  void reads(int layer, const SkipKey& key, const at::Tensor& skip);

 private:
  /// A block of memory. Times are in seconds, by the clock of Span::launched.
  struct Allocation {
    std::int64_t bytes = 0;
    double born = 0;
    double freed = std::numeric_limits<double>::infinity();  ///< not within the step, or by the caller
    int reaches = 0;                                         ///< the last layer whose input uses the memory
    std::set<int> readers = {};
  };
  struct Input {
    int layer = 0;
    std::int64_t bytes = 0;
    std::vector<VersionWatch> versions = {};
  };
  struct Skip {
    std::int64_t bytes = 0;
    VersionWatch version;  // as it was read last
    bool wants_gradient = false;
  };

  void allocated(const void* data, std::int64_t bytes) override;
  void freed(const void* data, std::int64_t) override;
  Allocation* find(const at::Tensor& tensor) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// The most bytes in use during an action, above those at its start.
  std::int64_t peak(const Step& step, std::size_t span) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Raises a field of each layer to the peak of its actions with the kind and micro-batch of `like`.
  void read_peaks(Profile& profile, const Step& step, const Action& like, std::int64_t LayerProfile::*field) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::thread::id caller_ = std::this_thread::get_id();  // runs no actions
  mutable Mutex mutex_;
  std::vector<Allocation> allocations_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<const void*, std::size_t> live_ ABSL_GUARDED_BY(mutex_);  // index, by address
  std::vector<Input> inputs_ ABSL_GUARDED_BY(mutex_);
  std::map<SkipKey, Skip> skips_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace gpipe
