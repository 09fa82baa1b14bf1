#include "gpipe/ranks/proposal.h"
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

}  // namespace
}  // namespace gpipe
