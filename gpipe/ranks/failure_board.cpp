#include "gpipe/ranks/failure_board.h"

#include <chrono>
#include <exception>
#include <set>
#include <stdexcept>
#include <utility>

namespace gpipe {
namespace {

constexpr std::chrono::milliseconds kWatchInterval{200};
/// How long a rank gives the others to say what they wait for.
constexpr std::chrono::milliseconds kGather{500};

const std::string kFailure = "failure";

std::string waiting_key(int rank) { return "waits/" + std::to_string(rank); }

}  // namespace

FailureBoard::FailureBoard(const c10::intrusive_ptr<c10d::Store>& store, int rank, std::function<void()> on_failure)
    : store_(store), watched_(store->clone()), rank_(rank), on_failure_(std::move(on_failure)) {
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
    if (!failure_.empty()) return;
    failure_ = cause;
    own_ = own;
  }
  changed_.notify_all();
  on_failure_();
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
  try {
    store_->set(waiting_key(rank_), std::to_string(awaited));
    {
      MutexLock lock(mutex_);
      if (failure_.empty()) changed_.wait_for(mutex_, kGather);
    }
    std::set<int> seen{rank_};
    while (seen.insert(blamed).second && store_->check({waiting_key(blamed)})) {
      blamed = std::stoi(store_->get_to_str(waiting_key(blamed)));
    }
  } catch (const std::exception&) {  // as in report()
  }
  report("rank " + std::to_string(blamed) + " did not answer in time: rank " + std::to_string(rank_) + " waited for " +
         what);
}

void FailureBoard::report_loss(int awaited, const std::string& what) noexcept {
  report("rank " + std::to_string(awaited) + " was lost while rank " + std::to_string(rank_) + " waited for " + what);
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
  for (;;) {
    {
      MutexLock lock(mutex_);
      if (!ending_ && failure_.empty()) changed_.wait_for(mutex_, kWatchInterval);
      if (ending_ || !failure_.empty()) return;
    }
    try {
      if (watched_->check({kFailure})) set(watched_->get_to_str(kFailure), /*own=*/false);
    } catch (const std::exception&) {  // the store is gone, as when its rank has ended; transfers will tell
      return;
    }
  }
}

}  // namespace gpipe
