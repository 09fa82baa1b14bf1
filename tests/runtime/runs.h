#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <optional>
#include <string>

#include "gpipe/runtime/executor.h"
#include "gpipe/schedule/generators.h"
#include "tests/runtime/fake_cells.h"
#include "tests/schedule/programs.h"

namespace gpipe::testing {

/// An exception that is not a std::exception.
struct Fault {
  Action action;
};

/// A program with every kind of action, and a skip over the middle stage.
inline Program every_kind() {
  return make(straight(3, 4), with_skips(chain(3, 2), {{0, 2}}, 3),
              lists({"0F0 0F1 0F2 0R0 0B0 0F3 0R1 0I1 0W1 0I2 0B3 0W2", "1F0 1F1 1R0 1B0 1F2 1I1 1F3 1R2 1B2 1W1 1B3",
                     "2F0 2I0 2F1 2W0 2R1 2B1 2F2 2B2 2F3 2I3 2W3"}));
}

/// GPipe's program with edges of capacity 1.
inline Program gpipe_program(int stages, int micro_batches, Checkpoint checkpoint = Checkpoint::kExceptLast) {
  const auto layout = straight(stages, micro_batches);
  return make(layout, chain(stages, 1), fill_drain(layout, checkpoint));
}

inline void expect_success(const std::optional<Failure>& failure) {
  if (!failure) return;
  try {
    std::rethrow_exception(failure->error);
  } catch (const std::exception& error) {
    ADD_FAILURE() << "failed" << (failure->action ? " in " + to_string(*failure->action) : "") << ": " << error.what();
  }
}

inline void expect_reference(const Program& program, const FakeCells& cells) {
  const auto expected = reference(program);
  EXPECT_EQ(cells.outputs, expected.outputs);
  EXPECT_EQ(cells.weights, expected.weights);
}

/// Runs all of the program with random delays and compares with the reference.
inline void expect_runs(Executor& executor, const Program& program, unsigned seed) {
  FakeCells cells(program, seed);
  expect_success(executor.run(program, Part::kAll, cells));
  EXPECT_EQ(cells.ran, program.schedule());
  expect_reference(program, cells);
}

/// REQUIRES: the error is a std::exception.
inline std::string message(const Failure& failure) {
  try {
    std::rethrow_exception(failure.error);
  } catch (const std::exception& error) {
    return error.what();
  }
}

}  // namespace gpipe::testing
