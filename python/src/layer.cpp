#include "python/src/layer.h"

#include <cxxabi.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "python/src/values.h"
#include "skip/skippable.h"

namespace gpipe::python {
namespace {

namespace py = pybind11;

std::vector<std::string> names_of(const std::vector<SkipKey>& keys) {
  std::vector<std::string> names;
  for (const auto& key : keys) names.push_back(key.name);
  return names;
}

/// The mirror of a Python module that declares skips.
struct SkippableMirror : torch::nn::Module, Skippable {
  explicit SkippableMirror(const SkipNames& skips)
      : Skippable({.stash = names_of(skips.stashes), .pop = names_of(skips.pops)}) {
    for (const auto* keys : {&skips.stashes, &skips.pops}) {
      for (const auto& key : *keys) isolate(key.ns, {key.name});
    }
  }
};

/// Counts as one level of Python recursion for its lifetime. Errors: RecursionError if the levels run out, as they do
/// for a module that contains itself.
class Recursion {
 public:
  Recursion() {
    if (Py_EnterRecursiveCall(" in a module that contains itself") != 0) throw py::error_already_set();
  }
  ~Recursion() { Py_LeaveRecursiveCall(); }
  Recursion(const Recursion&) = delete;
  Recursion& operator=(const Recursion&) = delete;
};

/// Calls f(name, value) for each item of one of a module's dicts, except those that are None.
template <typename F>
void for_each(PyObject* module, const char* dict_name, F f) {
  const auto named = py::reinterpret_steal<py::object>(PyObject_GetAttrString(module, dict_name));
  if (!named) throw py::error_already_set();
  // A scripted module has its own mapping type here.
  const auto dict = py::isinstance<py::dict>(named) ? named : py::object(py::dict(named.attr("items")()));
  PyObject* name = nullptr;
  PyObject* value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(dict.ptr(), &at, &name, &value) != 0;) {
    if (value != Py_None) f(name, value);
  }
}

void collect(PyObject* module, ModuleTensors& tensors) {
  const Recursion recursion;
  const auto add_to = [](std::vector<at::Tensor>& list) {
    return [&list](PyObject*, PyObject* value) {
      if (THPVariable_Check(value)) list.push_back(THPVariable_Unpack(value));
    };
  };
  for_each(module, "_parameters", add_to(tensors.parameters));
  for_each(module, "_buffers", add_to(tensors.buffers));
  for_each(module, "_modules", [&](PyObject*, PyObject* child) { collect(child, tensors); });
}

ModuleTensors tensors_of(PyObject* module) {
  ModuleTensors tensors;
  collect(module, tensors);
  return tensors;
}

std::shared_ptr<torch::nn::Module> mirror(PyObject* module, const std::vector<SkipNames>& skips) {
  const Recursion recursion;
  const auto declared =
      std::find_if(skips.begin(), skips.end(), [&](const auto& each) { return each.module.get() == module; });
  const auto result =
      declared == skips.end() ? std::make_shared<torch::nn::Module>() : std::make_shared<SkippableMirror>(*declared);
  const auto text = [](PyObject* name) { return py::reinterpret_borrow<py::str>(name).cast<std::string>(); };
  for_each(module, "_parameters", [&](PyObject* name, PyObject* value) {
    const auto& parameter = THPVariable_Unpack(value);
    result->register_parameter(text(name), parameter, parameter.requires_grad());
  });
  for_each(module, "_buffers",
           [&](PyObject* name, PyObject* value) { result->register_buffer(text(name), THPVariable_Unpack(value)); });
  for_each(module, "_modules",
           [&](PyObject* name, PyObject* child) { result->register_module(text(name), mirror(child, skips)); });
  return result;
}

bool same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const auto& left, const auto& right) { return left.is_same(right); });
}

}  // namespace

PythonLayer::PythonLayer(std::string name, PyObject* module, std::vector<SkipNames> skips,
                         std::shared_ptr<ThreadStates> states)
    : name_(std::move(name)),
      states_(std::move(states)),
      module_(reference_to(module)),
      skips_(std::move(skips)),
      mirrored_(tensors_of(module)),
      mirror_(mirror(module, skips_)) {
  auto slots = std::make_shared<Slots>();
  find_slots(module, *slots);
  slots_ = std::move(slots);
}

void PythonLayer::find_slots(PyObject* module, Slots& slots) {
  const Recursion recursion;
  const auto buffers = py::reinterpret_steal<py::object>(PyObject_GetAttrString(module, "_buffers"));
  if (!buffers) throw py::error_already_set();
  if (py::isinstance<py::dict>(buffers)) {
    const auto held = reference_to(buffers.ptr());
    for (const auto& item : py::reinterpret_borrow<py::dict>(buffers)) {
      slots.push_back({held, reference_to(item.first.ptr()), {}});
    }
  } else {
    for_each(module, "_buffers", [&](PyObject*, PyObject* buffer) {
      if (THPVariable_Check(buffer)) slots.push_back({nullptr, nullptr, THPVariable_Unpack(buffer)});
    });
  }
  for_each(module, "_modules", [&](PyObject*, PyObject* child) { find_slots(child, slots); });
}

Value PythonLayer::forward(Value input) { return call(module_.get(), {std::move(input)}, *states_); }

std::shared_ptr<torch::nn::Module> PythonLayer::module() const {
  MutexLock lock(mutex_);
  return mirror_;
}

bool PythonLayer::refresh() {
  auto tensors = tensors_of(module_.get());
  if (same(tensors.parameters, mirrored_.parameters) && same(tensors.buffers, mirrored_.buffers)) return false;
  auto fresh = mirror(module_.get(), skips_);
  auto slots = std::make_shared<Slots>();
  find_slots(module_.get(), *slots);
  mirrored_ = std::move(tensors);
  std::shared_ptr<const Slots> fresh_slots = std::move(slots);
  MutexLock lock(mutex_);
  mirror_.swap(fresh);
  slots_.swap(fresh_slots);
  return true;
}

std::shared_ptr<const PythonLayer::Slots> PythonLayer::slots() const {
  MutexLock lock(mutex_);
  return slots_;
}

std::vector<at::Tensor> PythonLayer::buffers() const {
  const auto slots = this->slots();
  if (slots->empty()) return {};
  const Section section;
  std::vector<at::Tensor> buffers;
  for (const auto& [dict, name, scripted] : *slots) {
    if (dict == nullptr) {
      buffers.push_back(scripted);
      continue;
    }
    PyObject* buffer = PyDict_GetItemWithError(dict.get(), name.get());
    if (buffer == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
    const bool is_tensor = buffer != nullptr && THPVariable_Check(buffer);
    buffers.push_back(is_tensor ? THPVariable_Unpack(buffer) : at::Tensor());
  }
  return buffers;
}

void PythonLayer::set_buffers(const std::vector<at::Tensor>& buffers) {
  const auto slots = this->slots();
  if (slots->size() != buffers.size()) return;  // a refresh() found other buffers
  if (slots->empty()) return;
  const Section section;
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    const auto& [dict, name, scripted] = (*slots)[i];
    if (dict == nullptr) continue;
    const auto buffer = py::reinterpret_steal<py::object>(to_python(buffers[i]));
    if (PyDict_GetItem(dict.get(), name.get()) == buffer.ptr()) continue;
    if (PyDict_SetItem(dict.get(), name.get(), buffer.ptr()) != 0) throw py::error_already_set();
  }
}

void PythonLayer::check_not_replaced() const {
  if (same(tensors_of(module_.get()).parameters, mirrored_.parameters)) return;
  throw std::runtime_error("[gpipe] the forward cannot be recomputed: parameters of layer '" + name_ +
                           "' were replaced between the forward and its backward, as torch.func.functional_call does; "
                           "use checkpoint='never'");
}

int PythonLayer::traverse(absl::FunctionRef<int(PyObject*)> visit) const {
  if (const int result = visit(module_.get()); result != 0) return result;
  for (const auto& skip : skips_) {
    if (const int result = visit(skip.module.get()); result != 0) return result;
  }
  return 0;
}

Value call(PyObject* callable, std::vector<Value> arguments, ThreadStates& states) {
  states.create_for_this_thread();
  const Section section;
  py::tuple converted(arguments.size());
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    converted[i] = py::reinterpret_steal<py::object>(to_python(std::exchange(arguments[i], {})));
  }
  py::object output;
  try {
    output = py::reinterpret_steal<py::object>(PyObject_CallObject(callable, converted.ptr()));
  } catch (abi::__forced_unwind&) {
    sleep_for_good();  // the interpreter finished while the callable waited
  }
  if (!output) throw py::error_already_set();
  return to_value(output.ptr());
}

}  // namespace gpipe::python
