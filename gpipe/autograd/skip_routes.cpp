#include "gpipe/autograd/skip_routes.h"

#include "gpipe/base/checks.h"

namespace gpipe {
namespace {

[[noreturn]] void fail(const SkipKey& key, const std::string& what) { throw_error("skip ", to_string(key), " ", what); }

[[noreturn]] void fail_twice(const SkipKey& key, const std::string& what) {
  fail(key, "was " + what + " twice in one forward; each layer stashes or reads a skip once");
}

[[noreturn]] void fail_changed(const SkipKey& key, const std::string& layer) {
  fail(key, "was changed in place " + layer + " between its stash and its last reader; stash a clone instead");
}

[[noreturn]] void fail_unused(const SkipKey& key, const std::string& what) {
  fail(key, "is declared to be " + what + " in every forward, but was not " + what + " in this one");
}

}  // namespace

SkipRoutes::SkipRoutes(const Stage& stage, std::vector<at::Tensor> entering)
    : stage_(stage), leaving_(stage.skips_out.size()) {
  for (std::size_t k = 0; k < entering.size(); ++k) {
    const auto& key = stage.skips_in[k];
    send(key, entering[k]);
    const VersionWatch version(entering[k]);
    present_.emplace(key, Present{std::move(entering[k]), version, stage.skip_readers.at(key)});
  }
}

void SkipRoutes::send(const SkipKey& key, const at::Tensor& tensor) {
  for (std::size_t k = 0; k < leaving_.size(); ++k) {
    if (stage_.skips_out[k] != key) continue;
    auto& leaving = leaving_[k];
    if (!leaving.parcel.tensors.empty()) fail_twice(key, "stashed");
    leaving.tensor = tensor;
    leaving.parcel.add_leaving(tensor);
  }
}

void SkipRoutes::stash(const SkipKey& key, at::Tensor tensor) {
  send(key, tensor);
  const auto readers = stage_.skip_readers.find(key);
  if (readers == stage_.skip_readers.end()) return;
  if (!present_.emplace(key, Present{std::move(tensor), {}, readers->second}).second) fail_twice(key, "stashed");
}

at::Tensor SkipRoutes::pop(const SkipKey& key) {
  const auto found = present_.find(key);
  if (found == present_.end()) fail(key, "was read before it was stashed");
  auto& [tensor, version, readers] = found->second;
  if (readers == 0) fail_twice(key, "read");
  if (version.changed()) fail_changed(key, "by the layer that reads it,");
  if (--readers > 0) return tensor;
  version = {};
  return std::move(tensor);
}

void SkipRoutes::check_unchanged(const std::string& layer) const {
  const auto by_layer = "by layer '" + layer + "'";
  for (const auto& [key, skip] : present_) {
    if (skip.version.changed()) fail_changed(key, by_layer);
  }
  for (std::size_t k = 0; k < leaving_.size(); ++k) {
    if (leaving_[k].parcel.changed()) fail_changed(stage_.skips_out[k], by_layer);
  }
}

void SkipRoutes::check_all_used() const {
  for (const auto& [key, skip] : present_) {
    if (skip.readers > 0) fail_unused(key, "read");
  }
  for (std::size_t k = 0; k < leaving_.size(); ++k) {
    if (leaving_[k].parcel.tensors.empty()) fail_unused(stage_.skips_out[k], "stashed");
  }
}

}  // namespace gpipe
