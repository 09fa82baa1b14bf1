#pragma once

#include <ATen/core/ivalue.h>

#include "gpipe/snapshot/plain.h"
#include "gpipe/snapshot/snapshot.h"

namespace gpipe {

// The dict that a snapshot's file holds.

/// Errors: std::runtime_error, without the path, for what from_content() would refuse.
c10::IValue to_content(const Snapshot& snapshot);

/// Errors: std::runtime_error, without the path, for what is not a snapshot or of a newer version.
Snapshot from_content(const Plain& content);

}  // namespace gpipe
