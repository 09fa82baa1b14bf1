#include "gpipe/ranks/job.h"

#include <unistd.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "gpipe/base/bytes.h"
#include "gpipe/base/checks.h"
#include "gpipe/ranks/agreement.h"
#include "gpipe/ranks/handshake.h"
#include "gpipe/ranks/parcel_message.h"
#include "gpipe/ranks/team.h"

namespace gpipe {
namespace {

constexpr Topic kEnd{};
constexpr char kSecretKey[] = "secret";
constexpr char kFailureKey[] = "failure";
constexpr std::chrono::milliseconds kStorePatience{1000};  // with the store
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
      store_(std::make_unique<StoreThread>([store = shared_] { return store->clone(); })) {}

Job::~Job() {
  if (getpid() != process_) {  // a forked process has none of the threads
    static_cast<void>(connections_.release());
    static_cast<void>(store_.release());
    static_cast<void>(devices_.release());
    return;
  }
  finish(unwinding().value_or(""), /*poll=*/nullptr);
  std::unique_ptr<Connections> last;  // its thread may report
  {
    MutexLock lock(mutex_);
    last = std::move(connections_);
  }
}

std::optional<std::string> Job::unwinding() const {
  if (std::uncaught_exceptions() <= exceptions_) return std::nullopt;
  return absl::StrCat("rank ", rank_, " ended with an exception outside of the pipeline");
}

// Settles which failure is the first by the store.
std::string Job::first_failure(const std::string& cause) noexcept try {
  const auto settle = [cause](c10d::Store& store) { return store.compareSet(kFailureKey, "", cause); };
  return store_->ask<std::string>(settle, kStorePatience, nullptr);
} catch (const std::exception&) {
  return cause;
}

void Job::report(const std::string& cause) noexcept {
  if (!failure().empty()) return;
  const auto first = is_joined_ ? cause : first_failure(cause);
  note(first, first == cause);
}

void Job::note(const std::string& cause, bool is_own) noexcept {
  {
    MutexLock lock(mutex_);
    if (!failure_.empty()) return;
    failure_ = cause;
    is_own_ = is_own;
    if (connections_) connections_->fail(cause);
  }
  if (devices_) devices_->abort();
}

void Job::note_end(int rank, const std::string& cause) noexcept {
  if (!cause.empty()) return note(cause, /*is_own=*/false);
  if (leaving_ || !failure().empty()) return;
  const auto lost = absl::StrCat("rank ", rank, " was lost: its process has ended, or the network has failed");
  note(is_joined_ ? lost : first_failure(lost), /*is_own=*/false);
}

std::string Job::failure() const {
  MutexLock lock(mutex_);
  return failure_;
}

bool Job::is_own() const {
  MutexLock lock(mutex_);
  return is_own_;
}

void Job::check(const std::string& what) const {
  if (const auto cause = failure(); !cause.empty()) throw_error(what, ": ", cause);
}

void Job::check_and_poll(const Poll& poll) {
  check();
  if (!poll) return;
  try {
    poll();
  } catch (const std::exception& error) {
    report(absl::StrCat("rank ", rank_, " was stopped: ", error.what()));
    throw;
  }
}

void Job::finish(const std::string& cause, const Poll& poll) {
  if (getpid() != process_ || std::exchange(finished_, true)) return;
  if (!cause.empty()) {
    report(cause);
  } else {
    MutexLock lock(mutex_);  // so that no pipeline is destroyed meanwhile
    for (const auto& [pipeline, leave] : members_) leave();
  }
  if (!connections_ && ranks_.size() > 1) {
    report(absl::StrCat("rank ", rank_, " has left the job before the ranks have made a pipeline"));
  }
  if (!connections_ || !failure().empty()) return;
  try {
    leave_together(poll);
  } catch (const ConnectionError&) {  // a rank is lost, or has failed
  } catch (const std::exception& error) {
    report(absl::StrCat("rank ", rank_, " was stopped: ", error.what()));
    throw;
  }
}

// A connection ends only after all ranks have begun to leave.
void Job::leave_together(const Poll& poll) {
  leaving_ = true;
  const auto end = end_after(ranks_.options().timeout());
  const auto send = [&](int rank) { connections_->send(rank, kEnd, {.text = ""}); };
  const auto receive = [&](int rank) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
    connections_->receive(rank, kEnd, left, poll);
  };
  if (rank_ != 0) {
    send(0);
    receive(0);
  } else {
    for (int r = 1; r < ranks_.size(); ++r) receive(r);
    for (int r = 1; r < ranks_.size(); ++r) send(r);
  }
}

void Job::add(int pipeline, std::function<void()> leave) {
  is_joined_ = true;
  MutexLock lock(mutex_);
  members_[pipeline] = std::move(leave);
}

void Job::remove(int pipeline) {
  MutexLock lock(mutex_);
  members_.erase(pipeline);
}

bool Job::has_one_caller() {
  MutexLock lock(mutex_);
  has_one_caller_ = has_one_caller_ && std::this_thread::get_id() == caller_;
  return has_one_caller_;
}

// Another thread of this rank, or of that one, could still make the call that is waited for.
void Job::check_order(int pipeline, int rank) {
  MutexLock lock(mutex_);
  if (!has_one_caller_) return;
  for (const auto& [other, leave] : members_) {
    if (other == pipeline) continue;
    const auto message = connections_->peek(rank, Team::topic_of_calls(other));
    const auto call = message ? awaited_call(*message) : "";
    if (call.empty()) continue;
    throw_error("rank 0 ", members_.contains(pipeline) ? "uses" : "makes", " pipeline ", pipeline - 1, ", but rank ",
                rank, " uses pipeline ", other - 1, " for '", call,
                "'; use pipelines, which are numbered as they are made, in the same order on all ranks");
  }
}

// Returns "" if the value does not come before `end`. Notes a failure that is in the store.
std::string Job::await_key(const std::string& key, std::chrono::steady_clock::time_point end, const Poll& poll) {
  const auto poll_or_fail = [&] {
    check();
    if (poll) poll();
  };
  const auto [found, value] = store_->await_any({kFailureKey, key}, end, ranks_.options().join_timeout(), poll_or_fail);
  if (found == kFailureKey) note(value, /*is_own=*/false);
  check();
  return value;
}

std::string Job::share(const std::string& text, const Poll& poll) {
  const auto key = absl::StrCat("text", texts_++);
  const auto limit = ranks_.options().join_timeout();
  if (rank_ == 0) {
    store_->ask<int>([=](c10d::Store& store) { return store.set(key, "=" + text), 0; }, limit, poll);
    return text;
  }
  const auto shared = await_key(key, end_after(limit), poll);
  if (shared.empty()) {
    throw_error("rank 0 has shared nothing within the join time-out, ", limit.count(),
                " ms; share() must be called on all ranks, as often on each");
  }
  return shared.substr(1);
}

// A rank listens before its address is in the store.
void Job::connect(const Poll& poll) {
  const auto limit = ranks_.options().join_timeout();
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
  store_->ask<int>(publish, limit, poll);
  JobAddresses job{rank_, "", {}};
  std::vector<int> missing;
  const auto end = end_after(limit);
  for (int r = 0; r < ranks_.size(); ++r) {
    const auto found = await_key(address_key(r), end, poll);
    found.empty() ? missing.push_back(r) : job.endpoints.push_back(ByteReader(found).get<Endpoint>());
  }
  if (!missing.empty()) {
    throw_error("the ranks cannot make the pipeline: rank ", absl::StrJoin(missing, ", "), " of ", ranks_.size(),
                " did not come within ", absl::StrFormat("%.1f s", static_cast<double>(limit.count()) / 1000));
  }
  job.secret = await_key(kSecretKey, end, poll);
  const auto report_end = [&](const ConnectionError& error) {
    const auto* lost = dynamic_cast<const RankLost*>(&error);
    if (lost != nullptr) return note_end(lost->rank, "");
    report(absl::StrCat("rank ", rank_, " cannot connect to the others: ", error.what()));
  };
  auto sockets = connect_ranks(std::move(listener), job, ranks_.options().timeout(), poll, report_end);
  auto made = std::make_unique<Connections>(std::move(sockets), allocate_parcels,
                                            [this](int rank, const std::string& cause) { note_end(rank, cause); });
  MutexLock lock(mutex_);
  connections_ = std::move(made);
  if (!failure_.empty()) connections_->fail(failure_);
}

int Job::join(const Poll& poll) {
  if (finished_) throw_error("no pipeline can be made: this rank has left the job");
  check_and_poll(poll);
  ++pipelines_;
  has_one_caller();
  if (connections_) return pipelines_;
  try {
    connect([&] { check_and_poll(poll); });
  } catch (const ConnectionError&) {
    check();
    throw;
  } catch (const std::exception& error) {
    report(error.what());
    throw;
  }
  return pipelines_;
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
    report(absl::StrCat("rank ", rank_, " cannot connect to the replicas: ", error.what()));
    throw;
  }
}

}  // namespace gpipe
