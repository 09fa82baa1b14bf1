#pragma once

#include <torch/arg.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "gpipe/api.h"
#include "gpipe/mesh.h"

namespace gpipe {

class Job;

/// Options of Ranks: RanksOptions().timeout(std::chrono::minutes(2)).
struct RanksOptions {
  /// The longest wait for a message within a call. A rank that stops or hangs is reported after this time.
  TORCH_ARG(std::chrono::milliseconds, timeout) = std::chrono::minutes(5);
  /// The longest wait for a rank to join: when Ranks or a pipeline are made, and at the start of each call.
  TORCH_ARG(std::chrono::milliseconds, join_timeout) = std::chrono::minutes(30);
  /// The network interface that accepts connections, such as "eth0". Empty: GLOO_SOCKET_IFNAME, else the one that
  /// reaches the store.
  TORCH_ARG(std::string, interface);
  /// The number of equal pipelines, which divides the number of ranks. Each trains on a part of the mini-batch.
  TORCH_ARG(int, replicas) = 1;
  /// Whether outputs, of forward() and StepOptions::return_output, go to all ranks of their replica. Else only the rank of
  /// the last stage has their values. On the others they are on the `meta` device: they have shapes, and a backward().
  /// The same on all ranks.
  TORCH_ARG(bool, share_outputs) = false;
};

/// Makes a back-end of c10d, such as a ProcessGroupNCCL, for `size` ranks with a device each. All of them call it with one
/// name, which no other call has. Can return null for names that contain "sums": the sums of replicas then pass through
/// the hosts. The back-end's time-out limits each transfer.
using JoinDevices = std::function<c10::intrusive_ptr<c10d::Backend>(const std::string& name, int rank, int size)>;

/// The processes of a job, which run one pipeline together, or several equal ones, the *replicas*. Each process, a
/// *rank*, holds one or more workers and the parameters of their stages.
///
///   auto ranks = gpipe::Ranks::from_environment();
///   auto pipe = gpipe::GPipe(model, {4, 3}, gpipe::GPipeOptions().chunks(8).ranks(ranks));
///
/// Traffic between ranks is not encrypted, and whoever can read the store can join. It belongs on a private network.
///
/// Outlives its pipelines; make and destroy these on one thread at a time. The destructor calls finish().
class GPIPE_API Ranks {
 public:
  // A function with the parameter `poll` calls it while it waits, unless it is null, and throws what it throws.

  /// Joins the job that the environment describes: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT. Under torchrun uses its
  /// store, otherwise rank 0 serves one at MASTER_ADDR. Waits until all ranks have come. Errors:
  /// std::invalid_argument for a variable that is missing or not valid; std::runtime_error if the store cannot be
  /// served or reached, or a rank does not come within the join time-out.
  static std::shared_ptr<Ranks> from_environment(RanksOptions options = {},
                                                 const std::function<void()>& poll = nullptr);

  /// Joins a job that shares a store, and waits until all ranks have come. All of them make their Ranks in the same order.
  /// `join_devices`: by what tensors go from GPU to GPU. All workers of a pipeline must have GPUs then, and no two ranks the
  /// same one, or all must be on the CPU. Null if tensors pass through the memory of the hosts. Errors: std::invalid_argument for a null store, a rank that
  /// is not in 0..size-1, a time-out that is not positive, or a number of replicas that does not divide `size`;
  /// std::runtime_error if the store does not answer, or a rank does not come, within the join time-out, or a rank has
  /// failed.
  Ranks(c10::intrusive_ptr<c10d::Store> store, int rank, int size, RanksOptions options = {},
        const JoinDevices& join_devices = nullptr, const std::function<void()>& poll = nullptr);

  ~Ranks();

  /// Returns rank 0's short text on all ranks, which call this in the same order. Errors: std::runtime_error if a rank
  /// has failed, or rank 0 does not come within the join time-out.
  std::string share(const std::string& text, const std::function<void()>& poll = nullptr);

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// The number of replicas, and the one to which this rank belongs.
  int replicas() const { return mesh_.replicas; }
  int replica() const { return mesh_.replica_of(rank_); }
  const Mesh& mesh() const { return mesh_; }
  /// This replica's part of a mini-batch: its first sample and the one behind its last. Parts differ by one sample at
  /// most, larger ones first; a part can be empty.
  std::pair<std::int64_t, std::int64_t> part(std::int64_t samples) const { return part(samples, replica()); }
  /// The same for any replica. REQUIRES: 0 <= replica < replicas().
  std::pair<std::int64_t, std::int64_t> part(std::int64_t samples, int replica) const;
  /// This rank's number on its host: LOCAL_RANK, or 0. Unknown if the environment describes a job of another size.
  std::optional<int> local_rank() const { return local_rank_; }
  const RanksOptions& options() const { return options_; }
  /// The address of this host at which other ranks connect.
  const std::string& address() const { return address_; }

  /// Leaves the job, and waits until the other ranks have left too, for at most the time-out. With an `error`, instead
  /// fails the job, as an error in a call does. REQUIRES: without an error, no call runs.
  void finish(const std::string& error = "", const std::function<void()>& poll = nullptr);

  Job& job() { return *job_; }

 private:
  const int rank_;
  const int size_;
  const std::optional<int> local_rank_;
  const RanksOptions options_;
  const Mesh mesh_;
  const std::string address_;
  std::unique_ptr<Job> job_;
};

}  // namespace gpipe
