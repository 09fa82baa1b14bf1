#include "gpipe/ranks/wire.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <deque>
#include <functional>
#include <optional>
#include <random>
#include <thread>

#include "tests/gpipe/random_cases.h"
#include "tests/ranks/fake_connections.h"
#include "tests/ranks/messages.h"

namespace gpipe {
namespace {

using namespace std::chrono_literals;
using testing::allocate;
using testing::FakeNetwork;
using ::testing::HasSubstr;
using testing::kLongLimit;
using testing::kShortLimit;
using testing::message;
using testing::strings;

using Strings = std::vector<std::string>;

constexpr std::size_t kLarge = 300'000;  // does not travel with its header

// The wire's tags.
constexpr int kFirstTag = 6;
constexpr int kHeaders = 6;
constexpr int kPieces = 7;
constexpr int kChanged = 8;

/// A wire from rank 0 to rank 1.
struct Wire {
  explicit Wire(std::uint64_t seed = 0, Allocate allocate_memory = allocate)
      : network(2, seed, 200us),
        sender(std::in_place, network.of(0), 1, kFirstTag, kLongLimit),
        receiver(network.of(1), 0, kFirstTag, kLongLimit, std::move(allocate_memory)) {}
  ~Wire() {
    if (::testing::Test::HasFailure()) network.of(0).close();  // what is undelivered is no failure of its own
  }

  void expect(std::size_t messages) {
    remembered_by_sender.resize(messages);
    remembered_by_receiver.resize(messages);
    std::vector<Remembered*> expected;
    for (auto& it : remembered_by_receiver) expected.push_back(&it);
    receiver.expect(std::move(expected));
  }
  void send(std::size_t position, const Strings& content) {
    sender->send(remembered_by_sender.at(position), position, message(content));
  }
  Strings receive(std::size_t position) { return strings(receiver.receive(position)); }

  FakeNetwork network;
  std::deque<Remembered> remembered_by_sender;
  std::deque<Remembered> remembered_by_receiver;
  std::optional<WireSender> sender;
  WireReceiver receiver;
};

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

TEST(Wire, CarriesAnyMessageAfterAnyOther) {
  for (const auto& first : contents()) {
    for (const auto& second : contents()) {
      Wire wire;
      for (const auto& content : {first, altered(first), second, altered(second), first}) {
        wire.expect(1);
        wire.send(0, content);
        EXPECT_EQ(wire.receive(0), content);
      }
    }
  }
}

TEST(Wire, CarriesManyMessagesInOrder) {
  Wire wire(/*seed=*/3);
  for (int call = 0; call < 3; ++call) {
    wire.expect(20);
    for (int i = 0; i < 20; ++i) wire.send(i, {"message " + std::to_string(i % 10), std::to_string(call)});
    for (int i = 0; i < 20; ++i) {
      EXPECT_EQ(wire.receive(i), (Strings{"message " + std::to_string(i % 10), std::to_string(call)}));
    }
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
  int messages = 0;
  Wire wire(0, [&](std::string_view layout) {
    ++messages;
    return allocate(layout);
  });
  const auto carry = [&](const Strings& content) {
    for (int i = 0; i < 10; ++i) {
      wire.send(i, content);
      wire.receive(i);
    }
  };
  wire.expect(10);
  EXPECT_EQ(wire.network.open_receives(0, 1, kHeaders), 10);
  carry({"", std::string(2 * kLarge, 'x')});
  messages = 0;
  wire.expect(10);
  EXPECT_EQ(wire.network.open_receives(0, 1, kHeaders), 3);
  EXPECT_EQ(wire.network.open_receives(0, 1, kPieces), 3);
  EXPECT_EQ(messages, 3);
  carry({"", std::string(kLarge / 2, 'x')});
  wire.expect(10);
  EXPECT_EQ(wire.network.open_receives(0, 1, kHeaders), 7);  // about a megabyte
  carry({"", "x"});
  wire.expect(10);
  EXPECT_EQ(wire.network.open_receives(0, 1, kHeaders), 10);
  carry({"", "x"});
}

TEST(Wire, KeepsAnOwnerUntilDelivery) {
  Wire wire;
  wire.expect(2);
  std::vector<std::weak_ptr<const void>> owners;
  for (int i = 0; i < 2; ++i) {
    auto large = message({"", std::string(kLarge, 'x')});
    owners.push_back(large.owner);
    wire.sender->send(wire.remembered_by_sender[i], i, std::move(large));
    EXPECT_FALSE(owners.back().expired());
  }
  wire.receive(0);
  EXPECT_FALSE(owners[1].expired());
  wire.receive(1);
  wire.sender.reset();
  for (const auto& owner : owners) EXPECT_TRUE(owner.expired());
}

TEST(Wire, FreesTheOwnerOfASmallMessageAtOnce) {
  Wire wire;
  wire.expect(1);
  wire.send(0, {"", "small"});
  wire.receive(0);
  wire.expect(1);
  auto small = message({"", "again"});
  const std::weak_ptr<const void> owner = small.owner;
  wire.sender->send(wire.remembered_by_sender[0], 0, std::move(small));
  EXPECT_TRUE(owner.expired());
  wire.receive(0);
}

TEST(Wire, IsEmptiedBeforeItsSenderEnds) {
  Wire wire;
  wire.expect(3);
  for (int i = 0; i < 3; ++i) wire.send(i, {"", std::string(kLarge, 'x')});
  std::thread receiver([&] {
    for (int i = 0; i < 3; ++i) EXPECT_EQ(wire.receive(i), (Strings{"", std::string(kLarge, 'x')}));
  });
  wire.sender->finish();
  wire.sender.reset();
  receiver.join();
}

/// What stands before each message.
struct Header {
  std::uint64_t magic = 0x6770697065000001;
  std::uint64_t sequence = 0;
  std::uint64_t label = 0;
  std::uint64_t layout_bytes = 3;
  std::uint64_t values_bytes = 0;
};

/// Expects that receiving a message throws an error with each of the words.
void expect_error(const std::function<void()>& receive, const std::vector<std::string>& words) {
  try {
    receive();
    ADD_FAILURE() << "no error";
  } catch (const ConnectionError& error) {
    ADD_FAILURE() << error.what();
  } catch (const std::runtime_error& error) {
    for (const auto& word : words) EXPECT_THAT(error.what(), HasSubstr(word));
  }
}

TEST(Wire, RefusesAnotherLabel) {
  Wire wire;
  wire.expect(1);
  wire.sender->send(wire.remembered_by_sender[0], 0xabc, message({"", ""}));
  expect_error([&] { wire.receiver.receive(0xdef); }, {"rank 0 sent message 0 with label abc", "label def was due"});
  wire.network.of(1).close();
}

/// Receives what is sent by hand: a header, then a layout with values.
void expect_refused(Header header, const std::string& layout_and_values, const std::vector<std::string>& words) {
  FakeNetwork network(2);
  WireReceiver receiver(network.of(1), 0, kFirstTag, kLongLimit, allocate);
  Remembered remembered;
  receiver.expect({&remembered});
  const auto first = network.of(0).send(1, kHeaders, std::as_bytes(std::span(&header, 1)));
  const auto second = network.of(0).send(1, kChanged, std::as_bytes(std::span(layout_and_values)));
  expect_error([&] { receiver.receive(0); }, words);
  EXPECT_FALSE(remembered.known);
  network.of(1).close();
}

TEST(Wire, RefusesMalformedMessages) {
  const std::vector<std::string> due = {"rank 0 sent message", "message 0 with label 0 was due", "the same program"};
  expect_refused({.magic = 1}, "0 0", due);
  expect_refused({.sequence = 1}, "0 0", due);
  expect_refused({.label = 1}, "0 0", due);
  expect_refused({.layout_bytes = 1 << 21}, "0 0", {"announced a layout of 2097152 bytes"});
  expect_refused({.layout_bytes = ~std::uint64_t{0}}, "0 0", {"announced a layout"});
  expect_refused({.values_bytes = 1 << 21}, "0 0", {"with 2097152 bytes of values"});
  expect_refused({.values_bytes = 1}, "0 0!", {"1 bytes of values, but the layout has 0"});
  expect_refused({}, "5 0", {"0 bytes of values, but the layout has 5"});
  expect_refused({}, "bad", {"the layout is malformed: bad"});
  expect_refused({.layout_bytes = 0}, "0 0", {"message 0 without a layout"});
}

TEST(Wire, IsRousedByAClose) {
  for (const int closes : {0, 1}) {
    Wire wire;
    wire.expect(2);
    std::thread closer([&] { wire.network.of(closes).close(); });
    EXPECT_THROW(wire.receive(0), ConnectionError);
    closer.join();
    EXPECT_THROW(wire.receive(1), ConnectionError);
    EXPECT_THROW(wire.send(0, {"", ""}), ConnectionError);
  }
}

TEST(Wire, TellsOfALostConnectionWhenItReceives) {
  Wire wire;
  wire.network.of(0).close();
  EXPECT_NO_THROW(wire.expect(2));
  EXPECT_THROW(wire.receive(0), ConnectionError);
}

TEST(Wire, EndsWithUndeliveredMessagesAfterAClose) {
  Wire wire;
  wire.expect(5);
  auto large = message({"", std::string(kLarge, 'x')});
  const std::weak_ptr<const void> owner = large.owner;
  wire.sender->send(wire.remembered_by_sender[0], 0, std::move(large));
  for (int i = 1; i < 5; ++i) wire.send(i, {"", "x"});
  wire.network.of(1).close();
  wire.sender.reset();
  EXPECT_TRUE(owner.expired());
}

[[noreturn]] void send_until_it_throws(WireSender& sender) {
  for (Remembered remembered;; std::this_thread::yield()) sender.send(remembered, 1, message({""}));
}

TEST(Wire, KeepsMemoryAfterATimeOutUntilTheConnectionsAreClosed) {
  FakeNetwork network(2);
  std::optional<WireSender> sender(std::in_place, network.of(0), 1, kFirstTag, kShortLimit);
  Remembered by_sender;
  auto large = message({"", std::string(kLarge, 'x')});
  const std::weak_ptr<const void> owner = large.owner;
  sender->send(by_sender, 0, std::move(large));
  EXPECT_THROW(send_until_it_throws(*sender), TimeoutError);
  EXPECT_FALSE(owner.expired());
  network.of(0).close();
  sender.reset();
  EXPECT_TRUE(owner.expired());
}

TEST(Wire, KeepsMemoryThatAMessageMayStillReach) {
  const std::string layout_and_values = "2 3ab";
  const std::string piece = "xyz";
  for (const bool piece_comes : {false, true}) {
    FakeNetwork network(2);
    WireReceiver receiver(network.of(1), 0, kFirstTag, kShortLimit, allocate);
    Remembered remembered;
    receiver.expect({&remembered});
    Header header{.values_bytes = 2};
    const auto first = network.of(0).send(1, kHeaders, std::as_bytes(std::span(&header, 1)));
    std::unique_ptr<Transfer> second;
    if (piece_comes) second = network.of(0).send(1, kChanged, std::as_bytes(std::span(layout_and_values)));
    EXPECT_THROW(receiver.receive(0), TimeoutError);
    const auto late = network.of(0).send(1, kChanged, std::as_bytes(std::span(piece)));
    late->wait(kLongLimit);
    network.of(1).close();
  }
}

/// Connections that lose every message.
class LosingConnections : public Connections {
 public:
  std::unique_ptr<Transfer> send(int /*rank*/, int /*tag*/, std::span<const std::byte> /*bytes*/) override {
    struct Lost : Transfer {
      void wait(std::chrono::milliseconds /*limit*/) override { throw TimeoutError("lost"); }
    };
    return std::make_unique<Lost>();
  }
  std::unique_ptr<Transfer> receive(int /*rank*/, int /*tag*/, std::span<std::byte> /*bytes*/) override {
    throw std::logic_error("nothing receives");
  }
  void close() noexcept override {}
};

TEST(Wire, ReportsTheErrorOfAnEarlierMessage) {
  LosingConnections connections;
  WireSender sender(connections, 1, kFirstTag, kLongLimit);
  Remembered remembered;
  EXPECT_NO_THROW(sender.send(remembered, 0, message({"", ""})));
  EXPECT_THROW(send_until_it_throws(sender), TimeoutError);
  EXPECT_THROW(sender.send(remembered, 0, message({"", ""})), TimeoutError);
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
  wire.remembered_by_sender.resize(12);
  std::thread sender([&] {
    for (const auto& messages : calls) {
      for (int i = 0; i < 12; ++i) {
        wire.sender->send(wire.remembered_by_sender[i], i, message(messages[i]));
      }
    }
  });
  for (const auto& messages : calls) {
    wire.remembered_by_receiver.resize(12);
    std::vector<Remembered*> expected;
    for (auto& it : wire.remembered_by_receiver) expected.push_back(&it);
    wire.receiver.expect(std::move(expected));
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
}  // namespace gpipe
