#include "examples/common/processes.h"

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <streambuf>
#include <string>
#include <string_view>

#include "absl/strings/str_join.h"
#include "gpipe/gpipe.h"

namespace gpipe::examples {
namespace {

/// Takes all and prints nothing.
class SilentBuffer : public std::streambuf {
 protected:
  int_type overflow(int_type c) override { return traits_type::not_eof(c); }
  std::streamsize xsputn(const char*, std::streamsize count) override { return count; }
};

}  // namespace

std::shared_ptr<Ranks> join_processes(int replicas) {
  // A cluster may set WORLD_SIZE for other reasons. Only torchrun sets the other variable.
  const char* size = std::getenv("WORLD_SIZE");
  if (std::getenv("TORCHELASTIC_RUN_ID") == nullptr || (size != nullptr && size == std::string_view("1"))) {
    if (replicas == 1) return nullptr;
    throw std::invalid_argument("--replicas is " + std::to_string(replicas) +
                                ", but there is one process; start as many per stage with torchrun");
  }
  auto ranks = Ranks::from_environment(RanksOptions().replicas(replicas));
  if (!is_first(ranks)) {
    static auto* silent = new SilentBuffer;  // never destroyed, because std::cout is flushed at the very end
    std::cout.rdbuf(silent);
  }
  return ranks;
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

at::Tensor join_parts(GPipe& pipe, const at::Tensor& part) {
  const auto own = part.cpu().contiguous();
  const auto& ranks = pipe->options().ranks();
  std::string bytes;
  if (!ranks || ranks->mesh().position_of(ranks->rank()) == 0) {  // the others have what this rank has
    bytes.assign(static_cast<const char*>(own.const_data_ptr()), own.nbytes());
  }
  bytes = absl::StrJoin(pipe->gather(std::move(bytes), "parts of a mini-batch"), "");
  auto shape = own.sizes().vec();
  shape.front() = -1;
  const auto joined = at::empty(static_cast<std::int64_t>(bytes.size() / own.element_size()), own.options());
  std::copy(bytes.begin(), bytes.end(), static_cast<char*>(joined.mutable_data_ptr()));
  return joined.view(shape);
}

bool is_first(const std::shared_ptr<Ranks>& ranks) { return !ranks || ranks->rank() == 0; }

void run_first(const std::shared_ptr<Ranks>& ranks, const std::function<void()>& work) {
  if (is_first(ranks)) work();
  if (ranks) ranks->share("");
}

}  // namespace gpipe::examples
