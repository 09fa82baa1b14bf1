#include "gpipe/ranks/agreement.h"

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <algorithm>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "gpipe/base/bytes.h"
#include "gpipe/base/checks.h"

namespace gpipe {
namespace {

// The first letter of each message.
constexpr char kCall = 'C';
constexpr char kRefused = 'R';
constexpr char kAgreed = 'A';
constexpr char kGone = 'G';

// Calls `visit` with each member of a proposal, to write and to read it.
template <typename Proposal, typename Visit>
void visit_members(Proposal& proposal, Visit visit) {
  auto& key = proposal.key;
  visit(key.call, key.name, key.number, key.retains_graph, key.measures, key.returns_output, key.sums_losses,
        key.counts, key.scale, key.training, key.checkpoints.modes, key.autocast, key.sizes, proposal.trained,
        proposal.trained_sizes, proposal.program, proposal.number, proposal.weight, proposal.has_samples,
        proposal.has_loaded, proposal.failed_before);
}

Proposal to_proposal(std::string_view message) {
  if (!message.starts_with(kCall)) ByteReader::refuse();
  ByteReader items(message.substr(1));
  Proposal proposal;
  visit_members(proposal, [&](auto&... members) { ((members = items.get<std::decay_t<decltype(members)>>()), ...); });
  if (!items.done() || proposal.key.call < 0 || proposal.key.call > StepKey::kBackward) ByteReader::refuse();
  return proposal;
}

template <typename... Parts>
std::string refuse(const Parts&... parts) {
  return encode_refusal(absl::StrCat(parts...));
}

bool differ_in_replicas(StepKey a, StepKey b) {
  a.sizes = b.sizes = {};
  return a != b;
}

}  // namespace

std::string to_string(const StepKey& key) {
  if (key.call == StepKey::kOther) return key.name;
  const std::string names[] = {"", "forward", "forward with gradients", "step", "the backward of call "};
  auto text = names[key.call];
  if (key.call == StepKey::kBackward) return absl::StrCat(text, key.number, key.retains_graph ? ", retain_graph" : "");
  const auto add = [&](bool holds, const auto&... words) {
    if (holds) absl::StrAppend(&text, words...);
  };
  add(key.returns_output, " with output");
  add(key.scale != 1, " scaled by ", absl::StrFormat("%.17g", key.scale));
  add(key.sums_losses, " with a sum of losses");
  add(key.counts, " with counts");
  add(key.measures, " that measures");
  add(true, " of micro-batches [", absl::StrJoin(key.sizes, ", "), "], checkpoint ", to_string(key.checkpoints));
  add(!key.training, ", evaluation mode");
  for (std::size_t i = 0; i + 1 < key.autocast.size(); i += 2) {
    add(true, ", autocast of ", c10::DeviceTypeName(static_cast<c10::DeviceType>(key.autocast[i]), /*lower_case=*/true),
        " to ", c10::toString(static_cast<c10::ScalarType>(key.autocast[i + 1])));
  }
  return text;
}

std::string encode(const Proposal& proposal) {
  ByteWriter items;
  visit_members(proposal, [&](const auto&... members) { items.add(members...); });
  return kCall + items.take();
}

std::string encode_refusal(const std::string& reason) { return kRefused + reason; }

std::string encode_leaving(const std::string& reason) { return kGone + reason; }

std::string decide(const std::vector<std::string>& messages, const Mesh& mesh) {
  const int size = static_cast<int>(messages.size());
  std::vector<Proposal> calls;
  for (int r = 0; r < size; ++r) {
    if (messages[r].starts_with(kGone)) return messages[r];
    if (messages[r].starts_with(kRefused)) return refuse("rank ", r, " refused the call: ", messages[r].substr(1));
  }
  for (const auto& message : messages) calls.push_back(to_proposal(message));
  for (int r = 0; r < size; ++r) {  // first, because it is told once
    if (calls[r].failed_before == calls[0].failed_before) continue;
    const int failed = calls[r].failed_before ? r : 0;
    return refuse("the last backward of rank ", failed, " ended with an exception, as of a hook, but that of rank ",
                  r - failed,
                  " did not, so gradients and parameters may not fit together; restart all ranks from a snapshot");
  }
  Agreement agreement{0, false, std::vector<double>(mesh.replicas), std::vector<int>(mesh.replicas)};
  for (int r = 0; r < size; ++r) {
    const auto& call = calls[r];
    const int replica = mesh.replica_of(r);
    const int first = mesh.rank_at(0, replica);
    const int counterpart = mesh.rank_at(mesh.position_of(r), 0);
    const bool differs = differ_in_replicas(call.key, calls[0].key);
    if (const auto& other = calls[differs ? 0 : first]; call.key != other.key) {
      return refuse("rank ", r, " calls ", to_string(call.key), ", but rank ", differs ? 0 : first, " calls ",
                    to_string(other.key), "; make the same calls in the same order on all ranks");
    }
    if (call.program != calls[first].program) {
      return refuse("rank ", r, " has another schedule for '", to_string(call.key), "' than rank ", first,
                    "; give all ranks the same schedule file or function");
    }
    const auto& same_stages = calls[counterpart];
    if (call.trained != same_stages.trained || call.trained_sizes != same_stages.trained_sizes) {
      return refuse("rank ", r, " trains ", call.trained, " parameters, but rank ", counterpart,
                    ", with the same stages, trains ", same_stages.trained,
                    call.trained == same_stages.trained ? " others, or such of other types or strides" : "",
                    "; freeze the same ones on all replicas");
    }
    agreement.largest = std::max(agreement.largest, call.number);
    agreement.has_loaded = agreement.has_loaded || call.has_loaded;
    agreement.weights[replica] = std::max(agreement.weights[replica], call.weight);
    agreement.micro_batches[replica] = call.has_samples ? static_cast<int>(call.key.sizes.size()) : 0;
  }
  ByteWriter items;
  items.add(agreement.largest, agreement.has_loaded, agreement.weights, agreement.micro_batches);
  return kAgreed + items.take();
}

std::optional<std::string> reason_for_leaving(const std::string& message) {
  return message.starts_with(kGone) ? std::optional(message.substr(1)) : std::nullopt;
}

Agreement decode_agreement(const std::string& decision) {
  if (decision.empty()) ByteReader::refuse();
  if (!decision.starts_with(kAgreed)) throw_error("", decision.substr(1));
  ByteReader items(std::string_view(decision).substr(1));
  Agreement agreement{items.get<std::uint64_t>(), items.get<bool>(), items.get<std::vector<double>>(),
                      items.get<std::vector<int>>()};
  if (!items.done() || agreement.weights.size() != agreement.micro_batches.size()) ByteReader::refuse();
  return agreement;
}

}  // namespace gpipe
