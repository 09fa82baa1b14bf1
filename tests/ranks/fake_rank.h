// A rank of a generated job, and what can go wrong on it.
#pragma once

#include <atomic>
#include <cstring>
#include <mutex>

#include "tests/ranks/wires.h"
#include "tests/runtime/fake_cells.h"
#include "tests/runtime/generated_programs.h"

namespace gpipe::testing {

/// One call of all ranks: which program they run, and which sizes its messages have.
struct RanksCall {
  int program = 0;
  bool in_parts = false;
  std::uint64_t sizes = 0;
};

/// What goes wrong on one rank, before a call or in one of its actions.
struct RankFault {
  enum Kind { kNone, kLate, kThrow, kDeath, kStop };
  Kind kind = kNone;
  int rank = 0;
  std::size_t call = 0;  ///< the number of calls: after the last one
  std::optional<Action> action;
};

/// What a seed stands for.
struct GeneratedJob {
  std::uint64_t seed = 0;
  std::vector<GeneratedProgram> programs;  ///< with the same number of workers
  std::vector<FakeCells> references;       ///< by program
  std::vector<int> ranks;                  ///< by worker
  std::vector<RanksCall> calls;
  bool large_pieces = false;
  RankFault fault;

  int workers() const { return static_cast<int>(ranks.size()); }
  int size() const { return ranks.back() + 1; }
};

/// The first failure of any rank.
struct Cause {
  std::mutex mutex;
  bool is_known = false;
  RankFault::Kind kind = RankFault::kNone;  ///< as the ranks see it; kNone for an error that no fault explains
  int rank = -1;                            ///< that threw, or that did not answer
  std::string text;
};

/// One rank of a job, as a process would be: workers, wires, and the calls that all ranks make. Between calls all ranks
/// meet, so that each of them learns of any failure.
class FakeRank {
 public:
  FakeRank(const GeneratedJob& job, int rank, FakeNetwork& network, Cause& cause)
      : job_(job),
        rank_(rank),
        network_(network),
        cause_(cause),
        limit_(job.fault.kind == RankFault::kStop ? kShortLimit : kLongLimit) {}

  /// Makes all calls and checks their results. Reports the first error, which ends it.
  void run() {
    Wires wires(network_.of(rank_), /*first=*/5, /*count=*/1000, limit_, allocate);
    try {
      make_calls(wires);
    } catch (...) {
      failed_ = true;
      report(std::current_exception(), awaited_);
    }
  }
  /// Whether run() has ended with an error.
  bool failed() const { return failed_; }

 private:
  /// What a fault throws.
  struct Struck {};

  /// Sends with each number a piece of memory that is filled with it.
  class Cells : public FakeCells {
   public:
    Cells(FakeRank& rank, std::size_t call, const Program& program)
        : FakeCells(program, rank.job_.seed), rank_(rank), call_(rank.job_.calls[call]), program_(program) {
      on_action = [this, call](const Action& action) { rank_.strike(call, action); };
    }

    void begin(Part part, Wires& wires) {
      wires_ = &wires;
      edges_.emplace(wires, program_, part, rank_.job_.ranks, rank_.rank_,
                     LayoutKey{call_.program, static_cast<int>(part)}, rank_.limit_);
    }

    void on_worker(int worker, absl::FunctionRef<void()> run_actions) override {
      FakeCells::on_worker(worker, run_actions);
      // Waits for deliveries, as wires between devices do. So workers that wait for each other are a failure of the
      // test.
      edges_->settle(worker, [&](int from, int to) {
        const auto& ranks = rank_.job_.ranks;
        if (ranks[from] != rank_.rank_) return;
        wires_->sender(from * program_.workers() + to, ranks[to]).drain(rank_.limit_);
      });
    }
    void run(const Action& action, Measure measure) override {
      edges_->receive(action, [this](const auto& message, auto incoming) { put_on(message, std::move(incoming)); });
      FakeCells::run(action, measure);
      edges_->send(action, [this](const auto& message) { return take_off(message); });
    }
    void cancel(const Failure& failure) noexcept override {
      rank_.report(failure.error, edges_->activity(failure.worker).awaits);
    }

   private:
    /// The size of what an action puts on an edge.
    std::size_t size_of(const Action& action, int edge) const {
      const auto kind = static_cast<int>(action.kind);
      std::mt19937_64 random(((call_.sizes * 8 + kind) * 1000 + action.stage * 64 + edge) * 1000 + action.micro_batch);
      if (rank_.job_.large_pieces && draw(random, 0, 7) == 0) return kLarge + draw(random, 0, 1);
      return draw(random, 0, 2) == 0 ? 0 : draw(random, 1, 100);
    }

    Outgoing take_off(const WireMessage& message) {
      Strings content(1);
      for (const int edge : message.edges) {
        const Number number = consume(slot(edge, message.action));
        content.front().append(reinterpret_cast<const char*>(&number), sizeof number);
        content.emplace_back(size_of(message.action, edge), static_cast<char>(number));
      }
      return testing::message(std::move(content));
    }

    void put_on(const WireMessage& message, std::unique_ptr<Incoming> incoming) {
      const auto received = strings(std::move(incoming));
      if (received.size() != 1 + message.edges.size()) throw std::logic_error("a message has other pieces");
      for (std::size_t k = 0; k < message.edges.size(); ++k) {
        Number number = 0;
        std::memcpy(&number, received.front().data() + k * sizeof number, sizeof number);
        const std::string sent(size_of(message.action, message.edges[k]), static_cast<char>(number));
        if (received[1 + k] != sent) throw std::logic_error("a piece has other bytes than were sent");
        produce(slot(message.edges[k], message.action), number);
      }
    }

    FakeRank& rank_;
    const RanksCall& call_;
    const Program& program_;
    Wires* wires_ = nullptr;            // of the part that runs
    std::optional<RemoteEdges> edges_;  // of the part that runs
  };

  void make_calls(Wires& wires) {
    const auto first = std::find(job_.ranks.begin(), job_.ranks.end(), rank_) - job_.ranks.begin();
    const auto here = static_cast<int>(std::count(job_.ranks.begin(), job_.ranks.end(), rank_));
    Executor executor(here, nullptr, static_cast<int>(first));
    for (std::size_t call = 0; call < job_.calls.size(); ++call) {
      strike(call, std::nullopt);
      meet(call, wires);
      make_call(call, wires, executor);
    }
    strike(job_.calls.size(), std::nullopt);
    meet(job_.calls.size(), wires);
  }

  void make_call(std::size_t call, Wires& wires, Executor& executor) {
    const auto& [number, in_parts, sizes] = job_.calls[call];
    const auto& program = job_.programs[number].program;
    Cells cells(*this, call, program);
    for (const auto part : in_parts ? std::vector{Part::kForward, Part::kBackward} : std::vector{Part::kAll}) {
      cells.begin(part, wires);
      const auto failure = executor.run(program, part, cells);
      if (failure) std::rethrow_exception(failure->error);
    }
    for (int w = 0; w < program.workers(); ++w) {
      EXPECT_EQ(cells.ran[w], job_.ranks[w] == rank_ ? program.schedule()[w] : std::vector<Action>());
    }
    for (int s = 0; s < program.layout().stages; ++s) {
      if (job_.ranks[program.layout().placement[s]] != rank_) continue;
      EXPECT_EQ(cells.outputs[s], job_.references[number].outputs[s]) << "stage " << s;
      EXPECT_EQ(cells.weights[s], job_.references[number].weights[s]) << "stage " << s;
    }
  }

  /// All ranks tell rank 0, and then it tells them.
  void meet(std::size_t call, Wires& wires) {
    const auto number = [&](int from, int to) { return job_.workers() * job_.workers() + from * job_.size() + to; };
    const auto send = [&](int to) {
      auto& last = wires.last_layouts(number(rank_, to), {}, 1).front();
      awaited_ = to;
      wires.sender(number(rank_, to), to).send(last, call, message({"word"}));
    };
    const auto receive = [&](int from) {
      auto& wire = wires.receiver(number(from, rank_), from, limit_);
      wire.expect(wires.last_layouts(number(from, rank_), {}, 1), 1);
      awaited_ = from;
      wire.receive(call);
    };
    if (rank_ == 0) {
      for (int r = 1; r < job_.size(); ++r) receive(r);
      for (int r = 1; r < job_.size(); ++r) send(r);
    } else {
      send(0);
      receive(0);
    }
    awaited_ = -1;
  }

  /// Lets the job's fault happen, if this is its place.
  void strike(std::size_t call, const std::optional<Action>& action) {
    const auto& fault = job_.fault;
    if (fault.rank != rank_ || fault.call != call || fault.action != action) return;
    if (fault.kind == RankFault::kLate) std::this_thread::sleep_for(kShortLimit / 4);
    if (fault.kind == RankFault::kStop) {
      network_.stop(rank_);
      network_.await_the_others_end(rank_);
    }
    if (fault.kind == RankFault::kDeath) {
      dead_ = true;
      network_.of(rank_).close();
    }
    if (fault.kind == RankFault::kDeath || fault.kind == RankFault::kThrow) throw Struck();
  }

  /// Reports before it closes, so that what the other ranks see then comes later.
  void report(const std::exception_ptr& error, int awaited) {
    if (dead_) return;
    try {
      std::rethrow_exception(error);
    } catch (const Struck&) {
      note(RankFault::kThrow, rank_, "struck");
    } catch (const TimeoutError& timeout) {
      note(RankFault::kStop, awaited, timeout.what());
    } catch (const ConnectionError& lost) {
      note(RankFault::kDeath, awaited, lost.what());
    } catch (const std::exception& other) {
      note(RankFault::kNone, rank_, other.what());
    }
    network_.of(rank_).close();
  }
  void note(RankFault::Kind kind, int rank, const std::string& text) {
    std::lock_guard lock(cause_.mutex);
    if (std::exchange(cause_.is_known, true)) return;
    cause_.kind = kind;
    cause_.rank = rank;
    cause_.text = text;
  }

  const GeneratedJob& job_;
  const int rank_;
  FakeNetwork& network_;
  Cause& cause_;
  const std::chrono::milliseconds limit_;
  int awaited_ = -1;  // in a meeting
  std::atomic<bool> dead_ = false;
  bool failed_ = false;
};

}  // namespace gpipe::testing
