// Tests that fork. They are a separate program, because a fork of a process with threads can hang.
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <random>

#include "tests/snapshot/samples.h"

namespace gpipe {
namespace {

/// A snapshot in which every value depends on `number`, so that a mixture of two snapshots is detected.
Snapshot numbered(std::int64_t number, std::int64_t elements = 30000) {
  Snapshot snapshot;
  for (const auto* name : {"first", "second", "third"}) snapshot.model.insert(name, torch::full({elements}, number));
  snapshot.epoch = number;
  snapshot.position = {{"batch", number}};
  snapshot.random = torch::full({10}, number);
  snapshot.options = {{"number", std::to_string(number)}};
  snapshot.history = {{"loss", std::vector<double>(10, static_cast<double>(number))}};
  return snapshot;
}

pid_t start(const std::function<int()>& run) {
  const auto child = ::fork();
  if (child != 0) return child;
  try {
    ::_exit(run());
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    ::_exit(1);
  }
}

int wait_for(pid_t child) {
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
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
    const auto writer = start([&] {
      for (auto number = before + 1;; ++number) {
        write_snapshot(path, numbered(number));
        written = number;
      }
      return 0;
    });
    while (written == before) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 30000));
    ::kill(writer, SIGKILL);
    ASSERT_EQ(wait_for(writer), -SIGKILL);

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

TEST(SnapshotProcess, FileSizeLimitLeavesThePreviousSnapshot) {
  const TemporaryDirectory folder;
  const auto path = folder / "latest";
  write_snapshot(path, numbered(1, 100));
  const auto writer = start([&] {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{4 << 20, 4 << 20};
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) throw std::runtime_error("setrlimit failed");
    const auto error = error_of([&] { write_snapshot(path, numbered(2, 1000000)); });
    if (error.find(path.string()) == error.npos || error.find("File too large") == error.npos) {
      throw std::runtime_error("the error is '" + error + "'");
    }
    return 0;
  });
  EXPECT_EQ(wait_for(writer), 0);
  EXPECT_TRUE(same_bits(read_snapshot(path), numbered(1, 100)));
  EXPECT_FALSE(std::filesystem::exists(folder / "latest.tmp"));
  write_snapshot(path, numbered(3, 100));
  EXPECT_TRUE(same_bits(read_snapshot(path), numbered(3, 100)));
}

}  // namespace
}  // namespace gpipe
