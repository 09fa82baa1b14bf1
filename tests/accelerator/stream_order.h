#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/accelerator/virtual_time.h"

namespace gpipe::accelerator {

/// A vector clock: how much of each stream's work is known to be done, by the stream's index. What it lacks is 0.
using Clock = std::vector<std::uint64_t>;

/// What an event waits for.
struct Event {
  Clock clock;
  int stream = 0;
  std::int64_t id = 0;  // of its last record
};

/// The last use of an allocation by a stream.
struct Use {
  std::uint64_t time = 0;  // on the stream's own clock
  std::string_view operation;
};

/// One allocation and its uses.
struct Allocation {
  int home = -1;  // the stream that was current when it was made
  std::int64_t id = 0;
  int writer = -1;  // the stream of the last write
  Use write;
  std::map<int, Use> uses;  // reads and writes since the last write, by stream
  std::set<int> recorded;   // streams that the allocator knows of
};

/// An operation's use of an allocation, through a tensor.
struct Access {
  Allocation* allocation;
  bool writes;
  std::span<const std::int64_t> sizes;
};

/// What the host asked of the devices.
struct Counts {
  int copies = 0;  // between devices, or between the host and a device
  int events = 0;
  int waits = 0;       // of a stream for an event
  int host_waits = 0;  // for all that a stream has to do, which then idles
};

/// Checks that the work of streams is ordered. A stream runs its work in order. The work of two streams is ordered only
/// by events and by host threads that wait. Each stream and each host thread has a vector clock; see Mattern, Virtual
/// Time and Global States of Distributed Systems, 1988. Work runs at once, so a missing order never changes results; it
/// is a violation, kept as text.
///
/// Thread safety: all functions may run on any thread.
class StreamOrder {
 public:
  /// Returns the index of a stream of a device.
  int index(int device, std::int64_t stream);

  /// Runs an operation on a stream. It comes after all that this thread waited for, and a copy from the host after all
  /// that any thread waited for. Checks its accesses. `operation` must outlive this.
  void launch(int stream, std::string_view operation, std::span<const Access> accesses, const Work& work = {});
  /// Makes a stream's later work come after the present work of another.
  void order(int first, int then);

  void record(Event& event, int stream);
  void wait(int stream, const Event& event);
  /// Notes that a stream's later work comes after an event, for which it need not wait.
  void comes_after(int stream, const Event& event);
  /// Makes this thread wait.
  void synchronize(int stream);
  void synchronize(const Event& event);
  void synchronize_device(int device);

  /// Calls `action` when a thread knows that the present work of a stream is over.
  void when_over(int stream, std::function<void()> action);

  /// Returns a new allocation of a stream.
  Allocation allocated(int stream, std::size_t bytes);
  /// Tells the allocator that a stream uses an allocation.
  void used(Allocation& allocation, int stream);
  /// Checks that the home stream may reuse the memory, after the present work of the streams that the allocator knows
  /// of.
  void freed(const Allocation& allocation);

  void report(std::string violation);

  /// Returns what was reported since the last call.
  std::vector<std::string> take_violations();
  /// Returns what was counted since the last call, by the first two characters of the action (see exchange_action()).
  std::map<std::string, Counts> take_counts();

  /// Logs all requests from now on, until take_log().
  void keep_log();
  Log take_log();

 private:
  Clock& host();
  Counts& counts();
  void check(int stream, std::string_view operation, const Access& access);
  void add_violation(std::string text);
  /// Logs a request of this thread, if a log is kept.
  void log(Request request);
  void log_synchronize(int stream);
  /// Runs what waited for the work that this thread knows to be over.
  void run_actions();
  std::string name(int stream) const;

  std::mutex mutex_;
  std::map<std::pair<int, std::int64_t>, int> indices_;  // by device and stream
  std::vector<Clock> streams_;
  std::map<int, Clock> hosts_;  // by thread
  std::vector<std::string> violations_;
  std::map<std::string, Counts> counts_;
  std::int64_t ids_ = 0;  // given to events and allocations
  std::optional<Log> log_;
  struct Action {
    int stream;
    std::uint64_t time;  // on the stream's clock
    std::function<void()> run;
  };
  std::vector<Action> actions_;
};

/// Names what this thread does from now on. Returns the name before.
std::string exchange_action(std::string name);

}  // namespace gpipe::accelerator
