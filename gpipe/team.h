#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gpipe/api.h"
#include "gpipe/timeline.h"

namespace gpipe {

class GPIPE_API GPipeImpl;
class Pipeline;

/// The calls that the ranks of a pipeline make together, besides its training: pipe->team(). As with forward(), all
/// ranks make them in the same order, and an error of one is an error of all. In one process they return at once.
///
/// Is valid as long as its pipeline.
class GPIPE_API TeamCalls {
 public:
  /// Returns the bytes of all ranks, in order, on rank 0; nothing on the others. `what` says what is sent, and must be
  /// equal on all ranks.
  std::vector<std::string> gather(std::string bytes, const std::string& what = "bytes");

  /// Returns, on all ranks of a replica, the bytes that the rank of its last stage gives, such as scores of the outputs.
  std::string share(std::string bytes);

  /// Returns the spans of all ranks on rank 0's axis of time, on rank 0; nothing on the others. Trace the same calls on
  /// all ranks.
  Timeline gather(Timeline timeline);

  /// Returns the largest number that a rank gives. So ranks stop at the same step:
  /// `if (pipe->team().largest(signal) != 0) break;`
  std::uint64_t largest(std::uint64_t number);

  /// Returns the sums, in the order of replicas, of the numbers that the first rank of each gives, such as scores of
  /// its part. All ranks give as many.
  std::vector<double> sum_over_replicas(std::vector<double> numbers);

  /// Takes a number for each of this rank's parameters(), in order. Returns the numbers of the whole model's
  /// parameters, in its order, on all ranks. Their sum has the same bits as in one process. `what`: as for gather().
  /// Errors: std::invalid_argument for another count.
  std::vector<double> of_all_parameters(std::vector<double> numbers, const std::string& what = "numbers");

  /// Makes the call that the other ranks begin throw there, because this rank cannot make it. `reason` tells them why.
  void withdraw(const std::string& reason);

  /// Call after a load of parameters by other means than GPipeImpl::load(). In the next call, replicas take the first
  /// one's parameters and buffers.
  void note_load();

 private:
  friend class GPipeImpl;
  TeamCalls(GPipeImpl& pipe, Pipeline& pipeline) : pipe_(pipe), pipeline_(pipeline) {}

  GPipeImpl& pipe_;
  Pipeline& pipeline_;
};

}  // namespace gpipe
