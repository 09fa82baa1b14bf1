// Generated jobs of one or several ranks in one process, with faults.

#include <array>

#include "gpipe/mesh.h"
#include "tests/ranks/fake_rank.h"

namespace gpipe::testing {
namespace {

constexpr int kJobs = 120;

const std::vector<std::string> kFaults = {"no fault", "late", "throw", "death", "stop"};

RankFault draw_fault(std::mt19937_64& random, const GeneratedJob& job) {
  RankFault fault;
  const int kind = draw(random, 0, 9);
  if (kind < 4) return fault;
  fault.kind = std::array{RankFault::kLate,  RankFault::kThrow, RankFault::kThrow,
                          RankFault::kDeath, RankFault::kDeath, RankFault::kStop}[kind - 4];
  if (job.size() == 1) fault.kind = RankFault::kThrow;  // another rank would tell the others
  fault.rank = draw(random, 0, job.size() - 1);
  fault.call = draw(random, 0, static_cast<int>(job.calls.size()));
  if (fault.call == job.calls.size() || draw(random, 0, 3) == 0) return fault;
  int worker = 0;
  do worker = draw(random, 0, job.workers() - 1);
  while (job.ranks[worker] != fault.rank);
  const auto& list = job.programs[job.calls[fault.call].program].program.schedule()[worker];
  fault.action = list[draw(random, 0, static_cast<int>(list.size()) - 1)];
  return fault;
}

GeneratedJob generate_job(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  GeneratedJob job;
  job.seed = seed;
  for (const int programs = draw(random, 1, 2); static_cast<int>(job.programs.size()) < programs;) {
    auto generated = generate(random);
    const int workers = generated.program.workers();
    if (workers == 1 || (!job.programs.empty() && workers != job.programs.front().program.workers())) continue;
    job.programs.push_back(std::move(generated));
  }
  for (const auto& generated : job.programs) job.references.push_back(reference(generated.program));
  const int workers = job.programs.front().program.workers();
  job.ranks = Mesh{draw(random, 1, workers)}.ranks_of_workers(workers, 0);
  for (int calls = draw(random, 1, 4); calls > 0; --calls) {
    auto& call = job.calls.emplace_back();
    call.program = draw(random, 0, static_cast<int>(job.programs.size()) - 1);
    call.in_parts = job.programs[call.program].program.two_phase() && draw(random, 0, 1) == 0;
    call.sizes = draw(random, 0, 1);
  }
  job.large_pieces = draw(random, 0, 7) == 0;
  job.fault = draw_fault(random, job);
  return job;
}

std::string describe(const GeneratedJob& job) {
  std::string text = "seed " + std::to_string(job.seed) + ": " + kFaults[job.fault.kind];
  if (job.fault.kind != RankFault::kNone) {
    text += " of rank " + std::to_string(job.fault.rank) + " in call " + std::to_string(job.fault.call);
    if (job.fault.action) text += ", " + to_string(*job.fault.action);
  }
  text += "; " + std::to_string(job.calls.size()) + " calls; ranks of the workers:";
  for (const int rank : job.ranks) text += " " + std::to_string(rank);
  for (const auto& program : job.programs) text += "\n" + describe(program);
  return text;
}

/// Runs a job, and expects that the ranks know the job's fault as the first failure.
void run(const GeneratedJob& job) {
  auto sockets = connect_all(job.size());
  std::deque<FakeRank> ranks;
  std::vector<std::thread> threads;
  for (int r = 0; r < job.size(); ++r) ranks.emplace_back(job, r, std::move(sockets[r]));
  for (auto& rank : ranks) threads.emplace_back([&rank] { rank.run(); });
  for (auto& thread : threads) thread.join();
  const std::string culprit = "rank " + std::to_string(job.fault.rank);
  const std::map<int, std::string> causes = {
      {RankFault::kThrow, culprit + " was struck"},
      {RankFault::kDeath, culprit + " was lost"},
      {RankFault::kStop, " did not answer in time"}};  // others run out of time too
  const auto cause = causes.find(job.fault.kind);
  for (int r = 0; r < job.size(); ++r) {
    EXPECT_EQ(ranks[r].failed(), cause != causes.end()) << "rank " << r;
    if (job.fault.kind == RankFault::kDeath && r == job.fault.rank) continue;
    const auto failure = ranks[r].failure();
    EXPECT_EQ(failure.empty(), cause == causes.end()) << "rank " << r << ": " << failure;
    if (cause != causes.end()) EXPECT_THAT(failure, HasSubstr(cause->second)) << "rank " << r;
  }
}

TEST(GeneratedJobs, EqualTheReferenceOrEndWithTheFault) {
  const auto seeds = seeds_from_environment(kJobs);
  std::set<std::string> seen;
  for (auto seed = seeds.first; seed < seeds.first + seeds.count; ++seed) {
    const auto job = generate_job(seed);
    run(job);
    ASSERT_FALSE(HasFailure()) << describe(job);
    for (const auto& program : job.programs) seen.insert(program.schedule);
    seen.insert(kFaults[job.fault.kind]);
  }
  if (seeds.count < kJobs) return;
  EXPECT_EQ(seen.size(), kFaults.size() + schedule_rules().size()) << "a fault or a schedule never occurred";
}

}  // namespace
}  // namespace gpipe::testing
