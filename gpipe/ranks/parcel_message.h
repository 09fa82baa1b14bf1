#pragma once

#include <memory>
#include <vector>

#include "gpipe/autograd/parcel.h"
#include "gpipe/ranks/wire.h"

namespace gpipe {

/// Makes a message of parcels of this rank. Keeps the tensors' memory, strides and bits; a tensor with gaps or overlaps is
/// made contiguous. REQUIRES: the tensors are on the CPU. Errors: std::invalid_argument for sparse tensors.
Outgoing to_message(std::vector<Parcel> parcels, int rank, const StructureCodec& codec);

/// Makes the memory for messages of parcels. Errors: std::runtime_error for a layout that is malformed.
Allocate parcel_memory(StructureCodec codec);

/// Returns the parcels of a message that was received into parcel_memory().
std::vector<Parcel> to_parcels(std::unique_ptr<Incoming> message);

}  // namespace gpipe
