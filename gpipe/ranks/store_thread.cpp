#include "gpipe/ranks/store_thread.h"

#include <unistd.h>

#include <torch/csrc/distributed/c10d/exception.h>
#include <random>

#include "absl/strings/str_join.h"
#include "gpipe/base/checks.h"

namespace gpipe {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kInterval{10};
constexpr milliseconds kLastPatience{1000};

}  // namespace

struct StoreThread::State {
  using Item = std::packaged_task<void(c10d::Store*, std::exception_ptr)>;

  void run(const Open& open) {
    c10::intrusive_ptr<c10d::Store> store;
    std::exception_ptr error;
    try {
      store = open();
    } catch (const std::exception&) {
      error = std::current_exception();
    }
    for (;;) {
      Item next;
      {
        MutexLock lock(mutex);
        while (items.empty() && !ending) changed.wait(mutex);
        if (items.empty()) return;
        next = std::move(items.front());
        items.pop_front();
      }
      next(store.get(), error);
    }
  }

  std::promise<void> ended;
  std::atomic<bool> is_stuck = false;  // the last answer did not come in time
  Mutex mutex;
  CondVar changed;
  bool ending ABSL_GUARDED_BY(mutex) = false;
  std::deque<Item> items ABSL_GUARDED_BY(mutex);
};

StoreThread::StoreThread(Open open)
    : state_(std::make_shared<State>()), thread_([state = state_, open = std::move(open)] {
        state->run(open);
        state->ended.set_value();
      }) {}

StoreThread::~StoreThread() {
  {
    MutexLock lock(state_->mutex);
    state_->ending = true;
  }
  state_->changed.notify_all();
  const auto patience = state_->is_stuck ? milliseconds(0) : kLastPatience;
  const bool has_ended = state_->ended.get_future().wait_for(patience) == std::future_status::ready;
  has_ended ? thread_.join() : thread_.detach();
}

std::future<void> StoreThread::add(Task task) {
  State::Item item([task = std::move(task)](c10d::Store* store, const std::exception_ptr& error) {
    if (error) std::rethrow_exception(error);
    task(*store);
  });
  auto done = item.get_future();
  MutexLock lock(state_->mutex);
  state_->items.push_back(std::move(item));
  state_->changed.notify_all();
  return done;
}

void StoreThread::await(std::future<void> done, milliseconds limit, const Poll& poll) {
  state_->is_stuck = true;
  for (const auto end = end_after(limit);;) {
    if (done.wait_until(poll ? std::min(end, end_after(kPollPeriod)) : end) == std::future_status::ready) break;
    if (Clock::now() >= end) {
      throw StoreTimeout(absl::StrCat("[gpipe] the store of the job has not answered within ", limit.count(),
                                      " ms: the process that serves it, rank 0 or torchrun, is stopped or cut off"));
    }
    if (poll) poll();
  }
  state_->is_stuck = false;
  done.get();
}

std::pair<std::string, std::string> StoreThread::await_any(const std::vector<std::string>& keys, Clock::time_point end,
                                                           milliseconds limit, const Poll& poll) {
  using Found = std::pair<std::string, std::string>;
  const auto look = [keys](c10d::Store& store) {
    for (const auto& key : keys) {
      if (store.check({key})) return Found(key, store.get_to_str(key));
    }
    return Found();
  };
  for (;; std::this_thread::sleep_for(kInterval)) {
    auto found = ask<Found>(look, limit, poll);
    if (!found.first.empty() || Clock::now() >= end) return found;
    if (poll) poll();
  }
}

void claim_rank(StoreThread& store, int rank, milliseconds limit, const Poll& poll) {
  char host[256] = {};
  gethostname(host, sizeof host - 1);
  // Containers may share a host's name and the numbers of processes.
  static const auto number = std::random_device()();
  const auto mine = absl::StrCat("process ", getpid(), " (", number, ") on host '", host, "'");
  const auto first = store.ask<std::string>(
      [=](c10d::Store& of_job) { return of_job.compareSet(absl::StrCat("rank ", rank), "", mine); }, limit, poll);
  if (first != mine) {
    throw_error("rank ", rank, " has already come to this job: ", first, ", but this is ", mine,
                "; give each job a MASTER_PORT of its own, and each process a RANK of its own");
  }
}

// A rank arrives under a number that it never had before. Only the present rank 0 answers that number.
std::string name_attempt(StoreThread& store, int rank, int size, milliseconds limit, const Poll& poll) {
  const auto arrivals = [](int r) { return absl::StrCat("arrivals of rank ", r); };
  const auto answer = [](int r, std::int64_t arrival) {
    return absl::StrCat("attempt of rank ", r, ", arrival ", arrival);
  };
  const auto joined = [](const std::string& name, int r) { return absl::StrCat("rank ", r, " joined ", name); };
  const auto add = [&](const std::string& key) {
    return store.ask<std::int64_t>([=](c10d::Store& of_job) { return of_job.add(key, 1); }, limit, poll);
  };
  const auto end = end_after(limit);
  if (rank != 0) {
    const auto name = store.await_any({answer(rank, add(arrivals(rank)))}, end, limit, poll).second;
    if (name.empty()) throw_error("rank 0 did not come in time");
    add(joined(name, rank));
    return name;
  }
  const auto name = absl::StrCat("attempt", add("attempts"));
  const auto await_ranks = [=](c10d::Store& of_job) {
    std::vector<int> missing;
    for (int r = 1; r < size; ++r) {
      if (of_job.check({joined(name, r)})) continue;
      missing.push_back(r);
      // The same answer again changes nothing.
      if (const auto arrival = of_job.add(arrivals(r), 0); arrival != 0) of_job.set(answer(r, arrival), name);
    }
    return missing;
  };
  for (;; std::this_thread::sleep_for(kInterval)) {
    const auto missing = store.ask<std::vector<int>>(await_ranks, limit, poll);
    if (missing.empty()) return name;
    if (Clock::now() >= end) throw_error("these ranks did not come in time: ", absl::StrJoin(missing, ", "));
    if (poll) poll();
  }
}

}  // namespace gpipe
