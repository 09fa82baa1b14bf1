#include "tests/ranks/fake_rank.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <stdexcept>
#include <thread>
#include <utility>

#include "tests/ranks/wires.h"

namespace gpipe::testing {
namespace {

using Number = FakeCells::Number;

/// What a fault throws.
struct Struck {};

/// The size of what an action puts on an edge.
std::size_t draw_size(const GeneratedJob& job, const RanksCall& call, const Action& action, int edge) {
  std::mt19937_64 random(((call.sizes * 8 + static_cast<int>(action.kind)) * 1000 + action.stage * 64 + edge) * 1000 +
                         action.micro_batch);
  if (job.large_pieces && draw(random, 0, 7) == 0) return kLarge + draw(random, 0, 1);
  return draw(random, 0, 2) == 0 ? 0 : draw(random, 1, 100);
}

}  // namespace

/// Sends with each number a piece of memory that is filled with it.
class FakeRank::Cells : public FakeCells {
 public:
  Cells(FakeRank& rank, std::size_t call, const Program& program)
      : FakeCells(program), rank_(rank), call_(call), program_(program) {
    on_action = [this](const Action& action) {
      dally(rank_.job_.seed, action);
      rank_.strike(call_, action);
    };
  }

  void begin(Part part, Wires& wires) {
    wires_ = &wires;
    const auto& call = rank_.job_.calls[call_];
    edges_.emplace(wires, program_, part, rank_.job_.ranks, rank_.rank_,
                   LayoutKey{call.program, static_cast<int>(part)}, rank_.limit_);
  }

  void on_worker(int worker, absl::FunctionRef<void()> run_actions) override {
    FakeCells::on_worker(worker, run_actions);
    edges_->settle(worker, [this](int from, int to) { settle(from, to); });
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
  Outgoing take_off(const WireMessage& message) {
    const auto& [action, edges] = message;
    std::vector<std::string> strings(1);
    for (const int edge : edges) {
      const Number number = consume(slot(edge, action));
      strings.front().append(reinterpret_cast<const char*>(&number), sizeof number);
      strings.emplace_back(draw_size(rank_.job_, rank_.job_.calls[call_], action, edge), static_cast<char>(number));
    }
    return testing::message(std::move(strings));
  }

  void put_on(const WireMessage& message, std::unique_ptr<Incoming> incoming) {
    const auto& [action, edges] = message;
    const auto received = strings(std::move(incoming));
    if (received.size() != 1 + edges.size()) throw std::logic_error("a message has another number of pieces");
    for (std::size_t k = 0; k < edges.size(); ++k) {
      Number number = 0;
      std::memcpy(&number, received.front().data() + k * sizeof number, sizeof number);
      const auto& piece = received[1 + k];
      if (piece.size() != draw_size(rank_.job_, rank_.job_.calls[call_], action, edges[k]) ||
          piece.find_first_not_of(static_cast<char>(number)) != std::string::npos) {
        throw std::logic_error("a piece has other bytes than were sent");
      }
      produce(slot(edges[k], action), number);
    }
  }

  // Waits for deliveries, as wires between devices do. So workers that wait for each other are a failure of the test.
  void settle(int from, int to) {
    const auto& ranks = rank_.job_.ranks;
    if (ranks[from] != rank_.rank_) return;
    wires_->sender(from * program_.workers() + to, ranks[to]).drain(rank_.limit_);
  }

  FakeRank& rank_;
  const std::size_t call_;
  const Program& program_;
  Wires* wires_ = nullptr;            // of the part that runs
  std::optional<RemoteEdges> edges_;  // of the part that runs
};

FakeRank::FakeRank(const GeneratedJob& job, int rank, FakeNetwork& network, Causes& causes)
    : job_(job),
      rank_(rank),
      network_(network),
      causes_(causes),
      limit_(job.fault.kind == RankFault::kStop ? kShortLimit : kLongLimit) {}

void FakeRank::run() {
  Wires wires(network_.of(rank_), /*first=*/5, limit_, allocate);
  try {
    make_calls(wires);
  } catch (...) {
    failed_ = true;
    report(std::current_exception(), awaited_);
  }
  wires.finish();
}

void FakeRank::make_calls(Wires& wires) {
  const auto first = std::find(job_.ranks.begin(), job_.ranks.end(), rank_) - job_.ranks.begin();
  const auto here = std::count(job_.ranks.begin(), job_.ranks.end(), rank_);
  Executor executor(static_cast<int>(here), nullptr, static_cast<int>(first), job_.workers() - static_cast<int>(here));
  for (std::size_t call = 0; call < job_.calls.size(); ++call) {
    strike(call, std::nullopt);
    meet(call, wires);
    make_call(call, wires, executor);
  }
  strike(job_.calls.size(), std::nullopt);
  meet(job_.calls.size(), wires);
}

void FakeRank::make_call(std::size_t call, Wires& wires, Executor& executor) {
  const auto& generated = job_.programs[job_.calls[call].program];
  Cells cells(*this, call, generated.program);
  using Parts = std::vector<Part>;
  for (const auto part : job_.calls[call].in_parts ? Parts{Part::kForward, Part::kBackward} : Parts{Part::kAll}) {
    cells.begin(part, wires);
    const auto failure = executor.run(generated.program, part, cells);
    if (failure) std::rethrow_exception(failure->error);
  }
  check(generated, job_.references[job_.calls[call].program], cells);
}

/// All ranks tell rank 0, and then it tells them.
void FakeRank::meet(std::size_t call, Wires& wires) {
  const auto number = [&](int from, int to) { return job_.workers() * job_.workers() + from * job_.size() + to; };
  const auto send = [&](int to) {
    auto& last = wires.last_layouts(number(rank_, to), {}, 1).front();
    awaited_ = to;
    wires.sender(number(rank_, to), to).send(last, call, message({"word"}));
  };
  const auto receive = [&](int from) {
    auto& wire = wires.receiver(number(from, rank_), from, limit_);
    wire.expect({&wires.last_layouts(number(from, rank_), {}, 1).front()});
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
void FakeRank::strike(std::size_t call, const std::optional<Action>& action) {
  const auto& fault = job_.fault;
  if (fault.rank != rank_ || fault.call != call || fault.action != action) return;
  switch (fault.kind) {
    case RankFault::kNone:
      return;
    case RankFault::kLate:
      return std::this_thread::sleep_for(kShortLimit / 4);
    case RankFault::kThrow:
      throw Struck();
    case RankFault::kDeath:
      dead_ = true;
      network_.of(rank_).close();
      throw Struck();
    case RankFault::kStop:
      network_.stop(rank_);
      network_.await_the_others_end(rank_);
      return;
  }
}

/// Reports before it closes, so that what the other ranks see then comes later.
void FakeRank::report(const std::exception_ptr& error, int awaited) {
  if (dead_) return;
  try {
    std::rethrow_exception(error);
  } catch (const Struck&) {
    causes_.report({Cause::kThrown, rank_, "struck"});
  } catch (const TimeoutError& timeout) {
    causes_.report({Cause::kTimedOut, awaited, timeout.what()});
  } catch (const ConnectionError& lost) {
    causes_.report({Cause::kLost, awaited, lost.what()});
  } catch (const std::exception& other) {
    causes_.report({Cause::kOther, rank_, other.what()});
  }
  network_.of(rank_).close();
}

void FakeRank::check(const GeneratedProgram& generated, const FakeCells& reference, const FakeCells& cells) const {
  const auto& program = generated.program;
  for (int w = 0; w < program.workers(); ++w) {
    EXPECT_EQ(cells.ran[w], job_.ranks[w] == rank_ ? program.schedule()[w] : std::vector<Action>());
  }
  for (int s = 0; s < program.layout().stages; ++s) {
    if (job_.ranks[program.layout().placement[s]] != rank_) continue;
    EXPECT_EQ(cells.outputs[s], reference.outputs[s]) << "stage " << s;
    EXPECT_EQ(cells.weights[s], reference.weights[s]) << "stage " << s;
  }
}

}  // namespace gpipe::testing
