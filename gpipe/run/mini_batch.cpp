#include "gpipe/run/mini_batch.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <numeric>
#include <sstream>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "gpipe/run/replica_state.h"
#include "gpipe/run/worker_scope.h"
#include "gpipe/tensors/profiler_range.h"
#include "gpipe/tensors/sample_hash.h"

namespace gpipe {

MiniBatch::MiniBatch(std::shared_ptr<Pipeline> pipeline, std::vector<Parcel> inputs, Options options,
                     std::optional<LossOfMiniBatch> loss)
    : pipeline_(std::move(pipeline)),
      micro_batches_(static_cast<int>(inputs.size())),
      options_(std::move(options)),
      grad_(options_.use != Pipeline::Use::kForward),
      program_(pipeline_->program(micro_batches_, options_.checkpoint, options_.use)),
      recording_(pipeline_->next_recording()),
      counter_(recording_.timeline ? std::make_shared<ByteCounter>(pipeline_->workers()) : nullptr),
      statistics_(options_.deferred_batch_norm ? pipeline_->count() : 0),
      cells_(static_cast<std::size_t>(pipeline_->count()) * micro_batches_),
      inputs_(*pipeline_, std::move(inputs), pipeline_->stages().front().device),
      outputs_(micro_batches_, pipeline_->stages().back().device) {
  if (loss) loss_.emplace(*pipeline_, *std::move(loss), outputs_);
}

// Counts the bytes of a forward, step or backward, if a timeline records them and nothing else listens to allocations.
class MiniBatch::Counting {
 public:
  explicit Counting(MiniBatch& mini_batch) : scope_(mini_batch.counter_) { mini_batch.counted_ = scope_.installed(); }

 private:
  const AllocationListener::Scope scope_;
};

// Begins a forward or a step.
void MiniBatch::begin(Call& call) {
  if (!counted_) counter_.reset();
  call.take_turn();
  for (auto& stage : pipeline_->stages()) {
    sinks_.emplace_back(stage, grad_, pipeline_->stream_of_worker(pipeline_->worker_of(stage.index)));
  }
  call.save(sinks_);
  agree(call);
  if (pipeline_->team().replicas() > 1 && std::exchange(pipeline_->buffers_differ(), options_.training)) {
    take_buffers_of_first_replica(*pipeline_);
  }
}

// Agrees with the other ranks on the random numbers, and on the weight of each replica's part.
void MiniBatch::agree(Call& call) {
  auto& team = pipeline_->team();
  const auto samples = std::accumulate(options_.sizes.begin(), options_.sizes.end(), std::int64_t{0});
  auto proposal = options_.proposal;
  if (team.replicas() > 1) proposal.same_for_counterparts = trained_parameters();
  proposal.number = team.rank() == 0 ? call.seed() : 0;
  proposal.weight = loss_ ? loss_->weight() : static_cast<double>(samples);
  proposal.micro_batches = samples == 0 ? 0 : micro_batches_;
  const auto [seed, weights, micro_batches] = call.agree(std::move(proposal));
  seed_ = seed;
  call_number_ = team.calls();
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  share_ = total == 0 ? 0 : weights[team.replica()] / total;
  first_micro_batch_ = std::accumulate(micro_batches.begin(), micro_batches.begin() + team.replica(), 0);
  if (loss_) loss_->normalize(total);
  call.start();
}

// Which of this rank's parameters get gradients, and what their values are, in a few words.
std::string MiniBatch::trained_parameters() const {
  std::size_t count = 0;
  std::uint64_t hash = 14695981039346656037u;  // FNV-1a
  std::vector<at::Tensor> own;
  for (const auto& sinks : sinks_) {
    own.insert(own.end(), sinks.own().begin(), sinks.own().end());
    for (std::size_t p = 0; p < sinks.all().size(); ++p) {
      count += sinks.has_sink()[p];
      const auto size = static_cast<std::uint64_t>(sinks.all()[p].numel());
      hash = (hash ^ (sinks.has_sink()[p] ? size + 1 : 0)) * 1099511628211u;
    }
  }
  return "trains " + std::to_string(count) + " parameters, whose sizes have the hash " + std::to_string(hash) +
         ", of values with the hash " + std::to_string(sample_hash(own));
}

// Ends a forward or a step that has succeeded.
void MiniBatch::finish() {
  if (pipeline_->team().replicas() > 1) merge_over_replicas(statistics_, *pipeline_);
  for (std::size_t s = 0; s < statistics_.size(); ++s) statistics_[s].commit(pipeline_->stages()[s]);
}

Gathered MiniBatch::forward(Call& call) {
  const Counting counting(*this);
  begin(call);
  run_part(Part::kForward);
  auto output = take_results().second;
  finish();
  return output;
}

MiniBatch::StepOutcome MiniBatch::step(Call& call) try {
  const Counting counting(*this);
  begin(call);
  // The backward runs without autocast.
  if (!c10::impl::tls_local_dispatch_key_set().excluded_.has_all(c10::autocast_dispatch_keyset)) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    backward_state_.emplace();
  }
  loss_->begin_comparison();
  StepOutcome outcome;
  {
    const GradientsAside aside(sinks_);
    begin_backward();
    run_part(Part::kAll);
    if (!reduction_) aside.move_to(sums_);
    loss_->end_comparison();
    std::tie(outcome.loss, outcome.output) = take_results();
    outcome.gradients = take_gradients();
  }
  finish();
  return outcome;
} catch (...) {
  call.report();  // before this is destroyed, which waits for the sums of gradients
  throw;
}

MiniBatch::BackwardResult MiniBatch::backward(Call& call, std::vector<Gradients> gradients, bool retain_graph) try {
  call.take_turn();
  check_parameters_unchanged();
  call.agree({.what = "the backward of call " + std::to_string(call_number_) + (retain_graph ? ", retain_graph" : "")});
  call.start();
  const Counting counting(*this);
  retain_graph_ = retain_graph;
  output_gradients_ = std::move(gradients);
  outputs_ready_.clear();
  if (pipeline_->team().replicas() > 1) {
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
  run_part(Part::kBackward);
  return take_gradients();
} catch (...) {
  call.report();
  cells_.clear();
  reduction_.reset();
  throw;
}

void MiniBatch::begin_backward() {
  input_gradients_.assign(micro_batches_, {});
  sums_.clear();
  for (const auto& sinks : sinks_) sums_.emplace_back(sinks.parameters().size());
  if (pipeline_->team().replicas() == 1) return;
  std::vector<std::vector<at::Tensor>> parameters;
  for (const auto& sinks : sinks_) parameters.push_back(sinks.parameters());
  reduction_ = pipeline_->team().begin_sum(std::move(parameters));
  last_backwards_.resize(pipeline_->count());
  for (const auto& actions : program_->schedule()) {
    for (const auto& action : actions) {
      if (action.kind == Kind::B || action.kind == Kind::W) last_backwards_[action.stage] = action;
    }
  }
}

// Returns the loss of a step(), and the outputs if they are wanted. All ranks get those of the last stage's.
std::pair<at::Tensor, Gathered> MiniBatch::take_results() {
  auto& team = pipeline_->team();
  at::Tensor loss;
  Gathered outputs;
  Parcel parcel;
  if (has_last_stage()) {
    if (loss_) loss = sum_over_replicas(loss_->join(), *pipeline_);
    if (!loss_ || loss_->keeps_outputs()) outputs = outputs_.gather();
    parcel.form = outputs.value.form();
    parcel.add(loss, /*gradient_wanted=*/false);
    for (std::size_t k = 0; k < outputs.value.tensors().size(); ++k) {
      parcel.add(outputs.value.tensors()[k], outputs.wants_gradient[k]);
    }
  }
  const auto group = !loss_ || loss_->keeps_outputs() ? Team::Group::kReplicaOutputs : Team::Group::kReplica;
  parcel = team.broadcast(group, pipeline_->rank_of(pipeline_->count() - 1), std::move(parcel));
  hand_over(parcel.tensors);
  if (!has_last_stage()) {
    loss = parcel.tensors.front();
    outputs.wants_gradient.assign(parcel.wants_gradient.begin() + 1, parcel.wants_gradient.end());
    outputs.value = Value(parcel.form, {parcel.tensors.begin() + 1, parcel.tensors.end()});
  }
  return {std::move(loss), std::move(outputs)};
}

MiniBatch::BackwardResult MiniBatch::take_gradients() {
  BackwardResult result;
  result.inputs = std::exchange(input_gradients_, {});
  if (reduction_) {
    result.parameters = std::exchange(reduction_, nullptr)->take();
  } else {
    for (auto& sums : sums_) result.parameters.push_back(sums.take_unshared());
  }
  for (const auto& list : {&result.inputs, &result.parameters}) {
    for (const auto& tensors : *list) hand_over(tensors);
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

// Gives tensors to the caller, who uses them on this thread.
void MiniBatch::hand_over(const std::vector<at::Tensor>& tensors) {
  for (const auto& tensor : tensors) {
    use_on_current_stream(tensor);
    if (counter_) counter_->release(tensor);
  }
}

void MiniBatch::run_part(Part part) {
  pipeline_->set_error(std::nullopt);  // again: another thread's call may have failed while this call waited
  state_.emplace();
  begin_.clear();
  for (int w = 0; w < pipeline_->workers(); ++w) begin_.push_back(record_event(pipeline_->device_of_worker(w)));
  end_.assign(begin_.size(), {});
  clocks_.assign(begin_.size(), std::nullopt);
  auto* timeline = recording_.timeline.get();
  const auto spans_before = timeline ? timeline->spans.size() : 0;
  const OwnWrites writes(pipeline_->stages(), sinks_);
  LayoutKey key{static_cast<int>(part), static_cast<int>(options_.use)};
  key.insert(key.end(), options_.sizes.begin(), options_.sizes.end());
  edges_.emplace(*pipeline_, *program_, part, key, counter_);
  const absl::Cleanup end_of_edges = [&] { edges_.reset(); };
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
  pipeline_->team().rethrow(failure->error);
}

ErrorInfo MiniBatch::describe(const Action& action, const std::exception_ptr& error) {
  const auto& cell = this->cell(action);
  return gpipe::describe(error, action, pipeline_->stages()[action.stage], cell ? cell->layer() : -1);
}

// The caller may use any result on any device, so each of its streams waits for all workers.
void MiniBatch::wait_for_workers() {
  for (const auto& devices : {pipeline_->devices(), outputs_.other_devices()}) {
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

void MiniBatch::on_worker(int worker, absl::FunctionRef<void()> run_actions) {
  const auto device = pipeline_->device_of_worker(worker);
  const WorkerScope scope(*pipeline_, worker, *state_, counter_.get());
  wait(begin_[worker], device);
  auto& clock = clocks_[worker];
  if (recording_.timeline && !device.is_cpu()) clock.emplace(device);
  run_actions();
  std::exception_ptr error;
  try {
    edges_->settle(worker);
  } catch (...) {
    error = std::current_exception();
  }
  if (clock) clock->stop();
  end_[worker] = {record_event(device)};
  if (worker == pipeline_->worker_of(pipeline_->count() - 1)) {
    for (const auto other : outputs_.other_devices()) end_[worker].push_back(record_event(other));
  }
  if (error) std::rethrow_exception(error);
}

void MiniBatch::run(const Action& action, Measure measure) {
  const ProfilerRange range([&] { return "gpipe " + to_string(action); });
  try {
    auto in = edges_->receive(action);
    if (action.kind == Kind::F && action.stage == 0) in.insert(in.begin(), inputs_.receive(action.micro_batch));
    std::vector<Parcel> out;
    measure([&] { out = run_action(action, std::move(in)); });
    edges_->send(action, std::move(out));
  } catch (const ConnectionError&) {
    throw;
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

std::vector<Parcel> MiniBatch::run_action(const Action& action, std::vector<Parcel> in) {
  auto& clock = clocks_[pipeline_->worker_of(action.stage)];
  if (clock) clock->start();
  std::vector<Parcel> out;
  switch (action.kind) {
    case Kind::F:
      out = run_forward(action, std::move(in));
      break;
    case Kind::R:
      run_recompute(action);
      break;
    case Kind::B:
      run_and_reduce(action, [&] { out = run_backward(action, std::move(in)); });
      break;
    case Kind::I:
      out = run_backward(action, std::move(in));
      break;
    case Kind::W:
      run_and_reduce(action, [&] { run_backward_weights(action); });
      break;
  }
  if (clock) clock->end();
  return out;
}

void MiniBatch::cancel(const Failure& failure) noexcept {
  auto& team = pipeline_->team();
  if (team.size() == 1) return;
  const auto where = [&] {
    if (!failure.action) return std::string();
    const auto info = describe(*failure.action, failure.error);
    return to_string(info.action) + " (stage " + std::to_string(info.action.stage) + ", micro-batch " +
           std::to_string(info.action.micro_batch) +
           (info.layer_name.empty() ? "" : ", layer '" + info.layer_name + "'") + ")";
  };
  try {
    std::rethrow_exception(failure.error);
  } catch (const ConnectionError& error) {
    const auto activity =
        failure.action ? edges_->activity(pipeline_->worker_of(failure.action->stage)) : edges_->activity();
    team.fail(error, activity.awaits, failure.action ? where() : "the end of transfers between devices");
  } catch (...) {
    const auto place = where();
    team.fail("rank " + std::to_string(team.rank()) + " failed" + (place.empty() ? "" : " in " + place) + ": " +
              message_of(failure.error));
  }
}

void MiniBatch::report_error(const Action& action) {
  const auto& on_error = pipeline_->binding().on_error;
  if (!on_error) return;
  const auto error = std::current_exception();
  on_error(describe(action, error), error);
}

Bytes MiniBatch::bytes(int worker) { return counted_ ? counter_->count(worker) : Bytes(); }

// `in` has the activation, the skips and the borrowed parameters.
std::vector<Parcel> MiniBatch::run_forward(const Action& action, std::vector<Parcel> in) {
  const int s = action.stage;
  const bool is_last = s + 1 == pipeline_->count();
  auto& sinks = sinks_[s];
  const auto borrowed = sinks.borrowed();
  const auto lenders = program_->in_edges(s).end() - std::ssize(borrowed);
  for (std::size_t k = 0; k < borrowed.size(); ++k) {
    if (pipeline_->is_here(pipeline_->edges()[lenders[k]].from)) continue;
    borrowed_values_.receive(in[in.size() - borrowed.size() + k], borrowed[k]);
  }
  LossOfCell loss;
  if (is_last && loss_) {
    loss = {loss_->layer(action.micro_batch), /*adopts_leaves=*/pipeline_->team().replicas() == 1};
  }
  auto& cell = this->cell(action);
  cell = std::make_unique<Cell>(pipeline_->stages()[s], sinks, seed_, first_micro_batch_ + action.micro_batch,
                                std::move(loss));
  const BatchStatistics::Scope statistics(statistics_.empty() ? nullptr : &statistics_[s]);
  const auto parameters = sinks.all().size();
  auto out = cell->forward(std::move(in), {.grad = grad_, .recompute = program_->recomputes(s, action.micro_batch)});
  if (pipeline_->team().size() > 1 && sinks.all().size() != parameters) {
    throw std::runtime_error(
        "[gpipe] a layer made a parameter in a forward; over ranks, run the model once before the pipeline is made");
  }
  if (!grad_) cell.reset();
  if (is_last && !loss_) outputs_.add(action.micro_batch, std::move(out.front()));
  if (is_last) out.erase(out.begin());
  return out;
}

void MiniBatch::run_recompute(const Action& action) {
  const CallerStateScope state(forward_state_);
  const AllocationListener::Scope counting(counted_ ? counter_ : nullptr);
  cell(action)->recompute(retain_graph_);
}

Gradients MiniBatch::output_gradients(int micro_batch) {
  if (loss_) return {loss_->gradient(micro_batch)};
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

// B or I.
std::vector<Parcel> MiniBatch::run_backward(const Action& action, std::vector<Parcel> in) {
  const BackwardScope scope(*this);
  const auto& [kind, s, micro_batch] = action;
  std::vector<Gradients> gradients;
  if (s + 1 == pipeline_->count()) gradients.push_back(output_gradients(micro_batch));
  for (auto& parcel : in) gradients.push_back(std::move(parcel.tensors));
  auto& cell = this->cell(action);
  auto& sums = sums_[s];
  sums.grow(sinks_[s].parameters().size());
  const bool split = kind == Kind::I;  // then W will end the cell
  auto result = split ? cell->backward_inputs(gradients, sums) : cell->backward(gradients, retain_graph_, sums);
  if (!split && !retain_graph_) {
    cell.reset();
  } else if (!split && program_->recomputes(s, micro_batch)) {
    cell->drop_graph();
  }
  std::vector<Parcel> out;
  for (auto& of_parcel : result) out.push_back({.tensors = std::move(of_parcel)});
  if (s == 0) {
    input_gradients_[micro_batch] = std::move(out.front().tensors);
    out.erase(out.begin());
  }
  return out;
}

void MiniBatch::run_backward_weights(const Action& action) {
  const BackwardScope scope(*this);
  auto& cell = this->cell(action);
  cell->backward_weights(sums_[action.stage]);
  cell.reset();
}

// Runs a B or a W. Hands the gradients of a stage's last one to the sum over replicas: the gradients of a B as they come.
void MiniBatch::run_and_reduce(const Action& action, absl::FunctionRef<void()> run) {
  const int stage = action.stage;
  if (!reduction_ || action != last_backwards_[stage]) return run();
  auto& sums = sums_[stage];
  {
    const absl::Cleanup unwatch = [&] { sums.watch({}); };
    if (action.kind == Kind::B) {
      sums.watch(
          [&, stage](std::size_t parameter) { reduction_->add(stage, parameter, sums.take_unshared(parameter)); });
    }
    run();
  }
  reduction_->add_rest(stage, sums.take_unshared());
}

}  // namespace gpipe
