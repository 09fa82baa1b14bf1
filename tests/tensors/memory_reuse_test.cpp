#include "gpipe/memory_reuse.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <thread>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "gpipe/gpipe.h"

namespace gpipe {
namespace {

constexpr std::int64_t kFloats = 40'000;

TEST(MemoryReuse, GivesAFreedBlockToTheNextTensorOfAboutItsSize) {
  reuse_cpu_memory();
  const absl::Cleanup off = [] { reuse_cpu_memory(false); };
  auto first = torch::ones({kFloats});
  const void* data = first.data_ptr();
  auto second = torch::ones({kFloats});
  EXPECT_NE(second.data_ptr(), data);
  std::thread([&] { first.reset(); }).join();
  const auto third = torch::zeros({kFloats + 100});
  EXPECT_EQ(third.data_ptr(), data);
  EXPECT_EQ(second.sum().item<float>(), kFloats);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(data) % 64, 0) << "vector instructions need whole cache lines";
}

TEST(MemoryReuse, GivesFreedBlocksToTensorsOfOtherSizes) {
  reuse_cpu_memory();
  const absl::Cleanup off = [] { reuse_cpu_memory(false); };
  std::set<const void*> places;
  {
    std::vector<torch::Tensor> small;
    for (int i = 0; i < 200; ++i) places.insert(small.emplace_back(torch::empty({1 << 20}, torch::kByte)).data_ptr());
  }
  const auto large = torch::empty({100 << 20}, torch::kByte);
  EXPECT_LE(large.data_ptr(), *places.rbegin());
  EXPECT_GT(static_cast<const char*>(large.data_ptr()) + large.nbytes(), *places.begin());
  std::vector<torch::Tensor> small;
  for (int i = 0; i < 100; ++i) {
    const auto* data = static_cast<const char*>(small.emplace_back(torch::empty({1 << 20}, torch::kByte)).data_ptr());
    const auto* other = static_cast<const char*>(large.data_ptr());
    EXPECT_TRUE(data + small.back().nbytes() <= other || data >= other + large.nbytes());
  }
}

TEST(MemoryReuse, KeepsTensorsWhenItIsSwitchedOff) {
  auto before = torch::ones({kFloats});
  reuse_cpu_memory();
  auto pooled = torch::ones({kFloats});
  const auto small = torch::ones({10});
  before.reset();
  auto freed = torch::ones({kFloats});
  const void* block = freed.data_ptr();
  freed.reset();
  reuse_cpu_memory(false);
  EXPECT_NE(torch::ones({kFloats}).data_ptr(), block);
  EXPECT_EQ(pooled.sum().item<float>(), kFloats);
  pooled.reset();
  EXPECT_EQ(small.sum().item<float>(), 10);
}

TEST(MemoryReuse, ChangesNoResult) {
  const auto step = [] {
    torch::manual_seed(3);
    torch::nn::Sequential model(torch::nn::Conv2d(3, 32, 3), torch::nn::ReLU(), torch::nn::Conv2d(32, 4, 3));
    GPipe pipe(model, {2, 1}, GPipeOptions().chunks(3).checkpoint(Checkpoint::kExceptLast).intraop_threads(1));
    pipe->forward(torch::randn({6, 3, 40, 40})).square().sum().backward();
    return model->parameters().front().grad();
  };
  const auto expected = step();
  reuse_cpu_memory();
  const absl::Cleanup off = [] { reuse_cpu_memory(false); };
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(torch::equal(step(), expected));
}

}  // namespace
}  // namespace gpipe
