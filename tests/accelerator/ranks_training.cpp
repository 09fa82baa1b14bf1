#include "tests/accelerator/ranks_training.h"

#include <condition_variable>
#include <deque>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "absl/cleanup/cleanup.h"
#include "gpipe/ranks/connections.h"
#include "tests/accelerator/device.h"
#include "tests/gpipe/layers.h"

namespace gpipe {

constexpr std::chrono::seconds kPatience{60};

namespace accelerator {
namespace {

struct Sent {
  std::vector<at::Tensor> values;  // on the host
  Event event;
  std::int64_t number;  // of the transfer
};

bool alike(const at::Tensor& one, const at::Tensor& other) {
  return one.dtype() == other.dtype() && one.sizes() == other.sizes() && one.strides() == other.strides();
}

}  // namespace

struct CheckedWires::Network {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::string, std::deque<Sent>> sent;  // by wire
  std::set<std::pair<std::string, int>> ends;    // the ends that are connected
  std::atomic<int> ranks = 0;
  std::int64_t transfers = 0;
  std::set<int> aborted;
};

class CheckedWires::Wire : public c10d::Backend {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;
  Wire(std::shared_ptr<Network> network, std::string name, int rank, int job_rank)
      : Backend(rank, /*size=*/2), network_(std::move(network)), name_(std::move(name)), job_rank_(job_rank) {}

  void eagerConnectSingleDevice(at::Device device) override { device_ = device; }
  void startCoalescing() override { tensors_.clear(); }
  Work send(std::vector<at::Tensor>& tensors, int /*to*/, int /*tag*/) override { return add(tensors); }
  Work recv(std::vector<at::Tensor>& tensors, int /*from*/, int /*tag*/) override { return add(tensors); }
  Work endCoalescing() override {
    if (std::exchange(is_connected_, true)) transfer();  // the first transfer only connects
    return {};
  }
  void abort() override {
    std::lock_guard lock(network_->mutex);
    network_->aborted.insert(job_rank_);
    held() = false;
    network_->changed.notify_all();
  }

 private:
  Work add(const std::vector<at::Tensor>& tensors) {
    tensors_.insert(tensors_.end(), tensors.begin(), tensors.end());
    return {};
  }

  void transfer() {
    const bool sends = getRank() == DeviceLink::kSender;
    std::vector<Access> accesses;
    for (const auto& tensor : tensors_) {
      if (tensor.device() != device_) stream_order().report("a wire of " + device_.str() + " gets a tensor elsewhere");
      add_access(tensor, /*writes=*/!sends, accesses);
    }
    std::lock_guard lock(network_->mutex);
    TORCH_CHECK(network_->aborted.empty(), "the wires were aborted");
    auto& queue = network_->sent[name_];
    const KernelsOnly kernels;
    // As on CUDA: a group has a stream of its own, after and before the work of the current one.
    const int current = current_stream(device_);
    const int stream = stream_order().index(device_.index(), std::hash<std::string>()(name_) >> 1);
    stream_order().order(current, stream);
    const absl::Cleanup join = [&] { stream_order().order(stream, current); };
    gpipe::accelerator::Work work;
    for (const auto& tensor : tensors_) work.bytes += static_cast<double>(tensor.nbytes());
    if (sends) {
      auto& sent = queue.emplace_back();
      for (const auto& tensor : tensors_) sent.values.push_back(alias_on_host(tensor).clone());
      work.transfer = sent.number = ++network_->transfers;
      stream_order().launch(stream, "send", accesses, work);
      stream_order().record(sent.event, stream);
      return;
    }
    if (queue.empty()) return stream_order().report("a receive is enqueued before its send, on the wire " + name_);
    const auto sent = std::move(queue.front());
    queue.pop_front();
    work.transfer = sent.number;
    stream_order().launch(stream, "receive", accesses, work);
    stream_order().comes_after(stream, sent.event);
    if (!std::ranges::equal(sent.values, tensors_, alike)) {
      return stream_order().report("the tensors that are received differ from those sent, on the wire " + name_);
    }
    for (std::size_t i = 0; i < tensors_.size(); ++i) alias_on_host(tensors_[i]).copy_(sent.values[i]);
  }

  const std::shared_ptr<Network> network_;
  const std::string name_;
  const int job_rank_;
  c10::Device device_ = c10::kCPU;
  bool is_connected_ = false;
  std::vector<at::Tensor> tensors_;
};

CheckedWires::CheckedWires() : network_(std::make_shared<Network>()) {}

ConnectDevices CheckedWires::connect() {
  const auto connect = [network = network_, job_rank = network_->ranks++](const std::string& name, int rank, int size) {
    if (size != 2 || name.starts_with("sums")) return DeviceGroup();
    std::unique_lock lock(network->mutex);
    if (!network->ends.insert({name, rank}).second) stream_order().report("a wire is made twice: " + name);
    network->changed.notify_all();
    const bool met = network->changed.wait_for(lock, kPatience, [&] {
      return !network->aborted.empty() || network->ends.contains({name, 1 - rank});
    });
    TORCH_CHECK(met && network->aborted.empty(), "nobody is at the other end of the wire ", name);
    return DeviceGroup(c10::make_intrusive<Wire>(network, name, rank, job_rank));
  };
  return [connect](const auto&, auto) { return std::make_unique<DeviceConnections>(kType, connect); };
}

int CheckedWires::aborted() const {
  std::lock_guard lock(network_->mutex);
  return static_cast<int>(network_->aborted.size());
}

}  // namespace accelerator

namespace {

namespace nn = torch::nn;
using accelerator::device;

/// A model and a mini-batch, the same each time. The input itself goes to another stage.
struct Training {
  Training() {
    static std::mutex mutex;  // the ranks are threads that share the default generator
    const std::lock_guard lock(mutex);
    torch::manual_seed(3);
    const auto with_gaps = [](Tensor x) { return torch::cat({x, x}, 1).narrow(1, 0, 6); };
    model = Sequential(Stash("skip"), Linear(6, 6), nn::ReLU(), function_layer(with_gaps), nn::Tanh(), Linear(6, 6),
                       Pop("skip"), Linear(6, 5));
    input = torch::randn({8, 6});
    target = torch::randn({8, 5});
  }

  Sequential model;
  Tensor input;
  Tensor target;
};

// Two stages: nothing comes back to the first one that tells that the input was sent.
void evaluate(const std::vector<torch::Device>& devices, const std::shared_ptr<Ranks>& ranks) {
  auto [model, input, target] = Training();
  input = input.to(devices.front());
  GPipe pipe(model, Balance{4, 4}, GPipeOptions().devices(devices).chunks(4).intraop_threads(1).ranks(ranks));
  const torch::NoGradGuard no_grad;
  pipe->forward(input);
  input.mul_(2);
}

}  // namespace

RanksOptions patient_ranks() { return RanksOptions().interface("lo").timeout(kPatience).join_timeout(kPatience); }

std::vector<std::string> run_ranks(int size, const RanksOptions& options, accelerator::CheckedWires* wires,
                                   const std::function<void(const std::shared_ptr<Ranks>&)>& run, int without_wires) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> errors(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        auto with = options;
        const bool has_wires = wires != nullptr && rank != without_wires;
        const auto ranks = std::make_shared<Ranks>(store, rank, size, with.nccl(has_wires),
                                                   has_wires ? wires->connect() : ConnectDevices());
        run(ranks);
      } catch (const std::exception& error) {
        errors[rank] = error.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return errors;
}

Results train(const std::string& schedule, Checkpoint checkpoint, const std::vector<torch::Device>& devices,
              const std::shared_ptr<Ranks>& ranks) {
  auto [model, input, target] = Training();
  input = input.to(devices.front());
  auto options = GPipeOptions().devices(devices).chunks(4).checkpoint(checkpoint).schedule(schedule).intraop_threads(1);
  GPipe pipe(model, Balance{2, 2, 2, 2}, options.stages_per_worker(2).ranks(ranks));
  torch::optim::SGD sgd(pipe->parameters(), 0.01);
  Results results;
  for (int i = 0; i < 2; ++i) {
    results.push_back(pipe->step(input, target, kMse).loss.cpu());
    input.mul_(2);
    sgd.step();
  }
  const auto output = pipe->forward(input);
  output.square().mean().backward();
  results.push_back(output.detach().cpu());
  for (const auto& parameter : pipe->parameters()) results.push_back(parameter.grad().cpu());
  evaluate(devices, ranks);
  return results;
}

std::vector<Results> train_over_ranks(const std::string& schedule, Checkpoint checkpoint, Way way) {
  constexpr int kRanks = 2;
  accelerator::CheckedWires wires;
  std::vector<Results> results(kRanks);
  const auto options = patient_ranks().share_outputs(true);
  const auto errors = run_ranks(kRanks, options, way == Way::kWires ? &wires : nullptr, [&](const auto& ranks) {
    results[ranks->rank()] = train(schedule, checkpoint, {device(ranks->rank())}, ranks);
  });
  EXPECT_THAT(errors, ::testing::Each(::testing::IsEmpty()));
  return results;
}

}  // namespace gpipe
