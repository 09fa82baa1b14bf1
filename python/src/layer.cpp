#include "python/src/layer.h"

#include <cxxabi.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "absl/cleanup/cleanup.h"
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

std::vector<SkipKey> keys_of(const std::vector<SkipNames>& skips) {
  std::vector<SkipKey> keys;
  for (const auto& each : skips) {
    for (const auto* list : {&each.stashes, &each.pops, &each.peeks})
      keys.insert(keys.end(), list->begin(), list->end());
  }
  return keys;
}

/// The mirror of a Python module that declares skips.
struct SkippableMirror : torch::nn::Module, Skippable {
  explicit SkippableMirror(const SkipNames& skips)
      : Skippable({names_of(skips.stashes), names_of(skips.pops), names_of(skips.peeks)}) {
    for (const auto* keys : {&skips.stashes, &skips.pops, &skips.peeks}) {
      for (const auto& key : *keys) isolate(key.ns, {key.name});
    }
  }
};

/// Enters a level of Python recursion, for the lifetime of the result. Errors: RecursionError if the levels run out, as
/// they do for a module that contains itself.
auto enter_module() {
  if (Py_EnterRecursiveCall(" in a module that contains itself") != 0) throw py::error_already_set();
  return absl::MakeCleanup([] { Py_LeaveRecursiveCall(); });
}

/// Calls f(name, value) for each item of one of a module's dicts, except those that are None.
template <typename F>
void for_each(const py::handle& module, const char* dict_name, F f) {
  const py::object named = module.attr(dict_name);
  // A scripted module has its own mapping type here.
  for (const auto& [name, value] :
       py::isinstance<py::dict>(named) ? py::dict(named) : py::dict(named.attr("items")())) {
    if (!value.is_none()) f(name, value);
  }
}

/// A function for for_each(), which adds tensors to a list.
auto add_to(std::vector<at::Tensor>& list) {
  return [&list](const py::handle&, const py::handle& value) {
    if (THPVariable_Check(value.ptr())) list.push_back(THPVariable_Unpack(value.ptr()));
  };
}

void collect(const py::handle& module, ModuleTensors& tensors) {
  const auto level = enter_module();
  for_each(module, "_parameters", add_to(tensors.parameters));
  for_each(module, "_buffers", add_to(tensors.buffers));
  for_each(module, "_modules", [&](const py::handle&, const py::handle& child) { collect(child, tensors); });
}

ModuleTensors tensors_of(PyObject* module) {
  ModuleTensors tensors;
  collect(module, tensors);
  return tensors;
}

std::shared_ptr<torch::nn::Module> mirror(const py::handle& module, const std::vector<SkipNames>& skips) {
  const auto level = enter_module();
  const auto declared =
      std::find_if(skips.begin(), skips.end(), [&](const auto& each) { return each.module.get() == module.ptr(); });
  const auto result =
      declared == skips.end() ? std::make_shared<torch::nn::Module>() : std::make_shared<SkippableMirror>(*declared);
  const auto text = [](const py::handle& name) { return name.cast<std::string>(); };
  for_each(module, "_parameters", [&](const py::handle& name, const py::handle& value) {
    const auto& parameter = THPVariable_Unpack(value.ptr());
    result->register_parameter(text(name), parameter, parameter.requires_grad());
  });
  for_each(module, "_buffers", [&](const py::handle& name, const py::handle& value) {
    result->register_buffer(text(name), THPVariable_Unpack(value.ptr()));
  });
  for_each(module, "_modules", [&](const py::handle& name, const py::handle& child) {
    result->register_module(registered_name(text(name)), mirror(child, skips));
  });
  return result;
}

/// Gives a dict the items of another one, or none for null.
void set_items(PyObject* dict, PyObject* items) {
  if (PyDict_Size(dict) == (items == nullptr ? 0 : PyDict_Size(items))) {
    bool same = true;
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    for (Py_ssize_t at = 0; items != nullptr && PyDict_Next(items, &at, &key, &value) != 0;) {
      same = same && PyDict_GetItem(dict, key) == value;
    }
    if (same) return;
  }
  PyDict_Clear(dict);
  if (items != nullptr && PyDict_Update(dict, items) != 0) throw py::error_already_set();
}

/// Whether a module is in training mode: True or False. Null if it has no mode.
PyObject* mode_of(const py::handle& module) {
  const py::object mode = py::getattr(module, "training", py::none());
  return py::isinstance<py::bool_>(mode) ? mode.ptr() : nullptr;
}

void set_mode(const py::handle& module, PyObject* mode) {
  if (mode != nullptr && mode_of(module) != mode) py::setattr(module, "training", mode);
}

}  // namespace

PythonLayer::PythonLayer(std::string name, PyObject* module, std::vector<SkipNames> skips,
                         std::shared_ptr<ThreadStates> states)
    : name_(std::move(name)),
      states_(std::move(states)),
      module_(reference_to(module)),
      skips_(std::move(skips)),
      mirrored_(tensors_of(module)),
      native_(NativeLayer::make(module, keys_of(skips_))),
      mirror_(mirror(module, skips_)) {
  if (native_) native_->refresh(module, true);
}

void PythonLayer::find_places(PyObject* object, Places& places) {
  const auto level = enter_module();
  const py::handle module = object;
  auto& place = places.emplace_back();
  const py::object buffers = module.attr("_buffers");
  const py::object children = module.attr("_modules");
  if (py::isinstance<py::dict>(buffers)) {
    place = {nullptr, reference_to(buffers.ptr()), reference_to(children.ptr()), PyDict_Size(children.ptr()), {}};
  } else {
    for_each(module, "_buffers", add_to(place.scripted));
  }
  place.module = reference_to(object);
  for_each(module, "_modules", [&](const py::handle&, const py::handle& child) { find_places(child.ptr(), places); });
}

Value PythonLayer::forward(Value input) { return call(module_.get(), {std::move(input)}, *states_); }

std::shared_ptr<torch::nn::Module> PythonLayer::module() const {
  MutexLock lock(mutex_);
  return mirror_;
}

bool PythonLayer::refresh() {
  std::shared_ptr<const Places> old;  // destroyed without the lock
  {
    MutexLock lock(mutex_);
    old.swap(places_);
  }
  auto tensors = tensors_of(module_.get());
  if (are_same(tensors.parameters, mirrored_.parameters) && are_same(tensors.buffers, mirrored_.buffers)) {
    if (native_) native_->refresh(module_.get(), false);
    return false;
  }
  auto fresh = mirror(module_.get(), skips_);
  mirrored_ = std::move(tensors);
  if (native_) native_->refresh(module_.get(), true);
  MutexLock lock(mutex_);
  mirror_.swap(fresh);
  return true;
}

std::shared_ptr<const PythonLayer::Places> PythonLayer::known_places() const {
  MutexLock lock(mutex_);
  return places_;
}

std::shared_ptr<const PythonLayer::Places> PythonLayer::places() const {
  auto known = known_places();
  const bool fits = known && std::all_of(known->begin(), known->end(), [](const Place& place) {
                      return place.children == nullptr || PyDict_Size(place.children.get()) == place.count;
                    });
  if (fits) return known;
  auto found = std::make_shared<Places>();  // a forward may have made a submodule
  find_places(module_.get(), *found);
  known = found;
  MutexLock lock(mutex_);
  known.swap(places_);  // destroyed without the lock
  return found;
}

Layer::Buffers PythonLayer::buffers() const {
  const Section section;
  const auto places = this->places();
  Buffers buffers;
  std::vector<Reference> dicts;  // a copy of each place's dict; null for an empty one
  std::vector<PyObject*> modes;
  for (const auto& [module, dict, children, count, scripted] : *places) {
    modes.push_back(mode_of(module.get()));
    buffers.tensors.insert(buffers.tensors.end(), scripted.begin(), scripted.end());
    dicts.emplace_back();
    if (dict == nullptr || PyDict_Size(dict.get()) == 0) continue;
    const py::dict copy = py::handle(dict.get()).attr("copy")();
    dicts.back() = reference_to(copy.ptr());
    for (const auto& [name, buffer] : copy) {
      buffers.tensors.push_back(THPVariable_Check(buffer.ptr()) ? THPVariable_Unpack(buffer.ptr()) : at::Tensor());
    }
  }
  buffers.put_back = [places, dicts = std::move(dicts), modes = std::move(modes)] {
    const Section section;
    for (std::size_t i = 0; i < dicts.size(); ++i) {
      const auto& place = (*places)[i];
      set_mode(place.module.get(), modes[i]);
      if (place.buffers) set_items(place.buffers.get(), dicts[i].get());
    }
  };
  return buffers;
}

std::vector<at::Tensor> PythonLayer::parameters() const {
  const Section section;
  return tensors_of(module_.get()).parameters;
}

void PythonLayer::check_not_replaced() const {
  const auto present = tensors_of(module_.get()).parameters;
  auto found = present.begin();
  const auto& mirrored = mirrored_.parameters;
  const bool all_found = std::all_of(mirrored.begin(), mirrored.end(), [&](const at::Tensor& parameter) {
    found = std::find_if(found, present.end(), [&](const at::Tensor& each) { return each.is_same(parameter); });
    return found != present.end();
  });
  if (all_found) return;
  throw std::runtime_error("[gpipe] the forward cannot be recomputed: parameters of layer '" + name_ +
                           "' were replaced between the forward and its backward, as torch.func.functional_call does; "
                           "use checkpoint='never'");
}

int PythonLayer::traverse(absl::FunctionRef<int(PyObject*)> visit) const {
  std::vector<PyObject*> held{module_.get()};
  for (const auto& skip : skips_) held.push_back(skip.module.get());
  const auto places = known_places();  // keeps them until they have been visited
  if (places) {
    for (const auto& place : *places) {
      held.insert(held.end(), {place.module.get(), place.buffers.get(), place.children.get()});
    }
  }
  for (auto* object : held) {
    if (const int result = object == nullptr ? 0 : visit(object); result != 0) return result;
  }
  return 0;
}

Value call(PyObject* callable, std::vector<Value> arguments, ThreadStates& states) {
  states.create_for_this_thread();
  const Section section;
  py::tuple converted(arguments.size());
  for (std::size_t i = 0; i < arguments.size(); ++i) converted[i] = to_python(std::exchange(arguments[i], {}));
  const ContextScope context;
  PyObject* result = nullptr;
  try {
    result = PyObject_CallObject(callable, converted.ptr());  // has no objects that an unwinding would destroy
  } catch (abi::__forced_unwind&) {
    sleep_for_good();  // the interpreter finished while the callable waited
  }
  if (result == nullptr) throw py::error_already_set();
  return to_value(py::reinterpret_steal<py::object>(result));
}

}  // namespace gpipe::python
