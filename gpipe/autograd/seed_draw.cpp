#include "gpipe/autograd/seed_draw.h"

#include <ATen/CPUGeneratorImpl.h>

#include <mutex>

#include "gpipe/autograd/random_scope.h"

namespace gpipe {
namespace {

constexpr int kWordsPerSeed = 2;  // the engine draws 32 bits at a time

at::Generator current_generator() {
  auto* scope = RandomScope::current();
  return scope ? scope->generator(c10::kCPU) : at::detail::getDefaultCPUGenerator();
}

at::Generator generator_copy(at::Generator generator) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.clone();
}

}  // namespace

SeedDraw::SeedDraw() : before_(generator_copy(current_generator())), seed_(RandomScope::draw_seed()) {}

void SeedDraw::undo() noexcept try {
  auto generator = current_generator();
  std::lock_guard<std::mutex> lock(generator.mutex());
  auto* impl = generator.get<at::CPUGeneratorImpl>();
  const auto before = before_.get<at::CPUGeneratorImpl>()->engine();
  auto after = before;
  for (int i = 0; i < kWordsPerSeed; ++i) after();
  const auto found = impl->engine().data();
  const auto expected = after.data();
  if (found.left_ == expected.left_ && found.state_ == expected.state_) impl->set_engine(before);
} catch (...) {  // the caller handles an exception already
}

}  // namespace gpipe
