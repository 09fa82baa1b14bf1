#include "gpipe/mini_batch.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/AutogradState.h>

#include <mutex>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "gpipe/autograd/random_scope.h"
#include "gpipe/runtime/intraop.h"

namespace gpipe {
namespace {

// The seed of a mini-batch, which can be given back: a failed forward leaves the default generator as if it had never
// been, unless somebody has drawn since.
class SeedDraw {
 public:
  SeedDraw() : before_(copy_of(generator())), seed_(RandomScope::draw_seed()) {}

  std::uint64_t seed() const { return seed_; }

  // Called while an exception is under way, which matters more than one of its own. Makes no tensor: memory may be out.
  void give_back() noexcept try {
    auto now = generator();
    std::lock_guard<std::mutex> lock(now.mutex());
    auto* impl = now.get<at::CPUGeneratorImpl>();
    const auto before = before_.get<at::CPUGeneratorImpl>()->engine();
    auto after = before;
    for (int half = 0; half < 2; ++half) after();  // a draw of 64 bits
    const auto is = impl->engine().data();
    const auto was = after.data();
    if (is.left_ == was.left_ && is.state_ == was.state_) impl->set_engine(before);
  } catch (...) {
  }

 private:
  static at::Generator generator() {
    auto* scope = RandomScope::current();
    return scope ? scope->generator(c10::kCPU) : at::detail::getDefaultCPUGenerator();
  }

  static at::Generator copy_of(at::Generator generator) {
    std::lock_guard<std::mutex> lock(generator.mutex());
    return generator.clone();
  }

  at::Generator before_;
  std::uint64_t seed_;
};

}  // namespace

// Has this thread report what it allocates and frees, and what takes over its state: unless a profiler, which would be
// shut out, does so already.
class MiniBatch::Counting {
 public:
  explicit Counting(const std::shared_ptr<ByteCounter>& counter) {
    constexpr auto kKind = c10::DebugInfoKind::PROFILER_STATE;
    if (counter && c10::ThreadLocalDebugInfo::get(kKind) == nullptr) guard_.emplace(kKind, counter);
  }

  bool possible() const { return guard_.has_value(); }

 private:
  std::optional<c10::DebugInfoGuard> guard_;
};

MiniBatch::MiniBatch(std::shared_ptr<Pipeline> pipeline, std::vector<Parcel> inputs, Checkpoint checkpoint, bool grad,
                     bool deferred_batch_norm)
    : pipeline_(std::move(pipeline)),
      micro_batches_(static_cast<int>(inputs.size())),
      grad_(grad),
      program_(pipeline_->program(micro_batches_, checkpoint, grad)),
      recording_(pipeline_->next_recording()),
      counter_(recording_.timeline ? std::make_shared<ByteCounter>(pipeline_->count()) : nullptr),
      statistics_(deferred_batch_norm ? pipeline_->count() : 0),
      cells_(static_cast<std::size_t>(pipeline_->count()) * micro_batches_),
      inputs_(std::move(inputs)),
      outputs_(micro_batches_),
      parcels_(pipeline_->edges().size() * micro_batches_),
      gradients_(pipeline_->edges().size() * micro_batches_) {}

Gathered MiniBatch::forward() {
  MutexLock turn(pipeline_->turn());
  forward_state_.emplace();
  const Counting counting(counter_);
  counted_ = counting.possible();
  if (!counted_) counter_.reset();
  std::vector<SavedBuffers> buffers;
  for (auto& stage : pipeline_->stages()) {
    // The engine runs a node on the stream that was current when it was made.
    const OptionalStreamScope stream(pipeline_->stream(stage.index));
    sinks_.emplace_back(stage, grad_);
  }
  for (const auto& stage : pipeline_->stages()) buffers.emplace_back(stage);
  SeedDraw draw;
  seed_ = draw.seed();
  for (const auto& tensor : inputs_.front().tensors) {
    inputs_ready_.push_back(record_event(tensor.device()));
    input_links_.push_back(new_link(tensor.device(), pipeline_->stages().front().device));
  }
  pipeline_->shared_buffers().before_forward(grad_);
  try {
    perform(Part::kForward);
    pipeline_->shared_buffers().after_forward();
    const auto parts = std::exchange(outputs_, {});
    for (const auto& part : parts) {
      for (const auto& tensor : part.tensors) use_on_current_stream(tensor);
    }
    auto result = gather(parts);
    release_to_caller(result.value.tensors());
    for (std::size_t s = 0; s < statistics_.size(); ++s) statistics_[s].commit(pipeline_->stages()[s]);
    return result;
  } catch (...) {
    for (auto& saved : buffers) saved.restore_after_error();
    draw.give_back();
    cells_.clear();
    throw;
  }
}

MiniBatch::BackwardResult MiniBatch::backward(std::vector<Gradients> gradients, bool retain_graph) {
  MutexLock turn(pipeline_->turn());
  const Counting counting(counter_);
  counted_ = counting.possible();
  retain_graph_ = retain_graph;
  output_gradients_ = std::move(gradients);
  input_gradients_.assign(micro_batches_, {});
  sums_.clear();
  for (const auto& sinks : sinks_) sums_.emplace_back(sinks.parameters().size());
  try {
    for (int s = 0; s < pipeline_->count(); ++s) {
      bool recomputes = false;
      for (int i = 0; i < micro_batches_; ++i) recomputes = recomputes || program_->recomputes(s, i);
      if (recomputes) sinks_[s].check_unchanged();
    }
    perform(Part::kBackward);
  } catch (...) {
    cells_.clear();
    throw;
  }
  BackwardResult result;
  result.inputs = std::exchange(input_gradients_, {});
  for (auto& sums : sums_) result.parameters.push_back(sums.take_unshared());
  for (const auto& list : {&result.inputs, &result.parameters}) {
    for (const auto& tensors : *list) {
      for (const auto& tensor : tensors) use_on_current_stream(tensor);
      release_to_caller(tensors);
    }
  }
  return result;
}

void MiniBatch::release_to_caller(const std::vector<at::Tensor>& tensors) {
  if (!counter_) return;
  for (const auto& tensor : tensors) counter_->release(tensor);
}

void MiniBatch::perform(Part part) {
  const auto& stages = pipeline_->stages();
  pipeline_->set_error(std::nullopt);  // again: others may have failed while this waited for its turn
  state_.emplace();
  begin_.clear();
  for (const auto& stage : stages) begin_.push_back(record_event(stage.device));
  end_.assign(stages.size(), nullptr);
  const OwnWrites writes(pipeline_->stages(), sinks_);
  const auto failure = pipeline_->executor().run(*program_, part, *this, recording_.timeline.get(), recording_.step);
  state_.reset();
  if (!failure) return wait_for_stages();
  if (failure->action) pipeline_->set_error(describe(*failure));
  try {
    wait_for_stages();
  } catch (...) {  // a device in an error state: the first error tells more
  }
  std::rethrow_exception(failure->error);
}

ErrorInfo MiniBatch::describe(const Failure& failure) {
  ErrorInfo info;
  info.action = *failure.action;
  const auto& cell = this->cell(info.action.stage, info.action.micro_batch);
  if (const int layer = cell ? cell->layer() : -1; layer >= 0) {
    const auto& stage = pipeline_->stages()[info.action.stage];
    info.layer = stage.first_layer + layer;
    info.layer_name = stage.layers[layer]->name();
  }
  try {
    std::rethrow_exception(failure.error);
  } catch (const std::exception& error) {
    info.message = error.what();
  } catch (...) {
    info.message = "unknown";
  }
  return info;
}

// The caller may use any result on any device: each of its streams there waits for all stages.
void MiniBatch::wait_for_stages() {
  for (const auto& stage : pipeline_->stages()) {
    for (const auto& end : end_) wait(end, stage.device);
  }
}

void MiniBatch::work(int worker, absl::FunctionRef<void()> run_actions) {
  // One stage a worker: the worker's number is its stage's.
  const auto device = pipeline_->stages()[worker].device;
  if (const auto& enter = pipeline_->binding().enter_worker) enter();
  at::ThreadLocalStateGuard state(*state_);
  c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
  // A cached cast would tie the graphs of two cells together.
  at::autocast::set_autocast_cache_enabled(false);
  if (device.is_cpu()) set_intraop_threads_of_this_thread(pipeline_->intraop_threads());
  OptionalStreamScope stream(pipeline_->stream(worker));
  const ByteCounter::Worker counted(counter_.get(), worker);
  wait(begin_[worker], device);
  run_actions();
  end_[worker] = record_event(device);
}

void MiniBatch::run(const Action& action) {
  const int stage = action.stage;
  const int micro_batch = action.micro_batch;
  try {
    switch (action.kind) {
      case Kind::F:
        run_forward(stage, micro_batch);
        break;
      case Kind::R: {
        at::ThreadLocalStateGuard state(*forward_state_);
        const Counting counting(counted_ ? counter_ : nullptr);
        c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
        cell(stage, micro_batch)->recompute(retain_graph_);
        break;
      }
      case Kind::B:
        run_backward(stage, micro_batch);
        break;
      case Kind::I:
      case Kind::W:
        TORCH_INTERNAL_ASSERT(false, "no program of forward() splits the backward");
    }
    // So that the trace shows work, not when it was enqueued.
    if (const auto& stream = pipeline_->stream(stage); recording_.timeline && stream) stream->synchronize();
  } catch (c10::Error& error) {
    std::ostringstream where;
    where << "in " << to_string(action) << " of the pipeline: stage " << stage << ", micro-batch " << micro_batch;
    error.add_context(where.str());
    report_error(action);
    throw;
  } catch (...) {
    report_error(action);
    throw;
  }
}

// Called while an exception is under way.
void MiniBatch::report_error(const Action& action) {
  const auto& on_error = pipeline_->binding().on_error;
  if (!on_error) return;
  const auto error = std::current_exception();
  on_error(describe({error, action}), error);
}

Bytes MiniBatch::bytes(int worker) { return counted_ ? counter_->count(worker) : Bytes(); }

Parcel MiniBatch::receive(int edge, int micro_batch) {
  auto [parcel, ready] = std::exchange(parcels_[slot(edge, micro_batch)], {});
  const auto& [from, to, capacity, name] = pipeline_->edges()[edge];
  if (parcel.changed()) {
    throw std::runtime_error("[gpipe] " + name + " was changed in place on its way from stage " + std::to_string(from) +
                             " to stage " + std::to_string(to) + "; change a clone instead");
  }
  copy_to_device(parcel.tensors, ready, pipeline_->stages()[to].device, pipeline_->link(edge));
  parcel.renew_versions();
  return std::move(parcel);
}

void MiniBatch::run_forward(int stage, int micro_batch) {
  auto& of_stage = pipeline_->stages()[stage];
  std::vector<Parcel> in;
  if (stage == 0) {
    auto& parcel = in.emplace_back(std::move(inputs_[micro_batch]));
    for (std::size_t k = 0; k < parcel.tensors.size(); ++k) {
      copy_to_device({&parcel.tensors[k], 1}, inputs_ready_[k], of_stage.device, input_links_[k]);
    }
    parcel.renew_versions();
  }
  for (const int edge : program_->in_edges(stage)) in.push_back(receive(edge, micro_batch));
  auto& cell = this->cell(stage, micro_batch);
  cell = std::make_unique<Cell>(of_stage, sinks_[stage], seed_, micro_batch);
  const BatchStatistics::Scope statistics(statistics_.empty() ? nullptr : &statistics_[stage]);
  auto out = cell->forward(std::move(in), {.grad = grad_, .recompute = program_->recomputes(stage, micro_batch)});
  if (!grad_) cell.reset();
  if (stage + 1 == pipeline_->count()) outputs_[micro_batch] = std::move(out.front());
  const auto& edges = program_->out_edges(stage);
  for (std::size_t k = 0; k < edges.size(); ++k) {
    parcels_[slot(edges[k], micro_batch)] = {std::move(out[k]), record_event(of_stage.device)};
  }
}

void MiniBatch::run_backward(int stage, int micro_batch) {
  const auto device = pipeline_->stages()[stage].device;
  std::vector<Gradients> gradients;
  if (stage + 1 == pipeline_->count()) {
    gradients.push_back(std::move(output_gradients_[micro_batch]));
    copy_to_device(gradients.back(), begin_[stage], device, {});
  }
  for (const int edge : program_->out_edges(stage)) {
    auto [sent, ready] = std::exchange(gradients_[slot(edge, micro_batch)], {});
    copy_to_device(sent, ready, device, pipeline_->back_link(edge));
    gradients.push_back(std::move(sent));
  }
  auto& cell = this->cell(stage, micro_batch);
  auto result = cell->backward(gradients, retain_graph_, sums_[stage]);
  if (!retain_graph_) {
    cell.reset();
  } else if (program_->recomputes(stage, micro_batch)) {
    cell->drop_graph();
  }
  if (stage == 0) input_gradients_[micro_batch] = std::move(result.front());
  const auto& edges = program_->in_edges(stage);
  for (std::size_t k = 0; k < edges.size(); ++k) {
    gradients_[slot(edges[k], micro_batch)] = {std::move(result[k]), record_event(device)};
  }
}

}  // namespace gpipe
