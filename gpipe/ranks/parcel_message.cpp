#include "gpipe/ranks/parcel_message.h"

#include <ATen/ops/empty_strided.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>

#include "gpipe/ranks/landing.h"
#include "gpipe/tensors/transfer.h"

namespace gpipe {
namespace {

constexpr std::int64_t kMostDimensions = 64;

// Numbers of memory count up in each rank. The rank's number goes above them, so that they stay distinct.
constexpr int kRankShift = 44;

[[noreturn]] void refuse_layout() {
  throw std::runtime_error(
      "[gpipe] a message from another rank has a malformed layout; run the same version of gpipe on all ranks");
}

class Writer {
 public:
  void add(std::int64_t number) { text_.append(reinterpret_cast<const char*>(&number), sizeof number); }
  void add(const std::string& bytes) {
    add(static_cast<std::int64_t>(bytes.size()));
    text_ += bytes;
  }
  std::string take() { return std::move(text_); }

 private:
  std::string text_;
};

class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  std::int64_t number() {
    std::int64_t number = 0;
    std::memcpy(&number, take(sizeof number).data(), sizeof number);
    return number;
  }
  /// A number from 0 to `most`.
  std::int64_t count(std::int64_t most) {
    const auto count = number();
    if (count < 0 || count > most) refuse_layout();
    return count;
  }
  std::string bytes() { return std::string(take(count(static_cast<std::int64_t>(text_.size())))); }
  bool done() const { return text_.empty(); }

 private:
  std::string_view take(std::size_t count) {
    if (count > text_.size()) refuse_layout();
    const auto taken = text_.substr(0, count);
    text_.remove_prefix(count);
    return taken;
  }
  std::string_view text_;
};

std::size_t bytes_of(const at::Tensor& tensor) { return tensor.numel() * tensor.element_size(); }

// A tensor whose memory sizes and strides describe.
at::Tensor described(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  if (tensor.layout() != at::kStrided) {
    throw std::invalid_argument("[gpipe] a tensor that goes to another rank is " +
                                std::string(c10::str(tensor.layout())) + "; only dense tensors can cross ranks");
  }
  return tensor.resolve_conj().resolve_neg();
}

void add_layout(const at::Tensor& tensor, bool wants_gradient, Writer& layout) {
  layout.add(wants_gradient ? 1 : 0);
  layout.add(tensor.defined() ? static_cast<std::int64_t>(tensor.scalar_type()) : -1);
  if (!tensor.defined()) return;
  layout.add(tensor.is_cpu() ? 0 : 1);
  layout.add(tensor.dim());
  for (const auto size : tensor.sizes()) layout.add(size);
  for (const auto stride : tensor.strides()) layout.add(stride);
  layout.add(static_cast<std::int64_t>(lead_of(tensor)));
}

// Makes the tensors of a message. Refuses one that needs more memory than this host has.
class Memories {
 public:
  at::Tensor make(std::int64_t type, Reader& layout) {
    if (type < 0 || type >= static_cast<std::int64_t>(at::ScalarType::Undefined)) refuse_layout();
    const at::TensorOptions options(static_cast<at::ScalarType>(type));
    const auto on_device = layout.count(1) != 0;
    const auto dimensions = layout.count(kMostDimensions);
    std::vector<std::int64_t> sizes;
    std::vector<std::int64_t> strides;
    for (std::int64_t d = 0; d < dimensions; ++d) sizes.push_back(layout.count(kMost));
    for (std::int64_t d = 0; d < dimensions; ++d) strides.push_back(layout.count(kMost));
    const auto lead = layout.count(63);
    const auto bytes = static_cast<std::int64_t>(options.dtype().itemsize());
    if (lead % bytes != 0) refuse_layout();
    const bool is_empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
    std::int64_t elements = 1;  // that travel
    std::int64_t extent = 1;    // of memory
    for (std::int64_t d = 0; d < dimensions && !is_empty; ++d) {
      if (strides[d] != 0) elements = product(elements, sizes[d]);
      extent = sum(extent, product(sizes[d] - 1, strides[d]));
    }
    take(product(sum(elements, extent), bytes));
    if (on_device) return at::empty_strided(sizes, strides, options.device(c10::kMeta));
    return empty_at(sizes, strides, options, static_cast<std::size_t>(lead));
  }

 private:
  static constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

  static std::int64_t product(std::int64_t a, std::int64_t b) {
    std::int64_t result = 0;
    if (__builtin_mul_overflow(a, b, &result)) refuse_layout();
    return result;
  }
  static std::int64_t sum(std::int64_t a, std::int64_t b) {
    std::int64_t result = 0;
    if (__builtin_add_overflow(a, b, &result)) refuse_layout();
    return result;
  }
  void take(std::int64_t bytes) {
    if (bytes > left_) {
      throw std::runtime_error("[gpipe] a message from another rank needs more memory than this host has, " +
                               std::to_string(host_) + " bytes; run the same version of gpipe on all ranks");
    }
    left_ -= bytes;
  }

  const std::int64_t host_ = std::int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  std::int64_t left_ = 2 * host_;  // elements may be counted twice
};

class ReceivedParcels : public Incoming {
 public:
  ReceivedParcels(std::string_view text, const StructureCodec& codec) {
    Reader layout(text);
    Memories memories;
    parcels_.resize(layout.count(static_cast<std::int64_t>(text.size())));
    for (auto& parcel : parcels_) {
      const auto kind = static_cast<Value::Form::Kind>(layout.count(Value::Form::kObject));
      parcel.form = kind == Value::Form::kObject ? Value::Form(decoded(codec, layout.bytes())) : Value::Form(kind);
      for (auto left = layout.count(static_cast<std::int64_t>(text.size())); left > 0; --left) {
        const bool wants_gradient = layout.number() == 1;
        const auto type = layout.number();
        auto tensor = type == -1 ? at::Tensor() : memories.make(type, layout);
        if (tensor.defined() && tensor.is_cpu()) landing_.add(tensor);
        parcel.add(std::move(tensor), wants_gradient);
        memory_.emplace_back();
      }
    }
    if (!layout.done()) refuse_layout();
  }

  std::span<std::byte> values() override { return std::as_writable_bytes(std::span(memory_)); }

  std::vector<std::span<std::byte>> pieces() override {
    std::vector<std::span<std::byte>> pieces;
    for (const auto& tensor : landing_.received()) {
      pieces.push_back({static_cast<std::byte*>(tensor.data_ptr()), bytes_of(tensor)});
    }
    return pieces;
  }

  std::vector<Parcel> take() {
    landing_.scatter();
    std::size_t next = 0;
    for (auto& parcel : parcels_) {
      for (auto& memory : parcel.memory) {
        const auto value = memory_[next++];
        memory = {value >> 1, (value & 1) != 0};
      }
      parcel.renew_versions();
    }
    return std::move(parcels_);
  }

 private:
  static std::shared_ptr<const Structure> decoded(const StructureCodec& codec, const std::string& bytes) {
    if (!codec.decode) refuse_layout();
    return codec.decode(bytes);
  }

  std::vector<Parcel> parcels_;
  Landing landing_;                    // of the tensors on the CPU
  std::vector<std::uint64_t> memory_;  // per tensor: Memory::number and, as the lowest bit, Memory::shared_later
};

}  // namespace

Outgoing to_message(std::vector<Parcel> parcels, int rank, const StructureCodec& codec,
                    std::vector<at::Tensor>* on_device) {
  Outgoing message;
  Writer layout;
  auto owner = std::make_shared<std::vector<at::Tensor>>();
  std::vector<std::uint64_t> values;
  layout.add(static_cast<std::int64_t>(parcels.size()));
  for (const auto& parcel : parcels) {
    layout.add(parcel.form.kind);
    if (parcel.form.kind == Value::Form::kObject) layout.add(codec.encode(*parcel.form.structure));
    layout.add(static_cast<std::int64_t>(parcel.tensors.size()));
    for (std::size_t i = 0; i < parcel.tensors.size(); ++i) {
      const auto tensor = described(parcel.tensors[i]);
      add_layout(tensor, parcel.wants_gradient[i], layout);
      auto [number, shared_later] = parcel.memory[i];
      if (number != Memory::kOwn && number >> kRankShift == 0) {
        number |= static_cast<std::uint64_t>(rank + 1) << kRankShift;
      }
      values.push_back(number << 1 | (shared_later ? 1 : 0));
      if (!tensor.defined()) continue;
      if (!tensor.is_cpu()) {
        on_device->push_back(elements_of(tensor));
        continue;
      }
      owner->push_back(elements_of(tensor));
      message.pieces.push_back(
          {static_cast<const std::byte*>(owner->back().const_data_ptr()), bytes_of(owner->back())});
    }
  }
  message.layout = layout.take();
  message.values.assign(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(std::uint64_t));
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

}  // namespace gpipe
