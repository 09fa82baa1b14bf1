// Tests that run as jobs of several processes.
#pragma once

#include "gpipe/ranks.h"
#include "gpipe/snapshot.h"
#include "tests/gpipe/helpers.h"

namespace gpipe {

using std::chrono::milliseconds;
using std::chrono::seconds;

/// How a process ended.
struct End {
  int status = 0;  ///< exit status, or minus the signal that ended it
  std::string output;
};

/// Time-outs that are long enough for a busy machine.
inline RanksOptions patient() { return RanksOptions().timeout(seconds(20)).join_timeout(seconds(20)); }

struct JobOptions {
  RanksOptions ranks = patient();
  std::function<void(int rank)> before = nullptr;  ///< called in each process before its Ranks are made
  seconds limit{60};                               ///< processes that still run then are killed
};

/// What a process of a job does.
using Body = std::function<void(std::shared_ptr<Ranks>)>;

/// Calls `body` in `size` forked processes, each of which ends with status 0 if no expectation failed, 1 if one did, 2
/// for an exception. Returns how they ended. Stopped processes are killed when the others have ended. REQUIRES: this
/// process has no threads, which a fork would lose.
std::vector<End> run_job(int size, const Body& body, const JobOptions& options = {});

/// The same, and expects each process to end with status 0.
void expect_job(int size, const Body& body, const JobOptions& options = {});

/// RANKS_TEST(suite, name, size, options...) { ... } is a test whose body runs as a job, with `ranks`.
#define RANKS_TEST(suite, name, size, ...)                                           \
  void suite##_##name(const std::shared_ptr<Ranks>& ranks);                          \
  TEST(suite, name) { expect_job(size, suite##_##name __VA_OPT__(, ) __VA_ARGS__); } \
  void suite##_##name([[maybe_unused]] const std::shared_ptr<Ranks>& ranks)

/// Expects that the other ranks ended with an exception that names the cause.
void expect_failed(const std::vector<End>& ends, int culprit, const std::string& cause);

/// Makes Ranks of the same job of `size` ranks, independent of those before, in a process of a job. All ranks call this
/// equally often.
std::shared_ptr<Ranks> new_ranks(int size, RanksOptions options = patient());

/// The message of the exception that a function throws; "nothing" if it throws none.
std::string message_from(const std::function<void()>& function);

/// What calls leave, by name.
using Record = std::map<std::string, Tensor>;

/// Expects that one process's record has the same bits for all that is in a rank's record.
void expect_part_of(const Record& part, const Record& whole);

/// The gradients of the parameters on this rank.
Record gradients_of(const GPipe& pipe);

/// A folder of the job, which is removed at its end.
std::filesystem::path job_folder();

}  // namespace gpipe
