#include "gpipe/autograd/cell.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <stdexcept>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "gpipe/autograd/random_scope.h"
#include "gpipe/autograd/skip_routes.h"
#include "gpipe/base/checks.h"
#include "gpipe/tensors/torch_internals.h"
#include "gpipe/tensors/transfer.h"

namespace gpipe {
namespace {

using torch::autograd::edge_list;

// Runs an empty backward: until a thread's next one, the engine keeps the graph and gradients of one that failed.
void clear_failed_backward() noexcept try {
  torch::autograd::Engine::get_default_engine().execute({}, {}, false, false, true);
} catch (...) {
}

bool has_new_modules(const Stage& stage, const StageState::Saved& saved) {
  bool result = false;
  stage.locked([&] {
    const auto count = [](const auto& layer) { return layer->buffers().modules; };
    result = !std::ranges::equal(stage.layers, saved.layers, {}, count, &Layer::Buffers::modules);
  });
  return result;
}

// Stages run concurrently, and a stand-in may be a copy. So no stage sees the writes of another.
[[noreturn]] void refuse_write() {
  throw_error(
      "a layer wrote to a parameter that several stages share, as an embedding with max_norm does; put the layers that "
      "share it into one stage");
}

}  // namespace

Cell::Cell(Stage& stage, ParameterSinks& sinks, std::uint64_t seed, int micro_batch, CellLoss loss)
    : stage_(stage), sinks_(sinks), seed_(seed), micro_batch_(micro_batch), loss_(std::move(loss)) {}

Cell::~Cell() {
  if (state_now_) StageState::restore_after_error(stage_, *state_now_);
}

// Returns what the layers get. Tensors that want gradients get sinks.
std::vector<at::Tensor> Cell::enter_parcel(const Parcel& parcel, bool graph, AliasCheck& aliases) {
  auto tensors = parcel.tensors;
  auto& sinks = entry_sinks_.emplace_back(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    auto& tensor = tensors[i];
    if (!tensor.defined()) continue;
    const bool wants_gradient = parcel.wants_gradient[i];
    tensor = graph && wants_gradient ? enter(tensor) : tensor.detach().requires_grad_(wants_gradient);
    sinks[i] = node_cast<GradientSink>(tensor.grad_fn());
    if (sinks[i]) sinks[i]->indices = {i};
    aliases.enters(tensor, parcel.alias_groups[i]);
  }
  return tensors;
}

Value Cell::call_layers(Value value, const std::vector<Borrowed>& borrowed,
                        absl::FunctionRef<void(const std::string& layer)> after_layer) {
  std::optional<RandomScope> draws;
  std::optional<at::RecordFunction> range;
  const auto end_layer = [&] {
    range.reset();
    draws.reset();
    if (layer_ >= 0) after_layer(stage_.name_of(layer_));
  };
  const auto start = [&](int layer) {
    end_layer();
    layer_ = layer;
    draws.emplace(seed_, stage_.first_layer + layer, micro_batch_);
    range.emplace(at::RecordScope::USER_SCOPE);
    if (range->isActive()) range->before("gpipe layer " + stage_.name_of(layer));
  };
  if (stage_.run_layers) {
    const auto begin = [&](int layer) {
      if (layer < 0 || layer >= std::ssize(stage_.layers)) {
        throw std::logic_error(absl::StrCat("[gpipe] stage ", stage_.index, " has no layer ", layer));
      }
      start(layer);
    };
    value = stage_.run_layers(std::move(value), begin, memo_, borrowed);
  } else {
    for (std::size_t i = 0; i < stage_.layers.size(); ++i) {
      start(static_cast<int>(i));
      value = stage_.layers[i]->forward(std::move(value));
    }
  }
  if (is_checkpointing() && at::GradMode::is_enabled()) {
    keeps_graph_ = sinks_.adopt_new() || has_new_modules(stage_, *state_at_forward_);
  }
  if (loss_.layer && (!is_checkpointing() || keeps_graph_)) {
    start(static_cast<int>(stage_.layers.size()));
    const PassScope plain(PassScope::Pass::kPlain);  // it runs once
    std::vector<NodePtr<torch::autograd::Node>> ends;
    for (const auto& tensor : value.tensors()) ends.push_back(tensor.defined() ? tensor.grad_fn() : nullptr);
    value = loss_.layer(value);
    if (loss_.adopts_leaves) sinks_.adopt_leaves(value.tensor(), ends);
  }
  end_layer();
  layer_ = -1;
  return value;
}

// A layer may write to its tensors in a later micro-batch, while another worker reads what left the stage.
void Cell::separate_from_state(Parcel& parcel) const {
  for (std::size_t i = 0; i < parcel.tensors.size(); ++i) {
    auto& tensor = parcel.tensors[i];
    if (!tensor.defined() || !stage_.state.has_memory_of(tensor)) continue;
    tensor = copy_of(tensor);
    parcel.versions[i] = VersionWatch(tensor);
  }
}

std::vector<Parcel> Cell::run_layers(const std::vector<Parcel>& in, bool graph, PassScope::Pass pass) {
  at::AutoGradMode grad_mode(graph);
  const auto begin = at::sequence_number::peek();
  AliasCheck aliases;
  entry_sinks_.clear();
  Value value(in.front().form, enter_parcel(in.front(), graph, aliases));
  std::vector<at::Tensor> skips_in;
  const auto first_borrowed = 1 + stage_.skips_in.size();
  for (std::size_t p = 1; p < first_borrowed; ++p) skips_in.push_back(enter_parcel(in[p], graph, aliases).front());
  SkipRoutes skips(stage_, std::move(skips_in));
  std::vector<Borrowed> borrowed;
  for (const auto& parameter : sinks_.borrowed()) {
    const auto& parcel = in[first_borrowed + borrowed.size()];
    borrowed.push_back({parameter, enter_parcel(parcel, graph, aliases).front()});
  }
  const auto lent = sinks_.lent();
  Parcel tied;
  for (const auto& parameter : lent) tied.add(parameter, false);
  for (const auto& parameter : borrowed) tied.add(parameter.stand_in, false);
  {
    const SkipContextGuard guard(skips);
    auto* saved = pass == PassScope::Pass::kCheckpointing ? &state_at_forward_ : &state_now_;
    const StageState::Scope state(stage_.state, *saved ? &**saved : nullptr, /*is_backward=*/false);
    const PassScope scope(pass);
    value = call_layers(std::move(value), borrowed, [&](const std::string& layer) {
      if (tied.changed()) refuse_write();
      skips.check_unchanged(layer);
      aliases.check(stage_.index, layer);
    });
    stage_.state.check(stage_);
  }
  skips.check_all_used();

  std::vector<Parcel> out(1);
  out.front().add_leaving(value);
  roots_.assign(1, {});
  for (const auto& tensor : value.tensors()) roots_.front().push_back(leave(tensor));
  // Their nodes are made last, so that a backward first adds the gradients of later stages, as without stages.
  for (auto& skip : skips.leaving()) {
    out.push_back(std::move(skip.parcel));
    roots_.push_back({leave(skip.tensor)});
  }
  for (const auto& parameter : lent) {
    out.emplace_back().add_leaving(parameter);
    roots_.push_back({leave(parameter)});
  }
  for (std::size_t p = 0; p + lent.size() < out.size(); ++p) separate_from_state(out[p]);
  aliases.leaves(out, stage_.receivers);
  if (!graph) {
    roots_.clear();
    return out;
  }
  sinks_.redirect(all_roots(), begin, borrowed);
  return out;
}

std::vector<Parcel> Cell::forward(std::vector<Parcel> in, bool grad, bool recompute) {
  if (!grad || !recompute) return run_layers(in, grad, PassScope::Pass::kPlain);
  inputs_.emplace(stage_, in);
  state_at_forward_ = stage_.state.save(stage_, sinks_.own());
  auto sources = sinks_.has_sink();
  for (const auto& parcel : in) {
    sources.insert(sources.end(), parcel.wants_gradient.begin(), parcel.wants_gradient.end());
  }
  auto& flow = stage_.needed_gradients;
  const bool known = flow.knows(sources);
  auto out = run_layers(in, /*graph=*/!known, PassScope::Pass::kCheckpointing);
  if (known) {
    flow.apply(out);
  } else if (!keeps_graph_) {
    flow.learn(std::move(sources), out);
    drop_graph();
  }
  for (const auto& parcel : out) sent_.push_back(parcel.wants_gradient);
  if (loss_.layer) sent_.front().clear();  // the loss takes its place
  inputs_->check_unchanged(in, "by one of its layers");
  return out;
}

void Cell::recompute(bool retain_graph) {
  if (keeps_graph_) return;
  const auto in = inputs_->take(retain_graph);
  state_now_ = stage_.state.save(stage_, sinks_.own());
  stage_.state.restore_forward(stage_, *state_at_forward_, *state_now_);
  if (!retain_graph) state_at_forward_.reset();
  const auto parameters = sinks_.all().size();
  const auto out = run_layers(in, /*graph=*/true, PassScope::Pass::kRecomputing);
  if (sinks_.all().size() != parameters) {
    throw_error("a layer of stage ", stage_.index,
                " made a parameter in a forward that is recomputed; repeat the call");
  }
  StageState::rebind(stage_, *state_now_);
  stage_.needed_gradients.check(sent_, out);
  inputs_->check_unchanged(in, "during its recompute");
}

// Runs the part of the graph behind `roots`. `entering` gets the gradients of the inputs.
void Cell::run_graph(const RootGradients& roots, bool retain_graph, GradientSums& sums,
                     std::vector<GradientSums>& entering) {
  std::vector<GradientSink*> connected;
  const absl::Cleanup disconnect = [&] {
    for (auto* sink : connected) sink->sums = nullptr;
  };
  const auto connect = [&](const NodePtr<GradientSink>& sink, GradientSums& of_sink) {
    if (!sink) return;
    connected.push_back(sink.get());
    sink->sums = &of_sink;
  };
  for (std::size_t p = 0; p < entry_sinks_.size(); ++p) {
    for (const auto& sink : entry_sinks_[p]) connect(sink, entering[p]);
  }
  for (const auto& sink : sinks_.sinks()) connect(sink, sums);
  const auto take = [&](const c10::TensorImpl* leaf, const at::Tensor& gradient) {
    auto end = sinks_.end_of(leaf);
    const auto borrowed = sinks_.borrowed();
    for (std::size_t k = 0; k < borrowed.size() && !entry_sinks_.empty(); ++k) {
      if (borrowed[k].unsafeGetTensorImpl() != leaf) continue;
      end = {entry_sinks_[1 + stage_.skips_in.size() + k].front(), 0};
    }
    if (end.is_valid()) {
      auto& sink = static_cast<GradientSink&>(*end.function);
      sink.sums->add(sink.indices[end.input_nr], gradient);
    }
    return end.is_valid();
  };
  const GradientCatch inner(take);
  // A layer may draw in its backward, for example in an inner checkpoint.
  const RandomScope draws(seed_, -1 - stage_.first_layer, micro_batch_);
  const StageState::Scope state(stage_.state, state_now_ ? &*state_now_ : nullptr, /*is_backward=*/true);
  try {
    torch::autograd::Engine::get_default_engine().execute(roots.edges, roots.gradients, retain_graph,
                                                          /*create_graph=*/false,
                                                          /*accumulate_grad=*/true);
  } catch (...) {
    clear_failed_backward();
    throw;
  }
}

edge_list Cell::all_roots() const {
  edge_list all;
  for (const auto& list : roots_) all.insert(all.end(), list.begin(), list.end());
  return all;
}

RootGradients Cell::root_gradients(const std::vector<Gradients>& gradients) const {
  RootGradients defined;
  for (std::size_t p = 0; p < roots_.size(); ++p) {
    if (roots_[p].size() != gradients[p].size()) {
      throw_error("the last layer of stage ", stage_.index, " returned ", gradients[p].size(),
                  " tensors in its forward and ", roots_[p].size(),
                  " in its recompute; it must not depend on grad mode");
    }
    for (std::size_t i = 0; i < roots_[p].size(); ++i) {
      if (!roots_[p][i].is_valid() || !gradients[p][i].defined()) continue;
      defined.edges.push_back(roots_[p][i]);
      defined.gradients.push_back(gradients[p][i]);
    }
  }
  return defined;
}

std::vector<Gradients> Cell::backward(const std::vector<Gradients>& gradients, bool retain_graph, GradientSums& sums) {
  if (inputs_) inputs_->check_before_backward();
  const auto roots = root_gradients(gradients);
  std::vector<GradientSums> entering;
  for (const auto& parcel : entry_sinks_) entering.emplace_back(parcel.size());
  if (!roots.edges.empty()) run_graph(roots, retain_graph, sums, entering);
  if (state_now_) StageState::restore_after_backward(stage_, *state_now_);
  state_now_.reset();
  std::vector<Gradients> result;
  for (auto& of_parcel : entering) result.push_back(of_parcel.take());
  return result;
}

std::vector<Gradients> Cell::backward_inputs(const std::vector<Gradients>& gradients, GradientSums& sums) {
  std::vector<const GradientSink*> inputs;
  for (const auto& of_parcel : entry_sinks_) {
    for (const auto& sink : of_parcel) {
      if (sink) inputs.push_back(sink.get());
    }
  }
  split_.emplace(all_roots(), inputs);
  auto result = backward(gradients, /*retain_graph=*/false, sums);
  keeps_graph_ = false;
  drop_graph();
  if (!split_->end_inputs()) split_.reset();
  versions_ = {sinks_.parameters().begin(), sinks_.parameters().end()};
  // W will read these gradients, and their receiver may add to them.
  for (auto& of_parcel : result) {
    for (auto& gradient : of_parcel) {
      if (split_ && split_->reads(gradient)) gradient = copy_of(gradient);
    }
  }
  return result;
}

void Cell::backward_weights(GradientSums& sums) {
  if (!split_) return;
  auto weights = split_->take_weights();
  split_.reset();
  std::vector<GradientSums> none;
  // Parameters get the versions that they had at I: a later micro-batch of the stage may have written to them. W reads
  // only the other factor of each product, but PyTorch would refuse to run it.
  std::vector<VersionWatch> present(sinks_.parameters().begin(), sinks_.parameters().end());
  for (auto& version : versions_) version.put_back();
  const absl::Cleanup put_back = [&] {
    for (auto& version : present) version.put_back();
  };
  run_graph(weights, /*retain_graph=*/false, sums, none);
}

void Cell::drop_graph() {
  if (keeps_graph_) return;
  entry_sinks_.clear();
  roots_.clear();
}

}  // namespace gpipe
