#pragma once

#include <c10/core/ScalarType.h>

#include <string_view>

#include "gpipe/snapshot/plain.h"
#include "gpipe/snapshot/zip_records.h"

namespace gpipe {

/// Reads a pickle as LibTorch and Python's torch.save write it. `records` has the bytes of its tensors, in "data/KEY";
/// the tensors are copies of them.
///
/// The pickle can only make plain values: any other class that it names is an error. It may hold a tensor twice, but
/// not a list or dict. A tensor lies inside its record, and shows no more bytes than the record has. Depth is limited;
/// time and memory are proportional to the size of the pickle and the records.
///
/// Errors: std::runtime_error with the reason.
Plain read_pickle(std::string_view pickle, const ZipRecords& records);

/// Whether tensors of this type can be in a snapshot: it is one that LibTorch and Python pickle alike.
bool is_saveable(c10::ScalarType type);

}  // namespace gpipe
