#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "gpipe/autograd/parcel.h"

namespace gpipe {

/// Watches one run of a cell for changes in place that tensors behind the cut would miss. Tensors that cross a cut are
/// detached one by one: when two of them share memory, autograd does not know it, and a device that gets copies does
/// not share it any more. So neither of them may be changed in place. Used by one thread.
class SharedMemory {
 public:
  /// Notes what enters the cell: the tensor as its layers see it, and what its parcel says of its memory.
  void enters(const at::Tensor& tensor, const Memory& memory);

  /// Errors: std::runtime_error, which names the layer that has run, when a tensor was changed whose memory another one
  /// shows that enters the same stage or a later one.
  void check(int stage, const std::string& layer) const;

  /// Says of the parcels that leave which memory their tensors show. `stages[k]` is where out[k] goes.
  void leaves(std::vector<Parcel>& out, const std::vector<int>& stages) const;

 private:
  struct Entering {
    at::Tensor tensor;
    std::uint32_t version;
    Memory memory;
    bool watched;
  };
  std::vector<Entering> entering_;
};

/// Says which of a mini-batch's inputs show the same memory. Each gets a number, so that outputs can be told from them.
std::vector<Memory> memory_of_inputs(const std::vector<at::Tensor>& inputs);

}  // namespace gpipe
