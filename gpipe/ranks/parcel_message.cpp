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

void add_layout(const at::Tensor& tensor, ByteWriter& layout) {
  layout.add(tensor.defined() ? static_cast<int>(tensor.scalar_type()) : -1);
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
  explicit ReceivedParcels(const std::string& text) {
    ByteReader layout(text);
    Memories memories;
    const auto most = static_cast<std::int64_t>(text.size());
    for (auto parcels = layout.count(most); parcels > 0; --parcels) {
      auto& parcel = parcels_.emplace_back();
      parcel.form = Value::Form(static_cast<Value::Form::Kind>(layout.count(Value::Form::kObject)));
      structures_.push_back(parcel.form.kind == Value::Form::kObject ? layout.get<std::string>() : "");
      for (auto left = layout.count(most); left > 0; --left) {
        const auto wants_gradient = layout.get<bool>();
        const auto number = layout.get<std::uint64_t>();
        const AliasGroup group{number, layout.get<int>()};
        const auto type = layout.get<std::int64_t>();
        auto tensor = type == -1 ? at::Tensor() : memories.make(type, layout);
        if (tensor.defined() && tensor.is_cpu()) landing_.add(tensor);
        parcel.add(std::move(tensor), wants_gradient, group);
      }
    }
    if (!layout.done()) ByteReader::refuse();
  }

  std::vector<std::span<std::byte>> pieces() override {
    std::vector<std::span<std::byte>> pieces;
    for (const auto& tensor : landing_.received()) {
      pieces.push_back({static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()});
    }
    return pieces;
  }

  std::vector<Parcel> take(const StructureCodec& codec) {
    landing_.scatter();
    for (std::size_t p = 0; p < parcels_.size(); ++p) {
      parcels_[p].renew_versions();
      if (parcels_[p].form.kind != Value::Form::kObject) continue;
      if (!codec.decode) ByteReader::refuse();
      parcels_[p].form = Value::Form(codec.decode(structures_[p]));
    }
    return std::move(parcels_);
  }

 private:
  std::vector<Parcel> parcels_;
  std::vector<std::string> structures_;  // of the parcels that are objects
  Landing landing_;                      // of the tensors on the CPU
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

Outgoing to_message(const std::vector<Parcel>& parcels, int rank, const StructureCodec& codec,
                    std::vector<at::Tensor>* on_device) {
  Outgoing message{.text = "", .is_layout = true};
  ByteWriter layout;
  auto owner = std::make_shared<std::vector<at::Tensor>>();
  layout.add(parcels.size());
  for (const auto& parcel : parcels) {
    layout.add(parcel.form.kind);
    if (parcel.form.kind == Value::Form::kObject) layout.add(codec.encode(*parcel.form.structure));
    layout.add(parcel.tensors.size());
    for (std::size_t i = 0; i < parcel.tensors.size(); ++i) {
      const auto tensor = described(parcel.tensors[i]);
      auto [number, shared_until] = parcel.alias_groups[i];
      if (number != AliasGroup::kNone && number >> kRankShift == 0) {
        number |= static_cast<std::uint64_t>(rank + 1) << kRankShift;
      }
      layout.add(parcel.wants_gradient[i], number, shared_until);
      add_layout(tensor, layout);
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
  message.text = layout.take();
  message.owner = std::move(owner);
  return message;
}

std::unique_ptr<Incoming> allocate_parcels(const std::string& layout) {
  return std::make_unique<ReceivedParcels>(layout);
}

std::vector<Parcel> to_parcels(Received message, const StructureCodec& codec) {
  auto* parcels = dynamic_cast<ReceivedParcels*>(message.memory.get());
  if (parcels == nullptr) ByteReader::refuse();
  return parcels->take(codec);
}

Parcel parcel_of(std::string bytes) {
  const auto owner = std::make_shared<std::string>(std::move(bytes));
  Parcel parcel;
  parcel.add(at::from_blob(
                 owner->data(), {std::ssize(*owner)}, [owner](void*) {}, at::kByte),
             /*gradient_wanted=*/false);
  return parcel;
}

std::string bytes_of(const Parcel& parcel) {
  const auto& tensor = parcel.tensors.at(0);
  if (!tensor.defined() || !tensor.is_cpu() || tensor.scalar_type() != at::kByte || !tensor.is_contiguous()) {
    ByteReader::refuse();
  }
  return std::string(static_cast<const char*>(tensor.const_data_ptr()), tensor.numel());
}

}  // namespace gpipe
