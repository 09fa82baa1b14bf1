#include "gpipe/tensors/parcel.h"

#include <ATen/MemoryOverlap.h>

#include <atomic>
#include <unordered_set>

#include "gpipe/base/checks.h"
#include "gpipe/tensors/transfer.h"

namespace gpipe {
namespace {

std::uint64_t next_number() {
  static std::atomic<std::uint64_t> last{AliasGroup::kNone};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

}  // namespace

std::vector<at::Tensor> distinct(std::vector<at::Tensor> tensors) {
  std::unordered_set<const void*> seen;
  std::erase_if(tensors, [&](const at::Tensor& tensor) {
    return !tensor.defined() || !seen.insert(tensor.unsafeGetTensorImpl()).second;
  });
  return tensors;
}

std::size_t index_of(const at::Tensor& tensor, const std::vector<at::Tensor>& tensors) {
  const auto is_it = [&](const at::Tensor& each) { return each.is_same(tensor); };
  return std::ranges::find_if(tensors, is_it) - tensors.begin();
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined() || a.numel() == 0 || b.numel() == 0) return false;
  if (a.is_same(b)) return true;
  if (!a.has_storage() || !b.has_storage() || !a.is_alias_of(b)) return false;
  return at::get_overlap_status(a, b) != at::MemOverlapStatus::No;
}

std::vector<Parcel> with_copies(std::vector<Parcel> parcels, std::size_t count) {
  for (std::size_t p = 0; p < count; ++p) {
    for (auto& tensor : parcels[p].tensors) {
      if (tensor.defined()) tensor = copy_of(tensor);
    }
    parcels[p].renew_versions();
  }
  return parcels;
}

void AliasCheck::enters(const at::Tensor& tensor, const AliasGroup& group) {
  if (!tensor.defined() || group.number == AliasGroup::kNone) return;
  entering_.push_back({tensor, VersionWatch(tensor), group});
}

void AliasCheck::check(int stage, const std::string& layer) const {
  for (const auto& [tensor, version, group] : entering_) {
    if (!version.changed()) continue;
    const auto shares = [&number = group.number](const Entering& other) { return other.group.number == number; };
    if (group.shared_until < stage && std::ranges::count_if(entering_, shares) == 1) continue;
    throw_error("a tensor was changed in place by layer '", layer,
                "', but another tensor that shares its memory enters stage ", stage,
                " or a later one and may get a wrong gradient; change a clone instead");
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
      a.group.shared_until = std::max(a.group.shared_until, b.stage);
      b.group.shared_until = std::max(b.group.shared_until, a.stage);
    }
  }
}

std::vector<AliasGroup> alias_groups_of_inputs(const std::vector<at::Tensor>& inputs) {
  std::vector<AliasGroup> groups;
  for (const auto& input : inputs) {
    AliasGroup of_input{next_number()};
    for (std::size_t i = 0; i < groups.size(); ++i) {
      if (overlap(inputs[i], input)) of_input = groups[i];
    }
    groups.push_back(of_input);
  }
  return groups;
}

}  // namespace gpipe
