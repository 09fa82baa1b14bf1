#include "gpipe/ranks/remote_edges.h"

#include "gpipe/mesh.h"
#include "tests/gpipe/random_cases.h"
#include "tests/ranks/wires.h"
#include "tests/schedule/programs.h"

namespace gpipe::testing {
namespace {

/// The wires of two ranks, and calls of which each sends two messages from rank 0 to rank 1.
struct Ends {
  static constexpr int kFirst = 2;
  FakeNetwork network{2};
  Wires sender{network.of(0), kFirst, 1, kLongLimit, allocate};
  Wires receiver{network.of(1), kFirst, 1, kLongLimit, allocate};

  /// Returns whether both layouts were known.
  bool call(const LayoutKey& key, const std::vector<Strings>& contents) {
    const int changed = network.sends(0, 1, kFirst * kTagsPerWire + 2);
    auto& wire = receiver.receiver(0, 0, kLongLimit);
    wire.expect(receiver.last_layouts(0, key, contents.size()), contents.size());
    auto& sent = sender.last_layouts(0, key, contents.size());
    for (std::size_t i = 0; i < contents.size(); ++i) sender.sender(0, 1).send(sent[i], i, message(contents[i]));
    for (std::size_t i = 0; i < contents.size(); ++i) EXPECT_EQ(strings(wire.receive(i)), contents[i]);
    return network.sends(0, 1, kFirst * kTagsPerWire + 2) == changed;
  }
};

/// Messages whose layouts follow from the size.
std::vector<Strings> contents(std::int64_t size) {
  return {{"values", std::string(size, 'x')}, {"", std::string(size + 1, 'y'), "tail"}};
}

TEST(Wires, RememberTheLayoutsOfSomeKeys) {
  Ends ends;
  std::mt19937_64 random(1);
  std::set<std::int64_t> known;  // keys
  for (int call = 0; call < 1000; ++call) {
    const std::int64_t size = draw(random, 1, 12);
    ASSERT_EQ(ends.call({7, size}, contents(size)), known.contains(size)) << "call " << call;
    if (known.size() == kKeysPerWire && !known.contains(size)) known.clear();
    known.insert(size);
  }
}

TEST(RanksOfWorkers, AreContiguousBlocksAsEqualAsPossible) {
  for (int workers = 1; workers <= 12; ++workers) {
    for (int ranks = 1; ranks <= workers; ++ranks) {
      const auto of_workers = Mesh{ranks}.ranks_of_workers(workers, 0);
      ASSERT_EQ(of_workers.size(), workers);
      EXPECT_TRUE(std::is_sorted(of_workers.begin(), of_workers.end()));
      for (int r = 0; r < ranks; ++r) {
        const auto count = std::count(of_workers.begin(), of_workers.end(), r);
        EXPECT_TRUE(count == workers / ranks || count == (workers + ranks - 1) / ranks) << count;
      }
    }
  }
}

TEST(PlanWires, JoinsTheEdgesOfAnAction) {
  const auto program = Program::make(straight(3, 1), chain(3, {{0, {2}, ""}, {0, {1}, ""}}), fill(straight(3, 1)));
  const auto plans = plan_wires(program, Part::kForward, {0, 1, 1});
  ASSERT_EQ(plans.size(), 2);
  EXPECT_EQ(plans[0].to, 1);
  ASSERT_EQ(plans[0].messages.size(), 1);
  EXPECT_EQ(plans[0].messages[0].edges, (std::vector{0, 3}));
  EXPECT_EQ(plans[1].to, 2);
  ASSERT_EQ(plans[1].messages.size(), 1);
  EXPECT_EQ(plans[1].messages[0].edges, std::vector{2});
}

}  // namespace
}  // namespace gpipe::testing
