#include "gpipe/mini_batch.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <sstream>
#include <utility>

#include "gpipe/autograd/seed_draw.h"
#include "gpipe/autograd/skip_routes.h"
#include "gpipe/replica_state.h"
#include "gpipe/runtime/profiler_range.h"
#include "gpipe/worker_scope.h"

namespace gpipe {

MiniBatch::MiniBatch(std::shared_ptr<Pipeline> pipeline, std::vector<Parcel> inputs, Options options,
                     LossOfMiniBatch loss)
    : pipeline_(std::move(pipeline)),
      micro_batches_(static_cast<int>(inputs.size())),
      use_(options.use),
      program_(pipeline_->program(micro_batches_, options.checkpoint, use_)),
      recording_(pipeline_->next_recording()),
      counter_(recording_.timeline ? std::make_shared<ByteCounter>(pipeline_->workers()) : nullptr),
      statistics_(options.deferred_batch_norm ? pipeline_->count() : 0),
      cells_(static_cast<std::size_t>(pipeline_->count()) * micro_batches_),
      inputs_(*pipeline_, std::move(inputs), pipeline_->stages().front().device),
      transport_(*pipeline_, micro_batches_),
      options_(std::move(options)),
      loss_(std::move(loss)),
      targets_(*pipeline_, loss_.targets, pipeline_->stages().back().device),
      outputs_(micro_batches_),
      losses_(micro_batches_) {
  if (pipeline_->peers() != nullptr) crossing_.emplace(*pipeline_, transport_, counter_);
}

// Runs a forward or a step. On an error, restores the buffers and the default generator.
void MiniBatch::begin(absl::FunctionRef<void()> run) {
  MutexLock turn(pipeline_->turn());
  forward_state_.emplace();
  const AllocationListener::Scope counting(counter_);
  counted_ = counting.installed();
  if (!counted_) counter_.reset();
  const bool grad = use_ != Pipeline::Use::kForward;
  std::vector<StageState::Moment> before;
  std::optional<SeedDraw> draw;
  prepare_call([&] {
    for (auto& stage : pipeline_->stages()) {
      sinks_.emplace_back(stage, grad, pipeline_->stream_of_worker(pipeline_->worker_of(stage.index)));
    }
    for (auto& stage : pipeline_->stages()) before.push_back(stage.state.hold(stage, sinks_[stage.index].own()));
    draw.emplace();
  });
  seed_ = draw->seed();
  try {
    agree();
  } catch (...) {
    draw->undo();
    throw;
  }
  try {
    if (has_replicas() && std::exchange(pipeline_->buffers_differ(), options_.training)) {
      take_buffers_of_first_replica(*pipeline_);
    }
    run();
    if (has_replicas()) merge_over_replicas(statistics_, *pipeline_);
    for (std::size_t s = 0; s < statistics_.size(); ++s) statistics_[s].commit(pipeline_->stages()[s]);
  } catch (...) {
    report_failure();
    cells_.clear();  // first, because a cell between its R and its B restores buffers too: those of the R's begin
    for (auto& stage : pipeline_->stages()) stage.state.restore_after_error(stage, before[stage.index]);
    draw->undo();
    throw;
  }
}

Gathered MiniBatch::forward() {
  Gathered result;
  begin([&] {
    perform(Part::kForward);
    result = share_outputs();
  });
  return result;
}

MiniBatch::StepOutcome MiniBatch::step() {
  StepOutcome outcome;
  begin([&] {
    // The backward runs without autocast.
    if (!c10::impl::tls_local_dispatch_key_set().excluded_.has_all(c10::autocast_dispatch_keyset)) {
      const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
      backward_state_.emplace();
    }
    auto& compared = pipeline_->compared_losses();
    const auto kind = loss_.function.kind.value_or(loss_.function.target_type().hash_code());
    if (loss_.check && micro_batches_ > 1 && !compared.contains(kind)) {
      comparison_.emplace(loss_.function, micro_batches_);
    }
    const GradientsAside aside(sinks_);
    begin_backward();
    perform(Part::kAll);
    if (!reduction_) aside.move_to(sums_);
    if (comparison_) compared.insert(kind);
    comparison_.reset();
    outcome.loss = share_loss();
    if (loss_.keep_outputs) outcome.output = share_outputs();
    stop_counting({outcome.loss});
    outcome.gradients = take_gradients();
  });
  return outcome;
}

MiniBatch::BackwardResult MiniBatch::backward(std::vector<Gradients> gradients, bool retain_graph) {
  MutexLock turn(pipeline_->turn());
  try {
    prepare_call([&] { check_parameters_unchanged(); });
  } catch (...) {
    cells_.clear();
    throw;
  }
  if (auto* peers = pipeline_->peers()) {
    peers->agree(
        {.what = "the backward of call " + std::to_string(call_number_) + (retain_graph ? ", retain_graph" : "")});
  }
  const AllocationListener::Scope counting(counter_);
  counted_ = counting.installed();
  retain_graph_ = retain_graph;
  try {
    output_gradients_ = std::move(gradients);
    outputs_ready_.clear();
    if (has_replicas()) {
      for (auto& of_micro_batch : output_gradients_) {
        for (auto& gradient : of_micro_batch) {
          if (gradient.defined()) gradient = share_ == 0 ? at::Tensor() : gradient * share_;
        }
      }
    }
    for (const auto& gradient : output_gradients_.front()) {
      outputs_ready_.push_back(gradient.defined() ? record_event(gradient.device()) : nullptr);
    }
    begin_backward();
    perform(Part::kBackward);
    return take_gradients();
  } catch (...) {
    report_failure();
    cells_.clear();
    throw;
  }
}

void MiniBatch::begin_backward() {
  input_gradients_.assign(micro_batches_, {});
  sums_.clear();
  for (const auto& sinks : sinks_) sums_.emplace_back(sinks.parameters().size());
  if (has_replicas()) begin_reduction();
}

Gathered MiniBatch::gather_outputs() {
  const auto parts = std::exchange(outputs_, {});
  for (const auto& part : parts) use_on_this_thread(part.tensors);
  auto result = gather(parts);
  stop_counting(result.value.tensors());
  return result;
}

MiniBatch::BackwardResult MiniBatch::take_gradients() {
  BackwardResult result;
  result.inputs = std::exchange(input_gradients_, {});
  if (reduction_) {
    check_gradients_untouched();
    present_gradients_.clear();
    result.parameters = std::exchange(reduction_, nullptr)->take();
  } else {
    for (auto& sums : sums_) result.parameters.push_back(sums.take_unshared());
  }
  for (const auto& list : {&result.inputs, &result.parameters}) {
    for (const auto& tensors : *list) {
      use_on_this_thread(tensors);
      stop_counting(tensors);
    }
  }
  return result;
}

void MiniBatch::check_parameters_unchanged() const {
  for (int s = 0; s < pipeline_->count(); ++s) {
    bool recomputes = false;
    for (int i = 0; i < micro_batches_; ++i) recomputes = recomputes || program_->recomputes(s, i);
    if (recomputes) sinks_[s].check_unchanged();
  }
}

void MiniBatch::use_on_this_thread(const std::vector<at::Tensor>& tensors) {
  for (const auto& tensor : tensors) use_on_current_stream(tensor);
}

void MiniBatch::stop_counting(const std::vector<at::Tensor>& tensors) {
  if (!counter_) return;
  for (const auto& tensor : tensors) counter_->release(tensor);
}

void MiniBatch::perform(Part part) {
  pipeline_->set_error(std::nullopt);  // again: another thread's call may have failed while this call waited
  state_.emplace();
  begin_.clear();
  for (int w = 0; w < pipeline_->workers(); ++w) begin_.push_back(record_event(pipeline_->device_of_worker(w)));
  end_.assign(begin_.size(), {});
  clocks_.assign(begin_.size(), std::nullopt);
  auto* timeline = recording_.timeline.get();
  const auto spans_before = timeline ? timeline->spans.size() : 0;
  const OwnWrites writes(pipeline_->stages(), sinks_);
  std::optional<Peers::Watched> watched;
  if (auto* peers = pipeline_->peers()) {
    LayoutKey key{static_cast<int>(part), static_cast<int>(use_)};
    key.insert(key.end(), options_.sizes.begin(), options_.sizes.end());
    exchange_.emplace(peers->wires(), *program_, part, peers->of_workers(), peers->rank(), key,
                      peers->options().timeout(), *crossing_);
    watched.emplace(*peers, *exchange_);
  }
  const auto failure = pipeline_->executor().run(*program_, part, *this, timeline, recording_.step);
  state_.reset();
  if (failure) reduction_.reset();
  const auto end = [&] {
    wait_for_workers();
    if (timeline) place_spans(*timeline, spans_before);
  };
  if (!failure) return end();
  if (failure->action) pipeline_->set_error(describe(*failure->action, failure->error));
  try {
    end();
  } catch (...) {  // the device is in an error state; the first error says more
  }
  if (const auto* peers = pipeline_->peers()) peers->rethrow(failure->error);
  std::rethrow_exception(failure->error);
}

ErrorInfo MiniBatch::describe(const Action& action, const std::exception_ptr& error) {
  const auto& cell = this->cell(action.stage, action.micro_batch);
  return gpipe::describe(error, action, pipeline_->stages()[action.stage], cell ? cell->layer() : -1);
}

// The caller may use any result on any device, so each of its streams waits for all workers.
void MiniBatch::wait_for_workers() {
  for (const auto& devices : {pipeline_->devices(), elsewhere_}) {
    for (const auto device : devices) {
      for (const auto& end : end_) wait(end, device);
    }
  }
}

// Sets the times of the spans from `first` on that are those of accelerators.
void MiniBatch::place_spans(Timeline& timeline, std::size_t first) {
  for (std::size_t i = first; i < timeline.spans.size(); ++i) {
    auto& span = timeline.spans[i];
    if (auto& clock = clocks_[span.worker]) clock->place(span);
  }
  clocks_.clear();
}

void MiniBatch::work(int worker, absl::FunctionRef<void()> run_actions) {
  const auto device = pipeline_->device_of_worker(worker);
  const WorkerScope scope(*pipeline_, worker, *state_, counter_.get());
  wait(begin_[worker], device);
  auto& clock = clocks_[worker];
  if (recording_.timeline && !device.is_cpu()) clock.emplace(device);
  run_actions();
  std::exception_ptr error;
  try {
    if (exchange_) exchange_->settle(worker);
  } catch (...) {
    error = std::current_exception();
  }
  if (clock) clock->stop();
  end_[worker] = {record_event(device)};
  if (worker == pipeline_->worker_of(pipeline_->count() - 1)) {
    for (const auto other : elsewhere_) end_[worker].push_back(record_event(other));
  }
  if (error) std::rethrow_exception(error);
}

void MiniBatch::run(const Action& action) {
  const ProfilerRange range([&] { return "gpipe " + to_string(action); });
  try {
    switch (action.kind) {
      case Kind::F:
        run_forward(action.stage, action.micro_batch);
        break;
      case Kind::R:
        run_recompute(action.stage, action.micro_batch);
        break;
      case Kind::B:
        run_and_reduce(action, [&] { run_backward(action.stage, action.micro_batch, /*split=*/false); });
        break;
      case Kind::I:
        run_backward(action.stage, action.micro_batch, /*split=*/true);
        break;
      case Kind::W:
        run_and_reduce(action, [&] { run_backward_weights(action.stage, action.micro_batch); });
        break;
    }
    if (auto& clock = clock_of(action.stage)) clock->end();
  } catch (c10::Error& error) {
    std::ostringstream where;
    where << "in " << to_string(action) << " of the pipeline: stage " << action.stage << ", micro-batch "
          << action.micro_batch;
    error.add_context(where.str());
    report_error(action);
    throw;
  } catch (...) {
    report_error(action);
    throw;
  }
}

void MiniBatch::report_error(const Action& action) {
  const auto& on_error = pipeline_->binding().on_error;
  if (!on_error) return;
  const auto error = std::current_exception();
  on_error(describe(action, error), error);
}

Bytes MiniBatch::bytes(int worker) { return counted_ ? counter_->count(worker) : Bytes(); }

Tail MiniBatch::tail(int stage, int micro_batch) {
  if (!loss_.function || stage + 1 != pipeline_->count()) return {};
  return [this, stage, micro_batch](Value output) -> Value {
    if (loss_.keep_outputs) {
      auto& kept = outputs_[micro_batch];
      kept.form = output.form();
      for (const auto& tensor : output.tensors()) add_leaving(tensor, kept);
      note_results(kept.tensors);
    }
    std::vector<std::shared_ptr<torch::autograd::Node>> ends;
    for (const auto& tensor : output.tensors()) ends.push_back(tensor.defined() ? tensor.grad_fn() : nullptr);
    auto target = targets_.receive(micro_batch);
    auto loss = call_loss(loss_.function, output, target);
    losses_[micro_batch] = loss.variable_data();
    note_results({losses_[micro_batch]});
    if (comparison_) comparison_->add(micro_batch, output, std::move(target), losses_[micro_batch]);
    if (!has_replicas()) {
      sinks_[stage].adopt_leaves(loss, ends);
      sums_[stage].grow(sinks_[stage].parameters().size());
    }
    return loss;
  };
}

// A layer or a loss may move its result to another device than the stage's.
void MiniBatch::note_results(const std::vector<at::Tensor>& results) {
  for (const auto& result : results) {
    if (!result.defined() || result.device() == pipeline_->stages().back().device) continue;
    const auto found = std::find(elsewhere_.begin(), elsewhere_.end(), result.device());
    if (found == elsewhere_.end()) elsewhere_.push_back(result.device());
  }
}

// The activation, the skips and the borrowed parameters, as Cell::forward() takes them.
std::vector<Parcel> MiniBatch::receive_inputs(int stage, int micro_batch) {
  std::vector<Parcel> in;
  if (stage == 0) in.push_back(inputs_.receive(micro_batch));
  for (const int edge : program_->in_edges(stage)) in.push_back(transport_.receive(edge, micro_batch));
  const auto borrowed = sinks_[stage].borrowed();
  const auto lenders = program_->in_edges(stage).end() - std::ssize(borrowed);
  for (std::size_t k = 0; k < borrowed.size(); ++k) {
    if (pipeline_->is_here(pipeline_->edges()[lenders[k]].from)) continue;
    borrowed_values_.receive(in[in.size() - borrowed.size() + k], borrowed[k]);
  }
  return in;
}

void MiniBatch::run_forward(int stage, int micro_batch) {
  auto in = receive_inputs(stage, micro_batch);
  if (auto& clock = clock_of(stage)) clock->start();
  auto& cell = this->cell(stage, micro_batch);
  cell = std::make_unique<Cell>(pipeline_->stages()[stage], sinks_[stage], seed_, first_micro_batch_ + micro_batch,
                                tail(stage, micro_batch));
  const BatchStatistics::Scope statistics(statistics_.empty() ? nullptr : &statistics_[stage]);
  const bool grad = use_ != Pipeline::Use::kForward;
  const auto parameters = sinks_[stage].all().size();
  auto out = cell->forward(std::move(in), {.grad = grad, .recompute = program_->recomputes(stage, micro_batch)});
  if (pipeline_->peers() != nullptr && sinks_[stage].all().size() != parameters) {
    throw std::runtime_error(
        "[gpipe] a layer made a parameter in a forward; over ranks, run the model once before the pipeline is made");
  }
  if (!grad) cell.reset();
  if (stage + 1 == pipeline_->count() && !loss_.function) {
    note_results(out.front().tensors);
    outputs_[micro_batch] = std::move(out.front());
  }
  const auto& edges = program_->out_edges(stage);
  for (std::size_t k = 0; k < edges.size(); ++k) transport_.send(edges[k], micro_batch, std::move(out[k]));
}

void MiniBatch::run_recompute(int stage, int micro_batch) {
  if (auto& clock = clock_of(stage)) clock->start();
  const CallerStateScope state(*forward_state_);
  const AllocationListener::Scope counting(counted_ ? counter_ : nullptr);
  cell(stage, micro_batch)->recompute(retain_graph_);
}

Gradients MiniBatch::output_gradients(int micro_batch) {
  if (loss_.function) {
    const double weight = loss_.weights[micro_batch];
    // An undefined gradient stops the backward: 0 * NaN would be NaN.
    if (weight == 0) return {at::Tensor()};
    return {at::scalar_tensor(weight * loss_.scale, losses_[micro_batch].options())};
  }
  auto gradients = std::move(output_gradients_[micro_batch]);
  for (std::size_t k = 0; k < gradients.size(); ++k) {
    if (gradients[k].defined()) wait(outputs_ready_[k], gradients[k].device());
  }
  return gradients;
}

// The caller's state, without autocast and gradients.
class MiniBatch::BackwardScope {
 public:
  explicit BackwardScope(const MiniBatch& mini_batch) {
    if (mini_batch.backward_state_) state_.emplace(*mini_batch.backward_state_);
    no_grad_.emplace();
  }

 private:
  std::optional<CallerStateScope> state_;
  std::optional<at::NoGradGuard> no_grad_;
};

// B, or I if it is split.
void MiniBatch::run_backward(int stage, int micro_batch, bool split) {
  const BackwardScope scope(*this);
  std::vector<Gradients> gradients;
  if (stage + 1 == pipeline_->count()) gradients.push_back(output_gradients(micro_batch));
  for (const int edge : program_->out_edges(stage)) {
    gradients.push_back(transport_.receive_gradients(edge, micro_batch));
  }
  if (auto& clock = clock_of(stage)) clock->start();
  auto& cell = this->cell(stage, micro_batch);
  sums_[stage].grow(sinks_[stage].parameters().size());
  auto result =
      split ? cell->backward_inputs(gradients, sums_[stage]) : cell->backward(gradients, retain_graph_, sums_[stage]);
  if (split) {
    // W will end the cell.
  } else if (!retain_graph_) {
    cell.reset();
  } else if (program_->recomputes(stage, micro_batch)) {
    cell->drop_graph();
  }
  if (stage == 0) input_gradients_[micro_batch] = std::move(result.front());
  const auto& edges = program_->in_edges(stage);
  for (std::size_t k = 0; k < edges.size(); ++k) {
    transport_.send_gradients(edges[k], micro_batch, std::move(result[k]));
  }
}

void MiniBatch::run_backward_weights(int stage, int micro_batch) {
  const BackwardScope scope(*this);
  if (auto& clock = clock_of(stage)) clock->start();
  auto& cell = this->cell(stage, micro_batch);
  cell->backward_weights(sums_[stage]);
  cell.reset();
}

}  // namespace gpipe
