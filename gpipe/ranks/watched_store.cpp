#include "gpipe/ranks/watched_store.h"

#include <stdexcept>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

namespace gpipe {
namespace {

std::unique_ptr<const Probe> probe_of(c10d::PrefixStore& store) {
  const auto innermost = store.getUnderlyingNonPrefixStore();
  const auto* served = dynamic_cast<const c10d::TCPStore*>(innermost.get());
  return served == nullptr ? nullptr : std::make_unique<const Probe>(served->getHost(), served->getPort());
}

}  // namespace

WatchedStore::WatchedStore(const std::string& prefix, c10::intrusive_ptr<c10d::Store> store)
    : WatchedStore(prefix, std::move(store), std::make_shared<Watch>()) {
  watch_->probe = probe_of(*this);
}

WatchedStore::WatchedStore(const std::string& prefix, c10::intrusive_ptr<c10d::Store> store,
                           std::shared_ptr<Watch> watch)
    : PrefixStore(prefix, std::move(store)), watch_(std::move(watch)) {}

template <typename Use>
auto WatchedStore::use(Use use) {
  if (watch_->probe && watch_->probe->has_ended()) watch_->ended = true;
  try {
    if (!watch_->ended) return use();
  } catch (const c10::DistNetworkError&) {
    watch_->ended = true;
  }
  throw std::runtime_error("[gpipe] the store of the job has ended, as it does when rank 0 or torchrun ends");
}

c10::intrusive_ptr<c10d::Store> WatchedStore::clone() {
  return use([&] {
    auto* clone = new WatchedStore(prefix_, store_->clone(), watch_);
    return c10::intrusive_ptr<c10d::Store>::unsafe_steal_from_new(clone);
  });
}

void WatchedStore::set(const std::string& key, const std::vector<std::uint8_t>& value) {
  use([&] { PrefixStore::set(key, value); });
}

std::vector<std::uint8_t> WatchedStore::compareSet(const std::string& key, const std::vector<std::uint8_t>& expected,
                                                   const std::vector<std::uint8_t>& desired) {
  return use([&] { return PrefixStore::compareSet(key, expected, desired); });
}

std::vector<std::uint8_t> WatchedStore::get(const std::string& key) {
  return use([&] { return PrefixStore::get(key); });
}

std::int64_t WatchedStore::add(const std::string& key, std::int64_t value) {
  return use([&] { return PrefixStore::add(key, value); });
}

bool WatchedStore::check(const std::vector<std::string>& keys) {
  return use([&] { return PrefixStore::check(keys); });
}

}  // namespace gpipe
