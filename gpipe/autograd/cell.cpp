#include "gpipe/autograd/cell.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include <algorithm>

#include "absl/cleanup/cleanup.h"
#include "gpipe/autograd/random_scope.h"
#include "gpipe/autograd/skip_routes.h"
#include "gpipe/base/checks.h"
#include "gpipe/base/clock.h"
#include "gpipe/tensors/torch_internals.h"
#include "gpipe/tensors/transfer.h"

namespace gpipe {
namespace {

using torch::autograd::edge_list;

// Stages run concurrently, and a stand-in may be a copy. So no stage sees the writes of another.
void check_tied(const Parcel& tied) {
  if (!tied.changed()) return;
  throw_error(
      "a layer wrote to a parameter that several stages share, as an embedding with max_norm does; put the layers that "
      "share it into one stage");
}

// Frozen ones too: a module that a forward makes draws random numbers, which a recompute would not.
std::size_t count_parameters(const Stage& stage) {
  std::size_t count = 0;
  stage.locked([&] {
    for (const auto& layer : stage.layers) count += layer->parameters().size();
  });
  return count;
}

bool have_changed(const std::vector<Parcel>& parcels) { return std::ranges::any_of(parcels, &Parcel::changed); }

// Sets `wants_gradient` in the result of a forward without a graph.
void set_wanted(std::vector<Parcel>& out, const Stage::NeededGradients& needed) {
  const bool any = std::ranges::find(needed.sources, true) != needed.sources.end();
  for (std::size_t p = 0; p < out.size(); ++p) {
    const bool is_known = !needed.vary && needed.wanted[p].size() == out[p].tensors.size();
    for (std::size_t i = 0; i < out[p].tensors.size(); ++i) {
      const auto& tensor = out[p].tensors[i];
      const bool differentiable = tensor.defined() && (tensor.is_floating_point() || tensor.is_complex());
      out[p].wants_gradient[i] = differentiable && (is_known ? needed.wanted[p][i] : any);
    }
  }
}

// Compares the result of a recompute with `sent`, the wants_gradient of the forward's parcels.
void check_sent(const std::vector<std::vector<bool>>& sent, const std::vector<Parcel>& out, Stage& stage) {
  for (std::size_t p = 0; p < sent.size(); ++p) {
    const auto& wants = out[p].wants_gradient;
    for (std::size_t i = 0; i < std::min(sent[p].size(), wants.size()); ++i) {
      if (sent[p][i] || !wants[i]) continue;
      stage.needed_gradients.vary = true;
      throw_error(
          "an output of a stage needs a gradient in this recompute, but needed none in the stage's earlier forwards; "
          "repeat the call: from now on every floating-point output of the stage gets a gradient");
    }
  }
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
  auto* const times = is_checkpointing() ? nullptr : stage_.layer_times;
  double began = 0;
  const auto end_layer = [&] {
    range.reset();
    draws.reset();
    if (layer_ < 0) return;
    if (times != nullptr) times[layer_].seconds += now() - began;
    after_layer(stage_.name_of(layer_));
  };
  const auto start = [&](int layer) {
    end_layer();
    layer_ = layer;
    draws.emplace(seed_, stage_.first_layer + layer, micro_batch_);
    range.emplace(at::RecordScope::USER_SCOPE);
    if (range->isActive()) range->before("gpipe layer " + stage_.name_of(layer));
    if (times != nullptr) began = now();
  };
  if (stage_.run_layers) {
    const auto begin = [&](int layer) {
      if (layer < 0 || layer >= std::ssize(stage_.layers)) {
        throw_error("stage ", stage_.index, " has no layer ", layer);
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
  if (loss_.layer && !is_checkpointing()) {
    start(static_cast<int>(stage_.layers.size()));
    const StageState::Scope once(stage_.state, StageState::Pass::kPlain, state_now_);
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

std::vector<Parcel> Cell::run_layers(const std::vector<Parcel>& in, bool graph, StageState::Pass pass) {
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
    auto& saved = pass == StageState::Pass::kCheckpointing ? state_at_forward_ : state_now_;
    const StageState::Scope scope(stage_.state, pass, saved);
    value = call_layers(std::move(value), borrowed, [&](const std::string& layer) {
      check_tied(tied);
      skips.check_unchanged(layer);
      aliases.check(stage_.index, layer);
    });
    stage_.state.check(stage_);
  }
  skips.check_all_used();

  std::vector<Parcel> out(1);
  out.front().add_leaving(value);
  // Without a graph, a view that a layer changed in place would refuse to tell its history.
  const auto root = [&](const at::Tensor& tensor) { return graph ? leave(tensor) : torch::autograd::Edge(); };
  roots_.assign(1, {});
  for (const auto& tensor : value.tensors()) roots_.front().push_back(root(tensor));
  // Their nodes are made last, so that a backward first adds the gradients of later stages, as without stages.
  for (auto& skip : skips.leaving()) {
    out.push_back(std::move(skip.parcel));
    roots_.push_back({root(skip.tensor)});
  }
  for (const auto& parameter : lent) {
    out.emplace_back().add_leaving(parameter);
    roots_.push_back({root(parameter)});
  }
  for (std::size_t p = 0; p + lent.size() < out.size(); ++p) separate_from_state(out[p]);
  aliases.leaves(out, stage_.receivers);
  graph ? sinks_.redirect(all_roots(), begin, borrowed) : roots_.clear();
  return out;
}

// Stores copies where the stage, or a later one with the same memory, changes its inputs in place, and until the first
// backward has shown that none does. Borrowed parameters, which are the last ones, do not change during a call.
void Cell::store_inputs(const std::vector<Parcel>& in) {
  stores_copies_ = stage_.in_place != Stage::InPlace::kNo;
  inputs_ = stores_copies_ ? with_copies(in, 1 + stage_.skips_in.size()) : in;
  for (const auto& parcel : in) originals_.insert(originals_.end(), parcel.versions.begin(), parcel.versions.end());
}

// Refuses changes of inputs in place if no copies are stored, as they are from then on.
void Cell::check_inputs(bool have_changed, const std::string& when) {
  if (!have_changed) return;
  stage_.in_place = Stage::InPlace::kYes;
  if (stores_copies_) return;
  throw_error("the input of stage ", stage_.index, " was changed in place ", when,
              " for the first time, so the stage cannot be recomputed; repeat the call: from now on the stage stores "
              "copies of its input");
}

std::vector<Parcel> Cell::forward(std::vector<Parcel> in, bool grad, bool recompute) {
  if (!grad || !recompute) return run_layers(in, grad, StageState::Pass::kPlain);
  is_checkpointed_ = true;
  store_inputs(in);
  state_at_forward_ = stage_.state.save(stage_, sinks_.own());
  auto sources = sinks_.has_sink();
  for (const auto& parcel : in) {
    sources.insert(sources.end(), parcel.wants_gradient.begin(), parcel.wants_gradient.end());
  }
  auto& needed = stage_.needed_gradients;
  const bool known = sources == needed.sources && !needed.wanted.empty();
  const auto parameters = known ? 0 : count_parameters(stage_);
  auto out = run_layers(in, /*graph=*/!known, StageState::Pass::kCheckpointing);
  if (!known && count_parameters(stage_) != parameters) {
    throw_error("a layer of stage ", stage_.index,
                " made a parameter in a forward, so the forward cannot be recomputed; run the model once before the "
                "pipeline is made");
  }
  if (known) set_wanted(out, needed);
  for (const auto& parcel : out) sent_.push_back(parcel.wants_gradient);
  if (!known) {
    needed.sources = std::move(sources);
    needed.wanted = sent_;
    drop_graph();
  }
  if (loss_.layer) sent_.front().clear();  // the loss takes its place
  check_inputs(have_changed(in), "by one of its layers");
  return out;
}

void Cell::recompute(bool retain_graph) {
  check_inputs(have_changed(inputs_), "between its forward and its recompute");
  auto in = retain_graph ? inputs_ : std::move(inputs_);
  if (retain_graph && stores_copies_) in = with_copies(std::move(in), 1 + stage_.skips_in.size());
  state_now_ = stage_.state.save(stage_, sinks_.own());
  stage_.state.begin_recompute(stage_, *state_at_forward_, *state_now_);
  if (!retain_graph) state_at_forward_.reset();
  const auto out = run_layers(in, /*graph=*/true, StageState::Pass::kRecomputing);
  StageState::put_back_modules(stage_, *state_now_);
  check_sent(sent_, out, stage_);
  check_inputs(have_changed(in), "during its recompute");
}

// Runs the part of the graph behind `roots`. `entering` gets the gradients of the inputs.
void Cell::run_graph(const RootGradients& roots, bool retain_graph, GradientSums& sums,
                     std::vector<GradientSums>& entering) {
  // A layer may draw in its backward, for example in an inner checkpoint.
  const RandomScope draws(seed_, -1 - stage_.first_layer, micro_batch_);
  const StageState::Scope scope(stage_.state, StageState::Pass::kPlain, state_now_);
  sinks_.run_backward(roots, retain_graph, sums, entry_sinks_, entering);
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
  // All later stages have run their forward of the micro-batch, maybe during the recompute.
  const auto originals = std::exchange(originals_, {});
  check_inputs(std::ranges::any_of(originals, &VersionWatch::changed), "during its recompute");
  if (is_checkpointed_ && stage_.in_place == Stage::InPlace::kUnknown) stage_.in_place = Stage::InPlace::kNo;
  const auto roots = root_gradients(gradients);
  std::vector<GradientSums> entering;
  for (const auto& parcel : entry_sinks_) entering.emplace_back(parcel.size());
  if (!roots.edges.empty()) run_graph(roots, retain_graph, sums, entering);
  if (state_now_) StageState::end_backward(stage_, *state_now_);
  state_now_.reset();
  std::vector<Gradients> result;
  for (auto& of_parcel : entering) result.push_back(of_parcel.take());
  return result;
}

std::vector<Gradients> Cell::backward_inputs(const std::vector<Gradients>& gradients, GradientSums& sums) {
  split_.emplace(all_roots(), entry_sinks_);
  auto result = backward(gradients, /*retain_graph=*/false, sums);
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
  entry_sinks_.clear();
  roots_.clear();
}

}  // namespace gpipe
