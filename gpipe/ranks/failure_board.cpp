#include "gpipe/ranks/failure_board.h"

#include <charconv>
#include <chrono>
#include <set>
#include <stdexcept>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "gpipe/base/mutex.h"

namespace gpipe {
namespace {

constexpr std::chrono::milliseconds kPollInterval{10};
/// How long a rank gives the others to say what they do, and to learn of a failure.
constexpr std::chrono::milliseconds kGather{500};

constexpr const char* kFailure = "failure";
constexpr const char* kQuestion = "question";

std::string answer_key(int rank) { return "answer/" + std::to_string(rank); }
std::string knows_key(int rank) { return "knows/" + std::to_string(rank); }

// The rank that a rank waits for, by its answer; -1 if it does not wait.
int awaited_in(const std::string& answer) {
  int rank = -1;
  const auto* end = answer.data() + answer.size();
  const auto parsed = std::from_chars(answer.data(), end, rank);
  return parsed.ec == std::errc() && parsed.ptr == end ? rank : -1;
}

}  // namespace

/// Shared with the store's thread, which may outlive the board.
struct FailureBoard::State {
  State(int rank, Callbacks callbacks) : rank(rank), callbacks(std::move(callbacks)) {}

  void set(const std::string& cause, bool is_own) {
    {
      MutexLock lock(mutex);
      if (!failure.empty()) {  // the store's thread may have read this rank's own report
        own = own || (is_own && failure == cause);
        return;
      }
      failure = cause;
      own = is_own;
    }
    MutexLock lock(calling);
    if (!ended) callbacks.on_failure();
  }

  /// Looks for a failure and a question in the store.
  void look(c10d::Store& store) {
    if (answered && known) return;
    if (!known && store.check({kFailure})) {
      set(store.get_to_str(kFailure), /*is_own=*/false);
      store.set(knows_key(rank), "");
      known = true;
    }
    if (answered || !store.check({kQuestion})) return;
    std::string answer;
    {
      MutexLock lock(calling);
      if (!ended) answer = callbacks.activity();
    }
    store.set(answer_key(rank), answer);
    answered = true;
  }

  const int rank;
  const Callbacks callbacks;
  bool known = false;  // this and the next: used only by the store's thread; if both are set, it looks no more
  bool answered = false;
  Mutex mutex;
  std::string failure ABSL_GUARDED_BY(mutex);
  bool own ABSL_GUARDED_BY(mutex) = false;
  Mutex calling;  // held during callbacks
  bool ended ABSL_GUARDED_BY(calling) = false;
};

FailureBoard::FailureBoard(const c10::intrusive_ptr<c10d::Store>& store, int rank, Callbacks callbacks)
    : rank_(rank),
      state_(std::make_shared<State>(rank, std::move(callbacks))),
      store_(store, [state = state_](c10d::Store& store) { state->look(store); }) {}

FailureBoard::~FailureBoard() {
  MutexLock lock(state_->calling);
  state_->ended = true;
}

void FailureBoard::report(const std::string& cause) noexcept {
  if (!failure().empty()) return;
  const auto first = store_.ask([cause](c10d::Store& store) { return store.compareSet(kFailure, "", cause); });
  // Without the store, the other ranks notice that the connections are closed.
  state_->set(first.value_or(cause), first.value_or(cause) == cause);
  store_.post([state = state_](c10d::Store& store) { state->look(store); });
}

void FailureBoard::report_wait(int awaited, const std::string& what) noexcept {
  int blamed = awaited;
  std::string answer;
  store_.post([](c10d::Store& store) { store.set(kQuestion, ""); });
  for (std::set<int> seen{rank_, blamed};;) {
    answer = answer_of(blamed);
    const int next = awaited_in(answer);
    if (next < 0) break;
    if (!seen.insert(next).second) {
      answer = "waits for rank " + answer;
      break;
    }
    blamed = next;
  }
  report("rank " + std::to_string(blamed) +
         (answer.empty() ? " is stopped or cut off" : " did not answer in time, it " + answer) + ": rank " +
         std::to_string(rank_) + " waited for " + what);
}

// What the rank does; empty if it does not say so soon.
std::string FailureBoard::answer_of(int rank) {
  for (const auto end = std::chrono::steady_clock::now() + kGather; std::chrono::steady_clock::now() < end;) {
    const auto answer = store_.ask([key = answer_key(rank)](c10d::Store& store) {
      return store.check({key}) ? store.get_to_str(key) : std::string();
    });
    if (!answer || !answer->empty()) return answer.value_or("");
    std::this_thread::sleep_for(kPollInterval);
  }
  return "";
}

void FailureBoard::report_loss(int lost) noexcept {
  report("rank " + std::to_string(lost) + " was lost: its process has ended, or the network has failed");
}

void FailureBoard::report_no_connection(int size, const std::string& error) noexcept {
  store_.post([](c10d::Store& store) { store.set(kQuestion, ""); });
  std::string silent;
  for (int r = 0; r < size; ++r) {
    if (r != rank_ && answer_of(r).empty()) silent += (silent.empty() ? "rank " : ", rank ") + std::to_string(r);
  }
  report("rank " + std::to_string(rank_) +
         " cannot connect to the others: " + (silent.empty() ? error : silent + " does not answer"));
}

void FailureBoard::rest() noexcept {
  store_.ask([state = state_](c10d::Store&) {
    state->known = state->answered = true;
    return std::string();
  });
}

void FailureBoard::await_others(int size) noexcept {
  const auto end = std::chrono::steady_clock::now() + kGather;
  for (int r = 0; r < size; ++r) {
    const auto knows = [key = knows_key(r)](c10d::Store& store) { return store.check({key}) ? "yes" : "no"; };
    while (store_.ask(knows) == "no" && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(kPollInterval);
    }
  }
}

std::string FailureBoard::failure() const {
  MutexLock lock(state_->mutex);
  return state_->failure;
}

void FailureBoard::check(const std::string& what) const {
  if (const auto cause = failure(); !cause.empty()) throw std::runtime_error("[gpipe] " + what + ": " + cause);
}

bool FailureBoard::is_own() const {
  MutexLock lock(state_->mutex);
  return state_->own;
}

}  // namespace gpipe
