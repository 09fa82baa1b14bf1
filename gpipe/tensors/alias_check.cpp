#include "gpipe/tensors/alias_check.h"

#include <atomic>
#include <stdexcept>

#include "gpipe/tensors/overlap.h"

namespace gpipe {
namespace {

std::uint64_t next_number() {
  static std::atomic<std::uint64_t> last{AliasGroup::kNone};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

}  // namespace

void AliasCheck::enters(const at::Tensor& tensor, const AliasGroup& group) {
  if (!tensor.defined() || group.number == AliasGroup::kNone) return;
  bool watched = group.shared_later;
  for (auto& other : entering_) {
    if (other.group.number != group.number) continue;
    other.watched = watched = true;
  }
  entering_.push_back({tensor, VersionWatch(tensor), group, watched});
}

void AliasCheck::check(int stage, const std::string& layer) const {
  for (const auto& [tensor, version, group, watched] : entering_) {
    if (!watched || !version.changed()) continue;
    throw std::runtime_error("[gpipe] a tensor was changed in place by layer '" + layer +
                             "', but another tensor that shares its memory enters stage " + std::to_string(stage) +
                             " or a later one and would get a wrong gradient; change a clone instead");
  }
}

void AliasCheck::leaves(std::vector<Parcel>& out, const std::vector<int>& stages) const {
  struct Leaving {
    const at::Tensor& tensor;
    AliasGroup& group;
    int stage;
  };
  std::vector<Leaving> leaving;
  for (std::size_t k = 0; k < out.size(); ++k) {
    for (std::size_t i = 0; i < out[k].tensors.size(); ++i) {
      if (out[k].tensors[i].defined()) leaving.push_back({out[k].tensors[i], out[k].alias_groups[i], stages[k]});
    }
  }
  for (auto& each : leaving) {
    for (const auto& entered : entering_) {
      if (overlap(entered.tensor, each.tensor)) each.group = entered.group;
    }
  }
  for (std::size_t i = 0; i < leaving.size(); ++i) {
    for (std::size_t j = i + 1; j < leaving.size(); ++j) {
      auto& a = leaving[i];
      auto& b = leaving[j];
      if (!overlap(a.tensor, b.tensor)) continue;
      if (a.group.number == AliasGroup::kNone) a.group.number = b.group.number;
      if (a.group.number == AliasGroup::kNone) a.group.number = next_number();
      b.group.number = a.group.number;
      a.group.shared_later |= a.stage <= b.stage;
      b.group.shared_later |= b.stage <= a.stage;
    }
  }
}

std::vector<AliasGroup> alias_groups_of_inputs(const std::vector<at::Tensor>& inputs) {
  std::vector<AliasGroup> groups;
  for (const auto& input : inputs) {
    AliasGroup of_input{next_number(), false};
    for (std::size_t i = 0; i < groups.size(); ++i) {
      if (overlap(inputs[i], input)) of_input = groups[i];
    }
    groups.push_back(of_input);
  }
  return groups;
}

}  // namespace gpipe
