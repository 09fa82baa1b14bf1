#include "tests/accelerator/checked_wires.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gpipe/ranks/connections.h"
#include "tests/accelerator/device.h"
#include "tests/accelerator/host_call.h"

namespace gpipe::accelerator {
namespace {

constexpr std::chrono::seconds kPatience{60};

struct Sent {
  std::vector<at::Tensor> values;  // on the host
  Event event;
};

bool alike(const at::Tensor& one, const at::Tensor& other) {
  return one.dtype() == other.dtype() && one.sizes() == other.sizes() && one.strides() == other.strides();
}

}  // namespace

struct CheckedWires::Network {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::string, std::deque<Sent>> sent;  // by wire
  std::set<std::pair<std::string, bool>> ends;   // those that are connected
  int aborted = 0;
};

class CheckedWires::Wire : public DeviceWire {
 public:
  Wire(Network& network, std::string name, bool sends, c10::Device device)
      : network_(network), name_(std::move(name)), sends_(sends), device_(device) {}

  void transfer(std::span<const at::Tensor> tensors) override {
    std::vector<Access> accesses;
    for (const auto& tensor : tensors) {
      if (tensor.device() != device_) stream_order().report("a wire of " + device_.str() + " gets a tensor elsewhere");
      add_access(tensor, /*writes=*/!sends_, accesses);
    }
    std::lock_guard lock(network_.mutex);
    if (network_.aborted > 0) throw ConnectionError("the wires were aborted");
    auto& queue = network_.sent[name_];
    const KernelsOnly kernels;
    const int stream = current_stream(device_);
    if (sends_) {
      auto& sent = queue.emplace_back();
      for (const auto& tensor : tensors) sent.values.push_back(alias_on_host(tensor).clone());
      stream_order().launch(stream, "send", accesses);
      stream_order().record(sent.event, stream);
      return;
    }
    if (queue.empty()) return stream_order().report("a receive is enqueued before its send, on the wire " + name_);
    const auto sent = std::move(queue.front());
    queue.pop_front();
    stream_order().wait(stream, sent.event);
    stream_order().launch(stream, "receive", accesses);
    bool same = sent.values.size() == tensors.size();
    for (std::size_t i = 0; same && i < tensors.size(); ++i) {
      const auto to = alias_on_host(tensors[i]);
      same = alike(to, sent.values[i]);
      if (same) to.copy_(sent.values[i]);
    }
    if (!same) stream_order().report("the tensors that are received differ from those sent, on the wire " + name_);
  }

 private:
  Network& network_;
  const std::string name_;
  const bool sends_;
  const c10::Device device_;
};

class CheckedWires::Connections : public DeviceConnections {
 public:
  explicit Connections(std::shared_ptr<Network> network) : network_(std::move(network)) {}

  c10::DeviceType device_type() const override { return kType; }

  DeviceWire& connect(const std::string& name, bool sends, c10::Device device) override {
    std::unique_lock lock(network_->mutex);
    if (!network_->ends.insert({name, sends}).second) stream_order().report("a wire is made twice: " + name);
    network_->changed.notify_all();
    const bool met = network_->changed.wait_for(lock, kPatience, [&] {
      return network_->aborted > 0 || network_->ends.contains({name, !sends});
    });
    if (!met || network_->aborted > 0) throw ConnectionError("nobody is at the other end of the wire " + name);
    return *wires_.emplace_back(std::make_unique<Wire>(*network_, name, sends, device));
  }

  void abort() noexcept override {
    std::lock_guard lock(network_->mutex);
    if (!std::exchange(aborted_, true)) ++network_->aborted;
    held() = false;
    network_->changed.notify_all();
  }

 private:
  const std::shared_ptr<Network> network_;
  bool aborted_ = false;
  std::vector<std::unique_ptr<Wire>> wires_;
};

CheckedWires::CheckedWires() : network_(std::make_shared<Network>()) {}

ConnectDevices CheckedWires::connect() {
  return [network = network_](const auto&, auto) { return std::make_unique<Connections>(network); };
}

int CheckedWires::aborted() const {
  std::lock_guard lock(network_->mutex);
  return network_->aborted;
}

}  // namespace gpipe::accelerator
