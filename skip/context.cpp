#include "skip/context.h"

#include <map>
#include <stdexcept>
#include <utility>

namespace gpipe {
namespace {

class ThreadContext : public SkipContext {
 public:
  void stash(const SkipKey& key, at::Tensor tensor) override { tensors_.insert_or_assign(key, std::move(tensor)); }

  at::Tensor pop(const SkipKey& key) override {
    auto node = tensors_.extract(key);
    if (node.empty()) throw std::runtime_error("skip " + to_string(key) + " was popped before it was stashed");
    return std::move(node.mapped());
  }

 private:
  std::map<SkipKey, at::Tensor> tensors_;
};

thread_local SkipContext* guarded = nullptr;

}  // namespace

SkipContext& SkipContext::current() {
  if (guarded != nullptr) return *guarded;
  thread_local ThreadContext own;
  return own;
}

SkipContextGuard::SkipContextGuard(SkipContext& context) : previous_(std::exchange(guarded, &context)) {}

SkipContextGuard::~SkipContextGuard() { guarded = previous_; }

}  // namespace gpipe
