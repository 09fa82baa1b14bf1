#include "gpipe/ranks/store_thread.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <deque>
#include <optional>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "absl/cleanup/cleanup.h"
#include "gpipe/base/checks.h"
#include "gpipe/base/mutex.h"
#include "gpipe/ranks/network.h"

namespace gpipe {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kLookInterval{200};
constexpr milliseconds kValueInterval{10};
constexpr milliseconds kLastPatience{1000};

struct Watch {
  /// A connection to the store's process, which ends with it and carries nothing. -1 for other stores.
  int probe = -1;
  std::atomic<bool> ended = false;

  ~Watch() {
    if (probe >= 0) close(probe);
  }
  bool has_ended() {
    pollfd state{.fd = probe, .events = POLLRDHUP, .revents = 0};
    if (probe >= 0 && poll(&state, 1, /*timeout=*/0) == 1) ended = true;
    return ended;
  }
};

class WatchedStore : public c10d::PrefixStore {
 public:
  using Bytes = std::vector<std::uint8_t>;

  WatchedStore(const std::string& prefix, c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<Watch> watch)
      : PrefixStore(prefix, std::move(store)), watch_(std::move(watch)) {}

  c10::intrusive_ptr<c10d::Store> clone() override {
    return use([&] { return c10::make_intrusive<WatchedStore>(prefix_, store_->clone(), watch_); });
  }
  void set(const std::string& key, const Bytes& value) override {
    use([&] { PrefixStore::set(key, value); });
  }
  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override {
    return use([&] { return PrefixStore::compareSet(key, expected, desired); });
  }
  Bytes get(const std::string& key) override {
    return use([&] { return PrefixStore::get(key); });
  }
  std::int64_t add(const std::string& key, std::int64_t value) override {
    return use([&] { return PrefixStore::add(key, value); });
  }
  bool check(const std::vector<std::string>& keys) override {
    return use([&] { return PrefixStore::check(keys); });
  }

 private:
  template <typename Use>
  std::invoke_result_t<Use> use(Use use) {
    try {
      if (!watch_->has_ended()) return use();
    } catch (const c10::DistNetworkError&) {
      watch_->ended = true;
    }
    throw_error("the store of the job has ended, as it does when rank 0 or torchrun ends");
  }

  const std::shared_ptr<Watch> watch_;  // shared with clones
};

}  // namespace

struct StoreThread::State {
  void run(const Open& open) {
    c10::intrusive_ptr<c10d::Store> store;
    std::exception_ptr error;
    try {
      store = open();
    } catch (const std::exception&) {
      error = std::current_exception();
    }
    for (auto next = Clock::now(); !ending;) {
      is_stuck = false;
      const auto [task, is_look] = await_task(next);
      if (is_look) next = Clock::now() + kLookInterval;
      try {
        task(store.get(), error);
      } catch (const std::exception&) {  // the store is gone, as when its rank has ended
      }
    }
  }

  /// Returns the next task; `look` from `next` on.
  std::pair<Task, bool> await_task(Clock::time_point next) {
    MutexLock lock(mutex);
    while (tasks.empty() && !(look && Clock::now() >= next)) {
      look ? changed.wait_until(mutex, next) : changed.wait(mutex);
    }
    if (tasks.empty()) return {look, true};
    auto task = std::move(tasks.front());
    tasks.pop_front();
    return {std::move(task), false};
  }

  bool ending = false;  // used by the thread only
  std::promise<void> ended;
  std::atomic<bool> is_stuck = false;
  Mutex mutex;
  CondVar changed;
  std::deque<Task> tasks ABSL_GUARDED_BY(mutex);
  Task look ABSL_GUARDED_BY(mutex);
};

StoreThread::StoreThread(Open open)
    : state_(std::make_shared<State>()), thread_([state = state_, open = std::move(open)] {
        state->run(open);
        state->ended.set_value();
      }) {}

StoreThread::~StoreThread() {
  add([state = state_.get()](auto*, const auto&) { state->ending = true; });
  const auto patience = is_stuck() ? milliseconds(0) : kLastPatience;
  const bool has_ended = state_->ended.get_future().wait_for(patience) == std::future_status::ready;
  has_ended ? thread_.join() : thread_.detach();
}

void StoreThread::add(Task task) {
  MutexLock lock(state_->mutex);
  state_->tasks.push_back(std::move(task));
  state_->changed.notify_all();
}

void StoreThread::post(std::function<void(c10d::Store&)> use) {
  add([use = std::move(use)](c10d::Store* store, const auto&) {
    if (store != nullptr) use(*store);
  });
}

void StoreThread::look_often(std::function<void(c10d::Store&)> look) {
  MutexLock lock(state_->mutex);
  state_->look = [look = std::move(look)](c10d::Store* store, const auto&) {
    if (store != nullptr) look(*store);
  };
  state_->changed.notify_all();
}

bool StoreThread::is_stuck() const { return state_->is_stuck; }

void StoreThread::await(std::function<bool(milliseconds)> is_ready, milliseconds limit, const Poll& poll) {
  const auto end = end_after(limit);
  absl::Cleanup give_up = [this] { state_->is_stuck = true; };
  for (;;) {
    const auto left = std::max(std::chrono::ceil<milliseconds>(end - Clock::now()), milliseconds(0));
    if (is_ready(poll ? std::min(left, kPollPeriod) : left)) break;
    if (Clock::now() >= end) {
      throw StoreTimeout(absl::StrCat("[gpipe] the store of the job has not answered within ", limit.count(),
                                      " ms: the process that serves it, rank 0 or torchrun, is stopped or cut off"));
    }
    if (poll) poll();
  }
  std::move(give_up).Cancel();
}

std::string await_value(StoreThread& store, const std::string& key, Clock::time_point end, milliseconds limit,
                        const Poll& poll) {
  const auto look = [key](c10d::Store& of_job) {
    return of_job.check({key}) ? std::optional(of_job.get_to_str(key)) : std::nullopt;
  };
  for (;; std::this_thread::sleep_for(kValueInterval)) {
    if (auto value = store.ask<std::optional<std::string>>(look, limit, poll)) return *std::move(value);
    if (Clock::now() >= end) return "";
    if (poll) poll();
  }
}

c10::intrusive_ptr<c10d::Store> watched_store(const std::string& prefix, c10::intrusive_ptr<c10d::Store> store) {
  auto watch = std::make_shared<Watch>();
  auto watched = c10::make_intrusive<WatchedStore>(prefix, std::move(store), watch);
  const auto innermost = watched->getUnderlyingNonPrefixStore();
  if (const auto* served = dynamic_cast<const c10d::TCPStore*>(innermost.get())) {
    watch->probe = first_socket(served->getHost(), served->getPort(), SOCK_STREAM | SOCK_NONBLOCK, connect_soon);
  }
  return watched;
}

}  // namespace gpipe
