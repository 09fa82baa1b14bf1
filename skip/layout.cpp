#include "skip/layout.h"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <utility>

namespace gpipe {
namespace {

/// One end of a skip: a layer's stash, pop or peek.
struct End {
  SkipKey key;
  int layer = 0;
  int order = 0;     // position of its module among all modules of the model
  std::string path;  // "layer", or "layer.child" for a module nested in it
};

/// Returns one kind of ends, in order.
std::vector<End> find_ends(const std::vector<SkipDeclaration>& declarations,
                           std::vector<SkipKey> SkipDeclaration::*keys) {
  std::vector<End> ends;
  for (int i = 0; i < std::ssize(declarations); ++i) {
    for (const auto& key : declarations[i].*keys) ends.push_back({key, declarations[i].layer, i, declarations[i].path});
  }
  return ends;
}

std::string to_string(const End& end) { return "layer '" + end.path + "' (" + std::to_string(end.layer) + ")"; }

bool contains(const End& outer, const End& inner) {
  return outer.layer == inner.layer && inner.path.starts_with(outer.path + ".");
}

bool in_order(const End& stash, const End& pop) {
  return stash.order < pop.order || contains(stash, pop) || contains(pop, stash);
}

/// Returns the first end of each key. Adds a fault for each further one.
std::map<SkipKey, const End*> index(const std::vector<End>& ends, const std::string& verb,
                                    std::vector<std::string>& faults) {
  std::map<SkipKey, const End*> first;
  for (const auto& end : ends) {
    const auto [earlier, added] = first.emplace(end.key, &end);
    if (added) continue;
    faults.push_back(to_string(end) + " " + verb + " " + to_string(end.key) + ", which " + to_string(*earlier->second) +
                     " already " + verb + ": isolate one of them with a Namespace");
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
  const auto all_stashes = find_ends(declarations, &SkipDeclaration::stashes);
  const auto all_pops = find_ends(declarations, &SkipDeclaration::pops);
  const auto all_peeks = find_ends(declarations, &SkipDeclaration::peeks);
  std::vector<std::string> faults;
  const auto stashes = index(all_stashes, "stashes", faults);
  const auto pops = index(all_pops, "pops", faults);

  std::map<SkipKey, std::vector<int>> readers;
  const auto add = [&](const End& reader, const std::string& verb) {
    readers[reader.key].push_back(reader.layer);
    const auto stash = stashes.find(reader.key);
    if (stash != stashes.end() && in_order(*stash->second, reader)) return;
    faults.push_back(to_string(reader) + " " + verb + " " + to_string(reader.key) + ", which no earlier layer stashes" +
                     (stash == stashes.end() ? "" : ": " + to_string(*stash->second) + " does"));
  };
  for (const auto& peek : all_peeks) {
    add(peek, "peeks at");
    const auto pop = pops.find(peek.key);
    if (pop == pops.end() || in_order(peek, *pop->second)) continue;
    faults.push_back(to_string(peek) + " peeks at " + to_string(peek.key) + ", which " + to_string(*pop->second) +
                     " has popped: let the last reader pop it");
  }
  for (const auto& pop : all_pops) add(pop, "pops");

  std::vector<SkipLink> links;
  for (const auto& stash : all_stashes) {
    auto& read_by = readers[stash.key];
    std::ranges::sort(read_by);
    if (read_by.empty()) faults.push_back(to_string(stash) + " stashes " + to_string(stash.key) + ", which no layer pops");
    links.push_back({stash.key, stash.layer, std::move(read_by)});
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
