#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "gpipe/ranks/connections.h"
#include "gpipe/ranks/wire.h"
#include "gpipe/ranks/wire_plan.h"
#include "gpipe/runtime/mutex.h"
#include "gpipe/schedule/program.h"

namespace gpipe {

/// Tells kinds of calls apart. Calls of the same key mostly send messages of the same layouts. All ranks compute the same key.
using LayoutKey = std::vector<std::int64_t>;

/// A wire remembers the layouts of so many keys: those that it has used last. So both of its ends forget the same.
inline constexpr std::size_t kKeysPerWire = 8;

/// The wires of one rank, which last as long as its connections.
///
/// Thread safety: sender(), receiver() and remembered() on one thread at a time.
class Wires {
 public:
  /// Numbers of wires count from `first`. `delivery`: the longest wait for a delivery. `allocate` makes the memory for
  /// received messages, on any thread.
  Wires(Connections& connections, int first, std::chrono::milliseconds delivery, Allocate allocate);

  /// The end of the wire with this number to or from another rank. Both ends use one number per direction. `limit`: the
  /// longest wait for a message.
  WireSender& sender(int number, int to_rank);
  WireReceiver& receiver(int number, int from_rank, std::chrono::milliseconds limit);

  /// What is remembered of the messages of a wire under a key, for at least `messages` of them. Valid until the wire forgets
  /// the key. Both ends of a wire use the same keys in the same order.
  std::deque<Remembered>& remembered(int number, const LayoutKey& key, std::size_t messages);

  /// Nothing more will be sent. Does not wait.
  void finish();

 private:
  Connections& connections_;
  const int first_;
  const std::chrono::milliseconds delivery_;
  const Allocate allocate_;
  std::map<int, std::unique_ptr<WireSender>> senders_;
  std::map<int, std::unique_ptr<WireReceiver>> receivers_;
  std::map<int, std::list<std::pair<LayoutKey, std::deque<Remembered>>>> remembered_;  // the last used key comes last
};

/// The contents of a mini-batch's edges, as an Exchange moves them. Called on the action's worker.
class EdgeContents {
 public:
  virtual ~EdgeContents() = default;
  /// Takes off the edges what the action has put there.
  virtual Outgoing take_off(const Action& action, const std::vector<int>& edges) = 0;
  /// Puts on the edges what the action put there on another rank.
  virtual void put_on(const Action& action, const std::vector<int>& edges, std::unique_ptr<Incoming> message) = 0;
  /// Waits for what does not come with messages: what one worker has sent another one, of which one is on this rank.
  /// Called after the last action of this rank's worker.
  virtual void settle(int /*from*/, int /*to*/) {}
};

/// What a worker does during an exchange: runs an action, or waits for another rank, or neither.
struct Activity {
  std::optional<Action> runs;
  int awaits = -1;  ///< the rank whose message it waits for or to which it sends, or -1
};

/// Moves what crosses ranks during one part of a program: the edges between this rank's workers and those of other ranks.
///
/// Thread safety: take(), put() and settle() run on their worker's thread; activity() on any thread.
/// Invariant: each worker takes the messages of a wire in the order of the plan. A message that comes before it is needed
/// lies on its edges.
class Exchange {
 public:
  /// Posts memory for the first messages. `ranks` has the rank of each worker. `limit`: the longest wait for a message. All
  /// arguments but `key` must outlive this.
  Exchange(Wires& wires, const Program& program, Part part, const std::vector<int>& ranks, int rank,
           const LayoutKey& key, std::chrono::milliseconds limit, EdgeContents& contents);

  /// See Cells::take() and Cells::put(). Errors: ConnectionError.
  void take(const Action& action);
  void put(const Action& action);
  /// Waits until all transfers of a worker have ended. Does nothing if its actions have not all run. Other workers of this
  /// rank may wait for what its last action puts, so that must have been handed over. Errors: ConnectionError.
  void settle(int worker);

  Activity activity(int worker) const;
  /// That of the worker that holds up this rank: one that runs an action, or else one that waits.
  Activity activity() const;

 private:
  struct Receiving {
    WireReceiver* wire;
    int rank;
    std::vector<WireMessage> messages;
    std::size_t next = 0;
  };
  struct Sending {
    WireSender* wire;
    int to;
    int rank;
    std::vector<WireMessage> messages;
    std::deque<Remembered>* remembered;
    std::size_t next = 0;
  };
  bool is_here(int worker) const { return ranks_[worker] == rank_; }
  void set_activity(int worker, Activity activity);
  /// Whether the edge's content for an action of this kind has come.
  char& arrived(int edge, const Action& action);

  const Program& program_;
  const Part part_;
  const std::vector<int>& ranks_;
  const int rank_;
  EdgeContents& contents_;
  std::map<std::pair<int, int>, Receiving> receiving_;  // by the workers at the ends
  std::vector<std::vector<Sending>> sending_;           // by worker
  std::vector<char> ended_;                             // by worker: whether its last action has run
  std::vector<char> arrived_;                           // by edge, direction and micro-batch
  mutable Mutex mutex_;
  std::vector<Activity> activities_ ABSL_GUARDED_BY(mutex_);  // by worker
};

}  // namespace gpipe
