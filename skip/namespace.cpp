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

}  // namespace gpipe
