#include "gpipe/run/pipeline.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <set>

#include "gpipe/base/checks.h"
#include "gpipe/options.h"
#include "gpipe/schedule/list_schedule.h"
#include "gpipe/schedules.h"
#include "gpipe/tensors/torch_internals.h"

namespace gpipe {
namespace {

constexpr std::size_t kPrograms = 16;

Executor make_executor(const Team& team, std::function<void()> poll) {
  const auto& ranks = team.of_workers();
  const auto [first, last] = std::equal_range(ranks.begin(), ranks.end(), team.rank());
  return Executor(static_cast<int>(last - first), std::move(poll), static_cast<int>(first - ranks.begin()));
}

// The verifier accepts more schedules than step() can run. From R to B or I a stage's buffers are the
// recompute's, so no other action of the stage but a W, which uses no buffers, may stand between.
void check_for_step(const Schedule& schedule) {
  bool has_backward = false;
  for (const auto& list : schedule) {
    std::map<int, Action> last;  // by stage, without W
    for (const auto& action : list) {
      if (action.kind == Kind::W) continue;
      const bool is_backward = action.kind == Kind::B || action.kind == Kind::I;
      has_backward = has_backward || is_backward;
      const auto before = std::exchange(last[action.stage], action);
      if (before.kind != Kind::R || (is_backward && action.micro_batch == before.micro_batch)) continue;
      refuse_argument("the schedule has ", to_string(action), " between ", to_string(before),
                      " and its B or I; put each R directly before its B or I");
    }
  }
  if (!has_backward) refuse_argument("the schedule has no backward; give each cell a B, or an I and a W");
}

// Gives the tensors the values that they have in the first replica. Undefined ones of `sent` stay as they are.
void take_values(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& sent, Team& team) {
  at::NoGradGuard no_grad;
  if (tensors.empty()) return;
  Parcel parcel;
  for (const auto& tensor : sent) {
    // An expanded tensor cannot be written, so it is not sent.
    const bool is_sent = tensor.defined() && at::has_internal_overlap(tensor) != at::MemOverlap::Yes;
    parcel.add(is_sent ? tensor.detach() : at::Tensor(), /*gradient_wanted=*/false);
  }
  parcel = team.broadcast(Team::Group::kCounterparts, team.counterpart(0), std::move(parcel));
  if (team.replica() == 0) return;
  if (parcel.tensors.size() != tensors.size()) {
    throw_error("the layers of this replica have ", tensors.size(),
                " parameters and buffers to make equal, but those of the first replica have ", parcel.tensors.size());
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto& value = parcel.tensors[i];
    if (!value.defined()) continue;
    if (value.sizes() == tensors[i].sizes()) {
      tensors[i].variable_data().copy_(value);
    } else {
      tensors[i].set_data(value.to(tensors[i].device()));  // a buffer whose shape follows the data
    }
  }
}

}  // namespace

void set_intraop_threads_of_this_thread(int threads) {
  // A thread's first parallel region sets its number of threads to the process's. Run this initialisation now, so that
  // it does not undo the setting later. lazy_init_num_threads() is inline, and its flag exists twice: in this library,
  // and in libtorch, where at::get_num_threads() sets it.
  at::internal::lazy_init_num_threads();
  at::get_num_threads();
  if (omp_set_num_threads != nullptr) omp_set_num_threads(threads);
  if (MKL_Set_Num_Threads_Local != nullptr) MKL_Set_Num_Threads_Local(threads);
}

std::shared_ptr<const Program> CallState::program(const Pipeline& pipeline, int micro_batches,
                                                  const Checkpoints& checkpoints, StepKey::Call call) {
  const Key key{micro_batches, checkpoints, call};
  ScheduleFunction make;
  {
    MutexLock lock(mutex_);
    const auto found = std::ranges::find(programs_, key, [](const auto& known) { return known.first; });
    if (found != programs_.end()) {
      std::rotate(found, found + 1, programs_.end());
      return programs_.back().second;
    }
    make = make_schedule_;
  }
  // Not under the lock: a user's schedule function may ask for another program.
  Layout layout{pipeline.count(), micro_batches, pipeline.placement()};
  auto schedule = call == StepKey::kForward                ? fill(layout)
                  : call == StepKey::kForwardWithGradients ? fill_drain(layout, Checkpoint::kNever)
                                                           : make(layout);
  schedule = with_recomputes(std::move(schedule), checkpoints, layout);
  if (call == StepKey::kStep) check_for_step(schedule);
  auto made = std::make_shared<const Program>(Program::make(std::move(layout), pipeline.edges(), std::move(schedule)));
  MutexLock lock(mutex_);
  if (programs_.size() == kPrograms) programs_.erase(programs_.begin());
  programs_.emplace_back(key, made);
  return made;
}

void CallState::set_schedule(const std::string& schedule) {
  MutexLock lock(mutex_);
  chosen_schedule_ = schedule;
  if (has_lists(schedule)) {
    make_schedule_ = [known = lists_of(schedule)](const Layout& layout) {
      return layout.micro_batches == known.layout.micro_batches ? known.schedule : list_schedule(layout);
    };
  } else {
    make_schedule_ = [schedule](const Layout& layout) { return make_schedule(schedule, layout, Checkpoint::kNever); };
  }
  std::erase_if(programs_, [](const auto& known) { return std::get<StepKey::Call>(known.first) == StepKey::kStep; });
}

CallState::Recording CallState::next_recording(int workers, bool needed) {
  MutexLock lock(mutex_);
  if (!timeline_ && !needed) return {};
  const auto counter = std::make_shared<ByteCounter>(workers);
  if (!timeline_) return {std::make_shared<Timeline>(), 0, counter};
  return {timeline_, steps_++, counter};
}

Link CallState::link(c10::Device from, c10::Device to) {
  if (from == to) return {};
  MutexLock lock(mutex_);
  const auto [found, is_new] = links_.try_emplace(from.str() + to.str());
  if (is_new) found->second = new_link(from, to);
  return found->second;
}

Pipeline::Pipeline(std::vector<Stage> stages, std::vector<Edge> edges, ScheduleSource schedules, int intraop_threads,
                   LanguageBinding binding, std::unique_ptr<Team> team)
    : stages_(std::move(stages)),
      placement_(std::move(schedules.placement)),
      edges_(std::move(edges)),
      loans_(find_loans(places_of_parameters(stages_))),
      intraop_threads_(intraop_threads),
      binding_(std::move(binding)),
      team_(std::move(team)),
      devices_(1 + std::ranges::max(placement_), c10::kCPU),
      calls_(std::move(schedules.make)),
      executor_(make_executor(*team_, binding_.poll)) {
  for (auto& stage : stages_) {
    devices_[worker_of(stage.index)] = stage.device;
    stage.state.has_replicas = team_->replicas() > 1;
    for (const auto& parameter : stage.parameters()) {
      if (parameter.is_leaf() && parameter.requires_grad()) catch_gradients(parameter);
    }
  }
  for (const auto device : devices_) streams_.push_back(new_stream(device));
  for (const auto& edge : edges_) ends_.push_back({stages_[edge.from].device, stages_[edge.to].device});
  if (team_->has_device_wires()) connect_devices();
  for (auto& ends : ends_) {
    ends.link = calls_.link(ends.from, ends.to);
    ends.back_link = calls_.link(ends.to, ends.from);
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
  std::map<int, std::optional<c10::Stream>> streams;  // by worker of this rank
  for (const auto& [from, to] : wires) {
    const int here = team_->is_here(from) ? from : to;
    const auto [stream, is_new] = streams.try_emplace(here);
    if (is_new) stream->second = new_stream(devices_[here]);
    device_links_.try_emplace({from, to}, team_->connect_devices(from, to, devices_[here], stream->second));
  }
}

void Pipeline::time_layers(Timeline* timeline) {
  for (auto& stage : stages_) stage.layer_times = nullptr;
  if (timeline == nullptr) return;
  std::vector<LayerTime> layers;
  for (const auto& stage : stages_) {
    if (!is_here(stage.index) || !stage.device.is_cpu()) continue;
    const bool has_loss = stage.index + 1 == count();
    layers.insert(layers.end(), stage.layers.size() + (has_loss ? 1 : 0), {stage.index});
  }
  const bool goes_on = std::ranges::equal(layers, timeline->layers, {}, &LayerTime::stage, &LayerTime::stage);
  if (!goes_on) timeline->layers = std::move(layers);
  for (auto& layer : timeline->layers) {
    auto& first = stages_[layer.stage].layer_times;
    if (first == nullptr) first = &layer;
  }
}

DeviceLink* Pipeline::device_link(int from, int to) {
  const auto found = device_links_.find({from, to});
  return found == device_links_.end() ? nullptr : &found->second;
}

Pipeline::~Pipeline() {
  if (executor_.forked()) static_cast<void>(team_.release());
}

void Pipeline::take_state_of_first_replica(bool all, bool trains) {
  if (all) calls_.has_loaded = false;
  const bool buffers_differ = std::exchange(calls_.buffers_differ, trains);
  if (team_->replicas() == 1 || !(all || buffers_differ)) return;
  std::vector<at::Tensor> tensors;
  std::vector<at::Tensor> sent;
  for (const auto& stage : stages_) {
    for (const auto& parameter : all ? stage.parameters() : std::vector<at::Tensor>()) {
      tensors.push_back(parameter);
      sent.push_back(parameter);
    }
    for (const auto& buffer : stage.buffers()) {
      tensors.push_back(buffer);
      sent.push_back(all || stage.state.may_change(buffer) ? buffer : at::Tensor());
    }
  }
  take_values(tensors, sent, *team_);
  for (const auto& tensor : tensors) {
    if (all && tensor.defined() && !tensor.is_inference()) torch::autograd::impl::bump_version(tensor);
  }
}

}  // namespace gpipe
