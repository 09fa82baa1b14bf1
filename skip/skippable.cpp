#include "skip/skippable.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <set>
#include <stdexcept>

namespace gpipe {
namespace {

// 0 is Namespace::global().
std::uint64_t next_id() {
  static std::atomic<std::uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

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

std::vector<SkipKey> to_keys(std::vector<std::string>& names) {
  std::vector<SkipKey> keys;
  for (auto& name : names) keys.push_back({.name = std::move(name)});
  return keys;
}

const SkipKey* find(const std::vector<SkipKey>& keys, const std::string& name) {
  const auto key = std::ranges::find(keys, name, &SkipKey::name);
  return key == keys.end() ? nullptr : &*key;
}

std::invalid_argument undeclared(const std::string& verb, const std::string& name,
                                 const std::vector<SkipKey>& declared) {
  auto text = "'" + name + "' was " + verb + " by a layer that does not declare it; it declares";
  for (const auto& key : declared) text += " '" + key.name + "'";
  if (declared.empty()) text += " none";
  return std::invalid_argument(text);
}

std::vector<Skippable*> skippables_in(torch::nn::Module& module) {
  std::vector<Skippable*> found;
  const auto add = [&](torch::nn::Module* m) {
    if (auto* skippable = dynamic_cast<Skippable*>(m)) found.push_back(skippable);
  };
  // Adds the module itself: modules(include_self=true) needs a shared_ptr, of which a constructor has none.
  add(&module);
  for (const auto& m : module.modules(/*include_self=*/false)) add(m.get());
  return found;
}

}  // namespace

Namespace::Namespace() : id_(next_id()) {}

std::string to_string(const SkipKey& key) {
  std::string text = "'" + key.name + "'";
  if (key.ns != Namespace::global()) text += " (namespace " + std::to_string(key.ns.id()) + ")";
  return text;
}

SkipContext& SkipContext::current() {
  if (guarded != nullptr) return *guarded;
  thread_local ThreadContext own;
  return own;
}

SkipContextGuard::SkipContextGuard(SkipContext& context) : previous_(std::exchange(guarded, &context)) {}

SkipContextGuard::~SkipContextGuard() { guarded = previous_; }

Skippable::Skippable(Names names) : stashes_(to_keys(names.stash)), pops_(to_keys(names.pop)) {
  std::set<std::string> seen;
  for (const auto* keys : {&stashes_, &pops_}) {
    for (const auto& key : *keys) {
      if (key.name.empty())
        throw std::invalid_argument("a Skippable layer declares an empty name; give every skip a name");
      if (!seen.insert(key.name).second) {
        throw std::invalid_argument("a Skippable layer declares '" + key.name +
                                    "' more than once; declare each name once, to stash or to pop");
      }
    }
  }
}

void Skippable::isolate(Namespace ns, const std::vector<std::string>& only) {
  auto* module = dynamic_cast<torch::nn::Module*>(this);
  if (module == nullptr) throw std::logic_error("a Skippable layer must also be a torch::nn::Module");
  gpipe::isolate(*module, ns, only);
}

void Skippable::stash(const std::string& name, torch::Tensor tensor) {
  const auto* key = find(stashes_, name);
  if (key == nullptr) throw undeclared("stashed", name, stashes_);
  SkipContext::current().stash(*key, std::move(tensor));
}

torch::Tensor Skippable::pop(const std::string& name) {
  const auto* key = find(pops_, name);
  if (key == nullptr) throw undeclared("popped", name, pops_);
  return SkipContext::current().pop(*key);
}

void isolate(torch::nn::Module& module, Namespace ns, const std::vector<std::string>& only) {
  const auto skippables = skippables_in(module);
  for (const auto& name : only) {
    const auto declares = [&](const Skippable* s) { return find(s->stashes_, name) || find(s->pops_, name); };
    if (std::ranges::none_of(skippables, declares)) {
      throw std::invalid_argument("no layer to isolate declares '" + name + "'");
    }
  }
  for (auto* skippable : skippables) {
    for (auto* keys : {&skippable->stashes_, &skippable->pops_}) {
      for (auto& key : *keys) {
        if (only.empty() || std::ranges::find(only, key.name) != only.end()) key.ns = ns;
      }
    }
  }
}

}  // namespace gpipe
