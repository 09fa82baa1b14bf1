#include "skip/namespace.h"

#include <atomic>

namespace gpipe {
namespace {

// 0 is Namespace::global().
std::uint64_t next_id() {
  static std::atomic<std::uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

}  // namespace

Namespace::Namespace() : id_(next_id()) {}

std::string to_string(const SkipKey& key) {
  std::string text = "'" + key.name + "'";
  if (key.ns != Namespace::global()) text += " (namespace " + std::to_string(key.ns.id()) + ")";
  return text;
}

}  // namespace gpipe
