#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <tuple>

#include "absl/base/thread_annotations.h"
#include "gpipe/assembly/stages.h"
#include "gpipe/base/mutex.h"
#include "gpipe/binding.h"
#include "gpipe/ranks/team.h"
#include "gpipe/runtime/executor.h"
#include "gpipe/schedule_source.h"
#include "gpipe/schedules.h"
#include "gpipe/tensors/byte_counter.h"
#include "gpipe/tensors/kept_memory.h"
#include "gpipe/tensors/transfer.h"

namespace gpipe {

class Pipeline;

/// What the calls of a pipeline share and change.
///
/// Thread safety: `has_call` and `buffers_differ` belong to the thread that has a Turn. The others: any thread.
class CallState {
 public:
  explicit CallState(ScheduleFunction make_schedule) : make_schedule_(std::move(make_schedule)) {}

  std::recursive_mutex turn;             ///< for Turn
  bool has_call = false;                 ///< whether a Call runs in this turn
  bool buffers_differ = false;           ///< a call has trained since the replicas' buffers were made equal
  std::atomic<bool> has_loaded = false;  ///< this rank, since the replicas' states were made equal

  /// Returns the verified program of a forward or step of `pipeline`, whose state this is. That of a forward with
  /// gradients has its backward, as a second part. Caches the 16 last used ones. Errors: std::invalid_argument for a
  /// schedule that cannot run.
  std::shared_ptr<const Program> program(const Pipeline& pipeline, int micro_batches, const Checkpoints& checkpoints,
                                         StepKey::Call call);
  /// Sets the schedule of later steps: a name, or lists in the text form, which list_schedule() replaces for other
  /// numbers of micro-batches.
  void set_schedule(const std::string& schedule);
  /// Empty before set_schedule().
  std::string chosen_schedule() const {
    MutexLock lock(mutex_);
    return chosen_schedule_;
  }

  /// The copy streams from a device to another, the same for all edges and inputs.
  Link link(c10::Device from, c10::Device to);

  void set_error(std::optional<ErrorInfo> error) {
    MutexLock lock(mutex_);
    error_ = std::move(error);
  }
  std::optional<ErrorInfo> error() const {
    MutexLock lock(mutex_);
    return error_;
  }

  /// Later mini-batches append to the timeline; nullptr ends this.
  void set_timeline(std::shared_ptr<Timeline> timeline) {
    MutexLock lock(mutex_);
    timeline_ = std::move(timeline);
    steps_ = timeline_ && !timeline_->spans.empty() ? timeline_->spans.back().step + 1 : 0;
  }
  struct Recording {
    std::shared_ptr<Timeline> timeline = nullptr;
    int step = 0;
    std::shared_ptr<ByteCounter> counter = nullptr;  ///< for the timeline
  };
  /// Returns where the next mini-batch records, and its step there. If there is no timeline and one is
  /// `needed`, a new one.
  Recording next_recording(int workers, bool needed);

 private:
  using Key = std::tuple<int, Checkpoints, StepKey::Call>;  // number of micro-batches

  mutable Mutex mutex_;
  std::string chosen_schedule_ ABSL_GUARDED_BY(mutex_);
  ScheduleFunction make_schedule_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::pair<Key, std::shared_ptr<const Program>>> programs_ ABSL_GUARDED_BY(mutex_);  // last used last
  std::map<std::string, Link> links_ ABSL_GUARDED_BY(mutex_);  // by the devices' names
  std::optional<ErrorInfo> error_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<Timeline> timeline_ ABSL_GUARDED_BY(mutex_);
  int steps_ ABSL_GUARDED_BY(mutex_) = 0;
};

/// A model cut into stages, with the threads that run them. Does not change, except for the stages and calls(). GPipe and
/// every mini-batch in flight share it.
///
/// Thread safety: stages() belong to the thread that has a Turn and its workers. The other functions: any thread.
class Pipeline {
 public:
  /// REQUIRES: the stages of a worker have one device. Stages of other ranks are on the CPU and have no layers. Errors,
  /// with wires between devices: ConnectionError.
  Pipeline(std::vector<Stage> stages, std::vector<Edge> edges, ScheduleSource schedules, int intraop_threads,
           LanguageBinding binding, std::unique_ptr<Team> team);
  ~Pipeline();

  std::vector<Stage>& stages() { return stages_; }
  const std::vector<Stage>& stages() const { return stages_; }
  int count() const { return static_cast<int>(stages_.size()); }
  const std::vector<Edge>& edges() const { return edges_; }
  /// The parameters that stages of this rank shared when this was made.
  const std::vector<Loan>& loans() const { return loans_; }
  Team& team() const { return *team_; }
  bool is_here(int stage) const { return team_->is_here(worker_of(stage)); }
  int rank_of(int stage) const { return team_->of_workers()[worker_of(stage)]; }
  CallState& calls() { return calls_; }
  /// Keeps freed memory as long as this lives; see KeptMemory.
  void keep_memory() { memory_.emplace(); }
  /// On all ranks.
  int workers() const { return static_cast<int>(devices_.size()); }
  const std::vector<int>& placement() const { return placement_; }
  int worker_of(int stage) const { return placement_[stage]; }
  c10::Device device_of_worker(int worker) const { return devices_[worker]; }
  const std::vector<c10::Device>& devices() const { return devices_; }
  Executor& executor() { return executor_; }
  const LanguageBinding& binding() const { return binding_; }
  int intraop_threads() const { return intraop_threads_; }

  /// The compute stream that the stages of a worker share; std::nullopt on CPU.
  const std::optional<c10::Stream>& stream_of_worker(int worker) const { return streams_[worker]; }
  /// The devices at both ends of an edge, as this rank sees them, and its copy streams. An end on another rank counts
  /// as the CPU, or with wires between devices as the device of this rank's end.
  struct Ends {
    c10::Device from;
    c10::Device to;
    Link link = {};
    Link back_link = {};
  };
  const Ends& ends(int edge) const { return ends_[edge]; }
  /// Lets the stages of this rank add the times of their layers to a timeline; null ends this.
  void time_layers(Timeline* timeline);
  /// This rank's end of the wire between the devices of two workers, one of them on this rank; null if what they
  /// exchange passes through the host. Belongs to this rank's worker.
  DeviceLink* device_link(int from, int to);

  /// Gives this rank's parameters and buffers the first replica's values if `all`: when a pipeline is made, and in the
  /// next call after a rank has loaded a state. Else only buffers that may have changed, if a call has trained since the
  /// last time, without new versions. `trains`: whether this call does, or has a backward. All ranks call it.
  void take_state_of_first_replica(bool all, bool trains);

 private:
  void connect_devices();

  std::optional<KeptMemory> memory_;
  std::vector<Stage> stages_;
  const std::vector<int> placement_;
  const std::vector<Edge> edges_;
  const std::vector<Loan> loans_;
  const int intraop_threads_;
  const LanguageBinding binding_;
  std::unique_ptr<Team> team_;
  std::vector<c10::Device> devices_;                 // per worker
  std::vector<std::optional<c10::Stream>> streams_;  // per worker
  std::vector<Ends> ends_;                           // per edge
  std::map<std::pair<int, int>, DeviceLink> device_links_;

  CallState calls_;
  Executor executor_;
};

}  // namespace gpipe
