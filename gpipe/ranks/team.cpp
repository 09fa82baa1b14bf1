#include "gpipe/ranks/team.h"

#include <limits>

#include "absl/strings/str_join.h"
#include "gpipe/base/bytes.h"
#include "gpipe/base/checks.h"
#include "gpipe/base/clock.h"
#include "gpipe/error_info.h"
#include "gpipe/program.h"
#include "gpipe/tensors/torch_internals.h"

namespace gpipe {
namespace {

constexpr int kLeader = 0;
constexpr int kPings = 16;
constexpr std::chrono::seconds kUntilNoticed{2};  // until a connection tells that a rank has ended

constexpr char kNextCall[] = "its next call";
constexpr char kResultOfCall[] = "the result of a call";

std::string to_text(const Manifest& manifest) {
  ByteWriter text;
  for (const auto& [name, value] : manifest) text.add(name, value);
  return text.take();
}

// The first difference between rank 0's manifest and another rank's; empty if there is none.
std::string difference(const std::vector<std::string>& texts) {
  std::vector<std::map<std::string, std::string>> manifests;
  std::vector<std::string> names;  // in order
  for (std::size_t r = 0; r < texts.size(); ++r) {
    auto& manifest = manifests.emplace_back();
    for (ByteReader words(texts[r]); !words.done();) {
      names.push_back(words.get<std::string>());
      manifest[names.back()] = words.get<std::string>();
    }
    for (const auto& name : names) {
      std::string of[2];
      for (const auto k : {std::size_t{0}, r}) {
        of[k != 0] = manifests[k].contains(name) ? manifests[k][name] : "nothing";
      }
      if (r == 0 || of[0] == of[1]) continue;
      return absl::StrCat("the ranks differ in ", name, ": rank 0 has ", of[0], ", but rank ", r, " has ", of[1]);
    }
  }
  return "";
}

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
      })),
      pipeline_(job_->join(poll)) {
  std::string different;
  transfer("its pipeline", [&] { different = decide_on(to_text(manifest), difference); });
  if (!different.empty()) {
    fail(different);
    throw_error("the ranks cannot make the pipeline: ", different);
  }
  if (replicas() > 1) sums_[""] = job_->connect_sums(sums_name(), replica(), replicas(), poll_);
  job_->add(pipeline_, [this] { leave("has ended"); });
}

Team::~Team() {
  if (job_ == nullptr) return;
  job_->remove(pipeline_);
  leave("has destroyed its pipeline");
  // Gloo waits for sums that another rank does not make.
  if (!job_->failure().empty()) std::thread([sums = std::move(sums_)]() mutable { sums.clear(); }).detach();
  job_->connections().end(pipeline_);
}

void Team::leave(const std::string& how) {
  if (!gone_.empty()) return;  // nobody waits for this rank
  gone_ = job_->unwinding().value_or(absl::StrCat("rank ", rank(), " ", how));
  try {
    if (rank() != kLeader) return send(kCall, kLeader, {.text = encode_leaving(gone_)});
    for (int r = 1; r < size(); ++r) send(kDecision, r, {.text = encode_leaving(gone_)});
  } catch (const std::exception&) {  // a rank has failed
  }
}

DeviceWire& Team::connect_devices(int from, int to, c10::Device device) {
  const auto name = absl::StrCat("pipeline ", pipeline_, ", from worker ", from, " of rank ", of_workers_[from],
                                 " to worker ", to, " of rank ", of_workers_[to]);
  try {
    return job_->devices()->connect(name, /*sends=*/is_here(from), device);
  } catch (const std::exception& error) {
    fail(absl::StrCat("rank ", rank(), " cannot connect its devices: ", error.what()));
    throw;
  }
}

std::string Team::sums_name() const { return absl::StrCat("sums ", pipeline_, " of ", mesh_.position_of(rank_), " "); }

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
      if (!on_cpu || sum.exception()) return fail_in_sums(message_of(std::current_exception()));
    }
    check();
    if (poll_) poll_();
  }
}

void Team::fail_in_sums(const std::string& error) {
  for (const auto end = end_after(kUntilNoticed); std::chrono::steady_clock::now() < end;) {
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

void Team::send(int from, int to, const Action& action, Outgoing message) {
  const auto number = [](int of) { return static_cast<std::uint64_t>(of); };
  message.label = calls_ << 45 | number(action.micro_batch) << 23 | number(action.stage) << 1 |
                  number(action.kind == Kind::F);  // see kMostCells
  job_->connections().send(of_workers_[to], topic(topic_of_workers(from, to)), std::move(message));
}

std::pair<Action, Received> Team::receive_next(int from, int to) {
  auto message = job_->connections().receive(of_workers_[from], topic(topic_of_workers(from, to)), timeout(), nullptr);
  const auto label = message.label;
  constexpr std::uint64_t kLast = kMostCells - 1;
  if (label >> 45 != (calls_ << 45) >> 45) {
    throw_error("rank ", of_workers_[from], " sent a message of another call; the ranks must run the same program");
  }
  const Action action{(label & 1) != 0 ? Kind::F : Kind::B, static_cast<int>(label >> 1 & kLast),
                      static_cast<int>(label >> 23 & kLast)};
  return {action, std::move(message)};
}

void Team::send(Subject subject, int to, Outgoing message) {
  job_->connections().send(to, topic(subject), std::move(message));
}

Received Team::receive(Subject subject, int from) {
  const bool within_call = subject != kCall && subject != kDecision;
  const auto poll = [&] {
    if (poll_) poll_();
    if (subject == kCall) job_->check_order(pipeline_, from);
  };
  return job_->connections().receive(from, topic(subject), within_call ? timeout() : ranks_->options().join_timeout(),
                                     poll);
}

void Team::check() const {
  if (job_ != nullptr) job_->check();
}

void Team::rethrow(const std::exception_ptr& error) const {
  bool is_own = job_ == nullptr || job_->is_own();
  try {
    std::rethrow_exception(error);
  } catch (const ConnectionError&) {  // only says that another rank has failed
    is_own = false;
  } catch (...) {
  }
  if (!is_own) check();
  std::rethrow_exception(error);
}

// Rank 0 decides on what all ranks say.
std::string Team::decide_on(const std::string& mine,
                            absl::FunctionRef<std::string(const std::vector<std::string>&)> decide) {
  if (rank() != kLeader) {
    send(kCall, kLeader, {.text = mine});
    return receive(kDecision, kLeader).text;
  }
  std::vector<std::string> all{mine};
  for (int r = 1; r < size(); ++r) all.push_back(receive(kCall, r).text);
  auto decision = decide(all);
  for (int r = 1; r < size(); ++r) send(kDecision, r, {.text = decision});
  return decision;
}

std::string Team::decide_on_call(const std::string& mine) {
  std::string decision;
  transfer(kNextCall,
           [&] { decision = decide_on(mine, [&](const auto& messages) { return decide(messages, mesh_); }); });
  if (auto reason = reason_for_leaving(decision)) gone_ = *std::move(reason);
  ++calls_;
  return decision;
}

Agreement Team::agree(Proposal proposal) {
  if (job_ == nullptr) {
    ++calls_;
    return {proposal.number, false, {proposal.weight}, {static_cast<int>(proposal.key.sizes.size())}};
  }
  job_->check("this pipeline cannot be used any more, because a rank has failed");
  if (!gone_.empty()) throw_error("this pipeline cannot be used any more: ", gone_);
  proposal.failed_before = has_failed_backward();
  proposal.has_one_caller = job_->has_one_caller();
  return decode_agreement(decide_on_call(encode(proposal)), mesh_);
}

void Team::withdraw(const std::string& reason) noexcept {
  try {
    if (job_ == nullptr || !job_->failure().empty() || !gone_.empty()) return;
    job_->has_one_caller();
    decide_on_call(encode_refusal(reason));
  } catch (const std::exception&) {  // a rank has failed; the next call says so
  }
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

void Team::transfer(const char* what, absl::FunctionRef<void()> run) {
  try {
    run();
  } catch (const std::exception&) {
    fail(std::current_exception(), absl::StrCat("at ", what));
    rethrow(std::current_exception());
  }
}

void Team::send_copies(Group group, Parcel parcel) {
  for (auto& tensor : parcel.tensors) {
    if (tensor.defined()) tensor = copy_of(tensor, c10::kCPU);
  }
  for (int other = 0; other < size(); ++other) {
    const bool is_counterpart = mesh_.position_of(other) == mesh_.position_of(rank());
    const bool is_in_replica = replica_of(other) == replica();
    const bool is_in_group = group == Group::kCounterparts ? is_counterpart : is_in_replica || group == Group::kAll;
    if (is_in_group && other != rank()) send(kResult, other, to_message({parcel}, rank(), codec_));
  }
}

Parcel Team::receive_parcel(int from) { return std::move(to_parcels(receive(kResult, from), codec_).at(0)); }

Parcel Team::broadcast(Group group, int owner, Parcel parcel) {
  if (size() == 1) return parcel;
  transfer(kResultOfCall, [&] {
    if (rank() == owner) return send_copies(group, parcel);
    parcel = receive_parcel(owner);
  });
  return parcel;
}

std::vector<Parcel> Team::all_gather(Parcel parcel) {
  std::vector<Parcel> all(replicas());
  transfer(kResultOfCall, [&] {
    send_copies(Group::kCounterparts, parcel);
    for (int r = 0; r < replicas(); ++r) {
      if (r != replica()) all[r] = receive_parcel(counterpart(r));
    }
  });
  all[replica()] = std::move(parcel);
  return all;
}

std::vector<std::string> Team::gather(std::string bytes) {
  std::vector<std::string> all;
  transfer(kResultOfCall, [&] {
    if (rank() != kLeader) {
      return send(kResult, kLeader, to_message({parcel_of(std::move(bytes))}, rank(), codec_));
    }
    all.push_back(std::move(bytes));
    for (int r = 1; r < size(); ++r) all.push_back(bytes_of(receive_parcel(r)));
  });
  return all;
}

// The other rank's clock was read between the two readings of this one. The ping that took least tells most.
std::vector<Team::Clock> Team::clocks() {
  std::vector<Clock> all;
  transfer(kResultOfCall, [&] {
    if (rank() != kLeader) {
      for (int i = 0; i < kPings; ++i) {
        receive(kResult, kLeader);
        send(kResult, kLeader, {.text = to_bytes(std::vector{now()})});
      }
      return;
    }
    all.emplace_back();
    for (int other = 1; other < size(); ++other) {
      auto& best = all.emplace_back(Clock{0, std::numeric_limits<double>::infinity()});
      for (int i = 0; i < kPings; ++i) {
        const double start = now();
        send(kResult, other, {.text = ""});
        const double there = to_items<double>(receive(kResult, other).text).at(0);
        const double end = now();
        const Clock clock{there - (start + end) / 2, (end - start) / 2};
        if (clock.error < best.error) best = clock;
      }
    }
  });
  return all;
}

void Team::fail(const std::string& cause) noexcept {
  if (job_ != nullptr) job_->report(cause);
}

void Team::fail(const std::exception_ptr& error, const std::string& where) noexcept {
  try {
    std::rethrow_exception(error);
  } catch (const TimeoutError& late) {
    fail(absl::StrCat(late.what(), ": rank ", rank(), " waited for it ", where));
  } catch (const ConnectionError&) {  // a rank has failed
  } catch (...) {
    fail(absl::StrCat("rank ", rank(), " failed ", where, ": ", message_of(error)));
  }
}

}  // namespace gpipe
