#include "gpipe/ranks/store_thread.h"

#include <deque>
#include <exception>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "gpipe/base/mutex.h"

namespace gpipe {
namespace {

constexpr std::chrono::milliseconds kInterval{200};
constexpr std::chrono::seconds kPatience{1};

using Clock = std::chrono::steady_clock;

}  // namespace

struct StoreThread::State {
  Mutex mutex;
  CondVar changed;
  std::deque<Task> tasks ABSL_GUARDED_BY(mutex);
  bool stuck ABSL_GUARDED_BY(mutex) = false;  // the store has not answered a question in time
  bool ending ABSL_GUARDED_BY(mutex) = false;
  bool ended ABSL_GUARDED_BY(mutex) = false;

  /// Waits for `done`, which the mutex guards. Returns it.
  bool await(const bool& done) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    for (const auto end = Clock::now() + kPatience; !done && !stuck;) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
      if (left.count() <= 0) break;
      changed.wait_for(mutex, left);
    }
    return done;
  }
};

StoreThread::StoreThread(const c10::intrusive_ptr<c10d::Store>& store, Task often)
    : state_(std::make_shared<State>()),
      thread_([state = state_, clone = store->clone(), often = std::move(often)] { run(*state, *clone, often); }) {}

StoreThread::~StoreThread() {
  bool ended = false;
  {
    MutexLock lock(state_->mutex);
    state_->ending = true;
    state_->changed.notify_all();
    ended = state_->await(state_->ended);
  }
  if (ended) {
    thread_.join();
  } else {
    thread_.detach();
  }
}

void StoreThread::run(State& state, c10d::Store& store, const Task& often) {
  for (auto next = Clock::now();;) {
    Task task;
    {
      MutexLock lock(state.mutex);
      if (state.tasks.empty() && !state.ending && Clock::now() < next) {
        state.changed.wait_for(state.mutex, std::chrono::duration_cast<std::chrono::milliseconds>(next - Clock::now()) +
                                                std::chrono::milliseconds(1));
      }
      if (!state.tasks.empty()) {
        task = std::move(state.tasks.front());
        state.tasks.pop_front();
      } else if (state.ending) {
        state.ended = true;
        state.changed.notify_all();
        return;
      } else if (Clock::now() >= next) {
        task = often;
        next = Clock::now() + kInterval;
      }
    }
    if (!task) continue;
    try {
      task(store);
    } catch (const std::exception&) {  // the store is gone, as when its rank has ended
    }
  }
}

void StoreThread::post(Task task) {
  MutexLock lock(state_->mutex);
  state_->tasks.push_back(std::move(task));
  state_->changed.notify_all();
}

std::optional<std::string> StoreThread::ask(Question question) {
  struct Answer {
    bool done = false;
    std::optional<std::string> text;
  };
  const auto answer = std::make_shared<Answer>();
  post([state = state_, answer, question = std::move(question)](c10d::Store& store) {
    std::optional<std::string> text;
    try {
      text = question(store);
    } catch (const std::exception&) {
    }
    MutexLock lock(state->mutex);
    *answer = {true, std::move(text)};
    state->stuck = false;
    state->changed.notify_all();
  });
  MutexLock lock(state_->mutex);
  state_->stuck = !state_->await(answer->done);
  return answer->done ? answer->text : std::nullopt;
}

}  // namespace gpipe
