#include "gpipe/graph/graph.h"

#include <ATen/autocast_mode.h>

#include <algorithm>
#include <list>

#include "gpipe/base/json.h"
#include "gpipe/graph/description.h"

namespace gpipe {
namespace {

using Description = Graph::Description;

/// Enters a context on this thread, for its lifetime.
class ContextScope {
 public:
  ContextScope(const Description::Context& context, at::DeviceType device) : context(context), device_(device) {
    if (context.grad) {
      grad_.emplace(*context.grad);
      return;
    }
    before_.dtype = at::autocast::get_autocast_dtype(device);
    before_.enabled = at::autocast::is_autocast_enabled(device);
    before_.cache = at::autocast::is_autocast_cache_enabled();
    set(context);
    at::autocast::increment_nesting();
  }
  ~ContextScope() {
    if (grad_) return;
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    set(before_);
  }
  ContextScope(const ContextScope&) = delete;

  const Description::Context& context;

 private:
  void set(const Description::Context& context) const {
    at::autocast::set_autocast_enabled(device_, context.enabled);
    if (context.dtype) at::autocast::set_autocast_dtype(device_, *context.dtype);
    if (context.cache) at::autocast::set_autocast_cache_enabled(*context.cache);
  }

  const at::DeviceType device_;
  std::optional<at::AutoGradMode> grad_;
  Description::Context before_{};
};

/// The contexts that calls run in. Stays in those that the next call shares.
class Contexts {
 public:
  explicit Contexts(at::DeviceType device) : device_(device) {}
  ~Contexts() { leave(0); }
  Contexts(const Contexts&) = delete;

  void enter(const std::vector<Description::Context>& wanted) {
    std::size_t shared = 0;
    for (const auto& scope : scopes_) {
      if (shared == wanted.size() || wanted[shared] != scope.context) break;
      ++shared;
    }
    leave(shared);
    for (; shared < wanted.size(); ++shared) scopes_.emplace_back(wanted[shared], device_);
  }

 private:
  void leave(std::size_t outer) {
    while (scopes_.size() > outer) scopes_.pop_back();
  }

  const at::DeviceType device_;
  std::list<ContextScope> scopes_;
};

c10::IValue item(const c10::IValue& list, std::int64_t index) {
  const auto items = list.isTuple() ? list.toTupleRef().elements().asArrayRef() : list.toListRef();
  const auto size = static_cast<std::int64_t>(items.size());
  if (-size > index || index >= size) refuse_argument("the model takes item ", index, " of ", size);
  return items[static_cast<std::size_t>(index < 0 ? index + size : index)];
}

std::string text(at::IntArrayRef sizes) {
  std::string joined;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    joined += (i == 0 ? "" : ", ") + (sizes[i] >= 0 ? std::to_string(sizes[i]) : i == 0 ? "batch" : "any");
  }
  return "(" + joined + (sizes.size() == 1 ? ",)" : ")");
}

/// The shapes of the inputs that are tensors.
std::string shapes_of(const std::vector<c10::IValue>& values, const std::vector<std::optional<std::size_t>>& inputs) {
  std::string joined;
  for (const auto& each : inputs) {
    if (!each || !values[*each].isTensor()) continue;
    joined += (joined.empty() ? "" : ", ") + text(values[*each].toTensor().sizes());
  }
  return joined;
}

/// What aten::batch_norm leaves to Python's functions to check.
void check_batch_norm(const std::vector<c10::IValue>& arguments) {
  const auto& input = arguments[0].toTensor();
  if (!arguments[5].toBool() || input.dim() < 2 || input.numel() != input.size(1)) return;
  refuse_argument("batch norm needs more than one value per channel in training mode, but a micro-batch has the shape ",
                  text(input.sizes()), "; give it more samples by fewer chunks");
}

c10::IValue result_of(const Description::Call& call, torch::jit::Stack stack, const Graph::CallPython& call_python) {
  if (!call.target) {
    if (call.name == kItem) return item(stack.at(0), stack.at(1).toInt());
    return call_python(call.name, std::move(stack));
  }
  if (call.is_batch_norm) check_batch_norm(stack);
  try {
    call.target->callBoxed(stack);
  } catch (c10::Error& error) {
    error.add_context("in " + call.name + (call.at.empty() ? "" : ", called at " + call.at));
    throw;
  }
  if (stack.size() > 1) return c10::ivalue::Tuple::create(std::move(stack));
  return stack.empty() ? c10::IValue() : std::move(stack.front());
}

at::Tensor to_tensor(c10::IValue value) { return value.isNone() ? at::Tensor() : std::move(value).toTensor(); }

c10::IValue to_value(at::Tensor tensor) { return tensor.defined() ? c10::IValue(std::move(tensor)) : c10::IValue(); }

void check_shape(std::size_t number, const at::Tensor& input, const Description::Shape& shape) {
  if (!shape) {
    if (input.defined()) refuse_argument("input ", number, " was a constant when the model was converted; give None");
    return;
  }
  const auto sizes = input.defined() ? input.sizes() : at::IntArrayRef();
  bool fits = input.defined() && sizes.size() == shape->size();
  for (std::size_t i = 0; fits && i < sizes.size(); ++i) fits = (*shape)[i] < 0 || (*shape)[i] == sizes[i];
  if (!fits) {
    refuse_argument("input ", number, " has the shape ", input.defined() ? text(sizes) : "of None",
                    ", but the model was converted for ", text(*shape),
                    "; convert it for this shape, or pad or resize the input");
  }
}

}  // namespace

Graph::Graph(const std::string& description, CallPython call_python) try
    : description_([&] {
        auto read = std::make_unique<Description>(parse_json(description));
        if (!call_python && !read->python_functions.empty()) {
          refuse_argument("the model calls ", read->python_functions.front(), ", which only Python can run");
        }
        read->call_python = std::move(call_python);
        return read;
      }()) {
} catch (const nlohmann::json::exception& error) {
  refuse_argument("the model's description is not valid: ", error.what());
}

Graph::~Graph() = default;

const std::vector<std::string>& Graph::tensors() const { return description_->tensors; }
const std::vector<std::string>& Graph::pops() const { return description_->pops; }
const std::vector<std::string>& Graph::peeks() const { return description_->peeks; }
const std::vector<std::string>& Graph::stashes() const { return description_->stashes; }
const std::vector<std::string>& Graph::python_functions() const { return description_->python_functions; }

std::vector<at::Tensor> Graph::with_constants(std::vector<at::Tensor> tensors) const {
  const auto& shapes = description_->shapes;
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    if (!shapes[i] && i <= tensors.size())
      tensors.insert(tensors.begin() + static_cast<std::ptrdiff_t>(i), at::Tensor());
  }
  return tensors;
}

std::vector<at::Tensor> Graph::run(std::vector<at::Tensor> inputs, const State& state) const {
  const auto& of = *description_;
  if (inputs.size() != of.inputs.size()) {
    refuse_argument("the model takes ", of.inputs.size(), " tensors, but got ", inputs.size());
  }
  std::optional<std::int64_t> samples;
  for (std::size_t i = 0; i < of.shapes.size(); ++i) {
    check_shape(i, inputs[i], of.shapes[i]);
    if (!inputs[i].defined() || inputs[i].dim() == 0) continue;
    if (inputs[i].size(0) != samples.value_or(inputs[i].size(0))) {
      refuse_argument("input ", i, " has ", inputs[i].size(0), " samples, but another has ", samples.value_or(0));
    }
    samples = inputs[i].size(0);
  }
  Frame frame{std::vector<c10::IValue>(of.values), state.training, at::kCPU};
  const auto set = [&](std::size_t value, at::Tensor tensor) {
    if (tensor.defined()) frame.device = tensor.device();
    frame.values[value] = to_value(std::move(tensor));
  };
  for (std::size_t i = 0; i < of.owned.size(); ++i) set(of.owned[i], state.tensors.at(i));
  auto& skips = SkipContext::current();
  for (std::size_t i = 0; i < of.popped.size(); ++i) set(of.popped[i], skips.pop(state.pops.at(i)));
  for (std::size_t i = 0; i < of.peeked.size(); ++i) set(of.peeked[i], skips.peek(state.peeks.at(i)));
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (of.inputs[i]) set(*of.inputs[i], std::move(inputs[i]));
  }
  inputs.clear();
  for (const auto& guard : of.guards) {
    if (!guard.holds.evaluate(frame).toBool()) {
      refuse_argument("the model was converted for inputs with ", guard.text, ", but a micro-batch has the shape ",
                      shapes_of(frame.values, of.inputs),
                      ": its code depends on that; give other sizes or another number of chunks, or keep the module "
                      "whole by opaque");
    }
  }
  for (const auto value : of.unused) frame.values[value] = {};

  Contexts contexts(frame.device.type());
  for (const auto& each : of.calls) {
    if (!each.mode || state.training == *each.mode) {
      contexts.enter(each.within);
      torch::jit::Stack stack;
      stack.reserve(each.arguments.size());
      for (const auto& argument : each.arguments) stack.push_back(argument.evaluate(frame));
      auto result = result_of(each, std::move(stack), of.call_python);
      if (each.result) frame.values[*each.result] = std::move(result);
    }
    for (const auto value : each.last_uses) frame.values[value] = {};
  }
  contexts.enter({});
  for (std::size_t i = 0; i < of.stashed.size(); ++i) {
    skips.stash(state.stashes.at(i), to_tensor(of.stashed[i].evaluate(frame)));
  }
  std::vector<at::Tensor> outputs;
  for (const auto& each : of.outputs) outputs.push_back(to_tensor(each.evaluate(frame)));
  return outputs;
}

}  // namespace gpipe
