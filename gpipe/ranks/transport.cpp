#include "gpipe/ranks/transport.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include "gpipe/base/bytes.h"
#include "gpipe/base/checks.h"
#include "gpipe/ranks/team.h"
#include "gpipe/schedule/verifier.h"
#include "gpipe/tensors/transfer.h"

namespace gpipe {
namespace {

constexpr std::size_t kMostDimensions = 64;
constexpr std::int64_t kAlignment = 64;  // see lead_of()

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

// The elements that travel: without gaps or repeats by strides of 0, ordered by the sizes and strides.
at::Tensor elements_of(const at::Tensor& tensor) {
  const auto elements = without_repeats(tensor);
  return elements.is_non_overlapping_and_dense() ? elements : elements.contiguous();
}

void add_layout(const at::Tensor& tensor, ByteWriter& layout) {
  layout.add(tensor.defined());
  if (!tensor.defined()) return;
  layout.add(tensor.scalar_type(), !tensor.is_cpu(), tensor.sizes().vec(), tensor.strides().vec(), lead_of(tensor));
}

at::Tensor make_tensor(ByteReader& layout) {
  constexpr auto kLastType = static_cast<std::int64_t>(at::ScalarType::Undefined) - 1;
  const at::TensorOptions options(static_cast<at::ScalarType>(layout.count(kLastType)));
  const auto on_device = layout.get<bool>();
  const auto sizes = layout.get<std::vector<std::int64_t>>();
  const auto strides = layout.get<std::vector<std::int64_t>>();
  if (sizes.size() != strides.size() || sizes.size() > kMostDimensions) ByteReader::refuse();
  const auto lead = static_cast<std::size_t>(layout.count(kAlignment - 1));
  return on_device ? at::empty_strided(sizes, strides, options.device(c10::kMeta))
                   : empty_at(sizes, strides, options, lead);
}

class ReceivedParcels : public Incoming {
 public:
  explicit ReceivedParcels(const std::string& text) {
    ByteReader layout(text);
    const auto most = static_cast<std::int64_t>(text.size());
    for (auto parcels = layout.count(most); parcels > 0; --parcels) {
      auto& parcel = parcels_.emplace_back();
      parcel.form = Value::Form(static_cast<Value::Form::Kind>(layout.count(Value::Form::kObject)));
      structures_.push_back(parcel.form.kind == Value::Form::kObject ? layout.get<std::string>() : "");
      for (auto left = layout.count(most); left > 0; --left) {
        const auto wants_gradient = layout.get<bool>();
        const auto number = layout.get<std::uint64_t>();
        const AliasGroup group{number, layout.get<int>()};
        sent_versions_.push_back(layout.get<std::uint32_t>());
        auto tensor = layout.get<bool>() ? make_tensor(layout) : at::Tensor();
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
    auto version = sent_versions_.begin();
    for (const auto& parcel : parcels_) {
      for (const auto& tensor : parcel.tensors) set_version(tensor, *version++);
    }
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
  std::vector<std::string> structures_;       // of the parcels that are objects
  std::vector<std::uint32_t> sent_versions_;  // per tensor
  Landing landing_;                           // of the tensors on the CPU
};

// Returns the same memory. When it is freed, on any thread, the counter learns of it.
std::shared_ptr<const void> counted(std::shared_ptr<const void> owner, std::shared_ptr<ByteCounter> counter) {
  const auto* memory = owner.get();
  return {memory, [owner = std::move(owner), counter = std::move(counter)](const void*) mutable {
            const AllocationListener::Scope counting(counter);
            owner.reset();
          }};
}

// The edges on which an action puts something for a worker, ascending.
std::vector<int> edges_of_message(const Program& program, const Action& action, int worker) {
  std::vector<int> edges;
  for (const int edge : program.wiring().puts(action)) {
    const auto& ends = program.edges()[edge];
    if (program.layout().placement[action.kind == Kind::F ? ends.to : ends.from] == worker) edges.push_back(edge);
  }
  return edges;
}

}  // namespace

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
      layout.add(parcel.wants_gradient[i], number, shared_until, version_of(parcel.tensors[i]));
      add_layout(tensor, layout);
      if (!tensor.defined()) continue;
      if (!tensor.is_cpu()) {
        if (on_device != nullptr) on_device->push_back(elements_of(tensor));
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

// The messages of a part of a program in the order in which their actions end, if all actions take equally long. Workers
// that send and receive in this order cannot deadlock: the first message that is still to come waits only for actions that
// ended earlier.
std::vector<RemoteTransport::Message> RemoteTransport::messages_of(const Program& program, Part part) {
  Schedule lists;
  for (int w = 0; w < program.workers(); ++w) {
    const auto actions = program.actions(w, part);
    lists.emplace_back(actions.begin(), actions.end());
  }
  const auto equal = [](const Action&) { return 1.0; };
  const auto run = replay(program.layout(), program.edges(), program.wiring(), lists, equal,
                          /*latencies=*/std::vector<double>(program.edges().size()));
  std::vector<Span> spans;
  for (const auto& of_worker : run.spans) spans.insert(spans.end(), of_worker.begin(), of_worker.end());
  std::ranges::sort(spans, {}, [](const Span& span) { return std::pair(span.end, span.worker); });
  std::vector<Message> messages;
  for (const auto& span : spans) {
    for (const int edge : program.wiring().puts(span.action)) {
      const auto& ends = program.edges()[edge];
      const int receiver = program.layout().placement[span.action.kind == Kind::F ? ends.to : ends.from];
      const bool is_last = edge == edges_of_message(program, span.action, receiver).back();
      if (receiver != span.worker && is_last) messages.push_back({span.action, span.worker, receiver});
    }
  }
  return messages;
}

RemoteTransport::RemoteTransport(Team& team, const Program& program, Part part, FindLink link,
                                 std::shared_ptr<ByteCounter> counter)
    : team_(team), program_(program), link_(std::move(link)), counter_(std::move(counter)), slots_(program) {
  left_.resize(program.workers());
  if (!team.has_device_wires()) return;
  for (const auto& message : messages_of(program, part)) {
    if (team.of_workers()[message.from] == team.of_workers()[message.to]) continue;
    for (const int worker : {message.from, message.to}) left_[worker].push_back(message);
  }
}

void RemoteTransport::put(int edge, const Action& action, Parcel parcel) {
  const auto& placement = program_.layout().placement;
  const auto& ends = program_.edges()[edge];
  const int to = placement[action.kind == Kind::F ? ends.to : ends.from];
  parcel.wants_gradient.resize(parcel.tensors.size());  // a parcel of gradients has only its tensors
  parcel.alias_groups.resize(parcel.tensors.size());
  slots_.put(edge, action, {std::move(parcel)});
  const auto edges = edges_of_message(program_, action, to);
  if (edge != edges.back()) return;
  std::vector<Parcel> parcels;
  for (const int of_message : edges) parcels.push_back(slots_.take(of_message, action).parcel);
  std::vector<at::Tensor> on_device;
  auto message = to_message(parcels, team_.rank(), team_.codec(), &on_device);
  const int from = placement[action.stage];
  if (auto* link = link_(from, to)) {
    auto& left = left_[from];
    while (left.front().from != from) receive(left.front().from, from);
    left.pop_front();
    link->send(on_device);
  }
  if (counter_) message.owner = counted(std::move(message.owner), counter_);
  parcels.clear();
  team_.send(from, to, action, std::move(message));
}

Slots::Item RemoteTransport::take(int edge, const Action& action) {
  const auto& placement = program_.layout().placement;
  const auto& ends = program_.edges()[edge];
  const int from = placement[action.kind == Kind::F ? ends.from : ends.to];
  const int to = placement[action.stage];
  while (!slots_.has(edge, action)) receive(left_[to].empty() ? from : left_[to].front().from, to);
  return slots_.take(edge, action);
}

void RemoteTransport::receive(int from, int to) {
  auto [sender, message] = team_.receive_next(from, to);
  const auto edges = edges_of_message(program_, sender, to);
  auto parcels = to_parcels(std::move(message), team_.codec());
  StreamEvents ready;
  if (auto* link = link_(from, to)) {
    left_[to].pop_front();
    ready = link->receive(parcels);
  }
  for (std::size_t k = 0; k < parcels.size(); ++k) slots_.put(edges[k], sender, {std::move(parcels[k]), ready});
}

}  // namespace gpipe
