#include "gpipe/tensors/shared_memory.h"

#include <atomic>
#include <stdexcept>

#include "gpipe/tensors/overlap.h"

namespace gpipe {
namespace {

std::uint64_t next_memory() {
  static std::atomic<std::uint64_t> last{Memory::kOwn};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

}  // namespace

void SharedMemory::enters(const at::Tensor& tensor, const Memory& memory) {
  if (!tensor.defined() || memory.number == Memory::kOwn) return;
  bool watched = memory.shared_later;
  for (auto& other : entering_) {
    if (other.memory.number != memory.number) continue;
    other.watched = watched = true;
  }
  entering_.push_back({tensor, VersionWatch(tensor), memory, watched});
}

void SharedMemory::check(int stage, const std::string& layer) const {
  for (const auto& [tensor, version, memory, watched] : entering_) {
    if (!watched || !version.changed()) continue;
    throw std::runtime_error("[gpipe] a tensor was changed in place by layer '" + layer +
                             "', but another tensor that shares its memory enters stage " + std::to_string(stage) +
                             " or a later one and would get a wrong gradient; change a clone instead");
  }
}

void SharedMemory::leaves(std::vector<Parcel>& out, const std::vector<int>& stages) const {
  struct Leaving {
    const at::Tensor& tensor;
    Memory& memory;
    int stage;
  };
  std::vector<Leaving> leaving;
  for (std::size_t k = 0; k < out.size(); ++k) {
    for (std::size_t i = 0; i < out[k].tensors.size(); ++i) {
      if (out[k].tensors[i].defined()) leaving.push_back({out[k].tensors[i], out[k].memory[i], stages[k]});
    }
  }
  for (auto& each : leaving) {
    for (const auto& entered : entering_) {
      if (overlap(entered.tensor, each.tensor)) each.memory = entered.memory;
    }
  }
  for (std::size_t i = 0; i < leaving.size(); ++i) {
    for (std::size_t j = i + 1; j < leaving.size(); ++j) {
      auto& a = leaving[i];
      auto& b = leaving[j];
      if (!overlap(a.tensor, b.tensor)) continue;
      if (a.memory.number == Memory::kOwn) a.memory.number = b.memory.number;
      if (a.memory.number == Memory::kOwn) a.memory.number = next_memory();
      b.memory.number = a.memory.number;
      a.memory.shared_later |= a.stage <= b.stage;
      b.memory.shared_later |= b.stage <= a.stage;
    }
  }
}

std::vector<Memory> memory_of_inputs(const std::vector<at::Tensor>& inputs) {
  std::vector<Memory> memory;
  for (const auto& input : inputs) {
    Memory of_input{next_memory(), false};
    for (std::size_t i = 0; i < memory.size(); ++i) {
      if (overlap(inputs[i], input)) of_input = memory[i];
    }
    memory.push_back(of_input);
  }
  return memory;
}

}  // namespace gpipe
