#pragma once

#include <chrono>
#include <exception>
#include <optional>
#include <thread>

#include "gpipe/runtime/executor.h"
#include "gpipe/schedules.h"
#include "tests/schedule/programs.h"

namespace gpipe::testing {

/// Cells that compute with plain integers instead of tensors. They use no atomics and no locks, so that ThreadSanitizer
/// checks whether the executor orders the accesses. Every number depends on all its inputs: a value that is lost,
/// swapped or read too early changes the results. An action throws if what it needs is missing, or if it runs twice.
class FakeCells : public ActionRunner {
 public:
  using Number = std::uint64_t;

  /// If the seed is not 0, actions take random times.
  explicit FakeCells(const Program& program, std::uint64_t seed = 0)
      : ran(program.workers()),
        threads(program.workers()),
        outputs(program.layout().stages, Column(program.layout().micro_batches)),
        weights(program.layout().stages),
        program_(program),
        seed_(seed),
        forward_(program.edges().size(), Column(program.layout().micro_batches)),
        backward_(forward_),
        stored_(outputs),
        graphs_(outputs),
        pending_(outputs) {}

  void on_worker(int worker, absl::FunctionRef<void()> run_actions) override {
    threads[worker].push_back(std::this_thread::get_id());
    if (before) before(worker);
    run_actions();
    if (after) after(worker);
  }

  void run(const Action& action, Measure measure) override {
    measure([&] { run(action); });
  }

  void run(const Action& action) {
    const auto& [kind, s, m] = action;
    ran[program_.layout().placement[s]].push_back(action);
    if (seed_ != 0) dally(action);
    if (on_action) on_action(action);
    switch (kind) {
      case Kind::F: {
        Number input = mix(s + 1, m + 1);
        for (const int e : program_.in_edges(s)) input = mix(input, consume(forward_[e][m]));
        outputs[s][m] = mix(input, 1);
        if (program_.recomputes(s, m)) {
          produce(stored_[s][m], input);
        } else if (program_.has_backward()) {
          produce(graphs_[s][m], outputs[s][m]);
        }
        for (const int e : program_.out_edges(s)) produce(forward_[e][m], mix(outputs[s][m], e));
        break;
      }
      case Kind::R:
        produce(graphs_[s][m], mix(consume(stored_[s][m]), 1));
        break;
      case Kind::B:
        weights[s] += input_gradient(s, m);
        break;
      case Kind::I:
        produce(pending_[s][m], input_gradient(s, m));
        break;
      case Kind::W:
        weights[s] += consume(pending_[s][m]);
        break;
    }
  }

  std::vector<std::vector<Action>> ran;               ///< per worker
  std::vector<std::vector<std::thread::id>> threads;  ///< per worker and run
  std::vector<std::vector<Number>> outputs;           ///< per stage and micro-batch
  std::vector<Number> weights;                        ///< per stage: the sum of the gradients
  std::function<void(const Action&)> on_action;
  std::function<void(int)> before;
  std::function<void(int)> after;

 protected:
  using Column = std::vector<Number>;

  static void produce(Number& slot, Number number) {
    if (slot != 0) throw std::logic_error("slot is full");
    slot = number;
  }

  static Number consume(Number& slot) {
    if (slot == 0) throw std::logic_error("slot is empty");
    return std::exchange(slot, 0);
  }

  /// The slot of what an action puts on an edge.
  Number& slot(int edge, const Action& action) {
    return (action.kind == Kind::F ? forward_ : backward_)[edge][action.micro_batch];
  }

 private:
  static Number mix(Number a, Number b) {
    Number x = a * 0x9E3779B97F4A7C15u + b + 0x632BE59BD9B4E019u;
    x = (x ^ (x >> 29)) * 0xBF58476D1CE4E5B9u;
    return (x ^ (x >> 32)) | 1;  // never 0, which means empty
  }

  /// Takes up to 50 µs, mostly nothing. Depends on the arguments only, so that threads share nothing.
  void dally(const Action& action) const {
    const Number number = mix(mix(seed_, action.stage * 5 + static_cast<int>(action.kind)), action.micro_batch) / 2;
    const Number choice = number % 16;
    const Number amount = number / 16 % 64;
    if (choice == 0) std::this_thread::sleep_for(std::chrono::microseconds(amount % 50));
    if (choice >= 1 && choice <= 3) {
      for (Number i = 0; i < amount % 4; ++i) std::this_thread::yield();
    }
    if (choice >= 4 && choice <= 7) {
      for (volatile Number i = 0; i < 32 * amount;) i = i + 1;
    }
  }

  Number input_gradient(int s, int m) {
    Number gradient = consume(graphs_[s][m]);
    for (const int e : program_.out_edges(s)) gradient = mix(gradient, consume(backward_[e][m]));
    for (const int e : program_.in_edges(s)) produce(backward_[e][m], mix(gradient, e));
    return gradient;
  }

  const Program& program_;
  const std::uint64_t seed_;
  std::vector<Column> forward_;   // per edge and micro-batch
  std::vector<Column> backward_;  // per edge and micro-batch
  std::vector<Column> stored_;    // this and the following: per stage and micro-batch
  std::vector<Column> graphs_;
  std::vector<Column> pending_;
};

/// Computes the program's results on this thread: forwards by ascending stage, then the rest by descending stage.
inline FakeCells reference(const Program& program) {
  FakeCells cells(program);
  const auto pass = [&](int s, bool forward) {
    for (const Action& action : program.schedule()[program.layout().placement[s]]) {
      if (action.stage == s && (action.kind == Kind::F) == forward) cells.run(action);
    }
  };
  for (int s = 0; s < program.layout().stages; ++s) pass(s, true);
  for (int s = program.layout().stages; s-- > 0;) pass(s, false);
  return cells;
}

/// An exception that is not a std::exception.
struct Fault {
  Action action;
};

/// REQUIRES: the error is a std::exception.
inline std::string message(const Failure& failure) {
  return error_of<std::exception>([&] { std::rethrow_exception(failure.error); });
}

inline void expect_success(const std::optional<Failure>& failure) {
  if (!failure) return;
  ADD_FAILURE() << "failed" << (failure->action ? " in " + to_string(*failure->action) : "") << ": "
                << message(*failure);
}

inline void expect_reference(const Program& program, const FakeCells& cells) {
  const auto expected = reference(program);
  EXPECT_EQ(cells.outputs, expected.outputs);
  EXPECT_EQ(cells.weights, expected.weights);
}

}  // namespace gpipe::testing
