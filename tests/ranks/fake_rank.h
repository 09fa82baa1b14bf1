// A rank of a generated job, and what can go wrong on it.
#pragma once

#include <atomic>
#include <cstring>

#include "tests/ranks/ends.h"
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

/// One rank of a job, as a process would be: workers, connections, and the calls that all ranks make. Between calls all
/// ranks meet, so that each of them learns of any failure.
class FakeRank {
 public:
  FakeRank(const GeneratedJob& job, int rank, std::vector<Socket> sockets)
      : job_(job),
        rank_(rank),
        limit_(job.fault.kind == RankFault::kStop ? kShortLimit : kLongLimit),
        connections_(job.size(), allocate) {
    for (const auto& socket : sockets) descriptors_.push_back(socket.get());
    add_all(connections_, rank, std::move(sockets));
  }

  /// Makes all calls and checks their results. Reports the first error, which ends it.
  void run() {
    try {
      make_calls();
    } catch (...) {
      failed_ = true;
      report(std::current_exception());
    }
  }
  /// Whether run() has ended with an error.
  bool failed() const { return failed_; }
  std::string failure() const { return connections_.failure(); }

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

    void run(const Action& action, Measure measure) override {
      const auto& placement = program_.layout().placement;
      const int worker = placement[action.stage];
      const auto& ranks = rank_.job_.ranks;
      for (const int edge : program_.wiring().takes(action)) {
        const auto& ends = program_.edges()[edge];
        const int from = placement[action.kind == Kind::F ? ends.from : ends.to];
        while (ranks[from] != rank_.rank_ && slot(edge, action) == 0) {
          auto next = rank_.connections_.receive(ranks[from], topic(from, worker), rank_.limit_, nullptr);
          const Action sender{next.label % 2 != 0 ? Kind::F : Kind::B, static_cast<int>(next.label / 2 % 1000),
                              static_cast<int>(next.label / 2000)};
          put_on(edges_of_message(sender, worker), sender, std::move(next));
        }
      }
      FakeCells::run(action, measure);
      for (int to = 0; to < static_cast<int>(ranks.size()); ++to) {
        const auto edges = ranks[to] == rank_.rank_ ? std::vector<int>() : edges_of_message(action, to);
        if (!edges.empty()) rank_.connections_.send(ranks[to], topic(worker, to), take_off(edges, action));
      }
    }
    void cancel(const Failure& failure) noexcept override { rank_.report(failure.error); }

   private:
    Topic topic(int from, int to) const { return {1, from * 100 + to}; }
    std::vector<int> edges_of_message(const Action& action, int worker) const {
      std::vector<int> edges;
      for (const int edge : program_.wiring().puts(action)) {
        const auto& ends = program_.edges()[edge];
        const int to = action.kind == Kind::F ? ends.to : ends.from;
        if (program_.layout().placement[to] == worker) edges.push_back(edge);
      }
      return edges;
    }
    /// The size of what an action puts on an edge.
    std::size_t size_of(const Action& action, int edge) const {
      const auto forward = static_cast<int>(action.kind == Kind::F);
      std::mt19937_64 random(((call_.sizes * 8 + forward) * 1000 + action.stage * 64 + edge) * 1000 +
                             action.micro_batch);
      if (rank_.job_.large_pieces && draw(random, 0, 7) == 0) return kLarge + draw(random, 0, 1);
      return draw(random, 0, 2) == 0 ? 0 : draw(random, 1, 100);
    }

    Outgoing take_off(const std::vector<int>& edges, const Action& action) {
      Strings content(1);
      for (const int edge : edges) {
        const Number number = consume(slot(edge, action));
        content.front().append(reinterpret_cast<const char*>(&number), sizeof number);
        content.emplace_back(size_of(action, edge), static_cast<char>(number));
      }
      return testing::message(std::move(content),
                              action.micro_batch * 2000 + action.stage * 2 + (action.kind == Kind::F ? 1 : 0));
    }

    void put_on(const std::vector<int>& edges, const Action& action, Received message) {
      const auto received = strings(std::move(message));
      if (received.size() != 1 + edges.size()) throw std::logic_error("a message has other pieces");
      for (std::size_t k = 0; k < edges.size(); ++k) {
        Number number = 0;
        std::memcpy(&number, received.front().data() + k * sizeof number, sizeof number);
        const std::string sent(size_of(action, edges[k]), static_cast<char>(number));
        if (received[1 + k] != sent) throw std::logic_error("a piece has other bytes than were sent");
        produce(slot(edges[k], action), number);
      }
    }

    static constexpr std::size_t kLarge = 1'000'000;
    FakeRank& rank_;
    const RanksCall& call_;
    const Program& program_;
  };

  void make_calls() {
    const auto first = std::find(job_.ranks.begin(), job_.ranks.end(), rank_) - job_.ranks.begin();
    const auto here = static_cast<int>(std::count(job_.ranks.begin(), job_.ranks.end(), rank_));
    Executor executor(here, nullptr, static_cast<int>(first));
    for (std::size_t call = 0; call < job_.calls.size(); ++call) {
      strike(call, std::nullopt);
      meet();
      make_call(call, executor);
    }
    strike(job_.calls.size(), std::nullopt);
    meet();
  }

  void make_call(std::size_t call, Executor& executor) {
    const auto& [number, in_parts, sizes] = job_.calls[call];
    const auto& program = job_.programs[number].program;
    Cells cells(*this, call, program);
    for (const auto part : in_parts ? std::vector{Part::kForward, Part::kBackward} : std::vector{Part::kAll}) {
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
  void meet() {
    const auto send = [&](int to) { connections_.send(to, {0, 0}, {.text = "word"}); };
    const auto receive = [&](int from) { connections_.receive(from, {0, 0}, limit_, nullptr); };
    if (rank_ == 0) {
      for (int r = 1; r < job_.size(); ++r) receive(r);
      for (int r = 1; r < job_.size(); ++r) send(r);
    } else {
      send(0);
      receive(0);
    }
  }

  /// Lets the job's fault happen, if this is its place.
  void strike(std::size_t call, const std::optional<Action>& action) {
    const auto& fault = job_.fault;
    if (fault.rank != rank_ || fault.call != call || fault.action != action) return;
    if (fault.kind == RankFault::kLate) std::this_thread::sleep_for(kShortLimit / 4);
    while (fault.kind == RankFault::kStop && failure().empty()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // until the others have told it
    }
    if (fault.kind == RankFault::kDeath) {
      dead_ = true;
      connections_.begin_to_leave();  // tells no cause
      for (const int descriptor : descriptors_) shutdown(descriptor, SHUT_RDWR);
    }
    if (fault.kind == RankFault::kDeath || fault.kind == RankFault::kThrow) throw Struck();
  }

  void report(const std::exception_ptr& error) {
    if (dead_) return;
    try {
      std::rethrow_exception(error);
    } catch (const Struck&) {
      connections_.fail("rank " + std::to_string(rank_) + " was struck");
    } catch (const TimeoutError& late) {
      connections_.fail(late.what());
    } catch (const ConnectionError&) {  // another rank has failed
    } catch (const std::exception& other) {
      connections_.fail(other.what());
    }
  }

  const GeneratedJob& job_;
  const int rank_;
  const std::chrono::milliseconds limit_;
  std::vector<int> descriptors_;
  std::atomic<bool> dead_ = false;
  bool failed_ = false;
  Connections connections_;
};

}  // namespace gpipe::testing
