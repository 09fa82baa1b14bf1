#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "gpipe/snapshot/zip_records.h"

namespace gpipe {

/// Whether a snapshot can contain tensors of this type. LibTorch and Python pickle these types in the same way.
bool is_saveable(c10::ScalarType type);

/// Returns the element type of a storage class as a pickle names it, such as "torch.FloatStorage"; std::nullopt for any
/// other name.
std::optional<c10::ScalarType> element_type(std::string_view storage_class);

/// A record's storage, and the type of its elements.
struct Stored {
  at::Storage storage;
  c10::ScalarType type;
};

/// Copies the records of an archive into storages, each record at most once. Not thread-safe.
class StoredTensors {
 public:
  /// `records` must outlive this object.
  explicit StoredTensors(const ZipRecords& records) : records_(records) {}

  /// Returns a copy of the record "data/KEY", which later calls share. Errors: std::runtime_error if there is no such
  /// record, or if it does not have exactly `count` elements.
  Stored get(const std::string& key, c10::ScalarType type, std::int64_t count);

 private:
  const ZipRecords& records_;
  std::map<std::string, at::Storage> storages_;
};

/// Returns a tensor that shares the storage. Errors: std::runtime_error for a tensor that lies outside the storage, or
/// has more elements than the storage.
at::Tensor make_tensor(const Stored& stored, std::int64_t offset, const std::vector<std::int64_t>& sizes,
                       const std::vector<std::int64_t>& strides);

}  // namespace gpipe
