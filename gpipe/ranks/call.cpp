#include "gpipe/ranks/call.h"

#include <algorithm>
#include <charconv>
#include <stdexcept>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"

namespace gpipe {
namespace {

// The first letter of each word.
constexpr char kCall = 'C';
constexpr char kRefused = 'R';
constexpr char kAgreed = 'A';
constexpr char kGone = 'G';

constexpr char kBetween = '\x1f';  // the parts of a word

// Whatever the locale.
double to_number(const std::string& text) {
  double number = 0;
  std::from_chars(text.data(), text.data() + text.size(), number);
  return number;
}

Call to_call(const std::string& word) {
  const std::vector<std::string> parts = absl::StrSplit(word.substr(1), absl::MaxSplits(kBetween, 7));
  return {.what = parts.at(7),
          .in_common = parts[6],
          .of_twins = parts[5],
          .number = std::stoull(parts[0]),
          .weight = to_number(parts[1]),
          .micro_batches = std::stoi(parts[2]),
          .failed_before = parts[3] == "1",
          .data = std::stoull(parts[4])};
}

std::string difference(int rank, const std::string& does, int other, const std::string& other_does) {
  return refusal(absl::StrFormat("rank %d %s, but rank %d %s; make the same calls in the same order on all ranks", rank,
                                 does, other, other_does));
}

}  // namespace

// Numbers have a fixed length, so that words seldom change theirs.
std::string to_word(Call call) {
  if (call.in_common.empty()) call.in_common = call.what;
  return absl::StrFormat("%c%020d%c%.17e%c%010d%c%d%c%020d%c%s%c%s%c%s", kCall, call.number, kBetween, call.weight,
                         kBetween, call.micro_batches, kBetween, call.failed_before ? 1 : 0, kBetween, call.data,
                         kBetween, call.of_twins, kBetween, call.in_common, kBetween, call.what);
}

std::string refusal(const std::string& reason) { return kRefused + reason; }

std::string farewell(const std::string& reason) { return kGone + reason; }

int SameData::compare(const std::vector<Call>& calls, const Mesh& mesh) {
  constexpr int kEnough = 2;  // one may be equal by chance, such as a first one of zeros
  ranks_.resize(calls.size());
  for (int rank = 0; rank < static_cast<int>(calls.size()); ++rank) {
    auto& [last, same, differs] = ranks_[rank];
    const auto data = calls[rank].data;
    const auto expected = calls[mesh.rank_at(0, mesh.replica_of(rank))].data;
    if (data == 0 || expected == 0 || differs) continue;
    const bool is_other = data != expected;
    if (is_other && same >= kEnough) return rank;
    differs = is_other;
    if (std::exchange(last, data) != data) ++same;
  }
  return -1;
}

std::string judge(const std::vector<std::string>& words, const Mesh& mesh, SameData& data) {
  for (std::size_t r = 0; r < words.size(); ++r) {
    if (words[r].front() == kGone) return words[r];
    if (words[r].front() == kRefused) {
      return refusal("rank " + std::to_string(r) + " refused the call: " + words[r].substr(1));
    }
  }
  std::vector<Call> calls;
  for (const auto& word : words) calls.push_back(to_call(word));
  for (int rank = 0; rank < static_cast<int>(calls.size()); ++rank) {  // first, because it is told once
    if (calls[rank].failed_before == calls[0].failed_before) continue;
    const int failed = calls[rank].failed_before ? rank : 0;
    return refusal(
        absl::StrFormat("the last backward of rank %d ended with an exception, as of a hook, but that of rank %d did "
                        "not, so gradients and parameters may not fit together; restart all ranks from a snapshot",
                        failed, rank - failed));
  }
  Verdict verdict{0, std::vector<double>(mesh.replicas), std::vector<int>(mesh.replicas)};
  for (int rank = 0; rank < static_cast<int>(calls.size()); ++rank) {
    const auto& call = calls[rank];
    const int replica = mesh.replica_of(rank);
    const int first = mesh.rank_at(0, replica);
    const int twin = mesh.rank_at(mesh.position_of(rank), 0);
    const auto& [what, in_common, of_twins, number, weight, micro_batches, failed_before, hash] = call;
    if (in_common != calls[0].in_common) return difference(rank, "calls " + what, 0, "calls " + calls[0].what);
    if (what != calls[first].what) return difference(rank, "calls " + what, first, "calls " + calls[first].what);
    if (of_twins != calls[twin].of_twins) {
      return refusal(absl::StrFormat("rank %d %s, but rank %d, with the same stages, %s", rank, of_twins, twin,
                                     calls[twin].of_twins));
    }
    verdict.largest = std::max(verdict.largest, number);
    verdict.weights[replica] = std::max(verdict.weights[replica], weight);
    verdict.micro_batches[replica] = micro_batches;
  }
  if (const int rank = data.compare(calls, mesh); rank >= 0) {
    return refusal(
        absl::StrFormat("rank %d trains on another mini-batch than rank %d, but had the same in the calls before; one "
                        "of them has left out a mini-batch",
                        rank, mesh.rank_at(0, mesh.replica_of(rank))));
  }
  auto judgement = absl::StrFormat("%c%020d", kAgreed, verdict.largest);
  for (int r = 0; r < mesh.replicas; ++r) {
    absl::StrAppendFormat(&judgement, "%c%.17e%c%010d", kBetween, verdict.weights[r], kBetween,
                          verdict.micro_batches[r]);
  }
  return judgement;
}

std::optional<std::string> reason_of_farewell(const std::string& words) {
  return words.front() == kGone ? std::optional(words.substr(1)) : std::nullopt;
}

Verdict to_verdict(const std::string& judgement) {
  if (judgement.front() != kAgreed) throw std::runtime_error("[gpipe] " + judgement.substr(1));
  const std::vector<std::string> parts = absl::StrSplit(judgement.substr(1), kBetween);
  Verdict verdict{.largest = std::stoull(parts[0]), .weights = {}, .micro_batches = {}};
  for (std::size_t i = 1; i + 1 < parts.size(); i += 2) {
    verdict.weights.push_back(to_number(parts[i]));
    verdict.micro_batches.push_back(std::stoi(parts[i + 1]));
  }
  return verdict;
}

}  // namespace gpipe
