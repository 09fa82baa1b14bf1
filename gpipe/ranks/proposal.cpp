#include "gpipe/ranks/proposal.h"

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

Proposal to_proposal(const std::string& word) {
  const std::vector<std::string> parts = absl::StrSplit(word.substr(1), absl::MaxSplits(kBetween, 7));
  return {.what = parts.at(7),
          .same_on_all = parts[6],
          .same_for_counterparts = parts[5],
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
std::string to_word(Proposal proposal) {
  if (proposal.same_on_all.empty()) proposal.same_on_all = proposal.what;
  return absl::StrFormat("%c%020d%c%.17e%c%010d%c%d%c%020d%c%s%c%s%c%s", kCall, proposal.number, kBetween,
                         proposal.weight, kBetween, proposal.micro_batches, kBetween, proposal.failed_before ? 1 : 0,
                         kBetween, proposal.data, kBetween, proposal.same_for_counterparts, kBetween,
                         proposal.same_on_all, kBetween, proposal.what);
}

std::string refusal(const std::string& reason) { return kRefused + reason; }

std::string farewell(const std::string& reason) { return kGone + reason; }

int SameData::compare(const std::vector<Proposal>& calls, const Mesh& mesh) {
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
  std::vector<Proposal> calls;
  for (const auto& word : words) calls.push_back(to_proposal(word));
  for (int rank = 0; rank < static_cast<int>(calls.size()); ++rank) {  // first, because it is told once
    if (calls[rank].failed_before == calls[0].failed_before) continue;
    const int failed = calls[rank].failed_before ? rank : 0;
    return refusal(
        absl::StrFormat("the last backward of rank %d ended with an exception, as of a hook, but that of rank %d did "
                        "not, so gradients and parameters may not fit together; restart all ranks from a snapshot",
                        failed, rank - failed));
  }
  Agreement agreement{0, std::vector<double>(mesh.replicas), std::vector<int>(mesh.replicas)};
  for (int rank = 0; rank < static_cast<int>(calls.size()); ++rank) {
    const auto& call = calls[rank];
    const int replica = mesh.replica_of(rank);
    const int first = mesh.rank_at(0, replica);
    const int counterpart = mesh.rank_at(mesh.position_of(rank), 0);
    const auto& [what, same_on_all, same_for_counterparts, number, weight, micro_batches, failed_before, hash] = call;
    if (same_on_all != calls[0].same_on_all) return difference(rank, "calls " + what, 0, "calls " + calls[0].what);
    if (what != calls[first].what) return difference(rank, "calls " + what, first, "calls " + calls[first].what);
    if (same_for_counterparts != calls[counterpart].same_for_counterparts) {
      return refusal(absl::StrFormat("rank %d %s, but rank %d, with the same stages, %s", rank, same_for_counterparts,
                                     counterpart, calls[counterpart].same_for_counterparts));
    }
    agreement.largest = std::max(agreement.largest, number);
    agreement.weights[replica] = std::max(agreement.weights[replica], weight);
    agreement.micro_batches[replica] = micro_batches;
  }
  if (const int rank = data.compare(calls, mesh); rank >= 0) {
    return refusal(
        absl::StrFormat("rank %d trains on another mini-batch than rank %d, but had the same in the calls before; one "
                        "of them has left out a mini-batch",
                        rank, mesh.rank_at(0, mesh.replica_of(rank))));
  }
  auto judgement = absl::StrFormat("%c%020d", kAgreed, agreement.largest);
  for (int r = 0; r < mesh.replicas; ++r) {
    absl::StrAppendFormat(&judgement, "%c%.17e%c%010d", kBetween, agreement.weights[r], kBetween,
                          agreement.micro_batches[r]);
  }
  return judgement;
}

std::optional<std::string> reason_of_farewell(const std::string& words) {
  return words.front() == kGone ? std::optional(words.substr(1)) : std::nullopt;
}

Agreement to_agreement(const std::string& judgement) {
  if (judgement.front() != kAgreed) throw std::runtime_error("[gpipe] " + judgement.substr(1));
  const std::vector<std::string> parts = absl::StrSplit(judgement.substr(1), kBetween);
  Agreement agreement{.largest = std::stoull(parts[0]), .weights = {}, .micro_batches = {}};
  for (std::size_t i = 1; i + 1 < parts.size(); i += 2) {
    agreement.weights.push_back(to_number(parts[i]));
    agreement.micro_batches.push_back(std::stoi(parts[i + 1]));
  }
  return agreement;
}

}  // namespace gpipe
