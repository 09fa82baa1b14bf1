#include "gpipe/ranks/failure_board.h"

#include <charconv>
#include <chrono>
#include <exception>
#include <set>
#include <stdexcept>
#include <utility>

namespace gpipe {
namespace {

constexpr std::chrono::milliseconds kWatchInterval{200};
constexpr std::chrono::milliseconds kPollInterval{10};
/// How long a rank gives the others to say what they do, and to learn of a failure.
constexpr std::chrono::milliseconds kGather{500};

const std::string kFailure = "failure";
const std::string kQuestion = "question";

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

FailureBoard::FailureBoard(const c10::intrusive_ptr<c10d::Store>& store, int rank, Callbacks callbacks)
    : store_(store), watched_(store->clone()), rank_(rank), callbacks_(std::move(callbacks)) {
  watcher_ = std::thread([this] { watch(); });
}

FailureBoard::~FailureBoard() {
  {
    MutexLock lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  watcher_.join();
}

void FailureBoard::set(const std::string& cause, bool own) noexcept {
  {
    MutexLock lock(mutex_);
    if (!failure_.empty()) {  // the watcher may have read this rank's own report
      own_ = own_ || (own && failure_ == cause);
      return;
    }
    failure_ = cause;
    own_ = own;
  }
  changed_.notify_all();
  callbacks_.on_failure();
  try {
    store_->set(knows_key(rank_), "");
  } catch (const std::exception&) {  // the store's rank has ended
  }
}

void FailureBoard::report(const std::string& cause) noexcept {
  if (!failure().empty()) return;
  std::string first = cause;
  try {
    first = store_->compareSet(kFailure, "", cause);
  } catch (const std::exception&) {  // the store's rank is gone; the others notice that too
  }
  set(first, first == cause);
}

void FailureBoard::report_wait(int awaited, const std::string& what) noexcept {
  int blamed = awaited;
  std::string answer;
  try {
    store_->set(kQuestion, "");
    const auto end = std::chrono::steady_clock::now() + kGather;
    for (std::set<int> seen{rank_, blamed};;) {
      answer = answer_of(blamed, end);
      const int next = awaited_in(answer);
      if (next < 0) break;
      if (!seen.insert(next).second) {
        answer = "waits for rank " + answer;
        break;
      }
      blamed = next;
    }
  } catch (const std::exception&) {  // as in report()
  }
  report("rank " + std::to_string(blamed) +
         (answer.empty() ? " is stopped or cut off" : " did not answer in time, it " + answer) + ": rank " +
         std::to_string(rank_) + " waited for " + what);
}

// What the rank does; empty if it does not say so before `end`.
std::string FailureBoard::answer_of(int rank, std::chrono::steady_clock::time_point end) {
  while (!store_->check({answer_key(rank)})) {
    MutexLock lock(mutex_);
    if (!failure_.empty() || std::chrono::steady_clock::now() > end) return "";
    changed_.wait_for(mutex_, kPollInterval);
  }
  return store_->get_to_str(answer_key(rank));
}

void FailureBoard::report_loss(int lost) noexcept {
  report("rank " + std::to_string(lost) + " was lost: its process has ended, or the network has failed");
}

void FailureBoard::await_others(int size) noexcept {
  try {
    const auto end = std::chrono::steady_clock::now() + kGather;
    for (int r = 0; r < size; ++r) {
      while (!store_->check({knows_key(r)}) && std::chrono::steady_clock::now() < end) {
        std::this_thread::sleep_for(kPollInterval);
      }
    }
  } catch (const std::exception&) {  // as in report()
  }
}

std::string FailureBoard::failure() const {
  MutexLock lock(mutex_);
  return failure_;
}

void FailureBoard::check(const std::string& what) const {
  if (const auto cause = failure(); !cause.empty()) throw std::runtime_error("[gpipe] " + what + ": " + cause);
}

bool FailureBoard::is_own() const {
  MutexLock lock(mutex_);
  return own_;
}

void FailureBoard::watch() {
  for (bool answered = false;;) {
    {
      MutexLock lock(mutex_);
      if (!ending_ && failure_.empty()) changed_.wait_for(mutex_, kWatchInterval);
      if (ending_ || !failure_.empty()) return;
    }
    try {
      if (watched_->check({kFailure})) set(watched_->get_to_str(kFailure), /*own=*/false);
      if (!answered && watched_->check({kQuestion})) {
        watched_->set(answer_key(rank_), callbacks_.activity());
        answered = true;
      }
    } catch (const std::exception&) {  // the store is gone, as when its rank has ended; transfers will tell
      return;
    }
  }
}

}  // namespace gpipe
