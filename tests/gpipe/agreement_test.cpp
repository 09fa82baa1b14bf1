#include "gpipe/ranks/agreement.h"
#include "tests/support/matchers.h"

namespace gpipe {
namespace {

constexpr Mesh kThree{.positions = 3, .replicas = 1};

/// What the ranks that make these calls are told; "" if they agree.
std::string told(const std::vector<Proposal>& calls, const Mesh& mesh = kThree) {
  std::vector<std::string> words;
  for (const auto& call : calls) words.push_back(encode(call));
  return error_of([&] { decode_agreement(decide(words, mesh)); });
}

TEST(Agreement, NamesTheRankWhoseBackwardFailed) {
  std::vector<Proposal> calls(3, {.key = {.name = "gather"}});
  for (auto& culprit : calls) {
    culprit.failed_before = true;
    EXPECT_THAT(told(calls), HasSubstr("the last backward of rank " + std::to_string(&culprit - calls.data()) +
                                       " ended with an exception"));
    culprit.failed_before = false;
  }
  for (auto& call : calls) call.failed_before = true;
  EXPECT_EQ(told(calls), "");
}

TEST(Agreement, TellsBothCallsInWordsIfTheyDiffer) {
  const StepKey key{.call = StepKey::kStep, .sizes = {2, 1}};
  struct Case {
    std::function<void(StepKey&)> change;
    std::string words;
  };
  const std::vector<Case> cases = {
      {[](auto& other) { other.call = StepKey::kForward; }, "forward of micro-batches [2, 1], checkpoint never"},
      {[](auto& other) {
         other.sizes = {1, 2};
       },
       "step of micro-batches [1, 2], checkpoint never"},
      {[](auto& other) { other.checkpoints = Checkpoint::kAlways; }, "step of micro-batches [2, 1], checkpoint always"},
      {[](auto& other) { other.training = false; }, "checkpoint never, evaluation mode"},
      {[](auto& other) {
         other.autocast = {0, 15};
       },
       "checkpoint never, autocast of cpu to BFloat16"},
      {[](auto& other) { other.returns_output = true; }, "step with output of"},
      {[](auto& other) { other.scale = 1 + 1e-15; }, "step scaled by 1.0000000000000011 of"},
      {[](auto& other) { other.sums_losses = true; }, "step with a sum of losses of"},
      {[](auto& other) { other.counts = true; }, "step with counts of"},
      {[](auto& other) { other.measures = true; }, "step that measures of"},
      {[](auto& other) { other = {.call = StepKey::kBackward, .number = 7, .retains_graph = true}; },
       "the backward of call 7, retain_graph;"},
      {[](auto& other) { other = {.name = "largest"}; }, "rank 0 calls largest;"}};
  for (const auto& [change, words] : cases) {
    std::vector<Proposal> calls(3, {.key = key});
    change(calls[0].key);
    EXPECT_THAT(told(calls), AllOf(HasSubstr("rank 1 calls step of micro-batches [2, 1], checkpoint never, but rank 0"),
                                   HasSubstr(words)));
    // Replicas may have other sizes.
    std::vector<Proposal> of_replicas(2, {.key = calls[0].key});
    of_replicas[1].key.sizes = {4};
    EXPECT_EQ(told(of_replicas, {.positions = 1, .replicas = 2}), "");
  }
}

TEST(Agreement, RefusesOtherBytes) {
  const auto right = encode({.key = {.name = "gather"}});
  for (const auto& word : {std::string(), std::string("?"), right.substr(0, 20), std::string("A") + right.substr(1)}) {
    EXPECT_THAT([&] { decide({right, right, word}, kThree); }, throws<std::runtime_error>("malformed layout"));
  }
  const auto decision = decide({right, right, right}, kThree);
  for (const auto& other : {std::string(), decision.substr(0, decision.size() - 1)}) {
    EXPECT_THAT([&] { decode_agreement(other); }, throws<std::runtime_error>("malformed layout"));
  }
}

}  // namespace
}  // namespace gpipe
