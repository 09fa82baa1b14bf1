#include "gpipe/runtime/exit.h"

#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <utility>

#include "gpipe/base/mutex.h"

namespace gpipe {
namespace {

constexpr std::chrono::seconds kExitTimeout{5};

struct State {
  Mutex mutex;
  CondVar changed;
  int threads ABSL_GUARDED_BY(mutex) = 0;  // that have a guard
  bool exits ABSL_GUARDED_BY(mutex) = false;
  const pid_t process = getpid();
};

State& state() {
  static auto* const it = new State();  // never destroyed
  return *it;
}

void await_guards();

struct OfThread {
  // exit() destroys this first. Objects that a call has made with static duration are still there.
  ~OfThread() {
    if (guards > 0) await_guards();
  }
  int guards = 0;
};
thread_local OfThread of_this_thread;

void await_guards() {
  const auto end = std::chrono::steady_clock::now() + kExitTimeout;
  auto& it = state();
  if (it.process != getpid()) return;  // forked: without the threads
  MutexLock lock(it.mutex);
  if (std::exchange(it.exits, true)) return;
  const int own = of_this_thread.guards > 0 ? 1 : 0;
  while (it.threads > own && std::chrono::steady_clock::now() < end) it.changed.wait_until(it.mutex, end);
}

void sleep_if_exiting(State& it, bool is_counted) ABSL_EXCLUSIVE_LOCKS_REQUIRED(it.mutex) {
  if (!it.exits) return;
  if (is_counted) --it.threads;
  it.changed.notify_all();
  while (true) it.changed.wait(it.mutex);
}

}  // namespace

ExitGuard::ExitGuard() {
  static const int registered = std::atexit(&await_guards);
  static_cast<void>(registered);
  auto& it = state();
  MutexLock lock(it.mutex);
  sleep_if_exiting(it, of_this_thread.guards > 0);
  if (of_this_thread.guards++ == 0) ++it.threads;
}

ExitGuard::~ExitGuard() {
  // Again, because exit() destroys what the first call has made before it calls what was registered earlier.
  static const int registered = std::atexit(&await_guards);
  static_cast<void>(registered);
  auto& it = state();
  MutexLock lock(it.mutex);
  sleep_if_exiting(it, /*is_counted=*/true);
  if (--of_this_thread.guards == 0) --it.threads;
}

bool process_exits() {
  MutexLock lock(state().mutex);
  return state().exits;
}

}  // namespace gpipe
