#include "gpipe/ranks/failure_board.h"

#include <set>

#include "absl/strings/numbers.h"
#include "gpipe/base/checks.h"
#include "gpipe/base/mutex.h"

namespace gpipe {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kPatience{1000};  // with the store
constexpr milliseconds kAskInterval{10};
/// How long a rank gives the others to say what they do, and to learn of a failure.
constexpr milliseconds kGather{500};

constexpr const char* kFailure = "failure";
constexpr const char* kQuestion = "question";
std::string answer_key(int rank) { return absl::StrCat("answer/", rank); }
std::string knows_key(int rank) { return absl::StrCat("knows/", rank); }

}  // namespace

struct FailureBoard::State {
  State(int rank, Callbacks callbacks) : rank(rank), callbacks(std::move(callbacks)) {}

  void look(c10d::Store& store) {
    if (!known && store.check({kFailure})) {
      set(store.get_to_str(kFailure), /*is_own=*/false);
      store.set(knows_key(rank), "");
      known = true;
    }
    if (answered || !store.check({kQuestion})) return;
    std::string answer;
    {
      MutexLock lock(calling);
      if (!silent) answer = callbacks.activity();
    }
    store.set(answer_key(rank), answer);
    answered = true;
  }

  void set(const std::string& cause, bool is_own) {
    {
      MutexLock lock(mutex);
      if (!failure.empty()) {  // the thread may have read this rank's own report
        own = own || (is_own && failure == cause);
        return;
      }
      failure = cause;
      own = is_own;
    }
    MutexLock lock(calling);
    if (!silent) callbacks.on_failure();
  }

  const int rank;
  const Callbacks callbacks;
  // Used by the store's thread only. If both are set, it asks no more.
  bool known = false;
  bool answered = false;
  Mutex mutex;
  std::string failure ABSL_GUARDED_BY(mutex);
  bool own ABSL_GUARDED_BY(mutex) = false;
  Mutex calling;  // held during callbacks
  bool silent ABSL_GUARDED_BY(calling) = false;
};

FailureBoard::FailureBoard(StoreThread& store, int rank, int size, Callbacks callbacks)
    : store_(store), rank_(rank), size_(size), state_(std::make_shared<State>(rank, std::move(callbacks))) {
  store_.look_often([state = state_](c10d::Store& of_job) { state->look(of_job); });
}

FailureBoard::~FailureBoard() {
  MutexLock lock(state_->calling);
  state_->silent = true;
}

std::optional<std::string> FailureBoard::ask(Question question) {
  try {
    return store_.ask<std::string>(std::move(question), store_.is_stuck() ? milliseconds(0) : kPatience, nullptr);
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

void FailureBoard::report(const std::string& cause) noexcept {
  if (!failure().empty()) return;
  // Without the store, the other ranks notice that the connections are closed.
  const auto first = ask([cause](c10d::Store& store) { return store.compareSet(kFailure, "", cause); }).value_or(cause);
  state_->set(first, first == cause);
  store_.post([state = state_](c10d::Store& store) { state->look(store); });
}

void FailureBoard::ask_all_ranks() {
  store_.post([](c10d::Store& store) { store.set(kQuestion, ""); });
}

std::string FailureBoard::answer_of(int rank, Clock::time_point end) {
  for (;; std::this_thread::sleep_for(kAskInterval)) {
    const auto answer = ask([key = answer_key(rank)](c10d::Store& store) {
      return store.check({key}) ? store.get_to_str(key) : std::string();
    });
    if (!answer || !answer->empty() || Clock::now() >= end) return answer.value_or("");
  }
}

void FailureBoard::report_wait(int awaited, const std::string& what) noexcept {
  ask_all_ranks();
  std::string answer;
  std::set<int> seen{rank_, awaited};
  for (int next = -1; absl::SimpleAtoi(answer = answer_of(awaited, Clock::now() + kGather), &next); awaited = next) {
    if (seen.insert(next).second) continue;
    answer = "waits for rank " + answer;
    break;
  }
  report(absl::StrCat("rank ", awaited, answer.empty() ? " is stopped or cut off" : " did not answer in time, it ",
                      answer, ": rank ", rank_, " waited for ", what));
}

void FailureBoard::report_loss(int lost) noexcept {
  report(absl::StrCat("rank ", lost, " was lost: its process has ended, or the network has failed"));
}

void FailureBoard::report_no_connection(const std::string& error) noexcept {
  ask_all_ranks();
  std::string silent;
  const auto end = Clock::now() + kGather;
  for (int r = 0; r < size_; ++r) {
    if (r != rank_ && answer_of(r, end).empty()) absl::StrAppend(&silent, silent.empty() ? "rank " : ", rank ", r);
  }
  report(absl::StrCat("rank ", rank_,
                      " cannot connect to the others: ", silent.empty() ? error : silent + " does not answer"));
}

void FailureBoard::rest() noexcept {
  ask([state = state_](c10d::Store&) {
    state->known = state->answered = true;
    return "";
  });
}

void FailureBoard::await_others() noexcept {
  const auto end = Clock::now() + kGather;
  for (int r = 0; r < size_; ++r) {
    const auto knows = [key = knows_key(r)](c10d::Store& store) { return store.check({key}) ? "yes" : "no"; };
    while (ask(knows) == "no" && Clock::now() < end) std::this_thread::sleep_for(kAskInterval);
  }
}

std::string FailureBoard::failure() const {
  MutexLock lock(state_->mutex);
  return state_->failure;
}

void FailureBoard::check(const std::string& what) const {
  if (const auto cause = failure(); !cause.empty()) throw_error(what, ": ", cause);
}

bool FailureBoard::is_own() const {
  MutexLock lock(state_->mutex);
  return state_->own;
}

}  // namespace gpipe
