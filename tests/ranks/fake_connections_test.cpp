#include "tests/ranks/fake_connections.h"

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <array>
#include <thread>

namespace gpipe {
namespace {

using namespace std::chrono_literals;
using testing::FakeNetwork;
using testing::kLongLimit;
using testing::kShortLimit;

template <typename T>
auto bytes(T& values) {
  return std::as_writable_bytes(std::span(values));
}

TEST(FakeConnections, KeepTheOrderOfATagOnly) {
  FakeNetwork network(2, /*seed=*/1, 100us);
  std::array<int, 4> sent = {1, 2, 3, 4};
  std::array<int, 4> received = {};
  std::vector<std::unique_ptr<Transfer>> transfers;
  for (const int i : {0, 1, 2, 3}) {
    transfers.push_back(network.of(0).send(1, /*tag=*/i % 2, bytes(sent).subspan(i * 4, 4)));
  }
  for (const int i : {3, 2, 1, 0}) {
    transfers.push_back(network.of(1).receive(0, /*tag=*/i % 2, bytes(received).subspan(i * 4, 4)));
  }
  for (const auto& transfer : transfers) transfer->wait(kLongLimit);
  EXPECT_EQ(received, (std::array{3, 4, 1, 2}));
}

TEST(FakeConnections, CompleteASendOnlyWithItsReceive) {
  FakeNetwork network(2);
  std::array<int, 1> sent = {1};
  std::array<int, 1> received = {};
  const auto send = network.of(0).send(1, 0, bytes(sent));
  EXPECT_THROW(send->wait(kShortLimit), TimeoutError);
  const auto receive = network.of(1).receive(0, 0, bytes(received));
  send->wait(kLongLimit);
  EXPECT_EQ(received, sent);
}

TEST(FakeConnections, EndAtBothEndsWhenARankCloses) {
  FakeNetwork network(3);
  std::array<int, 2> memory = {};
  const auto lost = network.of(1).receive(0, 0, bytes(memory));
  const auto sent = network.of(0).send(2, 0, bytes(memory));
  std::thread closer([&] { network.of(0).close(); });
  EXPECT_THROW(lost->wait(kLongLimit), ConnectionError);
  EXPECT_THROW(sent->wait(kLongLimit), ConnectionError);
  closer.join();
  const auto between_others = network.of(1).receive(2, 0, bytes(memory));
  network.of(2).send(1, 0, {})->wait(kLongLimit);
  between_others->wait(kLongLimit);
}

TEST(FakeConnections, MoveNothingToARankThatHasStopped) {
  FakeNetwork network(3);
  std::array<int, 2> memory = {};
  const auto receive = network.of(1).receive(0, 0, bytes(memory));
  const auto send = network.of(0).send(1, 0, bytes(memory));
  const auto other = network.of(2).receive(1, 0, bytes(memory));
  network.stop(1);
  EXPECT_THROW(send->wait(kShortLimit), TimeoutError);
  EXPECT_THROW(other->wait(kShortLimit), TimeoutError);
  network.of(0).close();
  network.of(2).close();
  network.await_the_others_end(1);
  EXPECT_THROW(receive->wait(kLongLimit), ConnectionError);
}

TEST(FakeConnections, ReportAMessageThatIsTooLong) {
  FakeNetwork network(2);
  std::array<int, 2> memory = {};
  const auto send = network.of(0).send(1, 0, bytes(memory));
  const auto receive = network.of(1).receive(0, 0, bytes(memory).first(7));
  EXPECT_NONFATAL_FAILURE(EXPECT_THROW(receive->wait(kLongLimit), ConnectionError), "sent 8 bytes");
}

TEST(FakeConnections, ReportATransferThatIsDropped) {
  FakeNetwork network(2);
  std::array<int, 1> memory = {};
  auto receive = network.of(1).receive(0, 0, bytes(memory));
  EXPECT_NONFATAL_FAILURE(receive.reset(), "rank 1 dropped a message from rank 0");
}

}  // namespace
}  // namespace gpipe
