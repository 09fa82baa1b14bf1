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
#include "gpipe/base/mutex.h"
#include "gpipe/ranks.h"
#include "gpipe/ranks/job.h"
#include "gpipe/ranks/meeting.h"
#include "gpipe/ranks/team.h"
#include "gpipe/tensors/parcel.h"

namespace gpipe {

/// The ranks of a job, as one pipeline sees them: the wires to them, the agreement on each call, and the first failure.
class RankTeam : public Team {
 public:
  /// Joins the other ranks, which must give the same manifest. `of_workers` has the rank of each worker of this
  /// replica. Calls `poll`, unless that is null, every 50 ms while the caller waits for other ranks; an exception from
  /// it is a failure.
  /// Errors: std::runtime_error for a rank that does not come or has another manifest.
  RankTeam(std::shared_ptr<Ranks> ranks, std::vector<int> of_workers, int stages, const Manifest& manifest,
           StructureCodec codec, std::function<void()> poll);
  /// Tells the other ranks. Calls that they begin later throw.
  ~RankTeam() override;

  int size() const override { return ranks_->size(); }
  int rank() const override { return ranks_->rank(); }
  int replica_of(int rank) const override { return ranks_->mesh().replica_of(rank); }
  int replicas() const override { return ranks_->replicas(); }
  const std::vector<int>& of_workers() const override { return of_workers_; }
  int counterpart(int replica) const override {
    return ranks_->mesh().rank_at(ranks_->mesh().position_of(rank()), replica);
  }

  Agreement agree(Proposal proposal) override;
  void withdraw(const std::string& reason) noexcept override;
  std::uint64_t calls() const override { return calls_; }

  Parcel broadcast(Group group, int owner, Parcel parcel) override;
  std::vector<Parcel> all_gather(Parcel parcel) override;
  std::vector<std::string> gather(std::string bytes) override;
  std::unique_ptr<GradientReduction> begin_sum(std::vector<std::vector<at::Tensor>> parameters) override;
  std::vector<Clock> clocks() override;

  Wires* wires() override { return wires_.get(); }
  const StructureCodec& codec() const override { return codec_; }
  std::chrono::milliseconds timeout() const override { return ranks_->options().timeout(); }
  bool has_device_wires() const override { return job_.devices() != nullptr; }
  DeviceWire& connect_devices(int from, int to, c10::Device device) override;

  void watch(std::function<Activity()> activity) override;
  void watch_backward(std::shared_ptr<const void> owner) override;

  void fail(const std::string& cause) noexcept override;
  void fail(const ConnectionError& error, int awaited, const std::string& what) noexcept override;
  void check() const override { job_.board().check("a rank has failed"); }
  [[noreturn]] void rethrow(const std::exception_ptr& error) const override;

  // For GradientReduction.

  /// The wires that carry the gradients of a stage to another replica and back: parts of sums, or sums.
  enum class Gradient { kPart, kSum };
  struct GradientWires {
    int replica;
    WireSender* sender;
    std::deque<LastLayout>* layouts;  // of the messages that it sends
    WireReceiver* receiver;           // expects as many messages
  };
  GradientWires gradient_wires(Gradient kind, int stage, int replica, std::size_t messages);
  /// Calls `wait`, and polls meanwhile.
  void while_polling(absl::FunctionRef<void()> wait);
  /// Sets the rank that the thread which sums gradients waits for; -1: none. Any thread.
  void set_awaited_for_gradients(int rank) { awaited_for_gradients_ = rank; }

 private:
  /// What a wire between two ranks carries: what a rank tells rank 0, what rank 0 tells it, results by their Group, and
  /// more.
  enum Subject { kWord, kDecision, kReplica, kReplicaOutputs, kCounterparts, kAll, kBytes, kPing, kGathered };
  static constexpr int kSubjects = 9;
  int wire_number(int subject, int from, int to) const;
  std::vector<int> ranks_of(Group group) const;
  void expect(Subject subject, int from);
  void send(Subject subject, int to, Parcel parcel);
  Parcel receive(Subject subject, int from);
  /// Calls `run`, which transfers `what` from or to `other`. On an error, this rank has failed.
  void transfer(const char* what, const int& other, absl::FunctionRef<void()> run);
  /// Sends copies of a parcel's tensors, because the caller may change these meanwhile. Sets `other` to each receiver.
  void send_copies(Subject subject, const std::vector<int>& receivers, Parcel parcel, int& other);
  std::string agree_on_words(const std::string& mine);
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
  std::function<Activity()> activity_ ABSL_GUARDED_BY(mutex_);
  std::atomic<int> awaited_ = -1;  // the rank whose word or result is awaited, or -1
  std::atomic<int> awaited_for_gradients_ = -1;
  std::set<int> handing_out_ ABSL_GUARDED_BY(mutex_);  // graph tasks
  SameData same_data_;                                 // on rank 0
  std::string gone_;                                   // why the pipeline of a rank is gone
  std::set<int> expected_;                             // the wires whose next message has been announced
  std::atomic<std::uint64_t> calls_ = 0;
};

}  // namespace gpipe
