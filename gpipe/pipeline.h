#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "gpipe/autograd/stage.h"
#include "gpipe/runtime/executor.h"
#include "gpipe/runtime/mutex.h"
#include "gpipe/runtime/transfer.h"
#include "gpipe/schedule/generators.h"
#include "gpipe/schedule/program.h"
#include "gpipe/shared_buffers.h"

namespace gpipe {

/// Where an exception of a forward or backward came from.
struct ErrorInfo {
  Action action;           ///< kind, stage and micro-batch
  int layer = -1;          ///< index in the model; -1 in a backward, which has no layers
  std::string layer_name;  ///< as the Sequential names it; empty in a backward
  std::string message;     ///< the exception's what(), or "unknown"
};

/// What a program in another language adds to a pipeline. Each may be empty.
struct LanguageBinding {
  /// The layers of each stage, run in its stead; empty, or one a stage.
  std::vector<RunLayers> run_layers = {};
  /// Calls a function under the lock, if any, that the layers' objects need. The lock may be taken again in it.
  std::function<void(absl::FunctionRef<void()>)> lock = {};
  /// Called on each worker before it begins its part of a forward or backward.
  std::function<void()> enter_worker = {};
  /// Called now and then by the thread that waits in a forward or backward, which ends with what it throws.
  std::function<void()> poll = {};
  /// Told, on the worker, of each error that ends an action. May throw another in its place.
  std::function<void(const ErrorInfo&, const std::exception_ptr&)> on_error = {};
};

/// A model cut into stages with the threads that run them: what GPipe owns and what every mini-batch in flight shares.
/// It outlives the container while a graph still needs it.
class Pipeline {
 public:
  Pipeline(std::vector<Stage> stages, std::vector<Edge> edges, SharedBuffers shared, int intraop_threads,
           LanguageBinding binding = {});

  std::vector<Stage>& stages() { return stages_; }
  int count() const { return static_cast<int>(stages_.size()); }
  const std::vector<Edge>& edges() const { return edges_; }
  /// REQUIRES: turn() is held.
  SharedBuffers& shared_buffers() { return shared_buffers_; }
  Executor& executor() { return executor_; }
  const LanguageBinding& binding() const { return binding_; }
  int intraop_threads() const { return intraop_threads_; }

  /// The compute stream of a stage; none on CPU.
  const std::optional<c10::Stream>& stream(int stage) const { return streams_[stage]; }
  /// The copy streams of an edge: forward, and back.
  const Link& link(int edge) const { return links_[edge]; }
  const Link& back_link(int edge) const { return back_links_[edge]; }

  /// Held by a mini-batch during its forward and during its backward. Errors: std::logic_error on one of the pipeline's
  /// own workers, which would wait for itself, and in a process that was forked off, which has no workers.
  Mutex& turn();

  /// The verified program for so many micro-batches: with backward, fill and drain; without, fill. The last 16 that
  /// were asked for are kept.
  std::shared_ptr<const Program> program(int micro_batches, Checkpoint checkpoint, bool backward);

  void set_error(std::optional<ErrorInfo> error);
  std::optional<ErrorInfo> error() const;

  /// Every later mini-batch appends to the timeline; nullptr ends it.
  void set_timeline(std::shared_ptr<Timeline> timeline);
  struct Recording {
    std::shared_ptr<Timeline> timeline;
    int step = 0;
  };
  /// What a mini-batch that begins now records to.
  Recording next_recording();

 private:
  struct Key {
    int micro_batches;
    Checkpoint checkpoint;
    bool backward;
    friend bool operator==(const Key&, const Key&) = default;
  };

  std::vector<Stage> stages_;
  const std::vector<Edge> edges_;
  SharedBuffers shared_buffers_;
  const int intraop_threads_;
  const LanguageBinding binding_;
  std::vector<std::optional<c10::Stream>> streams_;
  std::vector<Link> links_;
  std::vector<Link> back_links_;

  Mutex turn_;
  mutable Mutex mutex_;
  std::vector<std::pair<Key, std::shared_ptr<const Program>>> programs_ ABSL_GUARDED_BY(mutex_);  // last used last
  std::optional<ErrorInfo> error_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<Timeline> timeline_ ABSL_GUARDED_BY(mutex_);
  int steps_ ABSL_GUARDED_BY(mutex_) = 0;

  Executor executor_;
};

}  // namespace gpipe
