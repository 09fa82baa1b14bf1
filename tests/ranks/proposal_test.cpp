#include "gpipe/ranks/proposal.h"
#include "tests/support/matchers.h"

namespace gpipe {
namespace {

constexpr Mesh kThree{.positions = 3, .replicas = 1};

/// What the ranks that make these calls are told; "" if they agree.
std::string told(const std::vector<Proposal>& calls, SameData& data, const Mesh& mesh = kThree) {
  std::vector<std::string> words;
  for (const auto& call : calls) words.push_back(encode(call));
  return error_of([&] { decode_agreement(decide(words, mesh, data)); });
}

std::vector<Proposal> with_data(const std::vector<std::uint64_t>& data) {
  std::vector<Proposal> calls;
  for (const auto each : data) calls.push_back({.what = "step", .data = each});
  return calls;
}

TEST(Proposal, NamesTheRankWhoseBackwardFailed) {
  SameData data;
  for (int culprit = 0; culprit < 3; ++culprit) {
    auto calls = with_data({0, 0, 0});
    calls[culprit].failed_before = true;
    EXPECT_THAT(told(calls, data),
                HasSubstr("the last backward of rank " + std::to_string(culprit) + " ended with an exception"));
  }
  auto calls = with_data({0, 0, 0});
  for (auto& call : calls) call.failed_before = true;
  EXPECT_EQ(told(calls, data), "");
}

TEST(Proposal, NamesTheRankThatLeavesOutAMiniBatch) {
  SameData data;
  EXPECT_EQ(told(with_data({5, 5, 9}), data), "");
  EXPECT_EQ(told(with_data({6, 6, 9}), data), "");
  EXPECT_EQ(told(with_data({0, 0, 0}), data), "");  // a call that does not train
  EXPECT_EQ(told(with_data({7, 0, 9}), data), "");
  EXPECT_THAT(told(with_data({7, 8, 9}), data), HasSubstr("rank 1 trains on another mini-batch than rank 0"));
  EXPECT_THAT(told(with_data({9, 8, 9}), data), HasSubstr("rank 1 trains on another mini-batch than rank 0"));
  EXPECT_EQ(told(with_data({10, 10, 9}), data), "") << "it is in step again";
}

TEST(Proposal, LetsRanksGiveOtherMiniBatchesFromTheBeginning) {
  SameData data;
  EXPECT_EQ(told(with_data({1, 1, 1}), data), "");
  EXPECT_EQ(told(with_data({1, 1, 1}), data), "") << "the same again tells nothing";
  for (std::uint64_t step = 2; step < 9; ++step) EXPECT_EQ(told(with_data({step, 1, 100 + step}), data), "");
}

TEST(Proposal, ComparesMiniBatchesWithinAReplica) {
  SameData data;
  const Mesh mesh{.positions = 2, .replicas = 2};
  for (std::uint64_t step = 1; step < 4; ++step) {
    EXPECT_EQ(told(with_data({step, 10 + step, step, 10 + step}), data, mesh), "");
  }
  EXPECT_THAT(told(with_data({4, 14, 4, 15}), data, mesh),
              HasSubstr("rank 3 trains on another mini-batch than rank 1"));
}

}  // namespace
}  // namespace gpipe
