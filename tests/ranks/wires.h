#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/ranks/fake_connections.h"
#include "tests/ranks/messages.h"

namespace gpipe::testing {

using Strings = std::vector<std::string>;

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
    std::vector<LastLayout*> expected;
    for (auto& it : receiver_layouts) expected.push_back(&it);
    receiver.expect(std::move(expected));
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
