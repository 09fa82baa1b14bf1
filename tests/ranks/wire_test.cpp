#include "gpipe/ranks/wire.h"

#include <gtest/gtest.h>

#include <array>
#include <random>
#include <thread>

#include "tests/gpipe/random_cases.h"
#include "tests/ranks/wires.h"

namespace gpipe::testing {
namespace {

/// Messages with sizes of every kind.
std::vector<Strings> contents() {
  return {
      {"values", "small", ""},
      {"values", std::string(kLarge, 'x'), "", "tail"},
      {""},
      {"values without pieces"},
      {"", "", ""},
      {"", std::string(kLarge, 'y'), std::string(kLarge + 1, 'z')},
      {"other values", "longer pieces, but small"},
  };
}

/// The same sizes, other bytes.
Strings altered(Strings strings) {
  for (auto& string : strings) {
    for (auto& letter : string) letter = static_cast<char>(letter + 1);
  }
  return strings;
}

TEST(Wire, DrainsUntilTheMemoryMayChange) {
  Wire wire(/*seed=*/4);
  std::string memory(kLarge, 'x');
  const std::span<const std::byte> piece = std::as_bytes(std::span(memory));
  for (int call = 0; call < 3; ++call) {
    wire.expect(1);
    std::thread receiver([&] { EXPECT_EQ(wire.receive(0).at(1), std::string(kLarge, static_cast<char>('x' + call))); });
    auto content = message({"", ""});
    content.pieces = {piece};
    content.layout = message({"", memory}).layout;
    wire.sender->send(wire.sender_layouts.at(0), 0, std::move(content));
    wire.sender->drain(kLongLimit);
    for (auto& letter : memory) ++letter;
    receiver.join();
  }
}

TEST(Wire, SendsALayoutOnlyWhenItChanges) {
  Wire wire;
  const auto carry = [&](const Strings& content) {
    const auto sends = [&] {
      return std::array{wire.network.sends(0, 1, kHeaders), wire.network.sends(0, 1, kPieces),
                        wire.network.sends(0, 1, kChanged)};
    };
    const auto before = sends();
    wire.expect(1);
    wire.send(0, content);
    wire.receive(0);
    auto after = sends();
    for (int i = 0; i < 3; ++i) after[i] -= before[i];
    return after;
  };
  const Strings small = {"values", "a piece", "another"};
  const Strings large = {"values", std::string(kLarge, 'x'), "", "y"};
  EXPECT_EQ(carry(small), (std::array{1, 0, 3}));
  EXPECT_EQ(carry(small), (std::array{1, 0, 0}));
  EXPECT_EQ(carry(large), (std::array{1, 0, 3}));
  EXPECT_EQ(carry(large), (std::array{1, 2, 0}));
  EXPECT_EQ(carry(small), (std::array{1, 2, 3}));  // completes the receives for the large one
}

TEST(Wire, PostsMemoryAheadWithinBounds) {
  std::size_t allocated = 0;
  Wire wire(0, [&](std::string_view layout) {
    auto memory = allocate(layout);
    for (const auto piece : memory->pieces()) allocated += piece.size();
    return memory;
  });
  const auto carry = [&](std::size_t size) {
    for (int i = 0; i < 10; ++i) {
      wire.send(i, {"", std::string(size, 'x')});
      wire.receive(i);
    }
    allocated = 0;
    wire.expect(10);  // whose layouts it knows
    EXPECT_LE(allocated, most_posted(size));
    return wire.network.open_receives(0, 1, kHeaders);
  };
  wire.expect(10);
  EXPECT_EQ(wire.network.open_receives(0, 1, kHeaders), 10);
  EXPECT_EQ(carry(2 * kLarge), 3);
  EXPECT_EQ(allocated, 3 * 2 * kLarge);
  EXPECT_EQ(wire.network.open_receives(0, 1, kPieces), 3);
  EXPECT_EQ(carry(kLarge), 4);
  EXPECT_EQ(carry(kLarge / 2), 7);  // about a megabyte
  EXPECT_EQ(carry(1), 10);
  for (int i = 0; i < 10; ++i) {
    wire.send(i, {"", "x"});
    wire.receive(i);
  }
}

TEST(Wire, KeepsAnOwnerUntilDelivery) {
  Wire wire;
  wire.expect(3);
  std::vector<std::weak_ptr<const void>> owners;
  const auto send = [&](int i, const std::string& piece) {
    auto sent = message({"", piece});
    owners.push_back(sent.owner);
    wire.sender->send(wire.sender_layouts[i], i, std::move(sent));
    return !owners.back().expired();
  };
  EXPECT_TRUE(send(0, std::string(kLarge, 'x')));
  EXPECT_TRUE(send(1, std::string(kLarge, 'y')));
  wire.receive(0);
  EXPECT_FALSE(owners[1].expired());
  EXPECT_TRUE(send(2, "small"));
  std::jthread receiver([&] {
    for (int i = 1; i < 3; ++i) wire.receive(i);
  });
  wire.sender->finish();
  receiver.join();
  wire.sender->drain(kLongLimit);
  for (const auto& owner : owners) EXPECT_TRUE(owner.expired());
  wire.expect(3);
  EXPECT_FALSE(send(2, "again")) << "a small message of a known layout is copied";
  wire.network.of(0).close();
}

/// Several calls of random messages in one direction, some as in the call before. Each end on its own thread.
void carry_random_messages(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto all = contents();
  std::vector<std::vector<Strings>> calls;
  for (int call = draw(random, 1, 4); call > 0; --call) {
    auto& messages = calls.emplace_back();
    for (int i = 0; i < 12; ++i) {
      const bool repeats = calls.size() > 1 && draw(random, 0, 2) > 0;
      messages.push_back(repeats ? altered(calls[calls.size() - 2][i])
                                 : all[draw(random, 0, static_cast<int>(all.size()) - 1)]);
    }
  }
  Wire wire(seed);
  wire.sender_layouts.resize(12);
  wire.receiver_layouts.resize(12);
  std::jthread sender([&] {
    for (const auto& messages : calls) {
      for (int i = 0; i < 12; ++i) {
        wire.sender->send(wire.sender_layouts[i], i, message(messages[i]));
      }
    }
  });
  for (const auto& messages : calls) {
    wire.receiver.expect(pointers_to(wire.receiver_layouts, 12));
    for (int i = 0; i < 12; ++i) EXPECT_EQ(wire.receive(i), messages[i]);
  }
  sender.join();
}

TEST(Wire, CarriesRandomMessagesUnderDelays) {
  const auto seeds = seeds_from_environment(20);
  for (auto seed = seeds.first; seed < seeds.first + seeds.count && !HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    carry_random_messages(seed);
  }
}

}  // namespace
}  // namespace gpipe::testing
