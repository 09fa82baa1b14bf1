#pragma once

#include <algorithm>
#include <limits>
#include <map>

#include "balance/plan.h"
#include "balance/segments.h"

namespace gpipe {

/// The devices of one replica, and their memory.
class Devices {
 public:
  Devices(const PlanOptions& options, int workers, int replicas) {
    for (int w = 0; w < workers; ++w) {
      const auto& name = options.devices[w * replicas];
      const auto found = std::ranges::find(names_, name);
      device_.push_back(static_cast<int>(found - names_.begin()));
      if (found != names_.end()) continue;
      names_.push_back(name);
      if (options.memory.empty()) continue;
      const auto first = options.memory.begin() + w * replicas;
      memory_.push_back(options.memory.size() == 1 ? options.memory.front()
                                                   : *std::min_element(first, first + replicas));
    }
  }

  bool is_limited() const { return !memory_.empty(); }
  int count() const { return static_cast<int>(names_.size()); }
  int of(int worker) const { return device_[worker]; }
  std::int64_t memory(int device) const { return memory_[device]; }
  const std::string& name(int device) const { return names_[device]; }

  std::vector<std::int64_t> sum(const std::vector<std::int64_t>& of_workers) const {
    std::vector<std::int64_t> bytes(count());
    for (std::size_t w = 0; w < of_workers.size(); ++w) bytes[device_[w]] += of_workers[w];
    return bytes;
  }
  /// The device that lacks most bytes, and how many it lacks; negative if all fit.
  std::pair<int, std::int64_t> fullest(const std::vector<std::int64_t>& of_workers) const {
    std::pair<int, std::int64_t> most = {0, std::numeric_limits<std::int64_t>::min()};
    const auto bytes = sum(of_workers);
    for (int d = 0; d < count(); ++d) {
      const auto missing = bytes[d] - (is_limited() ? memory(d) : 0);
      if (missing > most.second) most = {d, missing};
    }
    return most;
  }

 private:
  std::vector<std::string> names_;
  std::vector<std::int64_t> memory_;
  std::vector<int> device_;  // by worker
};

/// Whether `a` lacks fewer bytes, or as many and is faster.
bool is_better(const Plan& a, const Plan& b);

/// Plans for one profile, schedule, placement and number of replicas.
class Contender {
 public:
  Contender(Segments& segments, RunOptions run, const PlanOptions& options);

  const Plan& best() const { return best_; }
  const Devices& devices() const { return devices_; }
  Segments& segments() const { return segments_; }
  const RunOptions& run() const { return run_; }
  /// No plan is faster: a worker does its work for all micro-batches after the first one's forward in earlier stages, and
  /// before the last one's backward in them. The weights' gradients can come after that.
  double least_seconds() const { return least_seconds_; }

  // These take the number of simulated actions off `actions`, and end when there are none left.

  /// Tries some cuts. REQUIRES: called once, first.
  void start(std::int64_t& actions);
  /// Improves the best plans as long as this helps.
  void refine(std::int64_t& actions);

 private:
  /// Consecutive layers of a stage, with one checkpoint mode.
  struct Part {
    int stage = 0;
    std::int64_t layers = 0;
    Checkpoint mode = Checkpoint::kNever;

    friend auto operator<=>(const Part&, const Part&) = default;
  };
  using Parts = std::vector<Part>;
  struct Tried {
    Plan plan;
    bool is_left = false;  ///< what is near it has been tried
  };

  /// Tries what is near the best plan that has not been left, again and again. Ends when this has not helped a few times.
  template <typename Key, typename TryNear>
  void search(std::map<Key, Tried>& tried, int most_in_vain, const TryNear& try_near);
  /// Lets a list schedule hold more or fewer cells where this helps.
  void deepen(std::int64_t& actions);
  /// Recomputes fewer micro-batches of a segment where the memory allows it.
  void relax(std::int64_t& actions);
  double find_least_seconds() const;
  /// Parts that differ by one change: a segment is recomputed or not, is cut in two, is joined with the next, or ends at
  /// the next place for a cut, before or after.
  std::vector<Parts> near(const Parts& parts) const;
  /// A stage's share of its device's memory.
  double share(int stage) const;
  /// Without needless segments.
  Parts joined(const Parts& parts) const;
  /// The plan of these parts, simulated, with the checkpoint mode that is given, if one is.
  Plan predicted(const Parts& parts, std::int64_t& actions) const;
  /// The same plan, which it keeps.
  const Plan& offer(const Parts& parts, std::int64_t& actions);
  /// The plan for a cut, with the recomputation of each device's stages that the price says.
  const Plan& priced(const std::vector<int>& ends, const std::vector<int>& prices, std::int64_t& actions);
  /// Finds the fastest plan for a cut. If none fits, recomputes as much as possible.
  void solve(const std::vector<int>& ends, std::int64_t& actions);

  Segments& segments_;
  RunOptions run_;
  const std::vector<int> placement_;  // of stages before they are cut into segments
  const Devices devices_;
  const PlanOptions& given_;
  const bool whole_;  // stages are recomputed as a whole, or not at all
  const double least_seconds_;
  std::vector<InFlight> in_flight_;  // by stage; empty if there is nothing to choose
  Plan best_;
  Parts best_parts_;
  std::map<Parts, Tried> tried_;
  std::map<std::vector<int>, Tried> cuts_;  ///< by the ends of stages; only the best plan of each
};

}  // namespace gpipe
