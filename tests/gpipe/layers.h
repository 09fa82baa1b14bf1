#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "gpipe/gpipe.h"

namespace gpipe {

struct StashImpl : torch::nn::Module, Skippable {
  explicit StashImpl(std::string name) : Skippable({.stash = {name}}), name_(std::move(name)) {}
  torch::Tensor forward(torch::Tensor x) {
    stash(name_, x);
    return x * 1.5;
  }
  std::string name_;
};
TORCH_MODULE(Stash);

struct PopImpl : torch::nn::Module, Skippable {
  explicit PopImpl(std::string name) : Skippable({.pop = {name}}), name_(std::move(name)) {}
  torch::Tensor forward(torch::Tensor x) { return x + pop(name_).tanh(); }
  std::string name_;
};
TORCH_MODULE(Pop);

/// Stashes integers, an undefined tensor and a float that nobody will use.
struct StashOddImpl : torch::nn::Module, Skippable {
  StashOddImpl() : Skippable({.stash = {"ids", "nothing", "unused"}}) {}
  torch::Tensor forward(torch::Tensor x) {
    stash("ids", (x.detach() > 0).to(torch::kLong));
    stash("nothing", torch::Tensor());
    stash("unused", x * 2);
    return x;
  }
};
TORCH_MODULE(StashOdd);

struct PopOddImpl : torch::nn::Module, Skippable {
  PopOddImpl() : Skippable({.pop = {"ids", "nothing", "unused"}}) {}
  torch::Tensor forward(torch::Tensor x) {
    pop("unused");
    TORCH_CHECK(!pop("nothing").defined());
    return x + pop("ids").to(x.scalar_type());
  }
};
TORCH_MODULE(PopOdd);

/// Crossing, nested and same-stage skips, dropout between: ten layers.
inline torch::nn::Sequential skip_model() {
  return torch::nn::Sequential(torch::nn::Linear(6, 6), Stash("a"), StashOdd(), torch::nn::Linear(6, 6), Stash("b"),
                               torch::nn::Dropout(0.3), Pop("a"), torch::nn::Linear(6, 6), PopOdd(), Pop("b"));
}

struct EmbedImpl : torch::nn::Module {
  EmbedImpl() : table(register_module("table", torch::nn::Embedding(5, 6))) {}
  std::tuple<torch::Tensor, torch::Tensor> forward(std::tuple<torch::Tensor, torch::Tensor> in) {
    auto& [x, ids] = in;
    return {x + table(ids), ids};
  }
  torch::nn::Embedding table;
};
TORCH_MODULE(Embed);

/// Changes what it gets in place, and returns the same tensor twice.
struct InPlaceImpl : torch::nn::Module {
  std::tuple<torch::Tensor, torch::Tensor, torch::Tensor> forward(std::tuple<torch::Tensor, torch::Tensor> in) {
    auto& [x, ids] = in;
    x.relu_();
    return {x, x, ids};
  }
};
TORCH_MODULE(InPlace);

struct MixImpl : torch::nn::Module {
  MixImpl() : weight(register_parameter("weight", torch::randn({6}))) {}
  std::vector<torch::Tensor> forward(std::tuple<torch::Tensor, torch::Tensor, torch::Tensor> in) {
    auto& [x, y, ids] = in;
    return {x * weight, y.exp() * weight + x.sin(), ids.to(x.scalar_type())};
  }
  torch::Tensor weight;
};
TORCH_MODULE(Mix);

struct UnmixImpl : torch::nn::Module {
  torch::Tensor forward(const std::vector<torch::Tensor>& in) { return in[0] + in[1] * in[2].unsqueeze(1); }
};
TORCH_MODULE(Unmix);

/// Tuples, vectors, integer tensors, in-place operations at a stage's head, dropout: six layers.
inline torch::nn::Sequential tuple_model() {
  return torch::nn::Sequential(Embed(), InPlace(), Mix(), Unmix(),
                               torch::nn::Dropout(torch::nn::DropoutOptions(0.3).inplace(true)),
                               torch::nn::ReLU(torch::nn::ReLUOptions(true)));
}

struct SizedImpl : torch::nn::Module {
  explicit SizedImpl(std::vector<std::int64_t>* seen) : seen(seen) {}
  torch::Tensor forward(torch::Tensor x) {
    seen->push_back(x.size(0));
    return x;
  }
  std::vector<std::int64_t>* seen;
};
TORCH_MODULE(Sized);

/// Calls `act` when the graph it is in goes backward.
struct OnBackward : torch::autograd::Function<OnBackward> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, torch::Tensor x, std::function<void()>* act) {
    context->saved_data["act"] = reinterpret_cast<std::int64_t>(act);
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    (*reinterpret_cast<std::function<void()>*>(context->saved_data["act"].toInt()))();
    return {gradients[0], torch::Tensor()};
  }
};

/// Counts up, and can be waited for.
struct Counter {
  void increment() {
    const std::lock_guard<std::mutex> lock(mutex);
    ++value;
    changed.notify_all();
  }
  void wait_for(int wanted) {
    std::unique_lock<std::mutex> lock(mutex);
    TORCH_CHECK(changed.wait_for(lock, std::chrono::seconds(30), [&] { return value >= wanted; }), "waited in vain");
  }
  std::mutex mutex;
  std::condition_variable changed;
  int value = 0;
};

/// A linear layer that counts its recomputes.
struct RecomputesImpl : torch::nn::Module {
  explicit RecomputesImpl(std::shared_ptr<Counter> counter)
      : linear(register_module("linear", torch::nn::Linear(6, 6))), counter(std::move(counter)) {}
  torch::Tensor forward(torch::Tensor x) {
    auto y = linear(x);
    if (is_recomputing()) counter->increment();
    return y;
  }
  torch::nn::Linear linear;
  std::shared_ptr<Counter> counter;
};
TORCH_MODULE(Recomputes);

/// Its n-th backward waits for the n-th count, and then long enough for an action that is about to end.
struct WaitInBackwardImpl : torch::nn::Module {
  explicit WaitInBackwardImpl(std::shared_ptr<Counter> counter) {
    act = [counter = std::move(counter), n = 0]() mutable {
      counter->wait_for(++n);
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    };
  }
  torch::Tensor forward(torch::Tensor x) { return OnBackward::apply(x, &act); }
  std::function<void()> act;
};
TORCH_MODULE(WaitInBackward);

/// Where a Faulty layer is to fail, once.
struct FaultPlan {
  enum Where { kNowhere, kForward, kRecompute, kBackward };
  void arm(Where at, std::function<void()> f) {
    where = at;
    fault = std::move(f);
  }
  void disarm() { where = kNowhere; }
  Where where = kNowhere;
  std::function<void()> fault;
};

/// Fails in a cell that is always checkpointed.
struct FaultyImpl : torch::nn::Module {
  explicit FaultyImpl(std::shared_ptr<FaultPlan> plan) : plan(std::move(plan)) {
    act = [this] {
      if (this->plan->where == FaultPlan::kBackward) this->plan->fault();
    };
  }
  torch::Tensor forward(torch::Tensor x) {
    const auto here = is_recomputing() ? FaultPlan::kRecompute : FaultPlan::kForward;
    if (plan->where == here) plan->fault();
    return OnBackward::apply(x, &act);
  }
  std::shared_ptr<FaultPlan> plan;
  std::function<void()> act;
};
TORCH_MODULE(Faulty);

/// Graphs alive, now and at most.
struct Live {
  std::atomic<int> now = 0;
  std::atomic<int> peak = 0;
};

/// Counts the graphs that it is in: one a forward with gradients, until it is freed.
struct PeakImpl : torch::nn::Module {
  torch::Tensor forward(torch::Tensor x) {
    struct Token : torch::autograd::FunctionPreHook {
      explicit Token(std::shared_ptr<Live> live) : live(std::move(live)) {
        const int now = ++this->live->now;
        this->live->peak = std::max(this->live->peak.load(), now);
      }
      ~Token() override { --live->now; }
      torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
        return gradients;
      }
      std::shared_ptr<Live> live;
    };
    auto y = x.sigmoid();
    if (y.requires_grad()) y.grad_fn()->add_pre_hook(std::make_unique<Token>(live));
    return y;
  }
  std::shared_ptr<Live> live = std::make_shared<Live>();
};
TORCH_MODULE(Peak);

/// Of this process.
inline std::size_t thread_count() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return static_cast<std::size_t>(std::distance(begin(tasks), end(tasks)));
}

}  // namespace gpipe
