#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "gpipe/ranks/remote_edges.h"
#include "tests/gpipe/random_cases.h"
#include "tests/ranks/wires.h"

namespace gpipe {
namespace {

using testing::allocate;
using testing::FakeNetwork;
using testing::kLongLimit;
using testing::message;
using testing::Strings;
using testing::strings;

/// The wires of two ranks, and calls of which each sends two messages from rank 0 to rank 1.
struct Ends {
  static constexpr int kFirst = 2;
  FakeNetwork network{2};
  Wires sender{network.of(0), kFirst, kLongLimit, allocate};
  Wires receiver{network.of(1), kFirst, kLongLimit, allocate};

  /// Returns whether both layouts were known.
  bool call(const LayoutKey& key, const std::vector<Strings>& contents) {
    const int changed = network.sends(0, 1, kFirst * kTagsPerWire + 2);
    auto& received = receiver.last_layouts(0, key, contents.size());
    std::vector<LastLayout*> expected;
    for (std::size_t i = 0; i < contents.size(); ++i) expected.push_back(&received[i]);
    auto& wire = receiver.receiver(0, 0, kLongLimit);
    wire.expect(expected);
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

TEST(Wires, RememberTheLayoutsOfTheLastKeys) {
  Ends ends;
  std::mt19937_64 random(1);
  std::vector<std::int64_t> last;  // keys, the last used one last
  for (int call = 0; call < 1000; ++call) {
    const std::int64_t size = draw(random, 1, 12);
    const auto found = std::find(last.begin(), last.end(), size);
    ASSERT_EQ(ends.call({7, size}, contents(size)), found != last.end()) << "call " << call;
    if (found != last.end()) last.erase(found);
    if (last.size() == kKeysPerWire) last.erase(last.begin());
    last.push_back(size);
  }
}

TEST(Wires, KeepNothingOfManyKeys) {
  Ends ends;
  const auto call_some = [&](std::int64_t first) {
    for (std::int64_t key = first; key < first + 2500; ++key) ends.call({key}, contents(key % 100));
    return mallinfo2().uordblks;  // 0 with sanitizers
  };
  const auto before = call_some(0);
  EXPECT_LT(call_some(2500), before + 1'000'000);
}

}  // namespace
}  // namespace gpipe
