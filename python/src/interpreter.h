#pragma once

#include <Python.h>
#include <pybind11/pybind11.h>
#include <sys/types.h>
#include <unistd.h>

#include <memory>
#include <optional>
#include <vector>

namespace gpipe::python {

/// What a thread does that the interpreter, having exited, wants to end: it must not unwind what the process may still
/// use.
[[noreturn]] void sleep_for_good();

/// While one lives, exit waits: for a call that has released the interpreter's lock and will want it back.
/// Errors: std::runtime_error once the interpreter exits.
class Call {
 public:
  Call();
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
};

/// Runs Python code on a thread of the library's own, or on one that has released the interpreter's lock: takes the
/// lock for its lifetime. Once the interpreter has exited, it ends each thread that asks for the lock, which C++ frames
/// do not survive; so exit waits, for a second, until no Section lives, and then there can be no more. A thread that
/// takes longer sleeps for good when it asks; exit does not wait for it.
///
/// Errors: std::runtime_error once the interpreter exits.
class Section {
 public:
  /// An error of Python's that is set on this thread is dropped, or kept for the section's end.
  enum class Pending { kDrop, kKeep };
  explicit Section(Pending error = Pending::kDrop);
  ~Section();
  Section(const Section&) = delete;
  Section& operator=(const Section&) = delete;

 private:
  const Call call_;
  PyGILState_STATE state_;
  std::optional<pybind11::error_scope> kept_;
};

/// Releases the interpreter's lock, which the caller holds, for its lifetime.
class Released {
 public:
  Released() : state_(PyEval_SaveThread()) {}
  ~Released();
  Released(const Released&) = delete;
  Released& operator=(const Released&) = delete;

 private:
  PyThreadState* state_;
};

/// Calls f() without the interpreter's lock, which the caller holds. Errors: those of f and of Call.
template <typename F>
auto released(F f) {
  const Call call;
  const Released release;
  return f();
}

/// Ends, at exit, what is under way: every Section that would begin throws.
void await_calls_at_exit();
/// In a forked process nothing is under way.
void forget_calls_in_forked_processes();

/// A reference that may be dropped on any thread, with the interpreter's lock or without; lost at exit.
using Reference = std::shared_ptr<PyObject>;
Reference reference_to(PyObject* object);

/// The Python thread states of a pipeline's workers. Each keeps its own for as long as this lives, so that
/// threading.local and the like last from call to call. Destroyed, on any thread, when the workers have ended; in a
/// forked process Python has freed the states itself.
class ThreadStates {
 public:
  ThreadStates() = default;
  ~ThreadStates();
  ThreadStates(const ThreadStates&) = delete;
  ThreadStates& operator=(const ThreadStates&) = delete;

  /// Gives the calling thread a state, unless it has one. To be called without the interpreter's lock, before the
  /// thread's first Section.
  void keep_for_this_thread();

 private:
  struct Kept {
    PyThreadState* state;
    unsigned long thread;
  };
  const pid_t process_ = getpid();
  std::vector<Kept> kept_;  // guarded by the interpreter's lock
};

}  // namespace gpipe::python
