// Freed memory that is kept for the next step.
#include <c10/core/CPUAllocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>

#include "gpipe/tensors/kept_memory.h"
#include "tests/gpipe/layers.h"

C10_DECLARE_bool(caffe2_cpu_allocator_do_zero_fill);

namespace gpipe {
namespace {

constexpr std::int64_t kMiB = 1 << 20;

Tensor bytes(std::int64_t size) { return torch::ones({size}, at::kByte); }

/// Returns the process's MiB: of addresses, and in memory.
std::pair<std::int64_t, std::int64_t> size_of_process() {
  std::ifstream file("/proc/self/statm");
  std::int64_t pages = 0;
  std::int64_t resident = 0;
  file >> pages >> resident;
  return {pages / 256, resident / 256};
}

class OtherAllocator : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t size) override { return c10::GetDefaultCPUAllocator()->allocate(size); }
  void copy_data(void* to, const void* from, std::size_t size) const override { default_copy_data(to, from, size); }
};

TEST(KeptMemory, IsUsedWhileAPipelineLives) {
  auto* const before = c10::GetCPUAllocator();
  {
    const GPipe pipe(mlp(), {2, 2});
    EXPECT_NE(c10::GetCPUAllocator(), before);
    const GPipe without(mlp(), {2, 2}, GPipeOptions().keep_memory(false));
  }
  EXPECT_EQ(c10::GetCPUAllocator(), before);
}

TEST(KeptMemory, IsAtMostFiveQuartersOfWhatWasLive) {
  const auto before = size_of_process().second;
  const std::optional<KeptMemory> kept(std::in_place);
  for (int size = 33; size < 49; ++size) bytes(size * kMiB);
  const auto after = size_of_process().second;
  EXPECT_GE(after - before, 48);
  EXPECT_LE(after - before, 48 * 5 / 4 + 8);
}

TEST(KeptMemory, ReturnsToTheSystemWithItsLastUser) {
  const auto before = size_of_process().second;
  std::optional<KeptMemory> first(std::in_place);
  std::optional<KeptMemory> second(std::in_place);
  bytes(64 * kMiB);
  first.reset();
  EXPECT_GE(size_of_process().second - before, 64);
  second.reset();
  EXPECT_LE(size_of_process().second - before, 8);
}

TEST(KeptMemory, IsReturnedWhenMemoryRunsOut) {
  const KeptMemory kept;
  torch::empty({512 * kMiB}, at::kByte);  // takes only addresses
  rlimit limit{};
  getrlimit(RLIMIT_AS, &limit);
  const auto unlimited = std::exchange(limit.rlim_cur, (size_of_process().first + 128) * kMiB);
  setrlimit(RLIMIT_AS, &limit);
  EXPECT_NO_THROW(torch::empty({384 * kMiB}, at::kByte));
  EXPECT_THAT([] { torch::empty({2048 * kMiB}, at::kByte); }, throws<c10::Error>("can't allocate memory"));
  limit.rlim_cur = unlimited;
  setrlimit(RLIMIT_AS, &limit);
}

TEST(KeptBlocks, AreReportedAndFilledLikeThoseOfPyTorch) {
  struct Reports : c10::MemoryReportingInfoBase {
    void reportMemoryUsage(void*, std::int64_t size, std::size_t, std::size_t, c10::Device) override {
      list.push_back(size);
    }
    bool memoryProfilingEnabled() const override { return true; }
    std::vector<std::int64_t> list;
  };
  const KeptMemory kept;
  bytes(kMiB);
  FLAGS_caffe2_cpu_allocator_do_zero_fill = true;
  EXPECT_EQ(torch::empty({kMiB}, at::kByte).sum().item<std::int64_t>(), 0);
  FLAGS_caffe2_cpu_allocator_do_zero_fill = false;
  const auto reports = std::make_shared<Reports>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, reports);
  torch::empty({kMiB}, at::kByte);
  EXPECT_THAT(reports->list, ElementsAre(kMiB, -kMiB));
}

TEST(KeptBlocks, OutliveTheirPipelineAndAreFreedByEitherAllocator) {
  auto& original = *c10::GetDefaultCPUAllocator();
  Tensor outside;
  void* kept_block = nullptr;
  {
    const KeptMemory kept;
    EXPECT_NE(c10::GetCPUAllocator(), &original);
    outside = bytes(kMiB);
    kept_block = c10::GetCPUAllocator()->raw_allocate(kMiB);
    c10::GetCPUAllocator()->raw_deallocate(original.raw_allocate(kMiB));
    EXPECT_EQ(c10::GetCPUAllocator()->allocate(0).get(), nullptr);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(bytes(kMiB + 1).data_ptr()) % c10::gAlignment, 0);
  }
  EXPECT_EQ(c10::GetCPUAllocator(), &original);
  original.raw_deallocate(kept_block);
  EXPECT_EQ(outside.sum().item<std::int64_t>(), kMiB);
  const KeptMemory again;
  outside.resize_({2 * kMiB}).fill_(1);
  outside.reset();
  EXPECT_EQ(bytes(kMiB).sum().item<std::int64_t>(), kMiB);
}

TEST(KeptBlocks, LeaveTheAllocatorOfTheProgram) {
  static OtherAllocator other;
  auto* const original = c10::GetCPUAllocator();
  c10::SetCPUAllocator(&other);
  {
    const KeptMemory kept;
    EXPECT_EQ(c10::GetCPUAllocator(), &other);
  }
  c10::SetCPUAllocator(original);
  {
    const KeptMemory kept;
    c10::SetCPUAllocator(&other);
  }
  EXPECT_EQ(c10::GetCPUAllocator(), &other);
  c10::SetCPUAllocator(original);
}

// The other thread may hold any lock in the moment of a fork.
TEST(KeptBlocks, AreNotKeptInAForkedChild) {
  const KeptMemory kept;
  const auto outside = bytes(kMiB);
  std::atomic<bool> ends = false;
  std::thread thread([&] {
    for (std::int64_t i = 0; !ends; ++i) c10::GetCPUAllocator()->allocate(kMiB + i % 8);
  });
  for (int i = 0; i < 8; ++i) {
    const auto child = ::fork();
    if (child == 0) {
      ::alarm(20);
      c10::GetCPUAllocator()->allocate(kMiB);
      ::_exit(c10::GetCPUAllocator() == c10::GetDefaultCPUAllocator() ? 0 : 1);
    }
    int status = -1;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  }
  ends = true;
  thread.join();
}

}  // namespace
}  // namespace gpipe
