#include "gpipe/ranks/proposal.h"

#include <algorithm>

#include "gpipe/base/bytes.h"
#include "gpipe/base/checks.h"

namespace gpipe {
namespace {

// The first letter of each word.
constexpr char kCall = 'C';
constexpr char kRefused = 'R';
constexpr char kAgreed = 'A';
constexpr char kGone = 'G';

Proposal to_proposal(std::string_view word) {
  if (!word.starts_with(kCall)) ByteReader::refuse();
  ByteReader items(word.substr(1));
  return {items.get<std::string>(),   items.get<std::string>(), items.get<std::string>(), items.get<std::uint64_t>(),
          items.get<std::uint64_t>(), items.get<double>(),      items.get<int>(),         items.get<bool>(),
          items.get<bool>(),          items.get<bool>()};
}

std::string difference(int rank, const std::string& does, int other, const std::string& other_does) {
  return encode_refusal(absl::StrFormat(
      "rank %d %s, but rank %d %s; make the same calls in the same order on all ranks", rank, does, other, other_does));
}

}  // namespace

std::string encode(Proposal proposal) {
  if (proposal.same_on_all.empty()) proposal.same_on_all = proposal.what;
  ByteWriter items;
  items.add(proposal.what, proposal.same_on_all, proposal.same_for_counterparts, proposal.program, proposal.number,
            proposal.weight, proposal.micro_batches, proposal.has_loaded, proposal.failed_before,
            proposal.has_one_caller);
  return kCall + items.take();
}

std::string encode_refusal(const std::string& reason) { return kRefused + reason; }

std::string encode_leaving(const std::string& reason) { return kGone + reason; }

std::string decide(const std::vector<std::string>& words, const Mesh& mesh) {
  for (std::size_t r = 0; r < words.size(); ++r) {
    if (words[r].starts_with(kGone)) return words[r];
    if (words[r].starts_with(kRefused)) {
      return encode_refusal("rank " + std::to_string(r) + " refused the call: " + words[r].substr(1));
    }
  }
  std::vector<Proposal> calls;
  for (const auto& word : words) calls.push_back(to_proposal(word));
  for (int rank = 0; rank < static_cast<int>(calls.size()); ++rank) {  // first, because it is told once
    if (calls[rank].failed_before == calls[0].failed_before) continue;
    const int failed = calls[rank].failed_before ? rank : 0;
    return encode_refusal(
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
    const auto& [what, same_on_all, same_for_counterparts, program, number, weight, micro_batches, has_loaded,
                 failed_before, has_one_caller] = call;
    if (same_on_all != calls[0].same_on_all) return difference(rank, "calls " + what, 0, "calls " + calls[0].what);
    if (what != calls[first].what) return difference(rank, "calls " + what, first, "calls " + calls[first].what);
    if (program != calls[first].program) {
      return encode_refusal(absl::StrFormat(
          "rank %d has another schedule for '%s' than rank %d; give all ranks the same schedule file or function", rank,
          what, first));
    }
    if (same_for_counterparts != calls[counterpart].same_for_counterparts) {
      return encode_refusal(absl::StrFormat("rank %d %s, but rank %d, with the same stages, %s", rank,
                                            same_for_counterparts, counterpart,
                                            calls[counterpart].same_for_counterparts));
    }
    agreement.largest = std::max(agreement.largest, number);
    agreement.weights[replica] = std::max(agreement.weights[replica], weight);
    agreement.micro_batches[replica] = micro_batches;
    agreement.has_loaded = agreement.has_loaded || has_loaded;
  }
  ByteWriter items;
  items.add(agreement.largest, agreement.has_loaded);
  for (int r = 0; r < mesh.replicas; ++r) items.add(agreement.weights[r], agreement.micro_batches[r]);
  return kAgreed + items.take();
}

std::string awaited_call(const std::string& words) {
  if (!words.starts_with(kCall)) return "";
  auto proposal = to_proposal(words);
  return proposal.has_one_caller ? std::move(proposal.what) : "";
}

std::optional<std::string> reason_for_leaving(const std::string& words) {
  return words.starts_with(kGone) ? std::optional(words.substr(1)) : std::nullopt;
}

Agreement decode_agreement(const std::string& decision, const Mesh& mesh) {
  if (decision.empty()) ByteReader::refuse();
  if (!decision.starts_with(kAgreed)) throw_error("", decision.substr(1));
  ByteReader items(std::string_view(decision).substr(1));
  Agreement agreement;
  agreement.largest = items.get<std::uint64_t>();
  agreement.has_loaded = items.get<bool>();
  for (int r = 0; r < mesh.replicas; ++r) {
    agreement.weights.push_back(items.get<double>());
    agreement.micro_batches.push_back(items.get<int>());
  }
  return agreement;
}

}  // namespace gpipe
