#include "gpipe/ranks/gloo.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#define USE_C10D_GLOO
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <algorithm>
#include <utility>
#include <vector>

#include "gpipe/runtime/mutex.h"

namespace gpipe {
namespace {

using Group = c10d::ProcessGroupGloo;
using Work = c10::intrusive_ptr<c10d::Work>;

[[noreturn]] void throw_connection_error(const std::exception& error) {
  const std::string what = error.what();
  if (what.find("Timed out") != std::string::npos || what.find("timed out") != std::string::npos) {
    throw TimeoutError(what);
  }
  throw ConnectionError(what);
}

class GlooTransfer : public Transfer {
 public:
  explicit GlooTransfer(Work work) : work_(std::move(work)) {}

  void wait(std::chrono::milliseconds limit) override {
    bool complete = false;
    try {
      complete = work_->wait(limit);
    } catch (const std::exception& error) {
      throw_connection_error(error);
    }
    if (!complete) throw ConnectionError("the connections were closed");
  }

  void abort() { work_->abort(); }

 private:
  const Work work_;
};

/// Invariant: `transfers_` has every transfer that may be waited for, so that close() ends the wait.
class GlooConnections : public Connections {
 public:
  explicit GlooConnections(c10::intrusive_ptr<Group> group) : group_(std::move(group)) {}
  ~GlooConnections() override { close(); }

  std::unique_ptr<Transfer> send(int rank, int tag, std::span<const std::byte> bytes) override {
    return start(bytes.size(), const_cast<std::byte*>(bytes.data()),
                 [&](Group& group, std::vector<at::Tensor>& tensors) { return group.send(tensors, rank, tag); });
  }

  std::unique_ptr<Transfer> receive(int rank, int tag, std::span<std::byte> bytes) override {
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
    for (const auto& weak : transfers) {
      if (const auto transfer = weak.lock()) transfer->abort();
    }
  }

 private:
  /// Shares a transfer with the connections that may abort it.
  class Handle : public Transfer {
   public:
    explicit Handle(std::shared_ptr<GlooTransfer> transfer) : transfer_(std::move(transfer)) {}
    void wait(std::chrono::milliseconds limit) override { transfer_->wait(limit); }

   private:
    const std::shared_ptr<GlooTransfer> transfer_;
  };

  template <typename Start>
  std::unique_ptr<Transfer> start(std::size_t size, std::byte* data, Start start) {
    std::vector<at::Tensor> tensors{size == 0 ? at::empty({0}, at::kByte)
                                              : at::from_blob(data, {static_cast<std::int64_t>(size)}, at::kByte)};
    MutexLock lock(mutex_);
    if (!group_) throw ConnectionError("the connections were closed");
    try {
      auto transfer = std::make_shared<GlooTransfer>(start(*group_, tensors));
      forget_ended();
      transfers_.push_back(transfer);
      return std::make_unique<Handle>(std::move(transfer));
    } catch (const std::exception& error) {
      throw_connection_error(error);
    }
  }

  // Amortised: looks through the list whenever it has doubled.
  void forget_ended() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (transfers_.size() < most_) return;
    std::erase_if(transfers_, [](const auto& weak) { return weak.expired(); });
    most_ = std::max<std::size_t>(64, 2 * transfers_.size());
  }

  Mutex mutex_;
  c10::intrusive_ptr<Group> group_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::weak_ptr<GlooTransfer>> transfers_ ABSL_GUARDED_BY(mutex_);
  std::size_t most_ ABSL_GUARDED_BY(mutex_) = 64;
};

}  // namespace

std::unique_ptr<Connections> connect_by_gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                             const ListenAt& listen_at, std::chrono::milliseconds limit) {
  auto options = Group::Options::create(limit);
  options->threads = 1;
  try {
    options->devices.push_back(!listen_at.interface.empty() ? Group::createDeviceForInterface(listen_at.interface)
                               : !listen_at.address.empty() ? Group::createDeviceForHostname(listen_at.address)
                                                            : Group::createDefaultDevice());
    return std::make_unique<GlooConnections>(c10::make_intrusive<Group>(store, rank, size, options));
  } catch (const std::exception& error) {
    throw_connection_error(error);
  }
}

}  // namespace gpipe
