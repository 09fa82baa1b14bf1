// The library that connect_by_nccl() loads.
#define USE_C10D_NCCL
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

// The caller owns the group. Its streams come from another pool than a pipeline's, so that no computation waits behind
// a transfer.
extern "C" c10d::Backend* gpipe_join_by_nccl(const c10::intrusive_ptr<c10d::Store>& store, const std::string& name,
                                             int rank, int size, std::chrono::milliseconds limit) {
  const auto options = c10d::ProcessGroupNCCL::Options::create(/*is_high_priority_stream=*/true);
  options->timeout = limit;
  options->group_name = name;
  options->config.blocking = 1;
  auto of_group = c10::make_intrusive<c10d::PrefixStore>("nccl/" + name, store);
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(std::move(of_group), rank, size, options).release();
}
