#include "gpipe/ranks/job.h"

#include <unistd.h>

#include <future>
#include <limits>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "absl/cleanup/cleanup.h"
#include "gpipe/base/bytes.h"
#include "gpipe/base/checks.h"
#include "gpipe/ranks/handshake.h"
#include "gpipe/ranks/sockets.h"

namespace gpipe {
namespace {

constexpr int kEndTag = 0;
constexpr char kSecretKey[] = "secret";
std::string address_key(int rank) { return absl::StrCat("address/", rank); }

}  // namespace

Job::Job(c10::intrusive_ptr<c10d::Store> store, const Ranks& ranks, std::unique_ptr<DeviceConnections> devices)
    : ranks_(ranks),
      rank_(ranks.rank()),
      exceptions_(std::uncaught_exceptions()),
      process_(getpid()),
      caller_(std::this_thread::get_id()),
      shared_(std::move(store)),
      devices_(std::move(devices)),
      store_(std::make_unique<StoreThread>([store = shared_] { return store->clone(); })),
      board_(std::make_unique<FailureBoard>(
          *store_, rank_, ranks.size(), FailureBoard::Callbacks{[this] { close(); }, [this] { return activity(); }})) {}

Job::~Job() {
  if (getpid() != process_) {  // a forked process has none of the threads
    static_cast<void>(connections_.release());
    static_cast<void>(board_.release());
    static_cast<void>(store_.release());
    static_cast<void>(devices_.release());
    return;
  }
  finish(unwinding().value_or(""), /*poll=*/nullptr);
  std::unique_ptr<Connections> last;  // the board must not close it any more, and its thread may report to the board
  {
    MutexLock lock(mutex_);
    last = std::move(connections_);
  }
}

std::optional<std::string> Job::unwinding() const {
  if (std::uncaught_exceptions() <= exceptions_) return std::nullopt;
  return absl::StrCat("rank ", rank_, " ended with an exception outside of the pipeline");
}

void Job::finish(const std::string& cause, const Poll& poll) {
  if (getpid() != process_ || std::exchange(finished_, true)) return;
  if (!cause.empty()) {
    board_->report(cause);
  } else {
    MutexLock lock(mutex_);  // so that no pipeline is destroyed meanwhile
    for (const auto& [owner, member] : members_) member.leave();
  }
  if (!connections_ && ranks_.size() > 1) {
    board_->report(absl::StrCat("rank ", rank_, " has left the job before the ranks have made a pipeline"));
  }
  const absl::Cleanup end = [this] {
    // This rank may serve the store.
    if (rank_ == 0 && !board_->failure().empty()) board_->await_others();
    close();
  };
  if (!connections_ || !board_->failure().empty()) return;
  if (rank_ != 0) board_->rest();  // rank 0, which may serve the store, ends after the others
  try {
    leave_together(poll);
  } catch (const ConnectionError&) {  // a rank is lost, or has failed
  } catch (const std::exception& error) {
    report_stop(error);
    throw;
  }
}

void Job::report_stop(const std::exception& error) {
  board_->report(absl::StrCat("rank ", rank_, " was stopped: ", error.what()));
}

void Job::add(const void* owner, Member member) {
  MutexLock lock(mutex_);
  member.number = pipelines_ - 1;
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
  {
    MutexLock lock(mutex_);
    if (connections_) connections_->close();
  }
  if (devices_) devices_->abort();
}

bool Job::has_one_caller() {
  MutexLock lock(mutex_);
  has_one_caller_ = has_one_caller_ && std::this_thread::get_id() == caller_;
  return has_one_caller_;
}

// Another thread of this rank, or of that one, could still make the call that is waited for.
void Job::check_order(const void* owner, int rank) {
  MutexLock lock(mutex_);
  if (rank_ != 0 || !has_one_caller_) return;
  for (const auto& [other, member] : members_) {
    if (other == owner) continue;
    const auto call = member.awaited_call(rank);
    if (call.empty()) continue;
    const auto own = owner != nullptr ? absl::StrCat("uses pipeline ", members_.at(owner).number)
                                      : absl::StrCat("makes pipeline ", pipelines_ - 1);
    throw_error("rank 0 ", own, ", but rank ", rank, " uses pipeline ", member.number, " for '", call,
                "'; use pipelines, which are numbered as they are made, in the same order on all ranks");
  }
}

std::string Job::share(const std::string& text, const Poll& poll) {
  const auto key = absl::StrCat("text", texts_);
  const auto limit = ranks_.options().join_timeout();
  std::string shared;
  if (rank_ == 0) {
    store_->ask<int>([=](c10d::Store& store) { return store.set(key, "=" + text), 0; }, limit, poll);
    shared = "=" + text;
  } else {
    shared = await_value(*store_, key, end_after(limit), limit, [&] {
      board_->check("rank 0 shares nothing");
      if (poll) poll();
    });
  }
  if (shared.empty()) {
    throw_error("rank 0 has shared nothing within the join time-out, ", limit.count(),
                " ms; share() must be called on all ranks, as often on each");
  }
  ++texts_;
  return shared.substr(1);
}

Socket Job::listen(const Poll& poll) {
  const auto& [interface, address] = ranks_.listen_at();
  host_ = !interface.empty() ? address_of_interface(interface) : !address.empty() ? address : address_of_this_host();
  Socket listener([&] { return listen_at(rank_, host_, /*port=*/0); });
  ByteWriter bytes;
  bytes.add(Endpoint::of(listener.get()));
  const auto publish = [rank = rank_, address = bytes.take()](c10d::Store& store) {
    if (rank == 0) store.set(kSecretKey, make_secret());
    store.set(address_key(rank), address);
    return 0;
  };
  store_->ask<int>(publish, ranks_.options().join_timeout(), poll);
  return listener;
}

// REQUIRES: all ranks listen.
void Job::connect(Socket listener, const Poll& poll) {
  const auto read = [rank = rank_, size = ranks_.size()](c10d::Store& store) {
    JobAddresses job{rank, store.get_to_str(kSecretKey), {}};
    for (int r = 0; r < size; ++r) {
      const auto address = store.get_to_str(address_key(r));
      job.endpoints.push_back(ByteReader(address).get<Endpoint>());
    }
    return job;
  };
  const auto job = store_->ask<JobAddresses>(read, ranks_.options().join_timeout(), poll);
  const auto report = [&](const ConnectionError& error) {
    const auto* lost = dynamic_cast<const RankLost*>(&error);
    lost != nullptr ? board_->report_loss(lost->rank) : board_->report_no_connection(error.what());
  };
  std::vector<Socket> sockets;
  try {
    sockets = connect_ranks(std::move(listener), job, ranks_.options().timeout(), poll, report);
  } catch (const ConnectionError&) {
    board_->check("no pipeline can be made");
    throw;
  }
  auto made = connections_over(std::move(sockets), [this](int r, const std::string& cause) { note_loss(r, cause); });
  {
    MutexLock lock(mutex_);
    connections_ = std::move(made);
  }
  if (!board_->failure().empty()) close();
}

void Job::note_loss(int rank, const std::string& cause) noexcept {
  if (leaving_) return;
  cause.empty() ? board_->report_loss(rank) : board_->report(cause);
}

// A connection ends only after all ranks have begun to leave.
void Job::leave_together(const Poll& poll) {
  leaving_ = true;
  const auto end = end_after(ranks_.options().timeout());
  const auto await = [&](const std::shared_ptr<Transfer>& transfer) {
    transfer->wait(std::chrono::ceil<std::chrono::milliseconds>(end - std::chrono::steady_clock::now()), poll);
  };
  const auto send = [&](int rank) { await(connections_->send(rank, kEndTag, {}, nullptr)); };
  const auto receive = [&](int rank) { await(connections_->receive(rank, kEndTag, {})); };
  if (rank_ != 0) {
    send(0);
    receive(0);
  } else {
    for (int r = 1; r < ranks_.size(); ++r) receive(r);
    for (int r = 1; r < ranks_.size(); ++r) send(r);
  }
}

void Job::check_and_poll(const Poll& poll) {
  board_->check("no pipeline can be made any more, because a rank has failed");
  if (!poll) return;
  try {
    poll();
  } catch (const std::exception& error) {
    report_stop(error);
    throw;
  }
}

// On a thread of its own, because nothing ends Gloo's wait.
c10::intrusive_ptr<c10d::Backend> Job::connect_sums(const std::string& name, int rank, int size, const Poll& poll) {
  using Group = c10::intrusive_ptr<c10d::Backend>;
  std::packaged_task<Group()> connect([=, host = host_, store = shared_, limit = ranks_.options().timeout()] {
    return connect_by_gloo(c10::make_intrusive<c10d::PrefixStore>(name, store->clone()), rank, size, host, limit);
  });
  auto connected = connect.get_future();
  std::thread(std::move(connect)).detach();
  while (connected.wait_for(kPollPeriod) != std::future_status::ready) check_and_poll(poll);
  try {
    return connected.get();
  } catch (const std::exception& error) {
    board_->report(absl::StrCat("rank ", rank_, " cannot connect to the replicas: ", error.what()));
    throw;
  }
}

int Job::join(const Manifest& manifest, int wires, const Poll& poll) {
  const auto poll_or_fail = [&] { check_and_poll(poll); };
  if (finished_) throw_error("no pipeline can be made: this rank has left the job");
  poll_or_fail();
  const auto prefix = absl::StrCat("pipeline", pipelines_++);
  has_one_caller();
  const auto poll_in_order = [&] {
    poll_or_fail();
    for (int r = 1; r < ranks_.size(); ++r) check_order(nullptr, r);
  };
  Socket listener;
  try {
    if (!connections_) listener = listen(poll_or_fail);  // before it says that it has come
    check_manifests(*store_, prefix, rank_, ranks_.size(), manifest, ranks_.options().join_timeout(), poll_in_order);
  } catch (const std::exception& error) {
    board_->report(error.what());
    throw;
  }
  if (!connections_) connect(std::move(listener), poll_or_fail);
  if (wires > std::numeric_limits<int>::max() / kTagsPerWire - next_wire_) {
    throw_error("the ranks have made so many pipelines that no tags are left; make fewer");
  }
  return std::exchange(next_wire_, next_wire_ + wires);
}

}  // namespace gpipe
