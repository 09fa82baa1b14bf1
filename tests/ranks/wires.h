// Wires that carry plain bytes.
#pragma once

#include <exception>
#include <optional>
#include <sstream>
#include <string_view>

#include "gpipe/ranks/remote_edges.h"
#include "tests/ranks/fake_connections.h"

namespace gpipe::testing {

using Strings = std::vector<std::string>;

/// The memory of a message of plain bytes. Its layout has the sizes of the values and of each piece, as text.
class Bytes : public Incoming {
 public:
  explicit Bytes(std::string_view layout) {
    std::istringstream in{std::string(layout)};
    std::size_t size = 0;
    while (in >> size) strings.emplace_back(size, '?');
    if (!in.eof() || strings.empty()) throw std::runtime_error("the layout is malformed: " + std::string(layout));
  }

  std::span<std::byte> values() override { return bytes(strings.front()); }
  std::vector<std::span<std::byte>> pieces() override {
    std::vector<std::span<std::byte>> pieces;
    for (std::size_t i = 1; i < strings.size(); ++i) pieces.push_back(bytes(strings[i]));
    return pieces;
  }

  Strings strings;  ///< the values, then the pieces

 private:
  static std::span<std::byte> bytes(std::string& string) { return std::as_writable_bytes(std::span(string)); }
};

inline std::unique_ptr<Incoming> allocate(std::string_view layout) { return std::make_unique<Bytes>(layout); }

/// A message of the values, then the pieces.
inline Outgoing message(Strings strings) {
  const auto owner = std::make_shared<Strings>(std::move(strings));
  Outgoing result;
  result.values = owner->front();
  for (const auto& string : *owner) {
    result.layout += (result.layout.empty() ? "" : " ") + std::to_string(string.size());
    if (&string != &owner->front()) result.pieces.push_back(std::as_bytes(std::span(string)));
  }
  result.owner = owner;
  return result;
}

inline Strings strings(std::unique_ptr<Incoming> message) { return std::move(static_cast<Bytes&>(*message).strings); }

inline constexpr std::size_t kLarge = 300'000;  // does not travel with its header

// The wire's tags.
inline constexpr int kFirstTag = 6;
inline constexpr int kHeaders = 6;
inline constexpr int kPieces = 7;
inline constexpr int kChanged = 8;

/// A wire from rank 0 to rank 1.
struct Wire {
  explicit Wire(std::uint64_t seed = 0, Allocate allocate_memory = allocate)
      : network(2, seed, std::chrono::microseconds(200)),
        sender(std::in_place, network.of(0), 1, kFirstTag, kLongLimit),
        receiver(network.of(1), 0, kFirstTag, kLongLimit, std::move(allocate_memory)) {}
  ~Wire() {
    // After a failure, undelivered messages do not count as another one.
    if (std::uncaught_exceptions() > 0 || ::testing::Test::HasFailure()) network.of(0).close();
  }

  void expect(std::size_t messages) {
    sender_layouts.resize(messages);
    receiver_layouts.resize(messages);
    receiver.expect(receiver_layouts, messages);
  }
  void send(std::size_t position, const Strings& content) {
    sender->send(sender_layouts.at(position), position, message(content));
  }
  Strings receive(std::size_t position) { return strings(receiver.receive(position)); }

  FakeNetwork network;
  std::deque<LastLayout> sender_layouts;
  std::deque<LastLayout> receiver_layouts;
  std::optional<WireSender> sender;
  WireReceiver receiver;
};

}  // namespace gpipe::testing
