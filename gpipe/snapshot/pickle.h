#pragma once

#include <string_view>

#include "gpipe/snapshot/plain.h"
#include "gpipe/snapshot/zip_records.h"

namespace gpipe {

/// Reads a pickle as LibTorch and Python's torch.save write it. The tensors' memory is copied from the records
/// "data/KEY".
///
/// The pickle can only make plain values: a reference to another class is an error. It can contain a tensor twice, but
/// not a list or dict. A tensor must lie inside its record and have no more elements than the record. Depth is limited.
/// Time and memory are proportional to the size of the pickle and the records.
///
/// Errors: std::runtime_error with the reason.
Plain read_pickle(std::string_view pickle, const ZipRecords& records);

}  // namespace gpipe
