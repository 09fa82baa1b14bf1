#pragma once

#include "gpipe/ranks/connections.h"
#include "gpipe/tensors/parcel.h"

namespace gpipe {

/// Returns the elements that travel: without gaps or repeats by strides of 0, ordered by the sizes and strides.
at::Tensor elements_of(const at::Tensor& tensor);

/// Receives tensors, also ones whose memory has gaps.
class Landing {
 public:
  /// Adds a tensor that will get its values.
  void add(const at::Tensor& tensor);
  /// The memory without gaps into which to receive, one tensor per add().
  const std::vector<at::Tensor>& received() const { return received_; }
  /// Gives the tensors with gaps their values. Call when all have been received, on the stream that has.
  void scatter();

 private:
  std::vector<at::Tensor> received_;
  std::vector<std::pair<at::Tensor, at::Tensor>> with_gaps_;  // to and from
};

/// Makes a message of parcels of this rank. Tensors arrive with their bits, strides and addresses modulo 64 bytes. Of
/// tensors that are not on the CPU it has only layouts: adds their elements_of() to `on_device`, for a DeviceWire.
/// REQUIRES: all tensors are on the CPU, or `on_device` is not null. Errors: std::invalid_argument unless
/// sizes and strides tell all about a tensor.
Outgoing to_message(const std::vector<Parcel>& parcels, int rank, const StructureCodec& codec,
                    std::vector<at::Tensor>* on_device = nullptr);

/// Makes memory for parcels. Errors: std::runtime_error for a layout that is malformed or too large for this host.
std::unique_ptr<Incoming> allocate_parcels(const std::string& layout);

/// Returns the parcels of a message from allocate_parcels(), with meta tensors in the place of tensors on devices.
/// Errors: std::runtime_error for a message without parcels.
std::vector<Parcel> to_parcels(Received message, const StructureCodec& codec);

/// Makes a parcel of bytes: one tensor, whose memory is the string's.
Parcel parcel_of(std::string bytes);
/// Errors: std::runtime_error unless parcel_of() has made the parcel.
std::string bytes_of(const Parcel& parcel);

}  // namespace gpipe
