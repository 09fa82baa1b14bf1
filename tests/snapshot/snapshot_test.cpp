#include "gpipe/snapshot.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "tests/snapshot/samples.h"

namespace gpipe {
namespace {

TEST(Snapshot, RoundTrip) {
  const TemporaryDirectory folder;
  auto snapshot = small_snapshot();
  snapshot.position["seed"] = std::int64_t{1} << 60;
  write_snapshot(folder / "latest", snapshot);
  EXPECT_TRUE(same(read_snapshot(folder / "latest"), snapshot));
  write_snapshot(folder / "latest", read_snapshot(folder / "latest"));
  EXPECT_TRUE(same(read_snapshot(folder / "latest"), snapshot));
}

TEST(Snapshot, RoundTripOfAnEmptySnapshot) {
  const TemporaryDirectory folder;
  write_snapshot(folder / "empty", {});
  EXPECT_TRUE(same(read_snapshot(folder / "empty"), {}));
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
  for (const auto type : {torch::kBool, torch::kUInt8, torch::kInt64, torch::kHalf, torch::kBFloat16, torch::kDouble}) {
    snapshot.model.insert(torch::toString(type), base.to(type));
  }
  snapshot.model.insert("the same", snapshot.model["Double"]);
  write_snapshot(folder / "tensors", snapshot);
  EXPECT_TRUE(same(read_snapshot(folder / "tensors"), snapshot));
  EXPECT_FALSE(read_snapshot(folder / "tensors").model["gradients"].requires_grad());

  Snapshot small;
  small.model.insert("small view", torch::zeros({1000000})[0]);
  write_snapshot(folder / "view", small);
  EXPECT_LT(std::filesystem::file_size(folder / "view"), 10000);
}

TEST(Snapshot, LibTorchCanReadIt) {
  const TemporaryDirectory folder;
  const auto snapshot = small_snapshot();
  write_snapshot(folder / "latest", snapshot);
  const auto bytes = bytes_of(folder / "latest");
  const auto read = torch::pickle_load({bytes.begin(), bytes.end()}).toGenericDict();
  EXPECT_EQ(read.at("format").toStringRef(), "gpipe snapshot");
  EXPECT_EQ(read.at("version").toInt(), 1);
  const auto weights = read.at("model").toGenericDict();
  EXPECT_TRUE(same(weights.at("0.weight").toTensor(), snapshot.model["0.weight"]));
}

TEST(Snapshot, PythonCanReadAndWriteIt) {
  const char* python = std::getenv("GPIPE_PYTHON");
  if (python == nullptr) GTEST_SKIP() << "GPIPE_PYTHON is not set to an interpreter with torch";
  const TemporaryDirectory folder;
  const auto snapshot = small_snapshot();
  write_snapshot(folder / "cpp", snapshot);
  write_bytes(folder / "script.py", R"(
import sys, torch
from torch import nn
state = torch.load(sys.argv[1], weights_only=True)
model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2, bias=False))
model.load_state_dict(state["model"])
assert set(state["model"]) == set(model.state_dict())
assert set(state["optimizer"]["state"]) == {name for name, _ in model.named_parameters()}
assert state["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.999)
assert state["optimizer"]["state"]["0.bias"]["exp_avg"].shape == model[0].bias.shape
assert type(state) is dict and type(state["history"]["loss"]) is list
assert state["format"] == "gpipe snapshot" and state["version"] == 1 and state["epoch"] == 7
assert state["history"]["dice"] == [1 / 3] and state["options"]["data"] == "a folder/\u00e4"
torch.set_rng_state(state["random"])
torch.save(state, sys.argv[2])
)");
  const auto quoted = [](const std::filesystem::path& path) { return " '" + path.string() + "'"; };
  const std::string command =
      quoted(python) + quoted(folder / "script.py") + quoted(folder / "cpp") + quoted(folder / "py");
  ASSERT_EQ(std::system(command.c_str()), 0);
  EXPECT_TRUE(same(read_snapshot(folder / "py"), snapshot));
}

}  // namespace
}  // namespace gpipe
