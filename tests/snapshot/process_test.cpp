// A test that forks. It is a separate program, because a fork of a process with threads can hang.
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <random>

#include "gpipe/snapshot/folder.h"
#include "tests/snapshot/samples.h"

namespace gpipe {
namespace {

/// A model in which every value is `number`, so that a mixture of two snapshots is detected.
struct Numbered : torch::nn::Module {
  explicit Numbered(std::int64_t number) {
    for (const auto* name : {"first", "second", "third"}) register_buffer(name, torch::full({30000}, number));
  }
};

TEST(SnapshotProcess, AKilledWriterLeavesTheNewestSnapshotOrTheOneBefore) {
  const char* kills = std::getenv("GPIPE_KILLS");
  const int kKills = kills == nullptr ? 30 : std::atoi(kills);
  const TemporaryDirectory folder;
  const auto path = folder / "latest";
  const auto save = [&](std::int64_t number) {
    save_snapshot(path, Numbered(number), nullptr, {.step = number, .extra = std::to_string(number)});
  };
  // The number of the last snapshot for which save_snapshot() has returned.
  void* shared =
      ::mmap(nullptr, sizeof(std::atomic<std::int64_t>), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(shared, MAP_FAILED);
  auto& written = *new (shared) std::atomic<std::int64_t>(0);
  save(0);

  std::mt19937 random(std::random_device{}());
  int half_written = 0;
  for (int kill = 0; kill < kKills; ++kill) {
    const auto before = written.load();
    const auto write_for_ever = [&]() noexcept {
      for (auto number = before + 1;; ++number) {
        save(number);
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

    const auto files = std::distance(std::filesystem::directory_iterator(path), {});
    half_written += files != 3;
    EXPECT_LE(files, 7);
    Numbered model(-1);
    const auto progress = load_snapshot(path, model);
    EXPECT_TRUE(same_bits(copy_of(model), copy_of(Numbered(progress.step))));
    EXPECT_EQ(progress.extra, std::to_string(progress.step));
    // Also for programs that read the index.
    const auto index = nlohmann::json::parse(bytes_of(path / "model.safetensors.index.json"))["weight_map"];
    EXPECT_EQ(index.size(), 3u);
    for (const auto& [name, file] : index.items()) EXPECT_EQ(SafetensorsFile(path / file).read(name).numel(), 30000);
    EXPECT_GE(progress.step, written);
    EXPECT_LE(progress.step, written + 1);
    written = progress.step;
  }
  std::cout << half_written << " of " << kKills << " kills came while a file was being written\n";
  ::munmap(shared, sizeof(std::atomic<std::int64_t>));
}

}  // namespace
}  // namespace gpipe
