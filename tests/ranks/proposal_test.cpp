#include "gpipe/ranks/proposal.h"
#include "tests/support/matchers.h"

namespace gpipe {
namespace {

constexpr Mesh kThree{.positions = 3, .replicas = 1};

/// What the ranks that make these calls are told; "" if they agree.
std::string told(const std::vector<Proposal>& calls, const Mesh& mesh = kThree) {
  std::vector<std::string> words;
  for (const auto& call : calls) words.push_back(encode(call));
  return error_of([&] { decode_agreement(decide(words, mesh), mesh); });
}

TEST(Proposal, NamesTheRankWhoseBackwardFailed) {
  std::vector<Proposal> calls(3, {.what = "step"});
  for (auto& culprit : calls) {
    culprit.failed_before = true;
    EXPECT_THAT(told(calls), HasSubstr("the last backward of rank " + std::to_string(&culprit - calls.data()) +
                                       " ended with an exception"));
    culprit.failed_before = false;
  }
  for (auto& call : calls) call.failed_before = true;
  EXPECT_EQ(told(calls), "");
}

TEST(Proposal, RefusesOtherBytes) {
  const auto right = encode({.what = "step"});
  for (const auto& word : {std::string(), std::string("?"), right.substr(0, 20), std::string("A") + right.substr(1)}) {
    EXPECT_THAT([&] { decide({right, right, word}, kThree); }, throws<std::runtime_error>("malformed layout"));
  }
  const auto decision = decide({right, right, right}, kThree);
  for (const auto& other : {std::string(), decision.substr(0, decision.size() - 1)}) {
    EXPECT_THAT([&] { decode_agreement(other, kThree); }, throws<std::runtime_error>("malformed layout"));
  }
}

}  // namespace
}  // namespace gpipe
