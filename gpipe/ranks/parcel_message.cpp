#include "gpipe/ranks/parcel_message.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <unistd.h>

#include <limits>

#include "gpipe/base/bytes.h"
#include "gpipe/base/checks.h"
#include "gpipe/tensors/transfer.h"

namespace gpipe {
namespace {

constexpr std::size_t kFewBytes = std::size_t{256} << 10;
constexpr std::size_t kWordBytes = 256;  // words are padded to multiples of this
constexpr std::int64_t kMostDimensions = 64;

// Numbers of memory count up in each rank. The rank's number goes above them, so that they stay distinct.
constexpr int kRankShift = 44;

// A tensor whose memory sizes and strides describe.
at::Tensor described(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  if (tensor._is_zerotensor()) return tensor.clone();  // a tensor without memory
  if (!has_plain_memory(tensor)) {
    refuse_argument("a tensor that goes to another rank is ",
                    tensor.is_nested()                ? "nested"
                    : tensor.is_quantized()           ? "quantized"
                    : tensor.layout() != at::kStrided ? c10::str(tensor.layout())
                                                      : "of a subclass with __torch_dispatch__",
                    "; only plain dense tensors can cross ranks: convert it in the layer, or put the layers that "
                    "exchange it on one rank");
  }
  return tensor.resolve_conj().resolve_neg();
}

void add_layout(const at::Tensor& tensor, bool wants_gradient, ByteWriter& layout) {
  layout.add(wants_gradient, tensor.defined() ? static_cast<int>(tensor.scalar_type()) : -1);
  if (!tensor.defined()) return;
  layout.add(!tensor.is_cpu(), tensor.dim());
  for (const auto size : tensor.sizes()) layout.add(size);
  for (const auto stride : tensor.strides()) layout.add(stride);
  layout.add(lead_of(tensor));
}

// Makes the tensors of a message. Refuses one that needs more memory than this host has.
class Memories {
 public:
  at::Tensor make(std::int64_t type, ByteReader& layout) {
    if (type < 0 || type >= static_cast<std::int64_t>(at::ScalarType::Undefined)) ByteReader::refuse();
    const at::TensorOptions options(static_cast<at::ScalarType>(type));
    const auto on_device = layout.count(1) != 0;
    const auto dimensions = layout.count(kMostDimensions);
    std::vector<std::int64_t> sizes;
    std::vector<std::int64_t> strides;
    for (std::int64_t d = 0; d < dimensions; ++d) sizes.push_back(layout.count(kMost));
    for (std::int64_t d = 0; d < dimensions; ++d) strides.push_back(layout.count(kMost));
    const auto lead = layout.count(63);
    const auto bytes = static_cast<std::int64_t>(options.dtype().itemsize());
    if (lead % bytes != 0) ByteReader::refuse();
    const bool is_empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
    double elements = 1;  // that travel
    double extent = 1;    // of memory
    for (std::int64_t d = 0; d < dimensions && !is_empty; ++d) {
      if (strides[d] != 0) elements *= static_cast<double>(sizes[d]);
      extent += static_cast<double>(sizes[d] - 1) * static_cast<double>(strides[d]);
    }
    left_ -= (elements + extent) * static_cast<double>(bytes);
    if (left_ < 0) {
      throw_error("a message from another rank needs more memory than this host has, ", host_,
                  " bytes; run the same version of gpipe on all ranks");
    }
    if (on_device) return at::empty_strided(sizes, strides, options.device(c10::kMeta));
    return empty_at(sizes, strides, options, static_cast<std::size_t>(lead));
  }

 private:
  static constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

  const std::int64_t host_ = std::int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  double left_ = 2 * static_cast<double>(host_);  // elements may be counted twice
};

class ReceivedParcels : public Incoming {
 public:
  ReceivedParcels(std::string_view text, const StructureCodec& codec) {
    ByteReader layout(text);
    Memories memories;
    for (auto parcels = layout.count(text.size()); parcels > 0; --parcels) {
      auto& parcel = parcels_.emplace_back();
      const auto kind = static_cast<Value::Form::Kind>(layout.count(Value::Form::kObject));
      const bool is_object = kind == Value::Form::kObject;
      if (is_object && !codec.decode) ByteReader::refuse();
      parcel.form = is_object ? Value::Form(codec.decode(layout.get<std::string>())) : Value::Form(kind);
      for (auto left = layout.count(text.size()); left > 0; --left) {
        const auto wants_gradient = layout.get<bool>();
        const auto type = layout.get<std::int64_t>();
        auto tensor = type == -1 ? at::Tensor() : memories.make(type, layout);
        if (tensor.defined() && tensor.is_cpu()) landing_.add(tensor);
        parcel.add(std::move(tensor), wants_gradient);
        groups_.resize(groups_.size() + 2);
      }
    }
    if (!layout.done()) ByteReader::refuse();
  }

  std::span<std::byte> values() override { return std::as_writable_bytes(std::span(groups_)); }

  std::vector<std::span<std::byte>> pieces() override {
    std::vector<std::span<std::byte>> pieces;
    for (const auto& tensor : landing_.received()) {
      pieces.push_back({static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()});
    }
    return pieces;
  }

  std::vector<Parcel> take() {
    landing_.scatter();
    std::size_t next = 0;
    for (auto& parcel : parcels_) {
      for (auto& group : parcel.alias_groups) {
        group = {groups_[next], static_cast<int>(groups_[next + 1]) - 1};
        next += 2;
      }
      parcel.renew_versions();
    }
    return std::move(parcels_);
  }

 private:
  std::vector<Parcel> parcels_;
  Landing landing_;                    // of the tensors on the CPU
  std::vector<std::uint64_t> groups_;  // per tensor: the number, and shared_until + 1
};

}  // namespace

at::Tensor elements_of(const at::Tensor& tensor) {
  const auto elements = without_repeats(tensor);
  return elements.is_non_overlapping_and_dense() ? elements : elements.contiguous();
}

void Landing::add(const at::Tensor& tensor) {
  auto elements = without_repeats(tensor);
  const bool has_gaps = !elements.is_non_overlapping_and_dense();
  received_.push_back(has_gaps ? at::empty(elements.sizes(), elements.options()) : elements);
  if (has_gaps) with_gaps_.emplace_back(std::move(elements), received_.back());
}

void Landing::scatter() {
  const at::NoGradGuard no_grad;
  for (const auto& [to, from] : with_gaps_) to.copy_(from);
}

Outgoing to_message(std::vector<Parcel> parcels, int rank, const StructureCodec& codec,
                    std::vector<at::Tensor>* on_device) {
  Outgoing message;
  ByteWriter layout;
  auto owner = std::make_shared<std::vector<at::Tensor>>();
  ByteWriter values;
  layout.add(parcels.size());
  for (const auto& parcel : parcels) {
    layout.add(parcel.form.kind);
    if (parcel.form.kind == Value::Form::kObject) layout.add(codec.encode(*parcel.form.structure));
    layout.add(parcel.tensors.size());
    for (std::size_t i = 0; i < parcel.tensors.size(); ++i) {
      const auto tensor = described(parcel.tensors[i]);
      add_layout(tensor, parcel.wants_gradient[i], layout);
      auto [number, shared_until] = parcel.alias_groups[i];
      if (number != AliasGroup::kNone && number >> kRankShift == 0) {
        number |= static_cast<std::uint64_t>(rank + 1) << kRankShift;
      }
      values.add(number, static_cast<std::uint64_t>(shared_until + 1));
      if (!tensor.defined()) continue;
      if (!tensor.is_cpu()) {
        on_device->push_back(elements_of(tensor));
        continue;
      }
      owner->push_back(elements_of(tensor));
      const auto& piece = owner->back();
      message.pieces.push_back({static_cast<const std::byte*>(piece.const_data_ptr()), piece.nbytes()});
    }
  }
  message.layout = layout.take();
  message.values = values.take();
  message.owner = std::move(owner);
  return message;
}

Allocate parcel_memory(StructureCodec codec) {
  return [codec = std::move(codec)](std::string_view layout) -> std::unique_ptr<Incoming> {
    return std::make_unique<ReceivedParcels>(layout, codec);
  };
}

std::vector<Parcel> to_parcels(std::unique_ptr<Incoming> message) {
  return static_cast<ReceivedParcels&>(*message).take();
}

Parcel of_bytes(std::string bytes) {
  const auto size = static_cast<std::int64_t>(bytes.size());
  at::Tensor tensor;
  // Strings have ever different addresses, which are part of a layout.
  if (bytes.size() <= kFewBytes) {
    tensor = at::empty({size}, at::kByte);
    std::copy(bytes.begin(), bytes.end(), static_cast<char*>(tensor.mutable_data_ptr()));
  } else {
    auto owner = std::make_shared<std::string>(std::move(bytes));
    const auto keep = [owner](void*) {};
    tensor = at::from_blob(owner->data(), {size}, keep, at::kByte);
  }
  Parcel parcel;
  parcel.add(std::move(tensor), /*gradient_wanted=*/false);
  return parcel;
}

std::string to_bytes(const Parcel& parcel) {
  const auto& tensor = parcel.tensors.at(0);
  if (!tensor.defined() || !tensor.is_cpu() || tensor.scalar_type() != at::kByte || !tensor.is_contiguous()) {
    ByteReader::refuse();
  }
  return std::string(static_cast<const char*>(tensor.const_data_ptr()), tensor.numel());
}

Parcel of_words(const std::string& words) {
  ByteWriter bytes;
  bytes.add(words);
  auto padded = bytes.take();
  padded.resize((padded.size() / kWordBytes + 1) * kWordBytes);
  return of_bytes(std::move(padded));
}

std::string to_words(const Parcel& parcel) {
  const auto bytes = to_bytes(parcel);
  return ByteReader(bytes).get<std::string>();
}

}  // namespace gpipe
