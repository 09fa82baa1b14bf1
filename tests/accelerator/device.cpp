#include "tests/accelerator/device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/record_function.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>
#include <cctype>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace gpipe::accelerator {
namespace {

constexpr std::int64_t kPool = 32;  // streams per device, handed out in turn, as on CUDA

thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<std::int64_t, kDevices> current_streams{};

c10::DeviceIndex checked(c10::DeviceIndex index) {
  TORCH_CHECK(index < kDevices, "device index ", static_cast<int>(index), " is out of range; choose 0 to ",
              kDevices - 1);
  return index < 0 ? current_device : index;
}

// No address of this kind exists, so a host that reads device memory crashes.
void* address_on_device(const void* host) {
  constexpr std::uintptr_t kDevice = std::uintptr_t{1} << 62;
  return host == nullptr ? nullptr : reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(host) | kDevice);
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  stream_order().freed(block->allocation);
  delete block;
}

class Allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    return adopt({c10::Storage::use_byte_size_t(), bytes, c10::GetCPUAllocator(), /*resizable=*/true},
                 device(current_device));
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

std::mutex pinned_mutex;
std::map<const void*, std::size_t> pinned_blocks;  // bytes by address

void unpin(void* memory) {
  {
    std::lock_guard lock(pinned_mutex);
    pinned_blocks.erase(memory);
  }
  c10::GetCPUAllocator()->raw_deallocate(memory);
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    void* memory = c10::GetCPUAllocator()->raw_allocate(std::max<std::size_t>(bytes, 1));
    std::lock_guard lock(pinned_mutex);
    pinned_blocks[memory] = bytes;
    return {memory, memory, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

struct TimedEvent {
  Event event;
  bool has_time = false;
  std::chrono::steady_clock::time_point recorded;
};

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Device getDevice() const override { return device(current_device); }
  void setDevice(c10::Device device) const override { current_device = checked(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto previous = getDevice();
    setDevice(device);
    return previous;
  }

  c10::Stream getStream(c10::Device device) const override {
    return stream(device, current_streams[checked(device.index())]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override {
    static std::array<std::atomic<std::int64_t>, kDevices> taken{};
    return stream(device, 1 + taken[checked(device.index())]++ % kPool);
  }
  c10::Stream getNewStream(c10::Device device, int = 0) const override { return getStreamFromGlobalPool(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto previous = std::exchange(current_streams[stream.device_index()], stream.id());
    return this->stream(stream.device(), previous);
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex device, c10::EventFlag flag) const override {
    TORCH_CHECK(device < 0 || device == stream.device_index(), "an event of device ", static_cast<int>(device),
                " is recorded on a stream of device ", static_cast<int>(stream.device_index()));
    if (*event == nullptr) *event = new TimedEvent{.has_time = flag == c10::EventFlag::BACKEND_DEFAULT};
    stream_order().record(at(*event).event, index(stream));
    at(*event).recorded = std::chrono::steady_clock::now();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) stream_order().wait(index(stream), at(event).event);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete &at(event); }
  /// Polling an event counts as waiting for it. PyTorch queries an event with timing only once.
  bool queryEvent(void* event) const override {
    if (!held() && !at(event).has_time) synchronizeEvent(event);
    return !held();
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(at(to).recorded - at(from).recorded).count();
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override { stream_order().synchronize(index(stream)); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) stream_order().synchronize(at(event).event);
  }
  void synchronizeDevice(c10::DeviceIndex device) const override { stream_order().synchronize_device(checked(device)); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (auto* block = block_of(data)) stream_order().used(block->allocation, index(stream));
  }

 private:
  static c10::Stream stream(c10::Device device, std::int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, accelerator::device(checked(device.index())), id);
  }
  static TimedEvent& at(void* event) { return *static_cast<TimedEvent*>(event); }
  static int index(const c10::Stream& stream) { return stream_order().index(stream.device_index(), stream.id()); }
};

/// Draws on the host.
class GeneratorImpl final : public c10::GeneratorImpl {
 public:
  explicit GeneratorImpl(c10::DeviceIndex device, at::Generator host = at::detail::createCPUGenerator())
      : c10::GeneratorImpl(accelerator::device(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(std::move(host)) {}

  // Fills the state as a RandomScope does on the CPU, so that a layer draws the same numbers on any device.
  void set_current_seed(std::uint64_t seed) override {
    const auto mix = [](std::uint64_t x) {
      x += 0x9e3779b97f4a7c15u;
      x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
      x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
      return x ^ (x >> 31);
    };
    at::mt19937_data_pod state{.seed_ = seed, .left_ = 1, .seeded_ = true, .next_ = 0};
    for (auto& word : state.state_) word = static_cast<std::uint32_t>(seed = mix(seed));
    at::mt19937 engine;
    engine.set_data(state);
    host.get<at::CPUGeneratorImpl>()->set_engine(engine);
  }
  void set_offset(std::uint64_t) override { TORCH_CHECK(false, "the generator has no offset"); }
  std::uint64_t get_offset() const override { TORCH_CHECK(false, "the generator has no offset"); }
  std::uint64_t current_seed() const override { return host.current_seed(); }
  std::uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  c10::GeneratorImpl* clone_impl() const override { return new GeneratorImpl(device().index(), host.clone()); }
  static c10::DeviceType device_type() { return kType; }

  at::Generator host;
};

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = checked(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(current_device, checked(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(device(checked(index)));
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<GeneratorImpl>(checked(index));
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static auto* allocator = new PinnedAllocator;
    return allocator;
  }
  bool isPinnedPtr(const void* memory) const override { return is_pinned(memory); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

[[maybe_unused]] const bool registered = [] {
  c10::register_privateuse1_backend("checked");
  c10::SetAllocator(kType, &allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  at::globalContext().lazyInitDevice(kType);
  return true;
}();

struct Context : at::ObserverContext {
  explicit Context(std::string action) : previous(exchange_action(std::move(action))) {}
  ~Context() override { exchange_action(std::move(previous)); }
  std::string previous;
};

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& range) {
  const std::string name = range.name();
  const std::string prefix = "gpipe ";
  const bool is_action = name.rfind(prefix, 0) == 0 && std::isdigit(name[prefix.size()]);
  return is_action ? std::make_unique<Context>(name.substr(prefix.size())) : nullptr;
}

}  // namespace

StreamOrder& stream_order() {
  static auto* order = new StreamOrder;
  return *order;
}

int current_stream(c10::Device device) {
  return stream_order().index(device.index(), current_streams[checked(device.index())]);
}

c10::DataPtr adopt(c10::Storage host, c10::Device device) {
  const auto bytes = host.nbytes();
  auto* block = new Block{std::move(host), stream_order().allocated(current_stream(device), bytes)};
  return {address_on_device(block->host.data()), block, &free_block, device};
}

Block* block_of(const c10::DataPtr& data) {
  return data.get_deleter() == &free_block ? static_cast<Block*>(data.get_context()) : nullptr;
}

bool is_stale(const Block& block, const c10::DataPtr& data) {
  return address_on_device(block.host.data()) != data.get();
}

c10::Allocator& allocator() {
  static auto* it = new Allocator;
  return *it;
}

void take_shape(const at::Tensor& tensor, const at::Tensor& of) {
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(of.sizes(), of.strides(), of.storage_offset());
}

at::Tensor alias_on_host(const at::Tensor& tensor) {
  const auto* block = block_of(tensor);
  auto host = block ? block->host
                    : c10::Storage(c10::Storage::use_byte_size_t(), 0, c10::GetCPUAllocator(), /*resizable=*/true);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(std::move(host), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                        tensor.dtype());
  take_shape(alias, tensor);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) alias.unsafeGetTensorImpl()->set_wrapped_number(true);
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

void add_access(const at::Tensor& tensor, bool writes, std::vector<Access>& accesses) {
  auto* block = on_device(tensor) && tensor.numel() > 0 ? block_of(tensor) : nullptr;
  if (block) accesses.push_back({&block->allocation, writes, tensor.sizes()});
}

bool is_pinned(const void* memory) {
  std::lock_guard lock(pinned_mutex);
  const auto after = pinned_blocks.upper_bound(memory);
  if (after == pinned_blocks.begin()) return false;
  const auto& [begin, bytes] = *std::prev(after);
  return static_cast<const char*>(memory) < static_cast<const char*>(begin) + bytes;
}

std::atomic<bool>& held() {
  static std::atomic<bool> is{false};
  return is;
}

at::Generator host_generator(const at::Generator& generator) { return generator.get<GeneratorImpl>()->host; }

const at::Generator& default_generator(c10::Device device) {
  static const auto* generators = [] {
    auto* made = new std::vector<at::Generator>;
    for (c10::DeviceIndex index = 0; index < kDevices; ++index) {
      made->push_back(at::make_generator<GeneratorImpl>(index));
    }
    return made;
  }();
  return (*generators)[device.index()];
}

std::shared_ptr<void> name_actions() {
  const auto handle = at::addGlobalCallback(at::RecordFunctionCallback(begin).scopes({at::RecordScope::USER_SCOPE}));
  return {nullptr, [handle](void*) { at::removeCallback(handle); }};
}

}  // namespace gpipe::accelerator

// What Python's tests call, through ctypes.

/// Returns the violations since the last call, one per line. The text lasts until this thread's next call.
extern "C" const char* take_violations() {
  thread_local std::string text;
  text.clear();
  for (const auto& violation : gpipe::accelerator::stream_order().take_violations()) text += violation + "\n";
  return text.c_str();
}

/// Returns how often the host has waited for all work of a device since the last call.
extern "C" int take_host_waits() {
  int waits = 0;
  for (const auto& [action, counts] : gpipe::accelerator::stream_order().take_counts()) waits += counts.host_waits;
  return waits;
}
