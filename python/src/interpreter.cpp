#include "python/src/interpreter.h"

#include <cxxabi.h>
#include <pthread.h>
#include <torch/csrc/PyInterpreter.h>

#include <atomic>
#include <chrono>
#include <optional>
#include <stdexcept>
#include <thread>

namespace gpipe::python {
namespace {

namespace py = pybind11;
using TransferredObjects = at::impl::ThreadLocalPythonObjects;

constexpr auto kContext = "gpipe.context";

constexpr std::chrono::seconds kExitTimeout{1};

struct Exiting : std::runtime_error {
  Exiting() : std::runtime_error("[gpipe] the Python interpreter is exiting") {}
};

// A new call increments the count, then reads the flag. Exit sets the flag, then reads the count. So at least one of
// them sees the other.
std::atomic<int> calls = 0;
std::atomic<bool> exiting = false;

#if PY_VERSION_HEX < 0x030D0000
bool finalizing() { return _Py_IsFinalizing() != 0; }
#else
bool finalizing() { return Py_IsFinalizing() != 0; }
#endif

bool alive() { return Py_IsInitialized() != 0 && !finalizing(); }

/// Calls f, which takes the interpreter's lock. Stops the thread if the interpreter has finished.
template <typename F>
auto take_lock(F f) {
  try {
    return f();
  } catch (abi::__forced_unwind&) {  // how a finished interpreter ends a thread
    sleep_for_good();
  }
}

/// Calls f as a Call, or does nothing once exit has begun.
template <typename F>
void unless_exiting(F f) try {
  const Call call;
  f();
} catch (const Exiting&) {
}

/// Removes the entry that threading.current_thread() added for a thread of the library. A Python thread that has got
/// the same number since keeps its entry.
void remove_dummy_thread(unsigned long thread) try {
  const auto threading = py::module_::import("threading");
  const py::dict active = threading.attr("_active");
  const py::int_ key(thread);
  if (active.contains(key) && py::isinstance(active[key], threading.attr("_DummyThread"))) {
    PyDict_DelItem(active.ptr(), key.ptr());
  }
} catch (const py::error_already_set&) {
}

}  // namespace

Call::Call() {
  ++calls;
  if (!exiting) return;
  --calls;
  throw Exiting();
}

Call::~Call() { --calls; }

void sleep_for_good() {
  for (;;) pause();
}

Released::~Released() {
  take_lock([this] { PyEval_RestoreThread(state_); });
}

Section::Section(Pending error) : state_(take_lock(PyGILState_Ensure)) {
  if (error == Pending::kRestore) pending_.emplace();
  PyErr_Clear();  // PyTorch's engine leaves the error of a failed backward set on its thread
}

Section::~Section() {
  pending_.reset();
  PyGILState_Release(state_);
}

void await_calls_at_exit() {
  exiting = true;
  const Released released;
  const auto end = std::chrono::steady_clock::now() + kExitTimeout;
  while (calls > 0 && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

void reset_calls_after_fork() {
  pthread_atfork(nullptr, nullptr, [] { calls = 0; });
}

Reference reference_to(PyObject* object) {
  Py_INCREF(object);
  return Reference(object, [](PyObject* held) {
    if (!alive()) return;
    if (PyGILState_Check() != 0) {
      Py_DECREF(held);
      return;
    }
    unless_exiting([held] {
      take_lock([held] {
        const auto state = PyGILState_Ensure();
        Py_DECREF(held);
        PyGILState_Release(state);
      });
    });
  });
}

SharedContext::SharedContext() : before_(TransferredObjects::get_state()) {
  auto* context = PyContext_CopyCurrent();
  if (context == nullptr) throw py::error_already_set();
  TransferredObjects::set(kContext, std::make_shared<c10::SafePyObject>(context, getPyInterpreter()));
}

SharedContext::~SharedContext() { TransferredObjects::set_state(before_); }

// Cells run concurrently, and a context can be entered once. So each has a copy, which also hides its changes.
ContextScope::ContextScope() {
  if (!TransferredObjects::contains(kContext)) return;
  context_ =
      py::reinterpret_steal<py::object>(PyContext_Copy(TransferredObjects::get(kContext)->ptr(getPyInterpreter())));
  if (!context_ || PyContext_Enter(context_.ptr()) != 0) throw py::error_already_set();
}

ContextScope::~ContextScope() {
  if (!context_) return;
  const py::error_scope pending;
  PyContext_Exit(context_.ptr());
}

void copy_backward_context() {
  constexpr auto kName = "context";  // torch/autograd/graph.py sets it
  if (!TransferredObjects::contains(kName)) return;
  const Section section;
  auto* original = TransferredObjects::get(kName)->ptr(getPyInterpreter());
  if (original == Py_None) return;  // after a backward
  const auto context = py::reinterpret_steal<py::object>(PyContext_Copy(original));
  if (!context) throw py::error_already_set();
  // The reference, unlike a SafePyObject, can be dropped while the interpreter exits.
  const auto drop = [copy = reference_to(context.ptr())](c10::SafePyObject* object) {
    object->release();
    delete object;
  };
  TransferredObjects::set(kName, {new c10::SafePyObject(context.ptr(), getPyInterpreter()), drop});
}

// Python treats a thread that deletes the state of another thread as having no state of its own from then on. So a
// temporary thread deletes the states.
ThreadStates::~ThreadStates() {
  if (states_.empty() || getpid() != process_ || !alive()) return;
  unless_exiting([this] {
    std::thread cleaner([this] {
      take_lock(PyGILState_Ensure);
      for (const auto& [state, thread] : states_) {
        PyThreadState_Clear(state);
        PyThreadState_Delete(state);
        remove_dummy_thread(thread);
      }
      PyThreadState_Clear(PyThreadState_Get());
      PyThreadState_DeleteCurrent();
    });
    std::optional<Released> released;
    if (PyGILState_Check() != 0) released.emplace();
    cleaner.join();
  });
}

void ThreadStates::create_for_this_thread() {
  if (PyGILState_GetThisThreadState() != nullptr) return;
  const Call call;
  take_lock(PyGILState_Ensure);
  states_.push_back({PyThreadState_Get(), PyThread_get_thread_ident()});
  PyEval_SaveThread();
}

}  // namespace gpipe::python
