#include "python/src/interpreter.h"

#include <cxxabi.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <optional>
#include <stdexcept>
#include <thread>

namespace gpipe::python {
namespace {

namespace py = pybind11;

constexpr std::chrono::seconds kPatience{1};

struct Exiting : std::runtime_error {
  Exiting() : std::runtime_error("[gpipe] the interpreter exits") {}
};

// Of this process's one interpreter. A thread counts itself before it looks whether the interpreter exits, and exit
// says so before it looks at the count: one of them sees the other.
std::atomic<int> under_way = 0;
std::atomic<bool> exiting = false;

#if PY_VERSION_HEX < 0x030D0000
bool finalizing() { return _Py_IsFinalizing() != 0; }
#else
bool finalizing() { return Py_IsFinalizing() != 0; }
#endif

bool alive() { return Py_IsInitialized() != 0 && !finalizing(); }

// Calls what asks for the lock.
template <typename F>
auto ask(F f) {
  try {
    return f();
  } catch (abi::__forced_unwind&) {  // the interpreter has exited
    sleep_for_good();
  }
}

// Calls f while exit waits for it; not at all once the interpreter exits.
template <typename F>
void unless_exiting(F f) try {
  const Call call;
  f();
} catch (const Exiting&) {
}

// Removes what threading.current_thread() has noted of a thread that Python had not made; unless a thread of Python's
// has got the same number since.
void forget_thread(unsigned long thread) try {
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
  ++under_way;
  if (!exiting) return;
  --under_way;
  throw Exiting();
}

Call::~Call() { --under_way; }

void sleep_for_good() {
  for (;;) pause();
}

Released::~Released() {
  ask([this] { PyEval_RestoreThread(state_); });
}

Section::Section(Pending error) : state_(ask(PyGILState_Ensure)) {
  if (error == Pending::kKeep) kept_.emplace();
  PyErr_Clear();  // PyTorch's engine leaves the error of a failed backward on its thread
}

Section::~Section() {
  kept_.reset();
  PyGILState_Release(state_);
}

void await_calls_at_exit() {
  exiting = true;
  const Released released;
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (under_way > 0 && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

void forget_calls_in_forked_processes() {
  pthread_atfork(nullptr, nullptr, [] { under_way = 0; });
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
      ask([held] {
        const auto state = PyGILState_Ensure();
        Py_DECREF(held);
        PyGILState_Release(state);
      });
    });
  });
}

// Python takes whoever deletes another thread's state to have none itself from then on: so a thread does it that has no
// more to do.
ThreadStates::~ThreadStates() {
  if (kept_.empty() || getpid() != process_ || !alive()) return;
  unless_exiting([this] {
    std::thread undertaker([this] {
      ask(PyGILState_Ensure);
      for (const auto& kept : kept_) {
        PyThreadState_Clear(kept.state);
        PyThreadState_Delete(kept.state);
        forget_thread(kept.thread);
      }
      PyThreadState_Clear(PyThreadState_Get());
      PyThreadState_DeleteCurrent();
    });
    std::optional<Released> released;
    if (PyGILState_Check() != 0) released.emplace();
    undertaker.join();
  });
}

void ThreadStates::keep_for_this_thread() {
  if (PyGILState_GetThisThreadState() != nullptr) return;
  const Call call;
  ask(PyGILState_Ensure);
  kept_.push_back({PyThreadState_Get(), PyThread_get_thread_ident()});
  PyEval_SaveThread();
}

}  // namespace gpipe::python
