#pragma once

#include <ATen/core/ivalue.h>

#include "gpipe/snapshot.h"
#include "gpipe/snapshot/plain.h"

namespace gpipe {

// Conversions between a Snapshot and the dict that its file contains.

/// Errors: std::runtime_error, without the path, for a snapshot that from_content() would refuse.
c10::IValue to_content(const Snapshot& snapshot);

/// Errors: std::runtime_error, without the path, for a value that is not a snapshot, or is of a newer version.
Snapshot from_content(const Plain& content);

}  // namespace gpipe
