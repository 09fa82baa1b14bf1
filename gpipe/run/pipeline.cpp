#include "gpipe/run/pipeline.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <set>
#include <stdexcept>
#include <utility>

namespace gpipe {
namespace {

constexpr std::size_t kPrograms = 16;

int workers_of(const ScheduleSource& schedules) {
  return 1 + *std::max_element(schedules.placement.begin(), schedules.placement.end());
}

// The workers of this rank: the first one and their number.
std::pair<int, int> workers_here(const Team& team) {
  const auto& ranks = team.of_workers();
  const auto first = std::find(ranks.begin(), ranks.end(), team.rank());
  return {static_cast<int>(first - ranks.begin()), static_cast<int>(std::count(first, ranks.end(), team.rank()))};
}

Executor make_executor(const Team& team, int workers, std::function<void()> poll) {
  const auto [first, count] = workers_here(team);
  return Executor(count, std::move(poll), first, workers - count);
}

}  // namespace

Pipeline::Pipeline(std::vector<Stage> stages, std::vector<Edge> edges, ScheduleSource schedules, int intraop_threads,
                   LanguageBinding binding, std::unique_ptr<Team> team)
    : stages_(std::move(stages)),
      schedules_(std::move(schedules)),
      edges_(std::move(edges)),
      loans_(find_loans(places_of_parameters(stages_))),
      intraop_threads_(intraop_threads),
      binding_(std::move(binding)),
      team_(std::move(team)),
      devices_(workers_of(schedules_), c10::kCPU),
      executor_(make_executor(*team_, workers(), binding_.poll)) {
  for (const auto& stage : stages_) devices_[worker_of(stage.index)] = stage.device;
  for (const auto device : devices_) streams_.push_back(new_stream(device));
  for (const auto& edge : edges_) ends_.push_back({stages_[edge.from].device, stages_[edge.to].device});
  if (team_->has_device_wires()) connect_devices();
  for (const auto& [from, to] : ends_) {
    links_.push_back(new_link(from, to));
    back_links_.push_back(new_link(to, from));
  }
}

// In the order of (from, to), which all ranks share, because both ends of a wire wait for each other.
void Pipeline::connect_devices() {
  std::set<std::pair<int, int>> wires;
  for (std::size_t e = 0; e < edges_.size(); ++e) {
    const auto& edge = edges_[e];
    if (is_here(edge.from) == is_here(edge.to)) continue;
    auto& ends = ends_[e];
    (is_here(edge.from) ? ends.to : ends.from) = is_here(edge.from) ? ends.from : ends.to;
    const int sender = worker_of(edge.from);
    const int receiver = worker_of(edge.to);
    wires.insert({{sender, receiver}, {receiver, sender}});
  }
  for (const auto& [from, to] : wires) {
    const auto device = devices_[team_->is_here(from) ? from : to];
    device_links_.try_emplace({from, to}, team_->connect_devices(from, to, device), device);
  }
}

DeviceLink* Pipeline::device_link(int from, int to) {
  const auto found = device_links_.find({from, to});
  return found == device_links_.end() ? nullptr : &found->second;
}

Pipeline::~Pipeline() {
  if (executor_.forked()) static_cast<void>(team_.release());
}

Link Pipeline::inlet_link(c10::Device from, c10::Device to) {
  if (from == to) return {};
  MutexLock lock(mutex_);
  for (const auto& known : inlet_links_) {
    if (known.from == from && known.to == to) return known.link;
  }
  return inlet_links_.emplace_back(InletLink{from, to, new_link(from, to)}).link;
}

Mutex& Pipeline::call_mutex() {
  executor_.check_caller();
  return call_mutex_;
}

namespace {

// The verifier accepts more schedules than step() can run.
void check_has_backward(const Schedule& schedule) {
  for (const auto& list : schedule) {
    for (const auto& action : list) {
      if (action.kind == Kind::B || action.kind == Kind::I) return;
    }
  }
  throw std::invalid_argument("[gpipe] the schedule has no backward; give each cell a B, or an I and a W");
}

// From R to B or I a stage's buffers are those of the recompute, so no other action of the stage but a W, which uses no
// buffers, may stand between.
void check_recomputes(const Schedule& schedule) {
  for (const auto& list : schedule) {
    std::map<int, Action> recomputed;  // by stage: the R whose B or I has not come
    for (const auto& action : list) {
      if (action.kind == Kind::W) continue;
      const auto found = recomputed.find(action.stage);
      if (found != recomputed.end()) {
        const bool ends =
            (action.kind == Kind::B || action.kind == Kind::I) && action.micro_batch == found->second.micro_batch;
        if (!ends) {
          throw std::invalid_argument("[gpipe] the schedule has " + to_string(action) + " between " +
                                      to_string(found->second) +
                                      " and its B or I; put each R directly before its B or I");
        }
        recomputed.erase(found);
      } else if (action.kind == Kind::R) {
        recomputed.emplace(action.stage, action);
      }
    }
  }
}

}  // namespace

Program Pipeline::make_program(const Key& key) const {
  Layout layout{count(), key.micro_batches, schedules_.placement};
  auto schedule = key.use == Use::kForward              ? fill(layout)
                  : key.use == Use::kForwardAndBackward ? fill_drain(layout, key.checkpoint)
                                                        : schedules_.make(layout, key.checkpoint);
  if (key.use == Use::kStep) {
    check_has_backward(schedule);
    check_recomputes(schedule);
  }
  return Program::make(std::move(layout), edges_, std::move(schedule));
}

std::shared_ptr<const Program> Pipeline::find_program(const Key& key) {
  MutexLock lock(mutex_);
  const auto found =
      std::find_if(programs_.begin(), programs_.end(), [&](const auto& known) { return known.first == key; });
  if (found == programs_.end()) return nullptr;
  std::rotate(found, found + 1, programs_.end());
  return programs_.back().second;
}

std::shared_ptr<const Program> Pipeline::program(int micro_batches, Checkpoint checkpoint, Use use) {
  const Key key{micro_batches, checkpoint, use};
  if (auto known = find_program(key)) return known;
  // Not under the lock: a user's schedule function may call the pipeline, or wait for a thread that does.
  auto made = std::make_shared<const Program>(make_program(key));
  MutexLock lock(mutex_);
  if (programs_.size() == kPrograms) programs_.erase(programs_.begin());
  programs_.emplace_back(key, made);
  return made;
}

void Pipeline::set_error(std::optional<ErrorInfo> error) {
  MutexLock lock(mutex_);
  error_ = std::move(error);
}

std::optional<ErrorInfo> Pipeline::error() const {
  MutexLock lock(mutex_);
  return error_;
}

void Pipeline::set_timeline(std::shared_ptr<Timeline> timeline) {
  MutexLock lock(mutex_);
  timeline_ = std::move(timeline);
  steps_ = 0;
}

Pipeline::Recording Pipeline::next_recording() {
  MutexLock lock(mutex_);
  if (!timeline_) return {};
  return {timeline_, steps_++};
}

}  // namespace gpipe
