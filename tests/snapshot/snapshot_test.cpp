#include <sys/resource.h>

#include <csignal>

#include "gpipe/snapshot/safetensors.h"
#include "tests/snapshot/samples.h"

namespace gpipe {
namespace {

TEST(Snapshot, RoundTrip) {
  const TemporaryDirectory folder;
  auto snapshot = small_snapshot();
  snapshot.position["seed"] = std::int64_t{1} << 60;
  write_snapshot(folder / "latest", snapshot);
  EXPECT_TRUE(same_bits(read_snapshot(folder / "latest"), snapshot));
  EXPECT_TRUE(same_bits(read_weights(folder / "latest"), snapshot.model));
  EXPECT_EQ(to_bytes(read_snapshot(folder / "latest")), bytes_of(folder / "latest"));
  write_snapshot(folder / "latest", {});
  EXPECT_TRUE(same_bits(read_snapshot(folder / "latest"), {}));
}

TEST(Snapshot, RoundTripOfTensorsOfEveryTypeAndLayout) {
  const TemporaryDirectory folder;
  Snapshot snapshot;
  const auto base = torch::randn({8, 6, 4, 5});
  snapshot.model.insert("view", base.select(1, 3));
  snapshot.model.insert("transposed", base.transpose(0, 1));
  snapshot.model.insert("expanded", torch::ones({1, 3}).expand({5, 3}));
  snapshot.model.insert("channels last", base.contiguous(torch::MemoryFormat::ChannelsLast));
  snapshot.model.insert("scalar", torch::tensor(5));
  snapshot.model.insert("empty", torch::empty({0, 3}));
  snapshot.model.insert("gradients", torch::randn({2}, torch::requires_grad()));
  snapshot.model.insert("not numbers", torch::tensor({std::nan("3"), -0.0, HUGE_VAL}, torch::kFloat64));
  for (const auto type : {torch::kBool, torch::kUInt8, torch::kInt64, torch::kHalf, torch::kBFloat16, torch::kDouble,
                          torch::kFloat8_e5m2, torch::kComplexFloat, torch::kComplexDouble}) {
    snapshot.model.insert(torch::toString(type), base.to(type));
  }
  snapshot.model.insert("conjugate", torch::randn({3}, torch::kComplexDouble).conj());
  snapshot.model.insert("imaginary", torch::imag(torch::randn({3}, torch::kComplexFloat).conj()));
  snapshot.model.insert("the same", snapshot.model["Double"]);
  write_snapshot(folder / "tensors", snapshot);
  EXPECT_TRUE(same_bits(read_snapshot(folder / "tensors"), snapshot));
  EXPECT_FALSE(read_snapshot(folder / "tensors").model["gradients"].requires_grad());

  Snapshot small;
  small.model.insert("small view", torch::zeros({1000000})[0]);
  write_snapshot(folder / "view", small);
  EXPECT_LT(std::filesystem::file_size(folder / "view"), 10000);
}

TEST(ReplaceFile, KeepsThePreviousFileUntilAllIsWritten) {
  const TemporaryDirectory folder;
  const auto path = folder / "file";
  write_bytes(path, "old");
  const auto abandon = [](const ByteSink& sink) {
    sink("new", 3);
    throw std::runtime_error("abandoned");
  };
  EXPECT_EQ(error_of([&] { replace_file(path, abandon); }), "abandoned");
  EXPECT_EQ(bytes_of(path), "old");
  EXPECT_FALSE(std::filesystem::exists(folder / "file.tmp"));

  write_bytes(folder / "file.tmp", "left by a killed writer");
  replace_file(path, [&](const ByteSink& sink) {
    sink("n", 1);
    sink("ew", 2);
    EXPECT_EQ(bytes_of(path), "old");
    EXPECT_THAT(error_of([&] { replace_file(path, abandon); }), HasSubstr("another writer"));
  });
  EXPECT_EQ(bytes_of(path), "new");
  EXPECT_FALSE(std::filesystem::exists(folder / "file.tmp"));
}

TEST(ReplaceFile, KeepsThePreviousFileIfTheNewOneIsTooLarge) {
  const TemporaryDirectory folder;
  write_bytes(folder / "file", "old");
  const std::string large(std::size_t{2} << 20, 'x');
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit limit{1 << 20, before.rlim_max};
  auto* const handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  const auto write_large = [&](const ByteSink& sink) { sink(large.data(), large.size()); };
  const auto error = error_of([&] { replace_file(folder / "file", write_large); });
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_THAT(error, AllOf(HasSubstr((folder / "file").string()), HasSubstr("File too large")));
  EXPECT_EQ(bytes_of(folder / "file"), "old");
  EXPECT_FALSE(std::filesystem::exists(folder / "file.tmp"));
}

}  // namespace
}  // namespace gpipe
