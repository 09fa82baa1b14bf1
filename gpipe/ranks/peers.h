#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "gpipe/autograd/parcel.h"
#include "gpipe/ranks/call.h"
#include "gpipe/ranks/connections.h"
#include "gpipe/ranks/device_wire.h"
#include "gpipe/ranks/exchange.h"
#include "gpipe/ranks/job.h"
#include "gpipe/ranks/manifest.h"
#include "gpipe/ranks/parcel_message.h"
#include "gpipe/ranks/ranks.h"
#include "gpipe/runtime/mutex.h"

namespace gpipe {

/// The other ranks, as one pipeline sees them: the wires to them, the agreement on each call, and the first failure.
///
/// Thread safety: agree(), withdraw(), share(), gather() and clocks() on one thread at a time; the other functions on any
/// thread.
/// Invariants:
///   1. The first failure of any rank is the failure of all. It is published before the connections are closed. (FailureBoard)
///   2. After a failure every call throws.
class Peers {
 public:
  /// Joins the other ranks, which must give the same manifest. `of_workers` has the rank of each worker of this replica;
  /// `stages` is the number of stages. Calls `poll`, unless that is null, every 50 ms while the caller waits for other ranks;
  /// an exception from it is a failure.
  /// Errors: std::runtime_error for a rank that does not come or has another manifest.
  Peers(std::shared_ptr<Ranks> ranks, std::vector<int> of_workers, int stages, const Manifest& manifest,
        StructureCodec codec, std::function<void()> poll);
  /// Tells the other ranks. Calls that they begin later throw.
  ~Peers();
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  int rank() const { return ranks_->rank(); }
  int replica() const { return ranks_->replica(); }
  int replicas() const { return ranks_->replicas(); }
  /// The rank that has this rank's stages in another replica.
  int twin(int replica) const { return ranks_->mesh().rank_at(ranks_->mesh().position_of(rank()), replica); }
  /// The rank of each worker of this replica.
  const std::vector<int>& of_workers() const { return of_workers_; }
  bool is_here(int worker) const { return of_workers_[worker] == rank(); }
  const RanksOptions& options() const { return ranks_->options(); }
  Wires& wires() { return *wires_; }

  /// Whether tensors go straight from the devices of one rank to those of another.
  bool has_device_wires() const { return job_.devices() != nullptr; }
  /// Makes this rank's end of the wire from a worker's device to that of a worker on another rank. Waits for the other end.
  /// `device` is that of this rank's worker. Errors: ConnectionError, which the other ranks learn of.
  DeviceWire& connect_devices(int from, int to, c10::Device device);

  const StructureCodec& codec() const { return codec_; }

  /// Begins a call. Errors: std::runtime_error if the calls differ, another rank has withdrawn, or a rank has failed.
  Verdict agree(Call call);

  /// Notes that a backward of the pipeline has returned its gradients to the autograd engine, and that the engine has ended
  /// well. If it has not before the next call, a hook or another part of the graph has thrown.
  void begin_handing_out(int graph_task);
  void end_handing_out(int graph_task);

  /// Makes the call that the other ranks begin throw there, because it cannot begin here.
  void withdraw(const std::string& reason) noexcept;

  /// The number of calls that were agreed on or withdrawn.
  std::uint64_t calls() const { return calls_; }

  /// What ranks share within a call: those of a replica, those with the same stages, or all.
  enum class Result { kLoss, kOutput, kOfTwins, kNumbers };
  /// Returns the parcel that rank `owner` gives, and sends copies of its tensors. The other ranks' parcels are ignored.
  /// Errors: std::runtime_error if a rank has failed.
  Parcel share(Result result, int owner, Parcel parcel);

  /// Returns the parcels that the ranks with the same stages give, in the order of replicas. REQUIRES: within a call.
  /// Errors: as share().
  std::vector<Parcel> exchange(Parcel parcel);

  /// The wires that carry the gradients of a stage from one replica to another: parts of sums, and sums.
  enum class Gradient { kPart, kSum };
  WireSender& gradient_sender(Gradient kind, int stage, int replica);
  WireReceiver& gradient_receiver(Gradient kind, int stage, int replica);
  /// What is remembered of the messages of such a wire; see Wires.
  std::deque<Remembered>& remembered_gradients(Gradient kind, int stage, int from_replica, int to_replica,
                                               std::size_t messages);
  /// For whom a thread waits that sums gradients; -1 for nobody. Any thread.
  void set_awaited_for_gradients(int rank) { awaited_for_gradients_ = rank; }
  /// Calls `wait`, and polls meanwhile.
  void while_polling(absl::FunctionRef<void()> wait);

  /// Returns the bytes of all ranks, in order, on rank 0; nothing on the other ranks. REQUIRES: within a call.
  /// Errors: as share().
  std::vector<std::string> gather(std::string bytes);

  /// A rank's clock, as rank 0 has measured it.
  struct Clock {
    double ahead = 0;  ///< of rank 0's, in seconds
    double error = 0;  ///< the most by which `ahead` can be wrong
  };
  /// Returns the clocks of all ranks, in order, on rank 0; nothing on the other ranks. REQUIRES: within a call.
  /// Errors: as share().
  std::vector<Clock> clocks();

  /// Reports a failure of this rank and closes the connections, unless a rank has failed before.
  void fail(const std::string& cause) noexcept;
  /// The same for a connection that failed while this rank waited for another one.
  void fail(const ConnectionError& error, int awaited, const std::string& what) noexcept;

  /// Errors: std::runtime_error if a rank has failed.
  void check() const { job_.board().check("a rank has failed"); }

  /// Throws the first failure: `error` if that is this rank's own.
  [[noreturn]] void rethrow(const std::exception_ptr& error) const;

  /// What this rank's workers do, while this exists, is what they do in the exchange.
  class Watched {
   public:
    Watched(Peers& peers, const Exchange& exchange);
    ~Watched();
    Watched(const Watched&) = delete;
    Watched& operator=(const Watched&) = delete;

   private:
    Peers& peers_;
  };

 private:
  /// What a wire between two ranks carries: what a rank tells rank 0, what rank 0 tells it, or results of calls.
  enum Subject { kWord, kVerdict, kLoss, kOutput, kOfTwins, kNumbers, kBytes, kPing, kExchanged };
  static constexpr int kSubjects = 9;
  int wires_between_workers() const { return static_cast<int>(of_workers_.size() * of_workers_.size()); }
  int wire_number(int subject, int from, int to) const;
  int gradient_wire(Gradient kind, int stage, int from_replica, int to_replica) const;
  std::vector<int> sharing(Result result) const;
  void expect(Subject subject, int from);
  void send(Subject subject, int to, Parcel parcel);
  Parcel receive(Subject subject, int from);
  /// Calls `run`, which transfers `what` from or to `other`. On an error, this rank has failed.
  void transfer(const char* what, const int& other, absl::FunctionRef<void()> run);
  /// Sends copies of a parcel's tensors, because the caller may change these meanwhile. Sets `other` to each receiver.
  void send_copies(Subject subject, const std::vector<int>& receivers, Parcel parcel, int& other);
  std::string exchange_words(const std::string& mine);
  bool has_failed_backward();
  void leave(const std::string& how);
  std::string activity();

  const std::shared_ptr<Ranks> ranks_;
  const std::vector<int> of_workers_;
  const int stages_;
  const StructureCodec codec_;
  const std::function<void()> poll_;
  Job& job_;
  int first_wire_ = 0;
  std::unique_ptr<Wires> wires_;
  Mutex mutex_;
  const Exchange* exchange_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::atomic<int> awaited_ = -1;  // the rank whose word or result is awaited, or -1
  std::atomic<int> awaited_for_gradients_ = -1;
  std::set<int> handing_out_ ABSL_GUARDED_BY(mutex_);  // graph tasks
  SameData same_data_;                                 // on rank 0
  std::string gone_;                                   // why the pipeline of a rank is gone
  std::set<int> expected_;                             // the wires whose next message has been announced
  std::atomic<std::uint64_t> calls_ = 0;
};

}  // namespace gpipe
