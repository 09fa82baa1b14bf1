#include "gpipe/ranks/job.h"

#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <exception>
#include <limits>
#include <stdexcept>
#include <utility>

#include "gpipe/ranks/gloo.h"

namespace gpipe {
namespace {

// The lifelines have the tags below this wire's.
constexpr int kFirstWire = (Lifelines::kTags + kTagsPerWire - 1) / kTagsPerWire;

}  // namespace

Job::Job(c10::intrusive_ptr<c10d::Store> store, const Ranks& ranks)
    : store_(std::move(store)),
      rank_(ranks.rank()),
      size_(ranks.size()),
      listen_at_(ranks.listen_at()),
      options_(ranks.options()),
      exceptions_(std::uncaught_exceptions()),
      process_(getpid()),
      next_wire_(kFirstWire),
      board_(std::make_unique<FailureBoard>(
          store_, rank_, FailureBoard::Callbacks{[this] { close(); }, [this] { return activity(); }})) {}

Job::~Job() {
  if (getpid() != process_) {  // a forked process has none of the threads, and shares the sockets
    for (auto& wires : retired_) static_cast<void>(wires.release());
    static_cast<void>(lifelines_.release());
    static_cast<void>(board_.release());
    static_cast<void>(connections_.release());
    return;
  }
  if (const auto cause = unwinding()) {
    board_->report(*cause);
  } else if (lifelines_) {
    lifelines_->part(options_.timeout());
  }
  // This rank may serve the store.
  if (rank_ == 0 && !board_->failure().empty()) board_->await_others(size_);
  close();
  lifelines_.reset();
  board_.reset();  // before the connections, which it closes
}

std::optional<std::string> Job::unwinding() const {
  if (std::uncaught_exceptions() <= exceptions_) return std::nullopt;
  return "rank " + std::to_string(rank_) + " ended with an exception outside of the pipeline";
}

void Job::add_activity(const void* owner, Activity activity) {
  MutexLock lock(mutex_);
  activities_[owner] = std::move(activity);
}

void Job::remove_activity(const void* owner) {
  MutexLock lock(mutex_);
  activities_.erase(owner);
}

std::string Job::activity() {
  MutexLock lock(mutex_);
  for (const auto& [owner, activity] : activities_) {
    if (auto found = activity(); !found.empty()) return found;
  }
  return "makes no call";
}

void Job::close() noexcept {
  Connections* connections = nullptr;
  {
    MutexLock lock(mutex_);
    connections = connections_.get();
  }
  if (connections != nullptr) connections->close();
}

std::string Job::share(const std::string& text) {
  const auto key = "text" + std::to_string(texts_++);
  if (rank_ == 0) {
    store_->set(key, "=" + text);
    return text;
  }
  const auto end = std::chrono::steady_clock::now() + options_.join_timeout();
  const auto shared = await_value(*store_, key, end, [&] { board_->check("rank 0 shares nothing"); });
  if (shared.empty()) throw std::runtime_error("[gpipe] rank 0 has shared nothing within the join time-out");
  return shared.substr(1);
}

void Job::connect() {
  try {
    auto made = connect_by_gloo(store_, rank_, size_, listen_at_, options_.timeout());
    MutexLock lock(mutex_);
    connections_ = std::move(made);
  } catch (const ConnectionError& error) {
    board_->report_no_connection(size_, error.what());
    board_->check("no pipeline can be made");
    throw;
  }
  if (!board_->failure().empty()) close();
  lifelines_ =
      std::make_unique<Lifelines>(*connections_, rank_, size_, [this](int lost) { board_->report_loss(lost); });
}

int Job::join(const Manifest& manifest, int wires, const std::function<void()>& poll) {
  const auto poll_or_fail = [&] {
    board_->check("no pipeline can be made any more, because a rank has failed");
    if (!poll) return;
    try {
      poll();
    } catch (const std::exception& error) {
      board_->report("rank " + std::to_string(rank_) + " was stopped: " + error.what());
      throw;
    }
  };
  poll_or_fail();
  const auto store = c10::make_intrusive<c10d::PrefixStore>("pipeline" + std::to_string(pipelines_++), store_);
  try {
    check_manifests(*store, rank_, size_, manifest, options_.join_timeout(), poll_or_fail);
  } catch (const std::exception& error) {
    board_->report(error.what());
    throw;
  }
  if (!connections_) connect();
  if (wires > std::numeric_limits<int>::max() / kTagsPerWire - next_wire_) {
    throw std::runtime_error("[gpipe] the ranks have made so many pipelines that no tags are left; make fewer");
  }
  return std::exchange(next_wire_, next_wire_ + wires);
}

}  // namespace gpipe
