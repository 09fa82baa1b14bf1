#include "examples/common/processes.h"

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>

namespace gpipe::examples {

std::shared_ptr<Ranks> join_processes(int replicas) {
  // A cluster may set WORLD_SIZE for other reasons. Only torchrun sets the other variable.
  const char* size = std::getenv("WORLD_SIZE");
  if (std::getenv("TORCHELASTIC_RUN_ID") == nullptr || (size != nullptr && size == std::string_view("1"))) {
    if (replicas == 1) return nullptr;
    throw std::invalid_argument("--replicas is " + std::to_string(replicas) +
                                ", but there is one process; start as many per stage with torchrun");
  }
  auto ranks = Ranks::from_environment(RanksOptions().replicas(replicas));
  if (!is_first(ranks) && std::freopen("/dev/null", "w", stdout) == nullptr) {
    throw std::runtime_error("cannot open /dev/null");
  }
  return ranks;
}

bool is_first(const std::shared_ptr<Ranks>& ranks) { return !ranks || ranks->rank() == 0; }

void run_first(const std::shared_ptr<Ranks>& ranks, const std::function<void()>& work) {
  if (is_first(ranks)) work();
  if (ranks) ranks->share("");
}

std::pair<std::int64_t, std::int64_t> part_of(const std::shared_ptr<Ranks>& ranks, std::int64_t images) {
  return ranks ? ranks->part(images) : std::pair<std::int64_t, std::int64_t>(0, images);
}

std::array<std::int64_t, 2> part_sizes(const std::shared_ptr<Ranks>& ranks, std::int64_t images) {
  if (!ranks) return {images, images};
  const auto size_of = [&](int replica) {
    const auto [begin, end] = ranks->part(images, replica);
    return end - begin;
  };
  return {size_of(0), size_of(ranks->replicas() - 1)};
}

}  // namespace gpipe::examples
