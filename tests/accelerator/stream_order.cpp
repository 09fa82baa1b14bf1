#include "tests/accelerator/stream_order.h"

#include <algorithm>
#include <atomic>
#include <sstream>

namespace gpipe::accelerator {
namespace {

thread_local std::string current_action;

int this_thread() {
  static std::atomic<int> threads{0};
  thread_local const int index = threads++;
  return index;
}

void join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (std::size_t stream = 0; stream < other.size(); ++stream) clock[stream] = std::max(clock[stream], other[stream]);
}

std::uint64_t at(const Clock& clock, std::size_t stream) { return stream < clock.size() ? clock[stream] : 0; }

}  // namespace

std::string exchange_action(std::string name) { return std::exchange(current_action, std::move(name)); }

int StreamOrder::index(int device, std::int64_t stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto [found, made] = indices_.try_emplace({device, stream}, static_cast<int>(indices_.size()));
  if (made) streams_.emplace_back(indices_.size());
  return found->second;
}

Clock& StreamOrder::host() { return hosts_[this_thread()]; }

Counts& StreamOrder::counts() { return counts_[current_action.substr(0, 2)]; }

std::string StreamOrder::name(int stream) const {
  for (const auto& [key, index] : indices_) {
    if (index == stream) return "stream " + std::to_string(key.second) + " of device " + std::to_string(key.first);
  }
  return "an unknown stream";
}

void StreamOrder::add_violation(std::string text) {
  violations_.push_back(current_action.empty() ? std::move(text) : current_action + ": " + std::move(text));
}

void StreamOrder::check(int stream, std::string_view operation, const Access& access) {
  auto& it = *access.allocation;
  auto& now = streams_[stream];
  const auto unordered = [&](int other, const Use& use) { return at(now, other) < use.time; };
  const auto add = [&](int other, const Use& use) {
    std::ostringstream text;
    text << operation << (access.writes ? " writes" : " reads") << " a tensor of shape [";
    for (std::size_t d = 0; d < access.sizes.size(); ++d) text << (d == 0 ? "" : ", ") << access.sizes[d];
    text << "] on " << name(stream) << ", which has not waited for " << use.operation << " on " << name(other);
    add_violation(text.str());
  };
  if (it.writer >= 0 && unordered(it.writer, it.write)) {
    add(it.writer, it.write);
  } else if (access.writes) {
    const auto found =
        std::find_if(it.uses.begin(), it.uses.end(), [&](const auto& use) { return unordered(use.first, use.second); });
    if (found != it.uses.end()) add(found->first, found->second);
  }
  const Use use{now[stream], operation};
  if (access.writes) {
    it.uses.clear();
    it.writer = stream;
    it.write = use;
  }
  it.uses[stream] = use;
}

void StreamOrder::log(Request request) {
  if (!log_) return;
  request.action = current_action;
  log_->threads[this_thread()].push_back(std::move(request));
}

void StreamOrder::launch(int stream, std::string_view operation, std::span<const Access> accesses, const Work& work) {
  std::lock_guard<std::mutex> lock(mutex_);
  log({.kind = Request::kLaunch, .stream = stream, .work = work, .operation = operation});
  if (work.is_copy()) ++counts().copies;
  if (work.is_copy() && work.copies_from < 0) {
    // Another thread may have made the values, after work that it waited for. No event tells which thread.
    for (const auto& [thread, clock] : hosts_) join(streams_[stream], clock);
  }
  join(streams_[stream], host());
  ++streams_[stream][stream];
  for (const auto& access : accesses) check(stream, operation, access);
}

void StreamOrder::order(int first, int then) {
  std::lock_guard<std::mutex> lock(mutex_);
  log({.kind = Request::kRecord, .stream = first, .id = ++ids_});
  log({.kind = Request::kWait, .stream = then, .id = ids_});
  join(streams_[then], streams_[first]);
}

void StreamOrder::record(Event& event, int stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++counts().events;
  join(streams_[stream], host());
  event = {streams_[stream], stream, ++ids_};
  log({.kind = Request::kRecord, .stream = stream, .id = event.id});
}

void StreamOrder::wait(int stream, const Event& event) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++counts().waits;
  log({.kind = Request::kWait, .stream = stream, .id = event.id});
  join(streams_[stream], event.clock);
}

void StreamOrder::comes_after(int stream, const Event& event) {
  std::lock_guard<std::mutex> lock(mutex_);
  join(streams_[stream], event.clock);
}

void StreamOrder::synchronize(int stream) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ++counts().host_waits;
    log_synchronize(stream);
    join(host(), streams_[stream]);
  }
  run_actions();
}

void StreamOrder::synchronize(const Event& event) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (at(event.clock, event.stream) == at(streams_[event.stream], event.stream)) ++counts().host_waits;
    log({.kind = Request::kSynchronize, .stream = -1, .id = event.id});
    join(host(), event.clock);
  }
  run_actions();
}

void StreamOrder::synchronize_device(int device) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ++counts().host_waits;
    for (const auto& [key, stream] : indices_) {
      if (key.first != device) continue;
      log_synchronize(stream);
      join(host(), streams_[stream]);
    }
  }
  run_actions();
}

void StreamOrder::when_over(int stream, std::function<void()> action) {
  std::lock_guard<std::mutex> lock(mutex_);
  actions_.push_back({stream, streams_[stream][stream], std::move(action)});
}

void StreamOrder::run_actions() {
  std::vector<Action> over;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto rest = std::partition(actions_.begin(), actions_.end(),
                                     [&](const Action& action) { return at(host(), action.stream) < action.time; });
    std::move(rest, actions_.end(), std::back_inserter(over));
    actions_.erase(rest, actions_.end());
  }
  for (const auto& action : over) action.run();
}

void StreamOrder::log_synchronize(int stream) {
  log({.kind = Request::kRecord, .stream = stream, .id = ++ids_});
  log({.kind = Request::kSynchronize, .stream = stream, .id = ids_});
}

Allocation StreamOrder::allocated(int stream, std::size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  log({.kind = Request::kAllocate, .stream = stream, .id = ++ids_, .work = {.bytes = static_cast<double>(bytes)}});
  return {.home = stream, .id = ids_};
}

void StreamOrder::used(Allocation& allocation, int stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  allocation.recorded.insert(stream);
}

void StreamOrder::freed(const Allocation& allocation) {
  std::lock_guard<std::mutex> lock(mutex_);
  Request request{.kind = Request::kFree, .stream = allocation.home, .id = allocation.id};
  std::ranges::copy_if(allocation.recorded, std::back_inserter(request.streams),
                       [&](int stream) { return stream != allocation.home; });
  log(std::move(request));
  auto known = streams_[allocation.home];
  join(known, host());
  for (const int stream : allocation.recorded) join(known, streams_[stream]);
  for (const auto& [stream, use] : allocation.uses) {
    if (at(known, stream) >= use.time) continue;
    std::ostringstream text;
    text << "memory returns to " << name(allocation.home) << " while " << use.operation << " on " << name(stream)
         << " may still use it; the allocator was not told of that stream";
    add_violation(text.str());
  }
}

void StreamOrder::report(std::string violation) {
  std::lock_guard<std::mutex> lock(mutex_);
  add_violation(std::move(violation));
}

std::vector<std::string> StreamOrder::take_violations() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(violations_, {});
}

std::map<std::string, Counts> StreamOrder::take_counts() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(counts_, {});
}

void StreamOrder::keep_log() {
  std::lock_guard<std::mutex> lock(mutex_);
  log_.emplace();
}

Log StreamOrder::take_log() {
  std::lock_guard<std::mutex> lock(mutex_);
  log_->devices.resize(indices_.size());
  for (const auto& [key, index] : indices_) log_->devices[index] = key.first;
  return *std::exchange(log_, std::nullopt);
}

}  // namespace gpipe::accelerator
