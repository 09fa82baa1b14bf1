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

Team::Team(std::shared_ptr<Ranks> ranks, std::vector<int> of_workers, bool has_device_wires, const Manifest& manifest,
           StructureCodec codec, const Poll& poll)
    : ranks_(std::move(ranks)),
      job_(&ranks_->job()),
      mesh_(ranks_->mesh()),
      rank_(ranks_->rank()),
      of_workers_(std::move(of_workers)),
      has_device_wires_(has_device_wires),
      codec_(std::move(codec)),
      poll_(job_->reporting(poll)),
      pipeline_(job_->join()) {
  std::string different;
  transfer("its pipeline", [&] {
    const auto all = collect(kCall, to_text(manifest));
    different = distribute(kDecision, difference(all));
  });
  if (!different.empty()) {
    fail(different);
    throw_error("the ranks cannot make the pipeline: ", different);
  }
  if (replicas() > 1) sums_[""] = job_->connect_sums(sums_name(), replica(), replicas(), poll_);
}

Team::~Team() {
  if (job_ == nullptr) return;
  if (gone_.empty()) leave();  // else no rank waits for this one
  // Gloo waits for sums that another rank does not make.
  if (has_failed()) std::thread([sums = std::move(sums_)]() mutable { sums.clear(); }).detach();
  job_->connections().end(pipeline_);
}

void Team::leave() noexcept try {
  const auto message =
      encode_leaving(job_->unwinding().value_or(absl::StrCat("rank ", rank(), " has destroyed its pipeline")));
  if (rank() != kLeader) return send(kCall, kLeader, {.text = message});
  for (int r = 1; r < size(); ++r) send(kDecision, r, {.text = message});
} catch (const std::exception&) {  // a rank has failed
}

DeviceLink Team::connect_devices(int from, int to, c10::Device device, const std::optional<c10::Stream>& stream) {
  const auto name = absl::StrCat("pipeline ", pipeline_, ", from worker ", from, " of rank ", of_workers_[from],
                                 " to worker ", to, " of rank ", of_workers_[to]);
  try {
    return {job_->devices()->join(name, is_here(from) ? DeviceLink::kSender : DeviceLink::kReceiver, /*size=*/2),
            device, stream};
  } catch (const std::exception& error) {
    fail(absl::StrCat("rank ", rank(), " cannot connect its devices: ", error.what()));
    throw;
  }
}

std::string Team::sums_name() const { return absl::StrCat("sums ", pipeline_, " of ", mesh_.position_of(rank_), " "); }

c10d::Backend& Team::sums(c10::Device device) {
  if (!has_device_wires() || device.is_cpu()) return *sums_.at("");
  auto& group = sums_[device.str()];
  if (!group) group = job_->devices()->join(absl::StrCat(sums_name(), sums_.size()), replica(), replicas());
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
  message.label = number(action.micro_batch) << 32 | number(action.stage) << 1 | number(action.kind == Kind::F);
  job_->connections().send(of_workers_[to], topic(topic_of_workers(from, to)), std::move(message));
}

std::pair<Action, Received> Team::receive_next(int from, int to) {
  auto message = job_->connections().receive(of_workers_[from], topic(topic_of_workers(from, to)), timeout(), nullptr);
  const auto label = message.label;
  const Action action{(label & 1) != 0 ? Kind::F : Kind::B, static_cast<int>((label & 0xffffffff) >> 1),
                      static_cast<int>(label >> 32)};
  return {action, std::move(message)};
}

void Team::send(Subject subject, int to, Outgoing message) {
  job_->connections().send(to, topic(subject), std::move(message));
}

Received Team::receive(Subject subject, int from) {
  const bool begins_call = subject == kCall || subject == kDecision;
  const auto limit = begins_call ? ranks_->options().join_timeout() : timeout();
  return job_->connections().receive(from, topic(subject), limit, [&] {
    if (poll_) poll_();
    if (begins_call) job_->check_stays(from, topic(subject));
  });
}

void Team::check() const {
  if (job_ != nullptr) job_->connections().check();
}

void Team::rethrow(const std::exception_ptr& error) const {
  bool is_own = job_ == nullptr || job_->connections().is_own();
  try {
    std::rethrow_exception(error);
  } catch (const ConnectionError&) {  // only says that another rank has failed
    is_own = false;
  } catch (...) {
  }
  if (!is_own) check();
  std::rethrow_exception(error);
}

std::vector<std::string> Team::collect(Subject subject, std::string mine) {
  std::vector<std::string> all;
  if (rank() != kLeader) return send(subject, kLeader, {.text = std::move(mine)}), all;
  all.push_back(std::move(mine));
  for (int r = 1; r < size(); ++r) all.push_back(receive(subject, r).text);
  return all;
}

std::string Team::distribute(Subject subject, std::string text) {
  if (rank() != kLeader) return receive(subject, kLeader).text;
  for (int r = 1; r < size(); ++r) send(subject, r, {.text = text});
  return text;
}

std::string Team::decide_on_call(const std::string& mine) {
  std::string decision;
  transfer("its next call", [&] {
    const auto all = collect(kCall, mine);
    decision = distribute(kDecision, all.empty() ? "" : decide(all, mesh_));
  });
  if (auto reason = reason_for_leaving(decision)) gone_ = *std::move(reason);
  ++calls_;
  return decision;
}

Agreement Team::agree(Proposal proposal) {
  if (job_ == nullptr) {
    ++calls_;
    return {proposal.number, false, {proposal.weight}, {static_cast<int>(proposal.key.sizes.size())}};
  }
  job_->connections().check("this pipeline cannot be used any more, because a rank has failed");
  if (job_->is_finished()) throw_error("this pipeline cannot be used any more: this rank has left the job");
  if (!gone_.empty()) throw_error("this pipeline cannot be used any more: ", gone_);
  proposal.failed_before = has_failed_backward();
  return decode_agreement(decide_on_call(encode(proposal)));
}

void Team::withdraw(const std::string& reason) noexcept {
  try {
    if (job_ == nullptr || !job_->connections().failure().empty() || !gone_.empty()) return;
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
    if (tensor.defined() && !tensor.is_meta()) tensor = copy_of(tensor, c10::kCPU);
  }
  for (int other = 0; other < size(); ++other) {
    const bool is_counterpart = mesh_.position_of(other) == mesh_.position_of(rank());
    const bool is_in_replica = replica_of(other) == replica();
    const bool is_in_group = group == Group::kCounterparts ? is_counterpart : is_in_replica;
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
  transfer(kResultOfCall, [&] { all = collect(kResult, std::move(bytes)); });
  return all;
}

std::string Team::share(std::string bytes) {
  transfer(kResultOfCall, [&] { bytes = distribute(kResult, std::move(bytes)); });
  return bytes;
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
  if (job_ != nullptr) job_->connections().fail(cause);
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
