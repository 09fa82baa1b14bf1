#include "gpipe/ranks/wire.h"

#include <array>
#include <thread>

#include "tests/ranks/wires.h"
#include "tests/support/matchers.h"

namespace gpipe::testing {
namespace {

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
    EXPECT_EQ(wire.receive(0), content);
    auto after = sends();
    for (int i = 0; i < 3; ++i) after[i] -= before[i];
    return after;
  };
  const Strings small = {"values", "a piece", "another"};
  const Strings large = {"values", std::string(kLarge, 'x'), "", "y"};
  EXPECT_EQ(carry(small), (std::array{1, 0, 3}));
  EXPECT_EQ(carry({"others", "of such", "lengths"}), (std::array{1, 0, 0}));
  EXPECT_EQ(carry(large), (std::array{1, 0, 3}));
  EXPECT_EQ(carry({"others", std::string(kLarge, 'z'), "", "!"}), (std::array{1, 2, 0}));
  EXPECT_EQ(carry(small), (std::array{1, 2, 3}));  // completes the receives for the large one
  for (const auto& content : std::vector<Strings>{{""}, {"no pieces"}, {"", "", ""}, large, {""}}) {
    carry(content);
    EXPECT_EQ(carry(content)[2], 0);
  }
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
  wire.network.of(0).close();
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
  for (int i = 1; i < 3; ++i) wire.receive(i);
  for (const auto& owner : owners) EXPECT_TRUE(owner.expired());
  wire.expect(3);
  EXPECT_FALSE(send(2, "again")) << "a small message of a known layout is copied";
  wire.network.of(0).close();
}

/// What stands before each message.
struct Header {
  std::uint64_t magic = 0x6770697065000001;
  std::uint64_t sequence = 0;
  std::uint64_t label = 0;
  std::uint64_t layout_bytes = 3;
  std::uint64_t values_bytes = 0;
};

/// Expects that what is sent by hand, a header and a layout with values, is refused with each of the words.
void expect_refused(Header header, const std::string& layout_and_values, const std::vector<std::string>& words) {
  FakeNetwork network(2);
  WireReceiver receiver(network.of(1), 0, kFirstTag, kLongLimit, allocate);
  std::deque<LastLayout> layouts(1);
  receiver.expect(layouts, 1);
  const auto first = network.of(0).send(1, kHeaders, std::as_bytes(std::span(&header, 1)), nullptr);
  const auto second = network.of(0).send(1, kChanged, std::as_bytes(std::span(layout_and_values)), nullptr);
  try {
    receiver.receive(0);
    ADD_FAILURE() << "no error";
  } catch (const ConnectionError& error) {
    ADD_FAILURE() << error.what();
  } catch (const std::runtime_error& error) {
    for (const auto& word : words) EXPECT_THAT(error.what(), HasSubstr(word));
  }
  EXPECT_FALSE(layouts.front().known);
  network.of(1).close();
}

TEST(WireFailure, RefusesMalformedMessages) {
  const std::vector<std::string> due = {"rank 0 sent message", "message 0 with label 0 was due", "the same program"};
  expect_refused({.magic = 1}, "0 0", due);
  expect_refused({.sequence = 1}, "0 0", due);
  expect_refused({.label = 0xabc}, "0 0", {"rank 0 sent message 0 with label abc", "label 0 was due"});
  expect_refused({.layout_bytes = 1 << 25}, "0 0", {"announced a layout of 33554432 bytes"});
  expect_refused({.layout_bytes = ~std::uint64_t{0}}, "0 0", {"announced a layout"});
  expect_refused({.values_bytes = 1 << 25}, "0 0", {"with 33554432 bytes of values"});
  expect_refused({.values_bytes = 1}, "0 0!", {"1 bytes of values, but the layout has 0"});
  expect_refused({}, "5 0", {"0 bytes of values, but the layout has 5"});
  expect_refused({}, "bad", {"the layout is malformed: bad"});
  expect_refused({.layout_bytes = 0}, "0 0", {"message 0 without a layout"});
}

TEST(WireFailure, EndsWithUndeliveredMessagesAfterAClose) {
  Wire wire;
  wire.expect(5);
  auto large = message({"", std::string(kLarge, 'x')});
  const std::weak_ptr<const void> owner = large.owner;
  wire.sender->send(wire.sender_layouts[0], 0, std::move(large));
  for (int i = 1; i < 5; ++i) wire.send(i, {"", "x"});
  wire.network.of(1).close();
  wire.sender.reset();
  EXPECT_TRUE(owner.expired());
}

[[noreturn]] void send_until_it_throws(WireSender& sender) {
  for (LastLayout last;; std::this_thread::yield()) sender.send(last, 1, message({""}));
}

TEST(WireFailure, KeepsMemoryAfterATimeOutUntilTheConnectionsAreClosed) {
  FakeNetwork network(2);
  std::optional<WireSender> sender(std::in_place, network.of(0), 1, kFirstTag, kShortLimit);
  LastLayout by_sender;
  auto large = message({"", std::string(kLarge, 'x')});
  const std::weak_ptr<const void> owner = large.owner;
  sender->send(by_sender, 0, std::move(large));
  EXPECT_THROW(send_until_it_throws(*sender), TimeoutError);
  EXPECT_THROW(sender->send(by_sender, 0, message({""})), TimeoutError) << "the error of an earlier message";
  EXPECT_FALSE(owner.expired());
  network.of(0).close();
  sender.reset();
  EXPECT_TRUE(owner.expired());
}

TEST(WireFailure, KeepsMemoryThatAMessageMayStillReach) {
  const std::string layout_and_values = "2 3ab";
  const std::string piece = "xyz";
  for (const bool piece_comes : {false, true}) {
    FakeNetwork network(2);
    WireReceiver receiver(network.of(1), 0, kFirstTag, kShortLimit, allocate);
    std::deque<LastLayout> layouts(1);
    receiver.expect(layouts, 1);
    Header header{.values_bytes = 2};
    const auto first = network.of(0).send(1, kHeaders, std::as_bytes(std::span(&header, 1)), nullptr);
    std::shared_ptr<Transfer> second;
    if (piece_comes) second = network.of(0).send(1, kChanged, std::as_bytes(std::span(layout_and_values)), nullptr);
    EXPECT_THROW(receiver.receive(0), TimeoutError);
    const auto late = network.of(0).send(1, kChanged, std::as_bytes(std::span(piece)), nullptr);
    late->wait(kLongLimit, nullptr);
    network.of(1).close();
  }
}

}  // namespace
}  // namespace gpipe::testing
