#pragma once

#include <optional>

#include "absl/functional/function_ref.h"
#include "gpipe/base/mutex.h"
#include "gpipe/program.h"
#include "gpipe/ranks/wire.h"

namespace gpipe {

/// What an action puts for one worker of another rank.
struct WireMessage {
  Action action;
  std::vector<int> edges;  ///< ascending

  /// Identifies the action in its program.
  std::uint64_t label() const;
};

/// The messages from one worker to another during a part of a program, in the sender's order, as both ends compute it.
struct WirePlan {
  int from = 0;
  int to = 0;
  std::vector<WireMessage> messages;
};

/// Returns the wires between workers of different ranks that a part of the program uses, ordered by (from, to).
std::vector<WirePlan> plan_wires(const Program& program, Part part, const std::vector<int>& ranks);

/// A kind of call, whose messages mostly have the same layouts in each call. The same on all ranks.
using LayoutKey = std::vector<std::int64_t>;

/// Both ends of a wire keep the layouts of so many keys, and drop them all before one more.
inline constexpr std::size_t kKeysPerWire = 8;

/// The wires of one rank for a pipeline. Thread safety: used by one thread at a time.
class Wires {
 public:
  /// Numbers of wires count from `first`, to before `first` + `count`. `delivery`: the longest time until a message is
  /// delivered. `allocate` makes the memory for received messages, on any thread.
  Wires(Connections& connections, int first, int count, std::chrono::milliseconds delivery, Allocate allocate);
  /// What has been sent will be delivered.
  ~Wires();

  /// Ends of a wire to or from another rank, which both use one number per direction. `limit`: the longest wait for a
  /// message.
  WireSender& sender(int number, int to_rank);
  WireReceiver& receiver(int number, int from_rank, std::chrono::milliseconds limit);

  /// The last layouts of a wire's messages under a key, for at least `messages` of them. Valid until the wire drops its
  /// keys. Both ends use the same keys in the same order.
  std::deque<LastLayout>& last_layouts(int number, const LayoutKey& key, std::size_t messages);

 private:
  int first_tag(int number) const { return (first_ + number) * kTagsPerWire; }

  Connections& connections_;
  const int first_;
  const int count_;
  const std::chrono::milliseconds delivery_;
  const Allocate allocate_;
  std::map<int, WireSender> senders_;
  std::map<int, WireReceiver> receivers_;
  std::map<int, std::map<LayoutKey, std::deque<LastLayout>>> layouts_;
};

/// What a worker does during a part of a program: runs an action, or waits for another rank, or neither.
struct Activity {
  std::optional<Action> runs;
  int awaits = -1;  ///< the rank whose message it waits for or to which it sends, or -1
};

/// The messages between this rank's workers and others during a part of a program, on each wire in the plan's order.
///
/// Thread safety: receive(), send() and settle() run on their worker's thread; activity() on any thread.
class RemoteEdges {
 public:
  /// Posts memory for the first messages. `ranks` has the rank of each worker. `limit`: the longest wait for a message.
  /// All arguments but `key` must outlive this.
  RemoteEdges(Wires& wires, const Program& program, Part part, const std::vector<int>& ranks, int rank,
              const LayoutKey& key, std::chrono::milliseconds limit);

  using Arrived = absl::FunctionRef<void(const WireMessage&, std::unique_ptr<Incoming>)>;
  /// Waits until what an action takes has come. Calls `arrived` with each message. Errors: ConnectionError.
  void receive(const Action& action, Arrived arrived);

  using MakeMessage = absl::FunctionRef<Outgoing(const WireMessage&)>;
  /// Sends what an action puts, as `make` returns it. Errors: ConnectionError.
  void send(const Action& action, MakeMessage make);

  using Settle = absl::FunctionRef<void(int from, int to)>;
  /// If all actions of a worker have run, calls `settle` with the ends of each of its wires, to wait for what messages
  /// do not bring. REQUIRES: this rank's workers have got what the last action puts. Errors: ConnectionError.
  void settle(int worker, Settle settle);

  Activity activity(int worker) const;
  /// The activity of the worker that holds up this rank: one that runs an action, or else one that waits.
  Activity activity() const;

 private:
  /// This rank's end of a wire.
  struct Wire {
    WirePlan plan;
    int rank;  // at the other end
    WireReceiver* receiver = nullptr;
    WireSender* sender = nullptr;
    std::deque<LastLayout>* layouts = nullptr;  // of the messages to send
    std::size_t next = 0;                       // message
  };
  bool is_here(int worker) const { return ranks_[worker] == rank_; }
  void set_activity(int worker, Activity activity);
  /// Whether what an action of this kind takes from an edge has come.
  char& arrived(int edge, const Action& action);

  const Program& program_;
  const Part part_;
  const std::vector<int>& ranks_;
  const int rank_;
  std::vector<std::vector<Wire>> sending_;    // by worker
  std::vector<std::vector<Wire>> receiving_;  // by worker
  std::vector<char> ended_;                   // by worker: whether its last action has run
  std::vector<char> arrived_;                 // by edge, direction and micro-batch
  mutable Mutex mutex_;
  std::vector<Activity> activities_ ABSL_GUARDED_BY(mutex_);  // by worker
};

}  // namespace gpipe
