#include "gpipe/autograd/skip_routes.h"

#include <algorithm>

#include "gpipe/base/checks.h"

namespace gpipe {
namespace {

// Searches linearly, because a stage has few skips.
std::size_t place_in(const std::vector<SkipKey>& keys, const SkipKey& key) {
  return std::ranges::find(keys, key) - keys.begin();
}

[[noreturn]] void fail(const SkipKey& key, const std::string& what) { throw_error("skip ", to_string(key), " ", what); }

[[noreturn]] void fail_twice(const SkipKey& key, const std::string& what) {
  fail(key, "was " + what + " twice in one forward; stash and pop each skip once");
}

[[noreturn]] void fail_changed(const SkipKey& key, const std::string& layer) {
  fail(key, "was changed in place " + layer + " between its stash and its pop; stash a clone instead");
}

[[noreturn]] void fail_unused(const SkipKey& key, const std::string& what) {
  fail(key, "is declared to be " + what + " in every forward, but was not " + what + " in this one");
}

}  // namespace

SkipRoutes::SkipRoutes(const Stage& stage, std::vector<at::Tensor> entering)
    : stage_(stage), leaving_(stage.skips_out.size()) {
  for (const auto& tensor : entering) entering_.push_back({tensor, VersionWatch(tensor)});
}

void SkipRoutes::stash(const SkipKey& key, at::Tensor tensor) {
  const auto k = place_in(stage_.skips_out, key);
  if (k == leaving_.size()) {
    if (!inside_.emplace(key, std::move(tensor)).second) fail_twice(key, "stashed");
    return;
  }
  auto& leaving = leaving_[k];
  if (!leaving.parcel.tensors.empty()) fail_twice(key, "stashed");
  leaving.root = leave(tensor);
  leaving.parcel.add_leaving(tensor);
}

at::Tensor SkipRoutes::pop(const SkipKey& key) {
  const auto k = place_in(stage_.skips_in, key);
  if (k == entering_.size()) {
    auto node = inside_.extract(key);
    if (node.empty()) fail(key, "was popped before it was stashed");
    return std::move(node.mapped());
  }
  auto& [tensor, version, popped] = entering_[k];
  if (popped) fail_twice(key, "popped");
  popped = true;
  if (version.changed()) fail_changed(key, "by the layer that pops it,");
  return std::move(tensor);
}

void SkipRoutes::check_unchanged(const std::string& layer) const {
  const auto by_layer = "by layer '" + layer + "'";
  for (std::size_t k = 0; k < entering_.size(); ++k) {
    if (!entering_[k].popped && entering_[k].version.changed()) fail_changed(stage_.skips_in[k], by_layer);
  }
  for (std::size_t k = 0; k < leaving_.size(); ++k) {
    if (leaving_[k].parcel.changed()) fail_changed(stage_.skips_out[k], by_layer);
  }
}

void SkipRoutes::check_all_used() const {
  for (std::size_t k = 0; k < entering_.size(); ++k) {
    if (!entering_[k].popped) fail_unused(stage_.skips_in[k], "popped");
  }
  for (std::size_t k = 0; k < leaving_.size(); ++k) {
    if (leaving_[k].parcel.tensors.empty()) fail_unused(stage_.skips_out[k], "stashed");
  }
  if (!inside_.empty()) fail_unused(inside_.begin()->first, "popped");
}

}  // namespace gpipe
