#include "gpipe/run/mini_batch.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/AutogradState.h>
#include <c10/core/DispatchKeySet.h>

#include <numeric>

#include "absl/cleanup/cleanup.h"
#include "gpipe/base/bytes.h"
#include "gpipe/base/checks.h"
#include "gpipe/options.h"
#include "gpipe/tensors/errors.h"

namespace gpipe {
namespace {

constexpr std::size_t kMostAhead = 2;

// Keeps the engine from running this thread's backwards on others.
void keep_backwards_here() { c10::AutogradState::get_tls_state().set_multithreading_enabled(false); }

// Notes which of this rank's parameters get gradients. Counterparts must train the same ones.
void note_trained(const std::vector<ParameterSinks>& stages, Proposal& proposal) {
  Hash hash;
  for (const auto& sinks : stages) {
    for (std::size_t p = 0; p < sinks.all().size(); ++p) {
      proposal.trained += sinks.has_sink()[p];
      const auto& parameter = sinks.all()[p];
      hash.add(sinks.has_sink()[p] ? parameter.numel() + 1 : 0);
      if (!sinks.has_sink()[p]) continue;
      hash.add(static_cast<std::int64_t>(parameter.scalar_type()));
      if (!parameter.is_non_overlapping_and_dense()) continue;
      for (const auto stride : parameter.strides()) hash.add(stride);
    }
  }
  proposal.trained_sizes = hash.value();
}

}  // namespace

MiniBatch::MiniBatch(std::shared_ptr<Pipeline> pipeline, std::vector<Parcel> inputs, Options options, StepLoss* loss)
    : pipeline_(std::move(pipeline)),
      micro_batches_(static_cast<int>(inputs.size())),
      options_(std::move(options)),
      grad_(options_.key.call != StepKey::kForward),
      program_(pipeline_->calls().program(*pipeline_, micro_batches_, options_.key.checkpoints, options_.key.call)),
      recording_(pipeline_->calls().next_recording(pipeline_->workers(), options_.key.measures)),
      statistics_(options_.deferred_batch_norm ? pipeline_->count() : 0),
      cells_(static_cast<std::size_t>(pipeline_->count()) * micro_batches_),
      inputs_(*pipeline_, std::move(inputs), pipeline_->stages().front().device),
      outputs_(options_.key.sizes, pipeline_->stages().back()),
      loss_(loss) {}

// Agrees with the other ranks on the random numbers, and on the weight of each replica's part.
void MiniBatch::begin(Call& call) {
  for (auto& stage : pipeline_->stages()) {
    sinks_.emplace_back(stage, grad_, pipeline_->stream_of_worker(pipeline_->worker_of(stage.index)));
  }
  {
    const AllocationListener::Scope counting(recording_.counter);  // cells free what it copies
    call.save(sinks_);
  }
  auto& team = pipeline_->team();
  const auto samples = std::accumulate(options_.key.sizes.begin(), options_.key.sizes.end(), std::int64_t{0});
  Proposal proposal{.key = options_.key};
  if (team.replicas() > 1) note_trained(sinks_, proposal);
  proposal.has_loaded = pipeline_->calls().has_loaded;
  proposal.program = program_->hash();
  proposal.number = team.rank() == 0 ? call.seed() : 0;
  proposal.weight = loss_ ? loss_->weight() : static_cast<double>(samples);
  proposal.has_samples = samples != 0;
  const auto [seed, has_loaded, weights, micro_batches] = call.agree(std::move(proposal));
  seed_ = seed;
  call_number_ = team.calls();
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  share_ = total == 0 ? 0 : weights[team.replica()] / total;
  first_micro_batch_ = std::accumulate(micro_batches.begin(), micro_batches.begin() + team.replica(), 0);
  if (loss_) loss_->normalize(total);
  call.start();
  if (loss_) loss_->begin_comparison();
  const auto& key = options_.key;
  pipeline_->take_state_of_first_replica(/*all=*/has_loaded, key.training || key.call != StepKey::kForward);
}

Results MiniBatch::start(Call& call) {
  begin(call);
  if (loss_) gradients_.emplace(*pipeline_, sinks_, micro_batches_, options_.accumulates);
  return run_part(loss_ ? Part::kAll : Part::kForward);
}

BackwardGradients::Result MiniBatch::backward(Call& call, std::vector<Gradients> gradients, bool retain_graph) try {
  for (int s = 0; s < pipeline_->count(); ++s) {
    if (program_->recomputes(s)) sinks_[s].check_unchanged();
  }
  call.agree({.key = {.call = StepKey::kBackward, .number = call_number_, .retains_graph = retain_graph}});
  call.start();
  retain_graph_ = retain_graph;
  gradients_.emplace(*pipeline_, sinks_, micro_batches_);
  gradients_->set_outputs(std::move(gradients), share_);
  return run_part(Part::kBackward).gradients;
} catch (...) {
  cells_.clear();
  gradients_.reset();
  throw;
}

Timeline MiniBatch::timeline() const {
  auto timeline = *recording_.timeline;
  std::erase_if(timeline.spans, [&](const Span& span) { return span.step != recording_.step; });
  return timeline;
}

Results MiniBatch::run_part(Part part) {
  auto& counter = recording_.counter;
  const AllocationListener::Scope counting(counter);
  if (!counting.installed()) counter.reset();
  run_actions(part);
  for (int s = 0; part == Part::kForward && s < pipeline_->count(); ++s) {
    if (program_->recomputes(s)) sinks_[s].note_values();
  }
  inputs_.await_copies();
  Results results;
  if (part != Part::kBackward) results = share_results(*pipeline_, outputs_, loss_);
  if (gradients_) results.gradients = gradients_->take();
  gradients_.reset();
  for (const auto& tensor : results.tensors()) {
    use_on_current_stream(tensor);
    if (counter) counter->release(tensor);
  }
  if (part != Part::kBackward) commit_statistics(*pipeline_, statistics_);
  return results;
}

MiniBatch::Run::Run(MiniBatch& of, Part part)
    : edges(*of.pipeline_, *of.program_, part, of.recording_.counter, of.inputs_) {
  for (int w = 0; w < of.pipeline_->workers(); ++w) {
    workers.push_back({.begin = record_event(of.pipeline_->device_of_worker(w))});
  }
}

// Returns when all workers rest. The caller's streams then wait for their work on any device. Errors: the first one;
// Pipeline::error() says where it came from.
void MiniBatch::run_actions(Part part) {
  run_.emplace(*this, part);
  auto* timeline = recording_.timeline.get();
  pipeline_->time_layers(timeline);
  const absl::Cleanup end = [&] {
    pipeline_->time_layers(nullptr);
    run_.reset();
  };
  const auto recorded = timeline ? timeline->spans.size() : 0;
  const auto failure = pipeline_->executor().run(*program_, part, *this, timeline, recording_.step);
  try {
    await_workers(recorded);
  } catch (...) {
    if (!failure) throw;  // else the device is in an error state; the first error says more
  }
  if (!failure) return;
  auto error = failure->error;
  if (failure->action) error = with_context(error, "in " + to_string(describe(*failure->action, error)));
  pipeline_->team().rethrow(error);
}

// The caller may use any result on any device. Sets the times of the spans from `recorded` on.
void MiniBatch::await_workers(std::size_t recorded) {
  for (const auto& devices : {pipeline_->devices(), outputs_.other_devices()}) {
    for (const auto device : devices) {
      if (device.is_cpu()) continue;  // its workers rest
      for (const auto& worker : run_->workers) wait(worker.end, device);
    }
  }
  const auto& timeline = recording_.timeline;
  for (auto i = recorded; timeline && i < timeline->spans.size(); ++i) {
    auto& span = timeline->spans[i];
    if (auto& clock = run_->workers[span.worker].clock) clock->set_times(span);
  }
}

void MiniBatch::on_worker(int worker, absl::FunctionRef<void()> run_actions) {
  const at::ThreadLocalStateGuard state(run_->state);
  keep_backwards_here();
  const c10::OptionalStreamGuard stream(pipeline_->stream_of_worker(worker));
  std::optional<ByteCounter::Worker> counted;
  if (recording_.counter) counted.emplace(recording_.counter.get(), worker);
  if (const auto& enter = pipeline_->binding().enter_worker) enter();
  // A cached cast would join the graphs of two cells.
  at::autocast::set_autocast_cache_enabled(false);
  const auto device = pipeline_->device_of_worker(worker);
  auto& [begin, end, clock, ahead] = run_->workers[worker];
  if (device.is_cpu()) set_intraop_threads_of_this_thread(pipeline_->intraop_threads());
  wait(begin, device);
  if (recording_.timeline && !device.is_cpu()) clock.emplace(device);
  run_actions();
  try {
    run_->edges.settle(worker);
  } catch (...) {
    end_worker(worker);
    throw;
  }
  end_worker(worker);
}

void MiniBatch::end_worker(int worker) {
  auto& [begin, end, clock, ahead] = run_->workers[worker];
  if (clock) clock->stop();
  end = {record_event(pipeline_->device_of_worker(worker))};
  if (worker != pipeline_->worker_of(pipeline_->count() - 1)) return;
  for (const auto device : outputs_.other_devices()) end.push_back(record_event(device));
}

// Lets a worker's host thread be at most kMostAhead actions ahead of its device. What another stream has used, such as a
// tensor that was sent, can be allocated again only when that is over: without a limit, each micro-batch would take new
// memory. R and W, which may be empty, do not count.
void MiniBatch::stay_near(int worker) {
  auto& ahead = run_->workers[worker].ahead;
  if (ahead.size() < kMostAhead) return;
  const auto event = std::move(ahead.front());
  ahead.pop_front();
  if (event) run_->edges.await(worker, event);
}

void MiniBatch::run(const Action& action, Measure measure) {
  RECORD_USER_SCOPE("gpipe " + to_string(action));
  const int worker = pipeline_->worker_of(action.stage);
  auto& clock = run_->workers[worker].clock;
  try {
    const bool exchanges = action.kind != Kind::R && action.kind != Kind::W;
    if (exchanges) stay_near(worker);
    auto in = run_->edges.receive(action);
    std::vector<Parcel> out;
    measure([&] {
      if (clock) clock->start();
      out = compute(action, std::move(in));
      if (clock) clock->end();
    });
    run_->edges.send(action, std::move(out));
    if (exchanges) run_->workers[worker].ahead.push_back(record_event(pipeline_->device_of_worker(worker)));
  } catch (const ConnectionError&) {
    throw;
  } catch (...) {
    const auto& on_error = pipeline_->binding().on_error;
    if (on_error) on_error(describe(action, std::current_exception()), std::current_exception());
    throw;
  }
}

void MiniBatch::cancel(const Failure& failure) noexcept {
  std::string place;
  if (failure.action) {
    const auto info = describe(*failure.action, failure.error);
    place = to_string(info);
    pipeline_->calls().set_error(info);
  }
  pipeline_->team().fail(failure.error, failure.action ? "in " + place : "at the end of transfers between devices");
}

ErrorInfo MiniBatch::describe(const Action& action, const std::exception_ptr& error) const {
  const auto& stage = pipeline_->stages()[action.stage];
  ErrorInfo info{.action = action, .message = message_of(error)};
  const auto& cell = cells_[index(action)];
  const int layer = cell ? cell->layer() : -1;
  if (layer < 0) return info;
  info.layer = stage.first_layer + layer;
  info.layer_name = stage.name_of(layer);
  return info;
}

std::vector<Parcel> MiniBatch::compute(const Action& action, std::vector<Parcel> in) {
  if (action.kind == Kind::F) return forward(action, std::move(in));
  if (action.kind == Kind::R) {
    const at::ThreadLocalStateGuard state(forward_state_);
    keep_backwards_here();
    const AllocationListener::Scope counting(recording_.counter);
    cells_[index(action)]->recompute(retain_graph_);
    return {};
  }
  // The backward of a step runs without autocast.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(loss_ ? c10::autocast_dispatch_keyset : c10::DispatchKeySet());
  const at::NoGradGuard no_grad;
  auto out = backward(action, std::move(in));
  if (action.kind != Kind::I) gradients_->end_backward(action.stage);
  return out;
}

// `in` has the activation, the skips and the borrowed parameters.
std::vector<Parcel> MiniBatch::forward(const Action& action, std::vector<Parcel> in) {
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
    loss.layer = [loss = loss_, m = action.micro_batch, &outputs = outputs_](const Value& output) {
      return loss->compute(m, output, outputs);
    };
    loss.adopts_leaves = pipeline_->team().replicas() == 1;
  }
  auto& cell = cells_[index(action)];
  cell = std::make_unique<Cell>(pipeline_->stages()[s], sinks, seed_, first_micro_batch_ + action.micro_batch,
                                std::move(loss));
  std::optional<BatchStatistics::Scope> statistics;
  if (!statistics_.empty()) statistics.emplace(&statistics_[s]);
  auto out = cell->forward(std::move(in), grad_, /*recompute=*/program_->recomputes(s, action.micro_batch));
  if (!grad_) cell.reset();
  if (is_last && !loss_) outputs_.add(action.micro_batch, std::move(out.front()));
  if (is_last) out.erase(out.begin());
  return out;
}

// B, I or W.
std::vector<Parcel> MiniBatch::backward(const Action& action, std::vector<Parcel> in) {
  const auto& [kind, s, micro_batch] = action;
  auto& cell = cells_[index(action)];
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
