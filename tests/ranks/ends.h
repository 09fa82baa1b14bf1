// Connections between ranks of one process, which carry plain bytes.
#pragma once

#include <sys/socket.h>

#include <sstream>

#include "gpipe/ranks/connections.h"
#include "tests/support/matchers.h"

namespace gpipe::testing {

/// The limit of a wait that should not run out of time, and of one that should.
inline constexpr std::chrono::milliseconds kLongLimit{20'000};
inline constexpr std::chrono::milliseconds kShortLimit{20};

using Strings = std::vector<std::string>;

/// The memory of pieces whose sizes the layout has as text.
class Bytes : public Incoming {
 public:
  explicit Bytes(const std::string& layout) {
    std::istringstream in(layout);
    for (std::size_t size = 0; in >> size;) strings.emplace_back(size, '?');
    if (!in.eof()) throw std::runtime_error("the layout is malformed: " + layout);
  }
  std::vector<std::span<std::byte>> pieces() override {
    std::vector<std::span<std::byte>> pieces;
    for (auto& string : strings) pieces.push_back(std::as_writable_bytes(std::span(string)));
    return pieces;
  }

  Strings strings;
};

inline std::unique_ptr<Incoming> allocate(const std::string& layout) { return std::make_unique<Bytes>(layout); }

/// A message of pieces.
inline Outgoing message(Strings strings, std::uint64_t label = 0) {
  const auto owner = std::make_shared<Strings>(std::move(strings));
  Outgoing result{.text = "", .label = label, .is_layout = true, .pieces = {}, .owner = owner};
  for (const auto& string : *owner) {
    result.text += std::to_string(string.size()) + " ";
    result.pieces.push_back(std::as_bytes(std::span(string)));
  }
  return result;
}

inline Strings strings(Received message) { return std::move(dynamic_cast<Bytes&>(*message.memory).strings); }

/// Returns a socket between each two ranks: by rank, then by the other rank.
inline std::vector<std::vector<Socket>> connect_all(int ranks) {
  std::vector<std::vector<Socket>> sockets(ranks);
  for (auto& of_rank : sockets) of_rank.resize(ranks);
  for (int a = 0; a < ranks; ++a) {
    for (int b = a + 1; b < ranks; ++b) {
      int ends[2];
      EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
      sockets[a][b] = Socket([&] { return ends[0]; });
      sockets[b][a] = Socket([&] { return ends[1]; });
    }
  }
  return sockets;
}

inline void add_all(Connections& connections, int own, std::vector<Socket> sockets) {
  for (int r = 0; r < static_cast<int>(sockets.size()); ++r) {
    if (r != own) connections.add(r, std::move(sockets[r]));
  }
}

}  // namespace gpipe::testing
