#include "skip/layout.h"

#include <algorithm>
#include <map>
#include <stdexcept>

namespace gpipe {
namespace {

std::string to_string(const SkipDeclaration& module) {
  return "layer '" + module.path + "' (" + std::to_string(module.layer) + ")";
}

bool contains(const SkipDeclaration& outer, const SkipDeclaration& inner) {
  return outer.layer == inner.layer && inner.path.starts_with(outer.path + ".");
}

/// The modules are elements of one list, in the order in which they run.
bool in_order(const SkipDeclaration& stash, const SkipDeclaration& pop) {
  return &stash < &pop || contains(stash, pop) || contains(pop, stash);
}

/// Returns the first module that stashes, or pops, each key. Adds a fault for each further one.
std::map<SkipKey, const SkipDeclaration*> index(const std::vector<SkipDeclaration>& modules,
                                                std::vector<SkipKey> SkipDeclaration::*keys, const std::string& verb,
                                                std::vector<std::string>& faults) {
  std::map<SkipKey, const SkipDeclaration*> first;
  for (const auto& module : modules) {
    for (const auto& key : module.*keys) {
      const auto [earlier, added] = first.emplace(key, &module);
      if (added) continue;
      faults.push_back(to_string(module) + " " + verb + " " + to_string(key) + ", which " +
                       to_string(*earlier->second) + " already " + verb + ": isolate one of them with a Namespace");
    }
  }
  return first;
}

}  // namespace

std::vector<int> distinct_readers(const SkipLink& skip) {
  auto readers = skip.readers;
  readers.erase(std::unique(readers.begin(), readers.end()), readers.end());
  return readers;
}

std::vector<SkipLink> match_skips(const std::vector<SkipDeclaration>& declarations) {
  std::vector<std::string> faults;
  const auto stashes = index(declarations, &SkipDeclaration::stashes, "stashes", faults);
  const auto pops = index(declarations, &SkipDeclaration::pops, "pops", faults);

  std::map<SkipKey, std::vector<int>> readers;
  const auto add_reader = [&](const SkipDeclaration& module, const SkipKey& key, const std::string& verb) {
    readers[key].push_back(module.layer);
    const auto stash = stashes.find(key);
    if (stash != stashes.end() && in_order(*stash->second, module)) return;
    faults.push_back(to_string(module) + " " + verb + " " + to_string(key) + ", which no earlier layer stashes" +
                     (stash == stashes.end() ? "" : ": " + to_string(*stash->second) + " does"));
  };
  for (const auto& module : declarations) {
    for (const auto& key : module.pops) add_reader(module, key, "pops");
    for (const auto& key : module.peeks) {
      add_reader(module, key, "peeks at");
      const auto pop = pops.find(key);
      if (pop == pops.end() || in_order(module, *pop->second)) continue;
      faults.push_back(to_string(module) + " peeks at " + to_string(key) + ", which " + to_string(*pop->second) +
                       " has popped: let the last reader pop it");
    }
  }
  std::vector<SkipLink> links;
  for (const auto& module : declarations) {
    for (const auto& key : module.stashes) {
      links.push_back({key, module.layer, readers[key]});
      if (readers[key].empty())
        faults.push_back(to_string(module) + " stashes " + to_string(key) + ", which no layer pops");
    }
  }
  if (faults.empty()) return links;

  std::string text = "one or more pairs of stash and pop do not match:";
  for (const auto& fault : faults) text += "\n  * " + fault;
  throw std::invalid_argument(text);
}

std::vector<SkipDeclaration> skip_declarations(const NamedLayer& layer, int index) {
  std::vector<SkipDeclaration> declarations;
  for (const auto& module : layer.module->named_modules(layer.name)) {
    const auto* skippable = dynamic_cast<const Skippable*>(module.value().get());
    if (skippable == nullptr) continue;
    declarations.push_back({index, module.key(), skippable->stashes(), skippable->pops(), skippable->peeks()});
  }
  return declarations;
}

std::vector<SkipLink> skip_links(const std::vector<NamedLayer>& layers) {
  std::vector<SkipDeclaration> declarations;
  for (int layer = 0; layer < std::ssize(layers); ++layer) {
    for (auto& declaration : skip_declarations(layers[layer], layer)) declarations.push_back(std::move(declaration));
  }
  return match_skips(declarations);
}

void verify_skippables(const torch::nn::Sequential& model) {
  std::vector<NamedLayer> layers;
  for (const auto& child : model->named_children()) layers.push_back({child.key(), child.value()});
  skip_links(layers);
}

}  // namespace gpipe
