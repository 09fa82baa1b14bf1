#include "gpipe/ranks/meeting.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <sched.h>

#define USE_C10D_GLOO
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <algorithm>
#include <csignal>
#include <future>
#include <thread>

#include "gpipe/base/mutex.h"

namespace gpipe {
namespace {

using Group = c10d::ProcessGroupGloo;
using Work = c10::intrusive_ptr<c10d::Work>;

using Clock = std::chrono::steady_clock;

// Gloo's own time-out would close all connections before the cause is published.
constexpr std::chrono::hours kNever{24 * 365};
constexpr std::chrono::milliseconds kExpiryInterval{100};

[[noreturn]] void throw_connection_error(const std::exception& error) {
  const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
  const std::string what = of_torch != nullptr ? of_torch->what_without_backtrace() : error.what();
  if (what.find("imed out") != std::string::npos) throw TimeoutError(what);
  throw ConnectionError(what);
}

class GlooTransfer : public Transfer {
 public:
  explicit GlooTransfer(Work work) : work_(std::move(work)) {}

  void wait(std::chrono::milliseconds limit) override {
    end_ = Clock::now() + std::min<std::chrono::milliseconds>(limit, kNever);
    bool complete = false;
    try {
      complete = work_->wait(kNever);
    } catch (const std::exception& error) {
      throw_connection_error(error);
    }
    if (complete) return;
    if (expired_) throw TimeoutError("another rank did not answer in time");
    throw ConnectionError("the connections were closed");
  }

  void abort() { work_->abort(); }
  void expire(Clock::time_point now) {
    if (now < end_.load()) return;
    expired_ = true;
    abort();
  }

 private:
  const Work work_;
  std::atomic<Clock::time_point> end_ = Clock::time_point::max();
  std::atomic<bool> expired_ = false;
};

/// Invariant: `transfers_` has every transfer that may be waited for, so that close() ends the wait.
class GlooConnections : public Connections {
 public:
  explicit GlooConnections(c10::intrusive_ptr<Group> group) : group_(std::move(group)), expiry_([this] { expire(); }) {}
  ~GlooConnections() override {
    close();
    expiry_.join();
  }

  std::shared_ptr<Transfer> send(int rank, int tag, std::span<const std::byte> bytes) override {
    return start(bytes.size(), const_cast<std::byte*>(bytes.data()),
                 [&](Group& group, std::vector<at::Tensor>& tensors) { return group.send(tensors, rank, tag); });
  }

  std::shared_ptr<Transfer> receive(int rank, int tag, std::span<std::byte> bytes) override {
    return start(bytes.size(), bytes.data(),
                 [&](Group& group, std::vector<at::Tensor>& tensors) { return group.recv(tensors, rank, tag); });
  }

  void close() noexcept override {
    c10::intrusive_ptr<Group> group;
    std::vector<std::weak_ptr<GlooTransfer>> transfers;
    {
      MutexLock lock(mutex_);
      group = std::exchange(group_, nullptr);
      transfers = std::exchange(transfers_, {});
    }
    closed_.notify_all();
    for (const auto& weak : transfers) {
      if (const auto transfer = weak.lock()) transfer->abort();
    }
  }

 private:
  template <typename Start>
  std::shared_ptr<Transfer> start(std::size_t size, std::byte* data, Start start) {
    std::vector<at::Tensor> tensors{size == 0 ? at::empty({0}, at::kByte)
                                              : at::from_blob(data, {static_cast<std::int64_t>(size)}, at::kByte)};
    MutexLock lock(mutex_);
    if (!group_) throw ConnectionError("the connections were closed");
    try {
      auto transfer = std::make_shared<GlooTransfer>(start(*group_, tensors));
      transfers_.push_back(transfer);
      return transfer;
    } catch (const std::exception& error) {
      throw_connection_error(error);
    }
  }

  void expire() {
    for (bool open = true; open;) {
      std::vector<std::weak_ptr<GlooTransfer>> transfers;
      {
        MutexLock lock(mutex_);
        if (group_) closed_.wait_until(mutex_, Clock::now() + kExpiryInterval);
        open = group_ != nullptr;
        std::erase_if(transfers_, [](const auto& weak) { return weak.expired(); });
        transfers = transfers_;
      }
      for (const auto& weak : transfers) {
        if (const auto transfer = weak.lock()) transfer->expire(Clock::now());
      }
    }
  }

  Mutex mutex_;
  CondVar closed_;
  c10::intrusive_ptr<Group> group_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::weak_ptr<GlooTransfer>> transfers_ ABSL_GUARDED_BY(mutex_);
  std::thread expiry_;  // last, because the thread uses the other members
};

// Makes a device whose thread inherits the policy SCHED_BATCH. With the default policy, an arriving message lets it
// preempt a thread that holds the connection's lock. It then polls until that thread runs again.
std::shared_ptr<::gloo::transport::Device> make_device(const ListenAt& listen_at) {
  const auto make = [&] {
    const sched_param priority{};
    sched_setscheduler(/*this thread*/ 0, SCHED_BATCH, &priority);  // messages only take longer if it is refused
    if (!listen_at.interface.empty()) return Group::createDeviceForInterface(listen_at.interface);
    if (!listen_at.address.empty()) return Group::createDeviceForHostname(listen_at.address);
    return Group::createDefaultDevice();
  };
  return std::async(std::launch::async, make).get();
}

// Gloo's write to a rank that has ended raises SIGPIPE, whose default action ends this process too. Python ignores it.
void ignore_broken_pipes() {
  struct sigaction action {};
  const bool is_default = sigaction(SIGPIPE, nullptr, &action) == 0 && action.sa_handler == SIG_DFL;
  if (is_default) std::signal(SIGPIPE, SIG_IGN);
}

}  // namespace

std::unique_ptr<Connections> connect_by_gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                             const ListenAt& listen_at, std::chrono::milliseconds limit) {
  ignore_broken_pipes();
  auto options = Group::Options::create(limit);
  options->threads = 1;
  try {
    options->devices.push_back(make_device(listen_at));
    return std::make_unique<GlooConnections>(c10::make_intrusive<Group>(store, rank, size, options));
  } catch (const std::exception& error) {
    throw_connection_error(error);
  }
}

}  // namespace gpipe
