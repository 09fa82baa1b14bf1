#include "gpipe/ranks/team.h"

#include <limits>

#include "absl/strings/str_join.h"
#include "gpipe/base/bytes.h"
#include "gpipe/base/checks.h"
#include "gpipe/base/clock.h"
#include "gpipe/error_info.h"
#include "gpipe/tensors/torch_internals.h"

namespace gpipe {
namespace {

constexpr int kLeader = 0;
constexpr int kPings = 16;
constexpr std::chrono::seconds kRestOfWords{2};

constexpr char kNextCall[] = "its next call";
constexpr char kResult[] = "the result of a call";

}  // namespace

Team::Team(std::shared_ptr<Ranks> ranks, std::vector<int> of_workers, const Manifest& manifest, StructureCodec codec,
           const Poll& poll)
    : ranks_(std::move(ranks)),
      job_(&ranks_->job()),
      mesh_(ranks_->mesh()),
      rank_(ranks_->rank()),
      of_workers_(std::move(of_workers)),
      codec_(std::move(codec)),
      poll_(poll == nullptr ? nullptr : Poll([this, poll] {
        try {
          poll();
        } catch (const std::exception& error) {
          fail(absl::StrCat("rank ", rank_, " was stopped: ", error.what()));
          throw;
        }
      })) {
  const int count = wire_number(kSubjects, 0, 0);
  first_wire_ = job_->join(manifest, count, poll);
  wires_ = std::make_unique<Wires>(job_->connections(), first_wire_, count, ranks_->options().join_timeout(),
                                   parcel_memory(codec_));
  transfer(kNextCall, [&] {  // a rank may have ended since an earlier pipeline
    for (int r = 0; r < size(); ++r) {
      if (r == rank() || (rank() != kLeader && r != kLeader)) continue;
      awaited_ = r;
      expect(rank() == kLeader ? kWord : kDecision, r);
    }
    awaited_ = -1;
  });
  if (replicas() > 1) sums_[""] = job_->connect_sums(sums_name(), replica(), replicas(), poll_);
  job_->add(this, {[this] { return activity(); }, [this] { leave("has ended"); },
                   [this](int from) { return awaited_call(from); }});
}

Team::~Team() {
  if (job_ == nullptr) return;
  job_->remove(this);
  leave("has destroyed its pipeline");
  // Gloo waits for sums that another rank does not make.
  if (!job_->board().failure().empty()) std::thread([sums = std::move(sums_)]() mutable { sums.clear(); }).detach();
}

void Team::leave(const std::string& how) {
  if (!gone_.empty()) return;  // nobody waits for this rank
  gone_ = job_->unwinding().value_or(absl::StrCat("rank ", rank(), " ", how));
  try {
    if (rank() != kLeader) return send(kWord, kLeader, of_words(encode_leaving(gone_)));
    for (int r = 1; r < size(); ++r) send(kDecision, r, of_words(encode_leaving(gone_)));
  } catch (const std::exception&) {  // a rank has failed
  }
}

int Team::wire_number(int subject, int from, int to) const {
  const int between_workers = static_cast<int>(of_workers_.size() * of_workers_.size());
  return between_workers + (subject * size() + from) * size() + to;
}

DeviceWire& Team::connect_devices(int from, int to, c10::Device device) {
  const auto name = absl::StrCat("pipeline ", first_wire_, ", from worker ", from, " of rank ", of_workers_[from],
                                 " to worker ", to, " of rank ", of_workers_[to]);
  try {
    return job_->devices()->connect(name, /*sends=*/is_here(from), device);
  } catch (const std::exception& error) {
    fail(absl::StrCat("rank ", rank(), " cannot connect its devices: ", error.what()));
    throw;
  }
}

std::string Team::sums_name() const {
  return absl::StrCat("sums ", first_wire_, " of ", mesh_.position_of(rank_), " ");
}

c10d::Backend& Team::sums(c10::Device device) {
  if (!has_device_wires() || device.is_cpu()) return *sums_.at("");
  auto& group = sums_[device.str()];
  if (!group) group = job_->devices()->group(absl::StrCat(sums_name(), sums_.size()), replica(), replicas());
  return group ? *group : *sums_.at("");
}

void Team::await(c10d::Work& sum, bool on_cpu) {
  for (;;) {
    try {
      sum.wait(on_cpu ? kPollPeriod : kNoTimeout);
      return;
    } catch (const std::exception&) {
      if (!on_cpu || sum.isCompleted()) return fail_in_sums(message_of(std::current_exception()));
    }
    check();
    if (poll_) poll_();
  }
}

void Team::fail_in_sums(const std::string& error) {
  // The end of a rank is also seen by its connection, which tells which it was.
  for (const auto end = end_after(kRestOfWords); std::chrono::steady_clock::now() < end;) {
    check();
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  std::vector<int> others;
  for (int r = 0; r < replicas(); ++r) {
    if (r != replica()) others.push_back(counterpart(r));
  }
  fail(
      absl::StrCat("rank ", rank(), " did not get the gradients of rank ", absl::StrJoin(others, " or "), ": ", error));
  check();
}

void Team::expect(Subject subject, int from) {
  const int number = wire_number(subject, from, rank());
  if (!expected_.insert(number).second) return;
  const bool within_call = subject != kWord && subject != kDecision;
  const auto limit = within_call ? timeout() : ranks_->options().join_timeout();
  wires_->receiver(number, from, limit).expect(wires_->last_layouts(number, {}, 1), 1);
}

void Team::send(Subject subject, int to, Parcel parcel) {
  const int number = wire_number(subject, rank(), to);
  awaited_ = to;
  wires_->sender(number, to)
      .send(wires_->last_layouts(number, {}, 1).front(), calls_, to_message({std::move(parcel)}, rank(), codec_));
  awaited_ = -1;
}

Parcel Team::receive(Subject subject, int from, const Poll& poll) {
  const int number = wire_number(subject, from, rank());
  expect(subject, from);
  awaited_ = from;
  auto message = wires_->receiver(number, from, {}).receive(calls_, poll);
  awaited_ = -1;
  expected_.erase(number);
  // A large message would keep memory until the next call.
  if (wires_->last_layouts(number, {}, 1).front().is_small()) expect(subject, from);
  return std::move(to_parcels(std::move(message)).front());
}

void Team::check() const {
  if (job_ != nullptr) job_->board().check("a rank has failed");
}

void Team::rethrow(const std::exception_ptr& error) const {
  bool is_own = job_ == nullptr || job_->board().is_own();
  try {
    std::rethrow_exception(error);
  } catch (const ConnectionError&) {  // only says that another rank has failed
    is_own = false;
  } catch (...) {
  }
  if (!is_own) check();
  std::rethrow_exception(error);
}

void Team::watch(std::function<Activity()> activity) {
  MutexLock lock(mutex_);
  activity_.swap(activity);
}

std::string Team::activity() {
  MutexLock lock(mutex_);
  const auto activity = activity_ ? activity_() : Activity();
  for (const int awaited : {awaited_.load(), activity.awaits}) {
    if (awaited >= 0) return std::to_string(awaited);
  }
  return activity.runs ? "runs " + to_string(ErrorInfo{.action = *activity.runs}) : "";
}

std::string Team::receive_words(int from) {
  if (auto early = early_words_.extract(from)) return std::move(early.mapped());
  const auto poll = [&] {
    if (poll_) poll_();
    job_->check_order(this, from);
  };
  return to_words(receive(kWord, from, poll));
}

std::string Team::awaited_call(int from) try {
  if (!early_words_.contains(from)) {
    if (!wires_->receiver(wire_number(kWord, from, rank()), from, {}).has_next()) return "";
    // The rest of the message is on its way, and the job's lock is held.
    const auto stop = [end = end_after(kRestOfWords)] {
      if (std::chrono::steady_clock::now() > end) throw TimeoutError("the rest of a message did not come");
    };
    early_words_[from] = to_words(receive(kWord, from, stop));
  }
  return gpipe::awaited_call(early_words_[from]);
} catch (const ConnectionError&) {  // who notices the loss reports it
  return "";
}

// Returns the leader's decision of what all ranks said.
std::string Team::agree_on_words(const std::string& mine) {
  std::string decision;
  transfer(kNextCall, [&] {
    if (rank() != kLeader) {
      send(kWord, kLeader, of_words(mine));
      decision = to_words(receive(kDecision, kLeader));
      return;
    }
    std::vector<std::string> words{mine};
    for (int r = 1; r < size(); ++r) words.push_back(receive_words(r));
    decision = decide(words, mesh_);
    for (int r = 1; r < size(); ++r) send(kDecision, r, of_words(decision));
  });
  if (auto reason = reason_for_leaving(decision)) gone_ = *std::move(reason);
  return decision;
}

Agreement Team::agree(Proposal proposal) {
  if (job_ == nullptr) {
    ++calls_;
    return {proposal.number, false, {proposal.weight}, {static_cast<int>(proposal.key.sizes.size())}};
  }
  job_->board().check("this pipeline cannot be used any more, because a rank has failed");
  if (!gone_.empty()) throw_error("this pipeline cannot be used any more: ", gone_);
  proposal.failed_before = has_failed_backward();
  proposal.has_one_caller = job_->has_one_caller();
  const auto decision = agree_on_words(encode(proposal));
  ++calls_;
  return decode_agreement(decision, mesh_);
}

void Team::watch_backward(std::shared_ptr<const void> owner) {
  if (job_ == nullptr) return;
  const int task = torch::autograd::get_current_graph_task_id();
  {
    MutexLock lock(mutex_);
    handing_out_.insert(task);
  }
  torch::autograd::Engine::get_default_engine().queue_callback([this, owner = std::move(owner), task] {
    MutexLock lock(mutex_);
    handing_out_.erase(task);
  });
}

// A call within a backward cannot tell.
bool Team::has_failed_backward() {
  if (torch::autograd::get_current_graph_task_id() >= 0) return false;
  MutexLock lock(mutex_);
  return !std::exchange(handing_out_, {}).empty();
}

void Team::withdraw(const std::string& reason) noexcept {
  try {
    if (job_ == nullptr || !job_->board().failure().empty() || !gone_.empty()) return;
    job_->has_one_caller();
    agree_on_words(encode_refusal(reason));
    ++calls_;
  } catch (const std::exception&) {  // a rank has failed; the next call says so
  }
}

void Team::transfer(const char* what, absl::FunctionRef<void()> run) {
  try {
    run();
  } catch (const ConnectionError& error) {
    fail(error, awaited_, what);
    rethrow(std::current_exception());
  } catch (const std::exception& error) {
    fail(absl::StrCat("rank ", rank(), " failed at ", what, ": ", error.what()));
    throw;
  }
}

void Team::send_copies(Subject subject, Group group, Parcel parcel) {
  for (auto& tensor : parcel.tensors) {
    if (tensor.defined()) tensor = copy_of(tensor, c10::kCPU);
  }
  for (int other = 0; other < size(); ++other) {
    const bool is_counterpart = mesh_.position_of(other) == mesh_.position_of(rank());
    const bool is_in_replica = replica_of(other) == replica();
    const bool is_in_group = group == Group::kCounterparts ? is_counterpart : is_in_replica || group == Group::kAll;
    if (is_in_group && other != rank()) send(subject, other, parcel);
  }
}

Parcel Team::broadcast(Group group, int owner, Parcel parcel) {
  if (size() == 1) return parcel;
  const auto subject = static_cast<Subject>(kReplica + static_cast<int>(group));
  transfer(kResult, [&] {
    if (rank() == owner) return send_copies(subject, group, parcel);
    parcel = receive(subject, owner);
  });
  return parcel;
}

std::vector<Parcel> Team::all_gather(Parcel parcel) {
  std::vector<Parcel> all(replicas());
  transfer(kResult, [&] {
    send_copies(kGathered, Group::kCounterparts, parcel);
    for (int r = 0; r < replicas(); ++r) {
      if (r != replica()) all[r] = receive(kGathered, counterpart(r));
    }
  });
  all[replica()] = std::move(parcel);
  return all;
}

std::vector<std::string> Team::gather(std::string bytes) {
  std::vector<std::string> all;
  transfer(kResult, [&] {
    if (rank() != kLeader) return send(kBytes, kLeader, of_bytes(std::move(bytes)));
    all.push_back(std::move(bytes));
    for (int r = 1; r < size(); ++r) all.push_back(to_bytes(receive(kBytes, r)));
  });
  return all;
}

// The other rank's clock was read between the two readings of this one. The ping that took least tells most.
std::vector<Team::Clock> Team::clocks() {
  std::vector<Clock> all;
  transfer(kResult, [&] {
    if (rank() != kLeader) {
      for (int i = 0; i < kPings; ++i) {
        receive(kPing, kLeader);
        send(kPing, kLeader, of_bytes(to_bytes(std::vector{now()})));
      }
      return;
    }
    all.emplace_back();
    for (int other = 1; other < size(); ++other) {
      auto& best = all.emplace_back(Clock{0, std::numeric_limits<double>::infinity()});
      for (int i = 0; i < kPings; ++i) {
        const double start = now();
        send(kPing, other, of_bytes(""));
        const double there = to_items<double>(to_bytes(receive(kPing, other))).at(0);
        const double end = now();
        const Clock clock{there - (start + end) / 2, (end - start) / 2};
        if (clock.error < best.error) best = clock;
      }
    }
  });
  return all;
}

void Team::fail(const std::string& cause) noexcept {
  if (job_ != nullptr) job_->board().report(cause);
}

void Team::fail(const ConnectionError& error, int awaited, const std::string& what) noexcept {
  if (dynamic_cast<const TimeoutError*>(&error) != nullptr) {
    job_->board().report_wait(awaited, what);
  } else {
    job_->board().report_loss(awaited);
  }
}

}  // namespace gpipe
