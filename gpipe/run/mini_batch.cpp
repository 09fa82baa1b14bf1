#include "gpipe/run/mini_batch.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <numeric>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "gpipe/base/checks.h"
#include "gpipe/tensors/profiler_range.h"

namespace gpipe {

MiniBatch::MiniBatch(std::shared_ptr<Pipeline> pipeline, std::vector<Parcel> inputs, Options options, StepLoss* loss)
    : pipeline_(std::move(pipeline)),
      micro_batches_(static_cast<int>(inputs.size())),
      options_(std::move(options)),
      grad_(options_.use != Pipeline::Use::kForward),
      program_(pipeline_->program(micro_batches_, options_.checkpoint, options_.use)),
      recording_(pipeline_->next_recording(options_.measures)),
      counter_(recording_.timeline ? std::make_shared<ByteCounter>(pipeline_->workers()) : nullptr),
      statistics_(options_.deferred_batch_norm ? pipeline_->count() : 0),
      cells_(static_cast<std::size_t>(pipeline_->count()) * micro_batches_),
      inputs_(*pipeline_, std::move(inputs), pipeline_->stages().front().device),
      outputs_(micro_batches_, pipeline_->stages().back().device),
      loss_(loss) {}

// Begins a forward or a step.
void MiniBatch::begin(Call& call) {
  if (!counted_) counter_.reset();
  call.take_turn();
  for (auto& stage : pipeline_->stages()) {
    sinks_.emplace_back(stage, grad_, pipeline_->stream_of_worker(pipeline_->worker_of(stage.index)));
  }
  call.save(sinks_);
  agree(call);
  pipeline_->take_buffers_of_first_replica(options_.training);
}

// Agrees with the other ranks on the random numbers, and on the weight of each replica's part.
void MiniBatch::agree(Call& call) {
  auto& team = pipeline_->team();
  const auto samples = std::accumulate(options_.sizes.begin(), options_.sizes.end(), std::int64_t{0});
  auto proposal = options_.proposal;
  if (team.replicas() > 1) proposal.same_for_counterparts = describe_trained(sinks_);
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

// Adds to a stage's statistics those of the other replicas, in their order.
void MiniBatch::join_over_replicas(BatchStatistics& statistics, const std::vector<at::Tensor>& buffers) {
  if (pipeline_->team().replicas() == 1 || buffers.empty()) return;
  Parcel parcel;
  for (auto& tensor : statistics.to_tensors(buffers)) parcel.add(std::move(tensor), /*gradient_wanted=*/false);
  std::vector<Gradients> of_replicas;
  for (auto& each : pipeline_->team().all_gather(std::move(parcel))) of_replicas.push_back(std::move(each.tensors));
  statistics.join(buffers, of_replicas);
}

// Ends a forward or a step that has succeeded.
void MiniBatch::finish() {
  for (std::size_t s = 0; s < statistics_.size(); ++s)
    join_over_replicas(statistics_[s], pipeline_->stages()[s].buffers());
  for (std::size_t s = 0; s < statistics_.size(); ++s) statistics_[s].commit(pipeline_->stages()[s]);
}

Gathered MiniBatch::forward(Call& call) {
  const AllocationListener::Scope counting(counter_);
  counted_ = counting.installed();
  begin(call);
  run_part(Part::kForward);
  auto output = take_results().outputs;
  finish();
  return output;
}

Results MiniBatch::step(Call& call) try {
  const AllocationListener::Scope counting(counter_);
  counted_ = counting.installed();
  begin(call);
  // The backward runs without autocast.
  if (!c10::impl::tls_local_dispatch_key_set().excluded_.has_all(c10::autocast_dispatch_keyset)) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    backward_state_.emplace();
  }
  loss_->begin_comparison();
  Results results;
  {
    const GradientsAside aside(sinks_);
    gradients_.emplace(*pipeline_, sinks_, micro_batches_);
    run_part(Part::kAll);
    gradients_->add(aside);
    loss_->end_comparison();
    results = take_results();
    results.gradients = take_gradients();
  }
  finish();
  return results;
} catch (...) {
  call.report();  // before the gradients are destroyed, which waits for their sums
  throw;
}

BackwardGradients::Result MiniBatch::backward(Call& call, std::vector<Gradients> gradients, bool retain_graph) try {
  call.take_turn();
  for (int s = 0; s < pipeline_->count(); ++s) {
    if (program_->recomputes(s)) sinks_[s].check_unchanged();
  }
  call.agree({.what = "the backward of call " + std::to_string(call_number_) + (retain_graph ? ", retain_graph" : "")});
  call.start();
  const AllocationListener::Scope counting(counter_);
  counted_ = counting.installed();
  retain_graph_ = retain_graph;
  gradients_.emplace(*pipeline_, sinks_, micro_batches_);
  gradients_->set_outputs(std::move(gradients), share_);
  run_part(Part::kBackward);
  return take_gradients();
} catch (...) {
  call.report();
  cells_.clear();
  gradients_.reset();
  throw;
}

Timeline MiniBatch::timeline() const {
  auto timeline = *recording_.timeline;
  std::erase_if(timeline.spans, [&](const Span& span) { return span.step != recording_.step; });
  return timeline;
}

Results MiniBatch::take_results() {
  auto results = share_results(*pipeline_, outputs_, loss_);
  hand_over({results.loss});
  hand_over(results.outputs.value.tensors());
  return results;
}

BackwardGradients::Result MiniBatch::take_gradients() {
  auto result = gradients_->take();
  gradients_.reset();
  for (const auto& list : {&result.inputs, &result.parameters}) {
    for (const auto& tensors : *list) hand_over(tensors);
  }
  return result;
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
  auto* timeline = recording_.timeline.get();
  events_.emplace(*pipeline_, /*times=*/timeline != nullptr);
  const auto spans_before = timeline ? timeline->spans.size() : 0;
  const ParameterWriteCounts writes(pipeline_->stages(), sinks_);
  LayoutKey key{static_cast<int>(part), static_cast<int>(options_.use)};
  key.insert(key.end(), options_.sizes.begin(), options_.sizes.end());
  edges_.emplace(*pipeline_, *program_, part, key, counter_);
  const absl::Cleanup end_of_edges = [&] { edges_.reset(); };
  const auto failure = pipeline_->executor().run(*program_, part, *this, timeline, recording_.step);
  state_.reset();
  // The caller may use any result on any device.
  const auto end = [&] {
    events_->await_workers(pipeline_->devices());
    events_->await_workers(outputs_.other_devices());
    if (timeline) events_->place_spans(*timeline, spans_before);
    events_.reset();
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

void MiniBatch::on_worker(int worker, absl::FunctionRef<void()> run_actions) {
  const WorkerScope scope(*pipeline_, worker, *state_, counter_.get());
  events_->begin(worker);
  run_actions();
  std::exception_ptr error;
  try {
    edges_->settle(worker);
  } catch (...) {
    error = std::current_exception();
  }
  const bool has_outputs = worker == pipeline_->worker_of(pipeline_->count() - 1);
  events_->end(worker, has_outputs ? outputs_.other_devices() : std::vector<c10::Device>());
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
    error.add_context(absl::StrCat("in ", to_string(action), " of the pipeline: stage ", action.stage, ", micro-batch ",
                                   action.micro_batch));
    report_error(action);
    throw;
  } catch (...) {
    report_error(action);
    throw;
  }
}

std::vector<Parcel> MiniBatch::run_action(const Action& action, std::vector<Parcel> in) {
  auto* clock = events_->clock(pipeline_->worker_of(action.stage));
  if (clock) clock->start();
  std::vector<Parcel> out;
  if (action.kind == Kind::F) {
    out = run_forward(action, std::move(in));
  } else if (action.kind == Kind::R) {
    const CallerStateScope state(forward_state_);
    const AllocationListener::Scope counting(counted_ ? counter_ : nullptr);
    cell(action)->recompute(retain_graph_);
  } else {
    std::optional<CallerStateScope> state;
    if (backward_state_) state.emplace(*backward_state_);
    const at::NoGradGuard no_grad;
    out = run_backward(action, std::move(in));
    if (action.kind != Kind::I) gradients_->end_backward(action.stage);
  }
  if (clock) clock->end();
  return out;
}

void MiniBatch::cancel(const Failure& failure) noexcept {
  auto& team = pipeline_->team();
  if (team.size() == 1) return;
  const auto place = failure.action ? to_string(describe(*failure.action, failure.error)) : "";
  try {
    std::rethrow_exception(failure.error);
  } catch (const ConnectionError& error) {
    const int awaits = edges_->activity(failure.worker).awaits;
    team.fail(error, awaits, failure.action ? place : "the end of transfers between devices");
  } catch (...) {
    team.fail(absl::StrCat("rank ", team.rank(), " failed", failure.action ? " in " : "", place, ": ",
                           message_of(failure.error)));
  }
}

void MiniBatch::report_error(const Action& action) {
  const auto& on_error = pipeline_->binding().on_error;
  if (on_error) on_error(describe(action, std::current_exception()), std::current_exception());
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
  CellLoss loss;
  if (is_last && loss_) {
    loss = {loss_->layer(action.micro_batch, outputs_), /*adopts_leaves=*/pipeline_->team().replicas() == 1};
  }
  auto& cell = this->cell(action);
  cell = std::make_unique<Cell>(pipeline_->stages()[s], sinks, seed_, first_micro_batch_ + action.micro_batch,
                                std::move(loss));
  const BatchStatistics::Scope statistics(statistics_.empty() ? nullptr : &statistics_[s]);
  const auto parameters = sinks.all().size();
  auto out = cell->forward(std::move(in), {.grad = grad_, .recompute = program_->recomputes(s, action.micro_batch)});
  if (pipeline_->team().size() > 1 && sinks.all().size() != parameters) {
    throw_error("a layer made a parameter in a forward; over ranks, run the model once before the pipeline is made");
  }
  if (!grad_) cell.reset();
  if (is_last && !loss_) outputs_.add(action.micro_batch, std::move(out.front()));
  if (is_last) out.erase(out.begin());
  return out;
}

// B, I or W.
std::vector<Parcel> MiniBatch::run_backward(const Action& action, std::vector<Parcel> in) {
  const auto& [kind, s, micro_batch] = action;
  auto& cell = this->cell(action);
  auto& sums = gradients_->sums(s);
  if (kind == Kind::W) {
    cell->backward_weights(sums);
    cell = nullptr;
    return {};
  }
  std::vector<Gradients> gradients;
  if (s + 1 == pipeline_->count()) {
    gradients.push_back(loss_ ? Gradients{loss_->gradient(micro_batch)} : gradients_->outputs(micro_batch));
  }
  for (auto& parcel : in) gradients.push_back(std::move(parcel.tensors));
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
    gradients_->set_inputs(micro_batch, std::move(out.front().tensors));
    out.erase(out.begin());
  }
  return out;
}

}  // namespace gpipe
