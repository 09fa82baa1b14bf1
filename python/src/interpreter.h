#pragma once

#include <ATen/ThreadLocalPythonObjects.h>
#include <Python.h>
#include <pybind11/pybind11.h>
#include <sys/types.h>
#include <unistd.h>

#include <memory>
#include <optional>
#include <vector>

namespace gpipe::python {

/// Base of classes whose objects cannot be copied.
struct Pinned {
  Pinned() = default;
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
};

/// Stops the calling thread for the rest of the process. For threads that a finished interpreter would end: unwinding
/// their stacks would destroy objects that the process still uses.
[[noreturn]] void sleep_for_good();

/// Counts a call that has released the interpreter's lock and will take it again. Exit waits for all calls to end.
/// Errors: std::runtime_error once exit has begun.
class Call : Pinned {
 public:
  Call();
  ~Call();
};

/// Holds the interpreter's lock for its lifetime, on any thread. Exit waits up to one second for all sections to end.
/// Then a thread that asks for the lock sleeps for good. Errors: std::runtime_error once exit has begun.
class Section : Pinned {
 public:
  /// What happens to a Python error that is already set on this thread.
  enum class Pending {
    kDrop,
    kRestore,  ///< it is set again when the section ends
  };
  explicit Section(Pending error = Pending::kDrop);
  ~Section();

 private:
  const Call call_;
  PyGILState_STATE state_;
  std::optional<pybind11::error_scope> pending_;
};

/// Releases the interpreter's lock for its lifetime. REQUIRES: the calling thread holds the lock.
class Released : Pinned {
 public:
  Released() : state_(PyEval_SaveThread()) {}
  ~Released();

 private:
  PyThreadState* state_;
};

/// Calls f() without the interpreter's lock. REQUIRES: the calling thread holds the lock. Errors: as f and Call.
template <typename F>
auto released(F f) {
  const Call call;
  const Released release;
  return f();
}

/// For exit: makes new calls and sections throw, and waits up to one second for the present ones to end.
void await_calls_at_exit();

/// Makes forked processes start without calls to wait for.
void reset_calls_after_fork();

/// Owns a Python object. May be destroyed on any thread, with or without the lock. After exit the object is leaked.
using Reference = std::shared_ptr<PyObject>;
Reference reference_to(PyObject* object);

/// For its lifetime, threads that take over the calling thread's PyTorch state, as workers do, find a copy of its
/// context variables. REQUIRES: the interpreter's lock.
class SharedContext : Pinned {
 public:
  SharedContext();
  ~SharedContext();

 private:
  const at::impl::ThreadLocalPythonObjects before_;
};

/// For its lifetime, this thread has a copy of the context variables that it finds. REQUIRES: the interpreter's lock.
class ContextScope : Pinned {
 public:
  ContextScope();
  ~ContextScope();

 private:
  pybind11::object context_;  // null if there is none to find
};

/// Gives this thread a copy of the context variables that torch hands to the backwards of compiled layers, if any.
/// Torch 2.12 enters them, which only one thread at a time can.
void copy_backward_context();

/// The Python thread states of a pipeline's workers. A worker keeps its state from call to call, so that
/// threading.local lasts. May be destroyed on any thread, after the workers have ended.
class ThreadStates : Pinned {
 public:
  ~ThreadStates();

  /// Creates a state for the calling thread, unless it has one. REQUIRES: the thread does not hold the interpreter's
  /// lock and has had no Section yet.
  void create_for_this_thread();

 private:
  struct ThreadState {
    PyThreadState* state;
    unsigned long thread;
  };
  const pid_t process_ = getpid();   // in a forked process, Python has freed the states
  std::vector<ThreadState> states_;  // guarded by the interpreter's lock
};

}  // namespace gpipe::python
