#include "gpipe/ranks/job.h"

#include <unistd.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "gpipe/base/checks.h"
#include "gpipe/ranks/handshake.h"
#include "gpipe/ranks/transport.h"

namespace gpipe {
namespace {

constexpr Topic kEnd{0, 2};
constexpr Topic kShared{0, 3};
constexpr char kInvitation[] = "invitation";  // of rank 0, in the store

}  // namespace

Job::Job(c10::intrusive_ptr<c10d::Store> store, const Ranks& ranks, const JoinDevices& join_devices, const Poll& poll)
    : ranks_(ranks),
      rank_(ranks.rank()),
      exceptions_(std::uncaught_exceptions()),
      process_(getpid()),
      store_(std::move(store)),
      connections_(std::make_unique<Connections>(ranks.size(), allocate_parcels)) {
  try {
    if (ranks.size() > 1) connect(poll);
    if (!join_devices) return;
    devices_ =
        std::make_unique<DeviceConnections>([join_devices, job = name_](const std::string& name, int rank, int size) {
          return join_devices(absl::StrCat(job, "/", name), rank, size);
        });
    connections_->on_failure([this] { devices_->abort(); });
  } catch (const ConnectionError& error) {
    connections_->fail(absl::StrCat("rank ", rank_, " cannot connect to the others: ", error.what()));
    connections_->check();
  } catch (const std::exception& error) {
    connections_->fail(absl::StrCat("rank ", rank_, " ended while the ranks connected: ", error.what()));
    throw;
  }
}

Job::~Job() {
  if (getpid() != process_) {  // a forked process has none of the threads
    static_cast<void>(connections_.release());
    static_cast<void>(devices_.release());
    return;
  }
  finish(unwinding().value_or(""), /*poll=*/nullptr);
}

void Job::connect(const Poll& poll) {
  const auto limit = ranks_.options().join_timeout();
  const auto write = [&](const std::string& text) {
    const auto set = [text, store = store_] { return store->set(kInvitation, text), true; };
    apart(set, limit, poll);
  };
  const auto read = [&] {
    const auto get = [store = store_] { return store->check({kInvitation}) ? store->get_to_str(kInvitation) : ""; };
    return apart(get, limit, poll);
  };
  name_ = connect_ranks(*connections_, rank_, ranks_.size(),
                        Socket([&] { return listen_at(rank_, ranks_.address(), /*port=*/0); }), {write, read}, limit,
                        ranks_.options().timeout(), poll);
}

std::optional<std::string> Job::unwinding() const {
  if (std::uncaught_exceptions() <= exceptions_) return std::nullopt;
  return absl::StrCat("rank ", rank_, " ended with an exception outside of the pipeline");
}

Poll Job::reporting(const Poll& poll) {
  if (!poll) return nullptr;
  return [this, poll] {
    try {
      poll();
    } catch (const std::exception& error) {
      connections_->fail(absl::StrCat("rank ", rank_, " was stopped: ", error.what()));
      throw;
    }
  };
}

int Job::join() {
  if (is_finished_) throw_error("no pipeline can be made: this rank has left the job");
  return ++pipelines_;
}

void Job::check_stays(int rank, Topic topic) {
  // In this order: its end comes last.
  if (!connections_->has_come(rank, kEnd) || connections_->has_come(rank, topic)) return;
  connections_->fail(absl::StrCat("rank ", rank, " has left the job"));
  connections_->check();
}

std::string Job::share(const std::string& text, const Poll& poll) {
  try {
    const auto check_and_poll = [&] {
      check_stays(0, kShared);
      if (poll) poll();
    };
    if (rank_ != 0) return connections_->receive(0, kShared, ranks_.options().join_timeout(), check_and_poll).text;
    for (int r = 1; r < ranks_.size(); ++r) connections_->send(r, kShared, {.text = text});
    return text;
  } catch (const TimeoutError& late) {
    throw_error(late.what(), ": share() must be called on all ranks, as often on each");
  } catch (const ConnectionError&) {
    connections_->check();
    throw;
  }
}

// A process that closes its sockets with unread data resets them, so it waits until all ranks have begun to leave.
void Job::finish(const std::string& cause, const Poll& poll) {
  if (getpid() != process_ || std::exchange(is_finished_, true)) return;
  if (!cause.empty()) connections_->fail(cause);
  if (!connections_->failure().empty()) return;
  connections_->begin_to_leave();
  const auto end = end_after(ranks_.options().timeout());
  try {
    for (int r = 0; r < ranks_.size(); ++r) {
      if (r != rank_) connections_->send(r, kEnd, {.text = ""});
    }
    for (int r = 0; r < ranks_.size(); ++r) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
      if (r != rank_) connections_->receive(r, kEnd, left, reporting(poll));
    }
  } catch (const ConnectionError&) {  // a rank is lost, or has failed
  }
}

// Nothing ends Gloo's wait.
c10::intrusive_ptr<c10d::Backend> Job::connect_sums(const std::string& name, int rank, int size, const Poll& poll) {
  const auto connect = [=, host = ranks_.address(), store = store_, name = name_ + name,
                        limit = ranks_.options().timeout()] {
    return connect_by_gloo(c10::make_intrusive<c10d::PrefixStore>(name, store->clone()), rank, size, host, limit);
  };
  const auto check_and_poll = [&] {
    connections_->check();
    if (poll) poll();
  };
  try {
    return apart(connect, std::chrono::milliseconds::max(), check_and_poll);
  } catch (const std::exception& error) {
    connections_->fail(absl::StrCat("rank ", rank_, " cannot connect to the replicas: ", error.what()));
    throw;
  }
}

}  // namespace gpipe
