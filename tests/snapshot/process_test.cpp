// A test that forks. It is a separate program, because a fork of a process with threads can hang.
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <random>

#include "tests/snapshot/samples.h"

namespace gpipe {
namespace {

/// A snapshot in which every value depends on `number`, so that a mixture of two snapshots is detected.
Snapshot numbered(std::int64_t number) {
  Snapshot snapshot;
  for (const auto* name : {"first", "second", "third"}) snapshot.model.insert(name, torch::full({30000}, number));
  snapshot.epoch = number;
  snapshot.position = {{"batch", number}};
  snapshot.random = torch::full({10}, number);
  snapshot.options = {{"number", std::to_string(number)}};
  snapshot.history = {{"loss", std::vector<double>(10, static_cast<double>(number))}};
  return snapshot;
}

TEST(SnapshotProcess, KilledWriterLeavesACompleteSnapshot) {
  constexpr int kKills = 30;
  const TemporaryDirectory folder;
  const auto path = folder / "latest";
  // The number of the last snapshot for which write_snapshot() has returned.
  void* shared =
      ::mmap(nullptr, sizeof(std::atomic<std::int64_t>), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(shared, MAP_FAILED);
  auto& written = *new (shared) std::atomic<std::int64_t>(0);
  write_snapshot(path, numbered(0));

  std::mt19937 random(std::random_device{}());
  int half_written = 0;
  for (int kill = 0; kill < kKills; ++kill) {
    const auto before = written.load();
    const auto write_for_ever = [&]() noexcept {
      for (auto number = before + 1;; ++number) {
        write_snapshot(path, numbered(number));
        written = number;
      }
    };
    const auto writer = ::fork();
    if (writer == 0) write_for_ever();
    while (written == before) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 30000));
    ::kill(writer, SIGKILL);
    int status = 0;
    ::waitpid(writer, &status, 0);
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;

    half_written += std::filesystem::exists(folder / "latest.tmp");
    const auto snapshot = read_snapshot(path);
    EXPECT_TRUE(same_bits(snapshot, numbered(snapshot.epoch)));
    EXPECT_GE(snapshot.epoch, written);
    EXPECT_LE(snapshot.epoch, written + 1);
    written = snapshot.epoch;
  }
  std::cout << half_written << " of " << kKills << " kills came while a file was being written\n";
  ::munmap(shared, sizeof(std::atomic<std::int64_t>));
}

}  // namespace
}  // namespace gpipe
