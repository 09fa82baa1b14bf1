#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "gpipe/ranks/connections.h"

namespace gpipe::testing {

/// The limit of a wait that should not run out of time, and of one that should.
inline constexpr std::chrono::milliseconds kLongLimit{20'000};
inline constexpr std::chrono::milliseconds kShortLimit{20};

/// The connections of all ranks of a job in one process, as slow and as strict as those between processes.
///
/// - A message moves after both its send and its receive have started, and after a random delay. Messages with one tag
///   between two ranks keep their order. Others overtake each other.
/// - A rank that closes its connections, or dies, ends its transfers at both ends.
/// - Nothing moves to or from a rank that has stopped, and its own waits do not run out of time.
/// - What Connections forbids is a failure of the test: a message that is longer than its receive, and a transfer that
///   is dropped before it is complete while its connection is open.
///
/// Thread safety: all functions may be called on any thread. REQUIRES: outlives the transfers.
class FakeNetwork {
 public:
  /// Delays are drawn from the seed, in the order in which the messages of a tag are sent.
  explicit FakeNetwork(int ranks, std::uint64_t seed = 0, std::chrono::microseconds longest_delay = {});
  ~FakeNetwork();

  Connections& of(int rank) { return *connections_[rank]; }

  void stop(int rank);
  /// Waits until all other ranks have closed their connections.
  void await_the_others_end(int rank);

  /// How many sends with a tag have started, and how many receives wait for a send.
  int sends(int from, int to, int tag);
  int open_receives(int from, int to, int tag);

 private:
  class End;
  class Ending;
  struct Message;
  struct Queue;
  struct State;
  const std::unique_ptr<State> state_;
  std::vector<std::unique_ptr<Connections>> connections_;
};

}  // namespace gpipe::testing
