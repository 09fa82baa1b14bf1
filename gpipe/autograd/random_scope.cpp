#include "gpipe/autograd/random_scope.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <mutex>

#include "absl/cleanup/cleanup.h"
#include "gpipe/autograd/batch_statistics.h"
#include "gpipe/autograd/stage_state.h"
#include "gpipe/base/checks.h"
#include "gpipe/base/mutex.h"
#include "gpipe/tensors/torch_internals.h"

namespace gpipe {
namespace {

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// A kernel for operators that write to their arguments.
void run_and_note_writes(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kInterceptingKey);
  const auto& arguments = op.schema().arguments();
  const auto values = torch::jit::last(*stack, arguments.size());
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (!is_written(arguments[i])) continue;
    if (values[i].isTensor()) StageState::before_write(values[i].toTensor());
    if (values[i].isTensorList()) {
      for (auto&& tensor : values[i].toTensorList()) StageState::before_write(tensor);
    }
  }
  op.redispatchBoxed(below, stack);
}

// Whether an operator writes to an argument.
bool writes(const c10::FunctionSchema& schema) { return std::ranges::any_of(schema.arguments(), is_written); }

thread_local RandomScope* current_scope = nullptr;

// One step of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014).
std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// manual_seed() keeps 32 bits of a seed on CPU; filling the whole state keeps all 64.
at::Generator make_cpu_generator(std::uint64_t key) {
  at::mt19937_data_pod state;
  state.seed_ = key;
  state.left_ = 1;
  state.seeded_ = true;
  state.next_ = 0;
  for (auto& word : state.state_) word = static_cast<std::uint32_t>(key = mix(key));
  at::mt19937 engine;
  engine.set_data(state);
  auto generator = at::detail::createCPUGenerator(state.seed_);
  generator.get<at::CPUGeneratorImpl>()->set_engine(engine);
  return generator;
}

Mutex& default_generator_mutex(c10::Device device) {
  static std::array<Mutex, 64> mutexes;
  return mutexes[static_cast<std::size_t>(device.index() + 1) % mutexes.size()];  // the CPU has index -1
}

bool is_generator(const c10::Argument& argument) {
  const auto& type = argument.type();
  if (type->kind() == c10::TypeKind::GeneratorType) return true;
  const auto optional = type->cast<c10::OptionalType>();
  return optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

std::optional<std::size_t> generator_argument(const c10::FunctionSchema& schema) {
  const auto& arguments = schema.arguments();
  const auto found = std::ranges::find_if(arguments, is_generator);
  return found == arguments.end() ? std::nullopt : std::optional(found - arguments.begin());
}

// The device on which an operator draws: its device argument, else its first tensor's device, else the CPU.
c10::Device device_of(at::ArrayRef<c10::IValue> arguments) {
  for (const auto& argument : arguments) {
    if (argument.isDevice()) return argument.toDevice();
  }
  for (const auto& argument : arguments) {
    if (argument.isTensor() && argument.toTensor().defined()) return argument.toTensor().device();
  }
  return c10::kCPU;
}

// Whether the operator is recorded instead of run. User-defined modes (a profiler, a counter) run it.
bool is_traced(c10::DispatchKeySet keys) {
  using Key = c10::impl::TorchDispatchModeKey;
  if (keys.has(c10::DispatchKey::Functionalize)) return true;
  if (!keys.has(c10::DispatchKey::Python)) return false;
  constexpr std::array kTracing = {Key::FAKE, Key::PROXY, Key::FUNCTIONAL};
  return std::ranges::any_of(kTracing,
                             [](Key key) { return c10::impl::TorchDispatchModeTLS::get_mode(key).has_value(); });
}

// An operator that draws. May write to its arguments too.
void draw(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto run = [&] { run_and_note_writes(op, keys, stack); };
  auto* scope = RandomScope::current();
  if (scope == nullptr || scope->lending() || is_traced(keys)) return run();
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  auto device = device_of(arguments);
  if (device.is_meta()) return run();
  if (!device.is_cpu() && !device.has_index()) {
    device.set_index(c10::impl::getDeviceGuardImpl(device.type())->getDevice().index());
  }
  if (const auto index = generator_argument(op.schema())) {
    auto& argument = (*stack)[stack->size() - arguments.size() + *index];
    if (argument.isNone() || argument.toGenerator() == at::globalContext().defaultGenerator(device)) {
      argument = scope->generator(device);
    } else if (is_recomputed() && argument.toGenerator() != scope->generator(device)) {
      throw_error(
          "a layer drew from a generator of its own in a forward that is recomputed, which would draw other numbers; "
          "draw from the default generator, or use checkpoint='never'");
    }
    return run();
  }
  // An operator of the CPU calls one with a generator, which arrives here again, unless a dispatch mode runs it.
  if (device.is_cpu() && !keys.has(c10::DispatchKey::Python)) return run();
  scope->lend_default_generator(device, run);
}

bool decomposes(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
}

// Excludes operators that decompose into others, which are intercepted themselves.
bool draws_itself(const c10::OperatorHandle& op) {
  if (generator_argument(op.schema())) return true;
  const auto tags = op.getTags();
  return !decomposes(op) && std::ranges::find(tags, at::Tag::nondeterministic_seeded) != tags.end();
}

void add_kernels(torch::Library& library) {
  register_batch_norm(library);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.getNamespace() != "aten") continue;
    // addr.out compares the addresses of its arguments, and a boxed call passes copies. Its caller addr_ is intercepted.
    if (name.name == "aten::addr" && name.overload_name == "out") continue;
    const auto op = dispatcher.findSchema(name);
    if (!op) continue;
    if (draws_itself(*op)) {
      library.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&draw>());
    } else if (writes(op->schema()) && !decomposes(*op)) {
      library.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_and_note_writes>());
    }
  }
}

// Called before the first scope, so that a process that only loads this library can use the key otherwise. The kernels
// stay: a thread may call operators while the process exits.
void register_kernels() {
  const auto library = [](const char* name, auto add) {
    auto* made = new torch::Library(torch::Library::IMPL, name, kInterceptingKey, __FILE__, __LINE__);
    add(*made);
    return made;
  };
  [[maybe_unused]] static const auto* const aten = library("aten", add_kernels);
  [[maybe_unused]] static const auto* const others =
      library("_", [](torch::Library& all) { all.fallback(torch::CppFunction::makeFallthrough()); });
}

// Calls f with the CPU generator of the current scope, or outside of scopes with the default one, under its locks.
template <typename F>
void with_current_generator(F f) {
  std::optional<MutexLock> turn;
  if (current_scope == nullptr) turn.emplace(default_generator_mutex(c10::kCPU));  // another thread's scope may use it
  auto generator = current_scope ? current_scope->generator(c10::kCPU) : at::detail::getDefaultCPUGenerator();
  std::lock_guard<std::mutex> lock(generator.mutex());
  f(*generator.get<at::CPUGeneratorImpl>());
}

}  // namespace

RandomScope::RandomScope(std::uint64_t seed, std::int64_t layer, std::int64_t micro_batch)
    : key_(mix(mix(mix(seed) ^ static_cast<std::uint64_t>(layer)) ^ static_cast<std::uint64_t>(micro_batch))),
      previous_(current_scope),
      intercept_((register_kernels(), kInterceptingKey)) {
  current_scope = this;
}

RandomScope::~RandomScope() { current_scope = previous_; }

RandomScope* RandomScope::current() { return current_scope; }

std::uint64_t RandomScope::draw_seed() { return SeedDraw().seed(); }

at::Generator RandomScope::generator(c10::Device device) {
  if (device.is_cpu()) {
    if (!cpu_) cpu_ = make_cpu_generator(key_);
    return *cpu_;
  }
  for (const auto& made : accelerators_) {
    if (made.device() == device) return made;
  }
  const auto& hooks = at::globalContext().getAcceleratorHooksInterface(device.type());
  accelerators_.push_back(hooks.getNewGenerator(device.index()));
  accelerators_.back().set_current_seed(key_);
  return accelerators_.back();
}

void RandomScope::lend_default_generator(c10::Device device, const std::function<void()>& call) {
  auto own = generator(device);
  auto lent = at::globalContext().defaultGenerator(device);
  MutexLock turn(default_generator_mutex(device));
  // Holds the generator's own mutex for reading and writing its state only, because `call` takes it.
  const auto exchange = [&lent](const at::Tensor& state) {
    std::lock_guard<std::mutex> lock(lent.mutex());
    auto was = lent.get_state();
    lent.set_state(state);
    return was;
  };
  const auto before = exchange(own.get_state());
  lending_ = true;
  absl::Cleanup give_back = [&] {
    lending_ = false;
    own.set_state(exchange(before));
  };
  call();
}

SeedDraw::SeedDraw() {
  register_kernels();  // on the caller's thread, before workers run operators
  with_current_generator([&](at::CPUGeneratorImpl& generator) {
    before_ = generator.engine();
    seed_ = generator.random64();
    after_ = generator.engine();
  });
}

void SeedDraw::undo() noexcept try {
  with_current_generator([&](at::CPUGeneratorImpl& generator) {
    const auto found = generator.engine().data();
    const auto expected = after_.data();
    if (found.left_ == expected.left_ && found.state_ == expected.state_) generator.set_engine(before_);
  });
} catch (...) {  // the caller handles an exception already
}

}  // namespace gpipe
