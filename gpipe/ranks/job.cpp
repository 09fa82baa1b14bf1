#include "gpipe/ranks/job.h"

#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <limits>

#include "absl/cleanup/cleanup.h"
#include "gpipe/base/checks.h"

namespace gpipe {
namespace {

constexpr int kLifelineTag = 0;
constexpr std::chrono::hours kForEver{24 * 365};

}  // namespace

Job::Job(c10::intrusive_ptr<c10d::Store> store, const Ranks& ranks, std::unique_ptr<DeviceConnections> devices)
    : store_(std::move(store)),
      ranks_(ranks),
      rank_(ranks.rank()),
      exceptions_(std::uncaught_exceptions()),
      process_(getpid()),
      devices_(std::move(devices)),
      board_(std::make_unique<FailureBoard>(
          store_, rank_, ranks.size(), FailureBoard::Callbacks{[this] { close(); }, [this] { return activity(); }})) {}

Job::~Job() {
  if (getpid() != process_) {  // a forked process has none of the threads, and shares the sockets
    for (auto& wires : kept_) static_cast<void>(wires.release());
    static_cast<void>(new std::deque(std::move(lifelines_)));
    static_cast<void>(board_.release());
    static_cast<void>(connections_.release());
    static_cast<void>(devices_.release());
    return;
  }
  finish(unwinding().value_or(""), /*poll=*/nullptr);
  for (auto& lifeline : lifelines_) {
    if (lifeline.thread.joinable()) lifeline.thread.join();
  }
  board_.reset();  // before the connections, which it closes
}

std::optional<std::string> Job::unwinding() const {
  if (std::uncaught_exceptions() <= exceptions_) return std::nullopt;
  return absl::StrCat("rank ", rank_, " ended with an exception outside of the pipeline");
}

void Job::finish(const std::string& cause, const std::function<void()>& poll) {
  if (getpid() != process_ || std::exchange(finished_, true)) return;
  if (!cause.empty()) {
    board_->report(cause);
  } else {
    MutexLock lock(mutex_);  // so that no pipeline is destroyed meanwhile
    for (const auto& [owner, member] : members_) member.leave();
  }
  if (lifelines_.empty() && ranks_.size() > 1) {
    board_->report(absl::StrCat("rank ", rank_, " has left the job before the ranks have made a pipeline"));
  }
  const absl::Cleanup end = [this] {
    // This rank may serve the store.
    if (rank_ == 0 && !board_->failure().empty()) board_->await_others();
    close();
  };
  if (lifelines_.empty() || !board_->failure().empty()) return;
  if (rank_ != 0) board_->rest();  // rank 0, which may serve the store, ends after the others
  while_polling(
      poll, [this] { leave_together(); }, [this](const std::exception& error) { report_stop(error); });
}

void Job::report_stop(const std::exception& error) {
  board_->report(absl::StrCat("rank ", rank_, " was stopped: ", error.what()));
}

void Job::add(const void* owner, Member member) {
  MutexLock lock(mutex_);
  members_[owner] = std::move(member);
}

void Job::remove(const void* owner) {
  MutexLock lock(mutex_);
  members_.erase(owner);
}

std::string Job::activity() {
  MutexLock lock(mutex_);
  for (const auto& [owner, member] : members_) {
    if (auto found = member.activity(); !found.empty()) return found;
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
  if (devices_) devices_->abort();
}

std::string Job::share(const std::string& text, const std::function<void()>& poll) {
  const auto key = absl::StrCat("text", texts_);
  if (rank_ == 0) {
    store_->set(key, "=" + text);
    ++texts_;
    return text;
  }
  const auto end = std::chrono::steady_clock::now() + ranks_.options().join_timeout();
  const auto shared = await_value(*store_, key, end, [&] {
    board_->check("rank 0 shares nothing");
    if (poll) poll();
  });
  if (shared.empty()) {
    throw_error("rank 0 has shared nothing within the join time-out, ", ranks_.options().join_timeout().count(),
                " ms; share() must be called on all ranks, as often on each");
  }
  ++texts_;
  return shared.substr(1);
}

void Job::connect() {
  try {
    auto made = connect_by_gloo(store_, rank_, ranks_.size(), ranks_.listen_at(), ranks_.options().timeout());
    MutexLock lock(mutex_);
    connections_ = std::move(made);
  } catch (const ConnectionError& error) {
    board_->report_no_connection(error.what());
    board_->check("no pipeline can be made");
    throw;
  }
  if (!board_->failure().empty()) close();
  std::vector<std::shared_ptr<Transfer>> transfers;  // all begin before a thread can close the connections
  for (int r = rank_ == 0 ? 1 : 0; r < (rank_ == 0 ? ranks_.size() : 1); ++r) {
    auto& each = lifelines_.emplace_back(Lifeline{.rank = r});
    transfers.push_back(connections_->receive(r, kLifelineTag, std::span(&each.received, 1)));
  }
  for (std::size_t i = 0; i < lifelines_.size(); ++i) {
    auto& each = lifelines_[i];
    each.thread = std::thread([this, rank = each.rank, transfer = transfers[i]] { watch(rank, *transfer); });
  }
}

void Job::watch(int rank, Transfer& transfer) {
  bool is_lost = false;
  try {
    transfer.wait(kForEver);
  } catch (const ConnectionError&) {
    is_lost = true;
  }
  bool is_failure = false;
  {
    MutexLock lock(mutex_);
    lost_ = lost_ || is_lost;
    if (!is_lost) ++ended_;
    is_failure = is_lost && !leaving_;
  }
  changed_.notify_all();
  if (is_failure) board_->report_loss(rank);
}

void Job::send_ends() {
  std::vector<std::shared_ptr<Transfer>> transfers;
  for (auto& each : lifelines_) {
    transfers.push_back(connections_->send(each.rank, kLifelineTag, std::span(&each.sent, 1)));
  }
  for (const auto& transfer : transfers) transfer->wait(ranks_.options().timeout());
}

void Job::leave_together() noexcept {
  const auto end = std::chrono::steady_clock::now() + ranks_.options().timeout();
  try {
    leaving_ = true;
    if (rank_ != 0) send_ends();
    {
      MutexLock lock(mutex_);
      while (ended_ < lifelines_.size() && !lost_ && std::chrono::steady_clock::now() < end) {
        changed_.wait_until(mutex_, end);
      }
    }
    if (rank_ == 0) send_ends();      // all have ended
  } catch (const ConnectionError&) {  // a rank is lost, or has failed
  }
}

int Job::join(const Manifest& manifest, int wires, const std::function<void()>& poll) {
  const auto poll_or_fail = [&] {
    board_->check("no pipeline can be made any more, because a rank has failed");
    if (!poll) return;
    try {
      poll();
    } catch (const std::exception& error) {
      report_stop(error);
      throw;
    }
  };
  if (finished_) throw_error("no pipeline can be made: this rank has left the job");
  poll_or_fail();
  const auto store = c10::make_intrusive<c10d::PrefixStore>(absl::StrCat("pipeline", pipelines_++), store_);
  try {
    check_manifests(*store, rank_, ranks_.size(), manifest, ranks_.options().join_timeout(), poll_or_fail);
  } catch (const std::exception& error) {
    board_->report(error.what());
    throw;
  }
  if (!connections_) connect();
  if (wires > std::numeric_limits<int>::max() / kTagsPerWire - next_wire_) {
    throw_error("the ranks have made so many pipelines that no tags are left; make fewer");
  }
  return std::exchange(next_wire_, next_wire_ + wires);
}

}  // namespace gpipe
