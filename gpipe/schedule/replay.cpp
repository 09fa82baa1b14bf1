#include "gpipe/schedule/replay.h"

#include <algorithm>

namespace gpipe {
namespace {

constexpr double kAbsent = -1;

/// One direction of one edge.
struct Channel {
  double latency = 0;
  double sending = 0;
  double* link_free = nullptr;  ///< when the link from the producer to the consumer has sent what was put before
  int consumer = 0;
  /// When each micro-batch can be taken; kAbsent before its put.
  std::vector<double> arrivals;
};

/// A worker's position: its current action, and how many of that action's edges it has taken.
struct Progress {
  std::size_t next = 0;  ///< index of the current action in the worker's list
  std::size_t taken = 0;
  double clock = 0;
};

/// Advances the workers in any order, each as far as possible. No event queue is needed, because a worker's times
/// depend only on its own list and on its exchanges, and a link has one producer.
class Replayer {
 public:
  Replayer(const Layout& layout, const std::vector<Edge>& edges, const Wiring& wiring, const Schedule& schedule,
           absl::FunctionRef<double(const Action&)> seconds, const std::vector<double>& latencies,
           const std::vector<double>& sending)
      : wiring_(wiring),
        schedule_(schedule),
        seconds_(seconds),
        progress_(schedule.size()),
        queued_(schedule.size(), true) {
    channels_.reserve(2 * edges.size());
    for (std::size_t e = 0; e < edges.size(); ++e) {
      for (const bool gradient : {false, true}) {
        const int producer = layout.placement[gradient ? edges[e].to : edges[e].from];
        const int consumer = layout.placement[gradient ? edges[e].from : edges[e].to];
        channels_.push_back({.latency = latencies[e],
                             .sending = sending.empty() ? 0 : sending[e],
                             .link_free = &links_free_[{producer, consumer}],
                             .consumer = consumer,
                             .arrivals = std::vector<double>(layout.micro_batches, kAbsent)});
      }
    }
    replay_.spans.resize(schedule.size());
    for (std::size_t w = schedule.size(); w-- > 0;) {
      replay_.spans[w].reserve(schedule[w].size());
      ready_.push_back(static_cast<int>(w));
    }
  }

  Replay run() && {
    while (!ready_.empty()) {
      const int worker = ready_.back();
      ready_.pop_back();
      advance(worker);
      queued_[worker] = false;
    }
    for (std::size_t w = 0; w < schedule_.size(); ++w) {
      const Progress& at = progress_[w];
      if (at.next == schedule_[w].size()) continue;
      const Action& action = schedule_[w][at.next];
      replay_.blocked.push_back({static_cast<int>(w), action, wiring_.takes(action)[at.taken]});
    }
    return std::move(replay_);
  }

 private:
  void advance(int worker) {
    Progress& at = progress_[worker];
    for (; at.next < schedule_[worker].size(); ++at.next) {
      const Action& action = schedule_[worker][at.next];
      const auto takes = wiring_.takes(action);
      for (; at.taken < takes.size(); ++at.taken) {
        if (!take(channel(takes[at.taken], action.kind), action.micro_batch, at.clock)) return;
      }
      const double start = at.clock;
      at.clock += seconds_(action);
      replay_.spans[worker].push_back({worker, action, start, at.clock, 0});
      for (const int edge : wiring_.puts(action)) put(channel(edge, action.kind), action.micro_batch, at.clock);
      at.taken = 0;
    }
  }

  Channel& channel(int edge, Kind kind) { return channels_[2 * static_cast<std::size_t>(edge) + (kind != Kind::F)]; }

  static bool take(const Channel& channel, int micro_batch, double& clock) {
    const double arrival = channel.arrivals[micro_batch];
    if (arrival == kAbsent) return false;
    clock = std::max(clock, arrival);
    return true;
  }

  void put(Channel& channel, int micro_batch, double clock) {
    const double start = std::max(clock, *channel.link_free);
    *channel.link_free = start + channel.sending;
    channel.arrivals[micro_batch] = start + channel.latency;
    if (queued_[channel.consumer]) return;
    queued_[channel.consumer] = true;
    ready_.push_back(channel.consumer);
  }

  const Wiring& wiring_;
  const Schedule& schedule_;
  const absl::FunctionRef<double(const Action&)> seconds_;
  std::vector<Channel> channels_;
  std::map<std::pair<int, int>, double> links_free_;  ///< by producer and consumer
  std::vector<Progress> progress_;
  std::vector<int> ready_;
  /// True for the workers in ready_ and for the one being advanced, which must not wake itself.
  std::vector<bool> queued_;
  Replay replay_;
};

}  // namespace

Replay replay(const Layout& layout, const std::vector<Edge>& edges, const Wiring& wiring, const Schedule& schedule,
              absl::FunctionRef<double(const Action&)> seconds, const std::vector<double>& latencies,
              const std::vector<double>& sending) {
  return Replayer(layout, edges, wiring, schedule, seconds, latencies, sending).run();
}

}  // namespace gpipe
