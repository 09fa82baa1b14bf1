#include "tests/accelerator/virtual_time.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <random>
#include <set>
#include <stdexcept>

#include "tests/accelerator/caching_allocator.h"

namespace gpipe::accelerator {
namespace {

constexpr double kLeastScaled = 64;  // bytes of a tensor; a loss is a number in any model
constexpr double kNever = std::numeric_limits<double>::infinity();

struct Event {
  double recorded = kNever;  // by the host
  double over = kNever;      // on the device
};

/// What a stream does in turn: an operator, or a wait for an event or its record.
struct Item {
  const Request* request;
  double enqueued;
  std::int64_t event = 0;  // 0: none
  std::int64_t frees = 0;  // of a record: the allocation that waits for it
  bool is_wait = false;
  bool has_begun = false;  // of a transfer
};

struct Stream {
  double time = 0;
  std::deque<Item> items;
};

struct Thread {
  double time = 0;
  const std::vector<Request>* requests;
  std::size_t next = 0;
  std::int64_t awaits = 0;  // the event of a kSynchronize that has begun
};

/// An allocation and what keeps its memory after its end.
struct Held {
  int device;
  double made;
  int records = 0;
};

/// Takes the earliest step of a thread or a stream, again and again. A step takes no time or some, so that those that
/// follow from it are never earlier: the order of the steps is their order in time.
class Simulation {
 public:
  Simulation(const Log& log, const Machine& machine) : log_(log), machine_(machine), streams_(log.devices.size()) {
    for (const auto& [index, requests] : log.threads) threads_.push_back({.requests = &requests});
  }

  Replay run() {
    while (step()) {
    }
    for (const auto& thread : threads_) {
      if (thread.next < thread.requests->size()) {
        throw std::logic_error("a host thread waits for ever" + begun_transfers());
      }
      result_.host_seconds = std::max(result_.host_seconds, thread.time);
    }
    for (const auto& stream : streams_) {
      if (!stream.items.empty()) throw std::logic_error("a stream waits for ever" + begun_transfers());
      result_.seconds = std::max(result_.seconds, stream.time);
    }
    for (const auto& [device, allocator] : allocators_) result_.reserved[device] = allocator.reserved();
    return std::move(result_);
  }

 private:
  bool step() {
    double first = kNever;
    Thread* thread = nullptr;
    for (auto& it : threads_) {
      if (const double at = ready(it); at < first) first = at, thread = &it;
    }
    int stream = -1;
    for (const int s : busy_) {
      if (const double at = ready(s); at < first) first = at, stream = s;
    }
    if (first == kNever) return false;
    stream >= 0 ? advance(stream, first) : advance(*thread, first);
    return true;
  }

  double ready(const Thread& thread) {
    if (thread.next == thread.requests->size()) return kNever;
    const auto& request = (*thread.requests)[thread.next];
    if (thread.awaits != 0) return std::max(thread.time, events_[thread.awaits].over);
    if (request.kind == Request::kWait) return std::max(thread.time, events_[request.id].recorded);
    if (request.kind != Request::kFree) return thread.time;
    const auto found = held_.find(request.id);
    return found == held_.end() ? thread.time : std::max(thread.time, found->second.made);
  }

  double ready(int index) {
    const auto& stream = streams_[index];
    const auto& item = stream.items.front();
    const double at = std::max(stream.time, item.enqueued);
    if (item.has_begun) return transfers_[transfer_of(item)].end;
    if (transfer_of(item) != 0) {
      const auto& room = rooms_[log_.devices[index]];
      return room.taken < machine_.transfers ? std::max(at, room.since) : kNever;
    }
    return item.is_wait ? std::max(at, events_[item.event].over) : at;
  }

  void advance(Thread& thread, double at) {
    const auto& request = (*thread.requests)[thread.next];
    thread.time = at;
    switch (request.kind) {
      case Request::kLaunch:
        thread.time += machine_.seed == 0 ? machine_.launch : random_(generator_);
        enqueue(request.stream, {.request = &request, .enqueued = thread.time});
        break;
      case Request::kRecord:
        events_[request.id].recorded = at;
        enqueue(request.stream, {.request = &request, .enqueued = at, .event = request.id});
        break;
      case Request::kWait:
        enqueue(request.stream, {.request = &request, .enqueued = at, .event = request.id, .is_wait = true});
        break;
      case Request::kSynchronize:
        if (thread.awaits == 0) {
          thread.awaits = request.id;
          return;
        }
        thread.awaits = 0;
        break;
      case Request::kAllocate:
        allocate(request, at);
        break;
      case Request::kFree:
        free(request, at);
        break;
    }
    ++thread.next;
  }

  void advance(int index, double at) {
    auto& stream = streams_[index];
    const auto item = stream.items.front();
    if (transfer_of(item) != 0 && !item.has_begun) return begin_transfer(index, at);
    if (item.has_begun) {
      auto& room = rooms_[log_.devices[index]];
      --room.taken;
      room.since = at;
    }
    stream.items.pop_front();
    if (stream.items.empty()) busy_.erase(index);
    stream.time = at;
    if (item.is_wait || item.has_begun) return;
    if (item.event != 0) {
      events_[item.event].over = at;
    } else if (item.frees != 0) {
      if (--held_.at(item.frees).records == 0) release(item.frees);
    } else {
      stream.time = execute(log_.devices[index], *item.request, at);
    }
  }

  static std::int64_t transfer_of(const Item& item) {
    const bool is_operator = item.event == 0 && item.frees == 0;
    return is_operator ? item.request->work.transfer : 0;
  }

  void begin_transfer(int index, double at) {
    auto& item = streams_[index].items.front();
    item.has_begun = true;
    ++rooms_[log_.devices[index]].taken;
    auto& transfer = transfers_[transfer_of(item)];
    if (++transfer.ends < item.request->work.ends) return;
    transfer.end = at + machine_.link_latency + machine_.scale * item.request->work.bytes / machine_.link_rate;
  }

  std::string begun_transfers() const {
    std::string text;
    for (std::size_t s = 0; s < streams_.size(); ++s) {
      const auto& items = streams_[s].items;
      if (items.empty() || !items.front().has_begun) continue;
      const auto& request = *items.front().request;
      text += "; device " + std::to_string(log_.devices[s]) + " has begun the " + std::string(request.operation) +
              " of " + request.action;
    }
    return text;
  }

  void enqueue(int stream, Item item) {
    streams_[stream].items.push_back(item);
    busy_.insert(stream);
  }

  /// Returns the operator's end.
  double execute(int device, const Request& request, double at) {
    const auto& work = request.work;
    double seconds = 0;
    std::vector<double*> engines;
    if (work.is_copy()) {
      engines = {&engines_["out of " + std::to_string(work.copies_from)],
                 &engines_["into " + std::to_string(work.copies_to)]};
      seconds = machine_.link_latency + machine_.scale * work.bytes / machine_.link_rate;
    } else {
      engines = {&engines_[std::to_string(device)]};
      seconds = machine_.kernel +
                machine_.scale * std::max(work.bytes / machine_.memory_rate, work.products / machine_.product_rate);
    }
    double start = at;
    for (const auto* free : engines) start = std::max(start, *free);
    for (auto* free : engines) *free = start + seconds;
    result_.spans.push_back({device, work.is_copy(), start, start + seconds, request.action});
    return start + seconds;
  }

  void allocate(const Request& request, double at) {
    const int device = log_.devices[request.stream];
    const double scale = request.work.bytes < kLeastScaled ? 1 : machine_.scale;
    held_[request.id] = {device, at};
    allocators_[device].allocate(request.id, request.stream, static_cast<std::int64_t>(scale * request.work.bytes));
  }

  void free(const Request& request, double at) {
    const auto found = held_.find(request.id);
    if (found == held_.end()) return;  // allocated before the log
    found->second.records = static_cast<int>(request.streams.size());
    for (const int stream : request.streams) {
      enqueue(stream, {.request = &request, .enqueued = at, .frees = request.id});
    }
    if (request.streams.empty()) release(request.id);
  }

  void release(std::int64_t id) {
    allocators_[held_.at(id).device].free(id);
    held_.erase(id);
  }

  const Log& log_;
  const Machine& machine_;
  std::vector<Thread> threads_;
  std::vector<Stream> streams_;
  std::set<int> busy_;  // the streams that have items
  std::map<std::int64_t, Event> events_;
  std::map<std::string, double> engines_;  // when each is free
  std::map<std::int64_t, Held> held_;
  std::map<int, CachingAllocator> allocators_;
  struct Transfer {
    int ends = 0;  // that have begun
    double end = kNever;
  };
  std::map<std::int64_t, Transfer> transfers_;
  struct Room {
    int taken = 0;  // by transfers
    double since = 0;
  };
  std::map<int, Room> rooms_;  // by device
  std::mt19937_64 generator_{machine_.seed};
  std::uniform_real_distribution<double> random_{0, 20 * machine_.launch};
  Replay result_;
};

}  // namespace

Replay replay(const Log& log, const Machine& machine) { return Simulation(log, machine).run(); }

}  // namespace gpipe::accelerator
