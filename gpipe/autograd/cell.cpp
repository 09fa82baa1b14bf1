#include "gpipe/autograd/cell.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <map>
#include <optional>
#include <stdexcept>
#include <utility>

#include "gpipe/autograd/boundary.h"
#include "gpipe/autograd/random_scope.h"
#include "gpipe/autograd/shared_memory.h"

namespace gpipe {
namespace {

using torch::autograd::edge_list;

// Adds a tensor to what leaves a cell.
void send(const at::Tensor& tensor, Parcel& parcel) {
  parcel.add(tensor.defined() ? tensor.detach() : tensor, tensor.defined() && tensor.requires_grad());
}

std::vector<Parcel> copies_of(const std::vector<Parcel>& parcels) {
  auto copies = parcels;
  for (auto& parcel : copies) {
    for (auto& tensor : parcel.tensors) {
      if (tensor.defined()) tensor = tensor.clone();
    }
    parcel.renew_versions();
  }
  return copies;
}

bool changed(const std::vector<Parcel>& parcels) {
  return std::any_of(parcels.begin(), parcels.end(), [](const auto& parcel) { return parcel.changed(); });
}

// A backward that fails leaves what it has not run, graph and gradients, in a queue of this thread, which the thread's
// next backward clears: here is one, of nothing.
void clear_failed_backward() noexcept try {
  torch::autograd::Engine::get_default_engine().execute({}, {}, false, false, true);
} catch (...) {
}

// Says where sinks put their gradients, for its lifetime.
class SumsScope {
 public:
  SumsScope() = default;
  ~SumsScope() {
    for (auto* sink : sinks_) sink->sums = nullptr;
  }
  SumsScope(const SumsScope&) = delete;
  SumsScope& operator=(const SumsScope&) = delete;

  void into(GradientSink& sink, GradientSums& sums) {
    sinks_.push_back(&sink);
    sink.sums = &sums;
  }

 private:
  std::vector<GradientSink*> sinks_;
};

}  // namespace

// Where stash and pop lead inside a cell: to the stage's edges, or, when both ends are in the stage, to each other.
class Cell::Context : public SkipContext {
 public:
  Context(const Stage& stage, const std::vector<Parcel>& in, std::vector<at::Tensor> entering)
      : stage_(stage),
        in_(in),
        entering_(std::move(entering)),
        popped_(entering_.size()),
        out_(stage.skips_out.size()) {
    for (const auto& key : stage.skips_out) out_index_.emplace(key, out_index_.size());
    for (const auto& key : stage.skips_in) in_index_.emplace(key, in_index_.size());
  }

  void stash(const SkipKey& key, at::Tensor tensor) override {
    const auto found = out_index_.find(key);
    if (found == out_index_.end()) {
      if (!local_.emplace(key, std::move(tensor)).second) throw_twice(key, "stashed");
      return;
    }
    auto& out = out_[found->second];
    if (out.stashed) throw_twice(key, "stashed");
    out.stashed = true;
    out.root = leave(tensor);
    send(tensor, out.parcel);
  }

  at::Tensor pop(const SkipKey& key) override {
    const auto found = in_index_.find(key);
    if (found == in_index_.end()) {
      auto node = local_.extract(key);
      if (node.empty()) throw std::runtime_error("[gpipe] " + to_string(key) + " has not been stashed, but was popped");
      return std::move(node.mapped());
    }
    const auto k = found->second;
    if (popped_[k]) throw_twice(key, "popped");
    popped_[k] = true;
    if (version_of(entering_[k]) != in_[k + 1].versions.front()) {
      throw std::runtime_error("[gpipe] " + to_string(key) +
                               " was changed in place after it was stashed; stash a clone of it instead");
    }
    return std::move(entering_[k]);
  }

  // Every declared skip that crosses the stage's bounds must have been used.
  void check() const {
    for (std::size_t k = 0; k < popped_.size(); ++k) {
      if (!popped_[k]) throw_unused(stage_.skips_in[k], "popped");
    }
    for (std::size_t k = 0; k < out_.size(); ++k) {
      if (!out_[k].stashed) throw_unused(stage_.skips_out[k], "stashed");
    }
    if (!local_.empty()) throw_unused(local_.begin()->first, "popped");
  }

  struct Out {
    bool stashed = false;
    torch::autograd::Edge root;
    Parcel parcel;
  };
  std::vector<Out>& out() { return out_; }

 private:
  [[noreturn]] static void throw_twice(const SkipKey& key, const std::string& what) {
    throw std::runtime_error("[gpipe] " + to_string(key) + " was " + what + " twice in one forward");
  }
  [[noreturn]] static void throw_unused(const SkipKey& key, const std::string& what) {
    throw std::runtime_error("[gpipe] " + to_string(key) + " is declared and must be " + what +
                             " in every forward, but its layer did not");
  }

  const Stage& stage_;
  const std::vector<Parcel>& in_;
  std::vector<at::Tensor> entering_;
  std::vector<bool> popped_;
  std::vector<Out> out_;
  std::map<SkipKey, std::size_t> in_index_;
  std::map<SkipKey, std::size_t> out_index_;
  std::map<SkipKey, at::Tensor> local_;
};

// Buffers and parameters at the beginning of an R. A graph may have saved what R made of them, so they are given back
// only after its backward.
class Cell::Borrowed {
 public:
  Borrowed(const Stage& stage, const ParameterSinks& sinks)
      : buffers_(stage, &stage.habits), parameters_(sinks.written()) {}
  ~Borrowed() {
    if (given_back_) return;
    buffers_.restore_after_error();
    parameters_.restore_after_error();
  }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;

  void give_back() {
    buffers_.restore();
    parameters_.restore();
    given_back_ = true;
  }

 private:
  const SavedBuffers buffers_;
  const SavedTensors parameters_;
  bool given_back_ = false;
};

Cell::Cell(Stage& stage, const ParameterSinks& sinks, std::uint64_t seed, int micro_batch)
    : stage_(stage), sinks_(sinks), seed_(seed), micro_batch_(micro_batch) {}

std::vector<Parcel> Cell::run_layers(const std::vector<Parcel>& in, bool graph, PassScope::Pass pass) {
  at::AutoGradMode grad_mode(graph);
  const auto begin = at::sequence_number::peek();
  SharedMemory memory;
  entry_sinks_.clear();
  roots_.clear();
  std::vector<at::Tensor> activation;
  std::vector<at::Tensor> skips;
  for (std::size_t p = 0; p < in.size(); ++p) {
    auto& sinks = entry_sinks_.emplace_back();
    for (std::size_t i = 0; i < in[p].tensors.size(); ++i) {
      auto tensor = in[p].tensors[i];
      std::shared_ptr<GradientSink> sink;
      if (tensor.defined()) {
        tensor = graph && in[p].wants_gradient[i] ? enter(tensor) : tensor.detach();
        sink = std::static_pointer_cast<GradientSink>(tensor.grad_fn());
        if (sink) sink->indices = {i};
      }
      memory.enters(tensor, in[p].memory[i]);
      sinks.push_back(std::move(sink));
      (p == 0 ? activation : skips).push_back(std::move(tensor));
    }
  }
  Context context(stage_, in, std::move(skips));
  Value value(in.front().form, std::move(activation));
  {
    const SkipContextGuard guard(context);
    const PassScope scope(pass);
    std::optional<RandomScope> draws;
    const auto end_layer = [&] {
      draws.reset();
      if (layer_ >= 0) memory.check(stage_.index, stage_.layers[layer_]->name());
    };
    const auto begin_layer = [&](int layer) {
      if (layer < 0 || layer >= static_cast<int>(stage_.layers.size())) {
        throw std::logic_error("[gpipe] stage " + std::to_string(stage_.index) + " has no layer " +
                               std::to_string(layer));
      }
      end_layer();
      layer_ = layer;
      draws.emplace(seed_, stage_.first_layer + layer, micro_batch_);
    };
    if (stage_.run_layers) {
      value = stage_.run_layers(std::move(value), begin_layer, memo_);
    } else {
      for (std::size_t i = 0; i < stage_.layers.size(); ++i) {
        begin_layer(static_cast<int>(i));
        value = stage_.layers[i]->forward(std::move(value));
      }
    }
    end_layer();
    layer_ = -1;
  }
  context.check();

  std::vector<Parcel> out(1);
  out.front().form = value.form();
  auto& roots = roots_.emplace_back();
  for (const auto& tensor : value.tensors()) {
    roots.push_back(leave(tensor));
    send(tensor, out.front());
  }
  for (auto& skip : context.out()) {
    out.push_back(std::move(skip.parcel));
    roots_.push_back({std::move(skip.root)});
  }
  memory.leaves(out, stage_.receivers);
  if (!graph) {
    roots_.clear();
    return out;
  }
  edge_list all;
  for (const auto& list : roots_) all.insert(all.end(), list.begin(), list.end());
  sinks_.redirect(all, begin);
  return out;
}

std::vector<Parcel> Cell::forward(std::vector<Parcel> in, ForwardMode mode) {
  if (!mode.grad || !mode.recompute) return run_layers(in, mode.grad, PassScope::Pass::kPlain);
  const bool was_pure = stage_.in_place == Stage::InPlace::kNo;
  stored_ = was_pure ? in : copies_of(in);
  if (stage_.in_place == Stage::InPlace::kUnknown) observed_ = in;
  buffers_.emplace(stage_, &stage_.habits);
  auto sources = sinks_.has_sink();
  for (const auto& parcel : in) {
    sources.insert(sources.end(), parcel.wants_gradient.begin(), parcel.wants_gradient.end());
  }
  auto& flow = stage_.gradient_flow;
  const bool known = flow.knows(sources);
  auto out = run_layers(in, /*graph=*/!known, PassScope::Pass::kCheckpointing);
  if (known) {
    flow.apply(out);
  } else {
    flow.learn(std::move(sources), out);
    drop_graph();
  }
  for (const auto& parcel : out) sent_.push_back(parcel.wants_gradient);
  buffers_->learn(stage_.habits);
  if (changed(in)) {
    stage_.in_place = Stage::InPlace::kYes;
    if (was_pure) {
      throw std::runtime_error(
          "[gpipe] a layer changed the input of stage " + std::to_string(stage_.index) +
          " in place, which it did not do before, so that the stage cannot be recomputed; repeat the call, which will "
          "work from a copy");
    }
  }
  return out;
}

void Cell::recompute(bool retain_graph) {
  if (!observed_.empty()) {
    // A later stage may have changed what this one passed on.
    if (changed(observed_)) {
      stage_.in_place = Stage::InPlace::kYes;
    } else if (stage_.in_place == Stage::InPlace::kUnknown) {
      stage_.in_place = Stage::InPlace::kNo;
    }
    observed_.clear();
  }
  if (changed(stored_)) {
    stage_.in_place = Stage::InPlace::kYes;
    throw std::runtime_error(
        "[gpipe] the input of stage " + std::to_string(stage_.index) +
        " was changed in place between its forward and its recompute, which did not happen before; "
        "repeat the call, which will work from a copy");
  }
  borrowed_ = std::make_unique<Borrowed>(stage_, sinks_);
  buffers_->restore();
  const auto out = run_layers(retain_graph && stage_.in_place != Stage::InPlace::kNo ? copies_of(stored_) : stored_,
                              /*graph=*/true, PassScope::Pass::kRecomputing);
  stage_.gradient_flow.check(sent_, out);
  if (retain_graph) return;
  stored_.clear();
  buffers_.reset();
}

std::vector<Gradients> Cell::backward(const std::vector<Gradients>& gradients, bool retain_graph, GradientSums& sums) {
  edge_list roots;
  Gradients root_gradients;
  for (std::size_t p = 0; p < roots_.size(); ++p) {
    if (roots_[p].size() != gradients[p].size()) {
      throw std::runtime_error("[gpipe] the last layer of stage " + std::to_string(stage_.index) + " returned " +
                               std::to_string(gradients[p].size()) + " tensors in its forward and " +
                               std::to_string(roots_[p].size()) + " in its recompute; it must not depend on grad mode");
    }
    for (std::size_t i = 0; i < roots_[p].size(); ++i) {
      if (!roots_[p][i].is_valid() || !gradients[p][i].defined()) continue;
      roots.push_back(roots_[p][i]);
      root_gradients.push_back(gradients[p][i]);
    }
  }
  std::vector<GradientSums> entering;
  for (const auto& parcel : entry_sinks_) entering.emplace_back(parcel.size());
  if (!roots.empty()) {
    SumsScope scope;
    for (std::size_t p = 0; p < entry_sinks_.size(); ++p) {
      for (const auto& sink : entry_sinks_[p]) {
        if (sink) scope.into(*sink, entering[p]);
      }
    }
    for (const auto& sink : sinks_.sinks()) scope.into(*sink, sums);
    // What a layer draws in its backward, or recomputes there, must not come from the generators of other threads.
    const RandomScope draws(seed_, -1 - stage_.first_layer, micro_batch_);
    try {
      torch::autograd::Engine::get_default_engine().execute(roots, root_gradients, retain_graph, /*create_graph=*/false,
                                                            /*accumulate_grad=*/true);
    } catch (...) {
      clear_failed_backward();
      throw;
    }
  }
  if (borrowed_) borrowed_->give_back();
  borrowed_.reset();
  std::vector<Gradients> result;
  for (auto& of_parcel : entering) result.push_back(of_parcel.take());
  return result;
}

Cell::~Cell() = default;

void Cell::drop_graph() {
  for (auto& of_parcel : entry_sinks_) {
    for (auto& sink : of_parcel) sink.reset();
  }
  roots_.clear();
}

}  // namespace gpipe
