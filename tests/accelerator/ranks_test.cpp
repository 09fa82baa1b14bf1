// Pipelines over ranks, on devices that check the order of streams. Threads of this process are the ranks. Tensors pass
// through the host, or go by wires between the devices.

#include <condition_variable>
#include <deque>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "absl/cleanup/cleanup.h"
#include "gpipe/ranks.h"
#include "gpipe/ranks/connections.h"
#include "gpipe/ranks/device_wire.h"
#include "gpipe/schedules.h"
#include "tests/accelerator/device.h"
#include "tests/gpipe/instruments.h"
#include "tests/gpipe/layers.h"
#include "tests/schedule/programs.h"

namespace gpipe {
namespace {

using accelerator::Access;
using accelerator::alias_on_host;
using accelerator::device;
using accelerator::held;
using accelerator::KernelsOnly;
using accelerator::stream_order;

constexpr std::chrono::seconds kPatience{60};

// A communicator between the devices of ranks, in place of NCCL's.

struct Sent {
  std::vector<Tensor> values;  // on the host
  accelerator::Event event;
  std::int64_t number;  // of the transfer
};

bool alike(const Tensor& one, const Tensor& other) {
  return one.dtype() == other.dtype() && one.sizes() == other.sizes() && one.strides() == other.strides();
}

/// A sum over the ranks of a group.
struct Sum {
  std::map<int, Tensor> values;  // on the host, by rank
  std::int64_t number = 0;       // of the transfer
};

/// What the communicators of a job share.
struct Wires {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::string, std::deque<Sent>> sent;     // by communicator
  std::map<std::pair<std::string, int>, Sum> sums;  // by communicator, in turn
  std::int64_t transfers = 0;
  std::set<int> aborted;  // the ranks that have aborted their communicators
};

/// A sum that has begun: streams can wait for it.
struct Summing : c10d::Work {
  explicit Summing(c10::Device device) : device(device) {}
  bool wait(std::chrono::milliseconds /*limit*/) override {
    stream_order().wait(accelerator::current_stream(device), event);
    return true;
  }
  const c10::Device device;
  accelerator::Event event;
};

/// One rank's end of a communicator, whose operations run on a stream of its own. What is wrong is a violation of
/// stream_order(): tensors that differ from those that were sent, and a receive that is enqueued before its send. To
/// abort lets held devices go on.
class Wire : public c10d::Backend {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;
  Wire(std::shared_ptr<Wires> wires, std::string name, int rank, int size, int job_rank)
      : Backend(rank, size), wires_(std::move(wires)), name_(std::move(name)), job_rank_(job_rank) {}

  const std::string getBackendName() const override { return "virtual"; }
  void eagerConnectSingleDevice(at::Device /*device*/) override {}
  void startCoalescing() override { tensors_.clear(); }
  Work send(std::vector<Tensor>& tensors, int /*to*/, int /*tag*/) override { return add(tensors); }
  Work recv(std::vector<Tensor>& tensors, int /*from*/, int /*tag*/) override { return add(tensors); }
  Work endCoalescing() override {
    if (std::exchange(is_connected_, true)) transfer();  // the first transfer only connects
    return {};
  }
  Work allreduce(std::vector<Tensor>& tensors, const c10d::AllreduceOptions& /*options*/) override {
    const auto& tensor = tensors.front();
    std::unique_lock lock(wires_->mutex);
    auto& sum = wires_->sums[{name_, sums_++}];
    if (sum.values.empty()) sum.number = ++wires_->transfers;
    launch("all-reduce", tensors, /*writes=*/true, sum.number, getSize());
    const KernelsOnly kernels;
    sum.values[getRank()] = alias_on_host(tensor).clone();
    wires_->changed.notify_all();
    const auto have_come = [&] { return !wires_->aborted.empty() || std::ssize(sum.values) == getSize(); };
    TORCH_CHECK(wires_->changed.wait_for(lock, kPatience, have_come) && wires_->aborted.empty(), "no sum of ", name_);
    auto values = sum.values.begin()->second.clone();
    for (auto it = std::next(sum.values.begin()); it != sum.values.end(); ++it) values += it->second;
    alias_on_host(tensor).copy_(values);
    auto summing = c10::make_intrusive<Summing>(tensor.device());
    stream_order().record(summing->event, stream(tensor.device()));
    return summing;
  }
  void abort() override {
    std::lock_guard lock(wires_->mutex);
    wires_->aborted.insert(job_rank_);
    held() = false;
    wires_->changed.notify_all();
  }

 private:
  Work add(const std::vector<Tensor>& tensors) {
    tensors_.insert(tensors_.end(), tensors.begin(), tensors.end());
    return {};
  }

  int stream(c10::Device device) const {
    return stream_order().index(device.index(), std::hash<std::string>()(name_) >> 1);
  }

  /// As on CUDA: after the work of the current stream.
  void launch(std::string_view operation, const std::vector<Tensor>& tensors, bool writes, std::int64_t number,
              int ends) {
    const auto device = tensors.front().device();
    std::vector<Access> accesses;
    accelerator::Work work{.transfer = number, .ends = ends};
    for (const auto& tensor : tensors) {
      if (tensor.device() != device) stream_order().report("a group of " + device.str() + " gets a tensor elsewhere");
      accelerator::add_access(tensor, writes, accesses);
      work.bytes += static_cast<double>(tensor.nbytes());
    }
    stream_order().order(accelerator::current_stream(device), stream(device));
    stream_order().launch(stream(device), operation, accesses, work);
  }

  void transfer() {
    std::lock_guard lock(wires_->mutex);
    TORCH_CHECK(wires_->aborted.empty(), "the wires were aborted");
    auto& queue = wires_->sent[name_];
    const KernelsOnly kernels;
    const auto device = tensors_.front().device();
    const absl::Cleanup join = [&] { stream_order().order(stream(device), accelerator::current_stream(device)); };
    if (getRank() == DeviceLink::kSender) {
      auto& sent = queue.emplace_back();
      for (const auto& tensor : tensors_) sent.values.push_back(alias_on_host(tensor).clone());
      sent.number = ++wires_->transfers;
      launch("send", tensors_, /*writes=*/false, sent.number, /*ends=*/2);
      stream_order().record(sent.event, stream(device));
      return;
    }
    if (queue.empty()) return stream_order().report("a receive is enqueued before its send, on the wire " + name_);
    const auto sent = std::move(queue.front());
    queue.pop_front();
    launch("receive", tensors_, /*writes=*/true, sent.number, /*ends=*/2);
    stream_order().comes_after(stream(device), sent.event);
    if (!std::ranges::equal(sent.values, tensors_, alike)) {
      return stream_order().report("the tensors that are received differ from those sent, on the wire " + name_);
    }
    for (std::size_t i = 0; i < tensors_.size(); ++i) alias_on_host(tensors_[i]).copy_(sent.values[i]);
  }

  const std::shared_ptr<Wires> wires_;
  const std::string name_;
  const int job_rank_;
  bool is_connected_ = false;
  int sums_ = 0;
  std::vector<Tensor> tensors_;
};

/// Makes the communicators of one rank.
JoinDevices join_by(const std::shared_ptr<Wires>& wires, int job_rank) {
  return [wires, job_rank](const std::string& name, int rank, int size) {
    return DeviceGroup(c10::make_intrusive<Wire>(wires, name, rank, size, job_rank));
  };
}

RanksOptions patient() { return RanksOptions().interface("lo").timeout(kPatience).join_timeout(kPatience); }

/// Calls `run` for each rank of a job on a thread of its own, with wires if there are any. Returns the errors'
/// texts, by rank; empty if there was none. The rank `without_wires` gets none.
std::vector<std::string> run_ranks(int size, const RanksOptions& options, const std::shared_ptr<Wires>& wires,
                                   const std::function<void(const std::shared_ptr<Ranks>&)>& run,
                                   int without_wires = -1) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> errors(size);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const bool has_wires = wires && rank != without_wires;
        run(std::make_shared<Ranks>(store, rank, size, options, has_wires ? join_by(wires, rank) : JoinDevices()));
      } catch (const std::exception& error) {
        errors[rank] = error.what();
      }
    });
  }
  threads.clear();
  return errors;
}

// A training.

using Results = std::vector<Tensor>;

/// A model and a mini-batch, the same each time. The input itself goes to another stage.
struct Training {
  Training() {
    static std::mutex mutex;  // the ranks are threads that share the default generator
    const std::lock_guard lock(mutex);
    torch::manual_seed(3);
    const auto with_gaps = [](Tensor x) { return torch::cat({x, x}, 1).narrow(1, 0, 6); };
    model = Sequential(Stash("skip"), Linear(6, 6), torch::nn::ReLU(), function_layer(with_gaps), torch::nn::Tanh(),
                       Linear(6, 6), Pop("skip"), Linear(6, 5));
    input = torch::randn({8, 6});
    target = torch::randn({8, 5});
  }

  Sequential model;
  Tensor input;
  Tensor target;
};

/// Steps, a forward, a backward and an evaluation on two workers, with skips. After some calls, the caller changes the
/// input in place and the optimizer the parameters. Returns the losses, the output and the gradients. `ranks` may be null.
Results train(const std::string& schedule, Checkpoint checkpoint, const std::vector<torch::Device>& devices,
              const std::shared_ptr<Ranks>& ranks) {
  auto [model, input, target] = Training();
  input = input.to(devices.front());
  const auto options = GPipeOptions().devices(devices).chunks(4).intraop_threads(1).ranks(ranks);
  GPipe pipe(model, Balance{2, 2, 2, 2},
             GPipeOptions(options).checkpoint(checkpoint).schedule(schedule).stages_per_worker(2));
  torch::optim::SGD sgd(pipe->parameters(), 0.01);
  Results results;
  for (int i = 0; i < 2; ++i) {
    results.push_back(pipe->step(input, target, kMse).loss.cpu());
    input.mul_(2);
    sgd.step();
  }
  const auto output = pipe->forward(input);
  output.square().mean().backward();
  results.push_back(output.detach().cpu());
  for (const auto& parameter : pipe->parameters()) results.push_back(parameter.grad().cpu());
  // Of two stages, nothing comes back to the first one that tells that the input was sent.
  GPipe of_two(Training().model, Balance{4, 4}, options);
  const torch::NoGradGuard no_grad;
  of_two->forward(input);
  input.mul_(2);
  return results;
}

class RanksOnDevices : public ::testing::TestWithParam<std::tuple<std::string, Checkpoint, bool>> {};

TEST_P(RanksOnDevices, WorkIsOrdered) {
  const auto& schedule = std::get<0>(GetParam());
  const auto checkpoint = std::get<1>(GetParam());
  const auto expected = train(schedule, checkpoint, {torch::kCPU, torch::kCPU}, nullptr);
  stream_order().take_violations();
  std::vector<Results> results(2);
  const auto wires = std::get<2>(GetParam()) ? std::make_shared<Wires>() : nullptr;
  const auto errors = run_ranks(2, patient().share_outputs(true), wires, [&](const auto& ranks) {
    results[ranks->rank()] = train(schedule, checkpoint, {device(ranks->rank())}, ranks);
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
  EXPECT_THAT(stream_order().take_violations(), IsEmpty());
  // Losses and output, on all ranks; then the gradients of stages 0 and 2 on rank 0, of 3 on rank 1. Stage 1 has none.
  const std::vector<std::vector<int>> of_all = {{0, 1, 2, 3, 4, 5, 6}, {0, 1, 2, 7, 8}};
  for (std::size_t rank = 0; rank < results.size(); ++rank) {
    Results wanted;
    for (const int i : of_all[rank]) wanted.push_back(expected[i]);
    expect_close(results[rank], wanted, 1e-5, 1e-6);
  }
}

INSTANTIATE_TEST_SUITE_P(Schedules, RanksOnDevices,
                         ::testing::Combine(::testing::Values("gpipe", "interleaved_1f1b", "interleaved_zb"),
                                            ::testing::Values(Checkpoint::kNever, Checkpoint::kAlways),
                                            ::testing::Bool()),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" + to_string(std::get<1>(info.param)) +
                                  (std::get<2>(info.param) ? "_wires" : "");
                         });

Sequential two_layers(const std::shared_ptr<FaultPlan>& faults = std::make_shared<FaultPlan>()) {
  Sequential model(Linear(4, 4), Linear(4, 4), Faulty(faults));
  const torch::NoGradGuard no_grad;
  for (auto& parameter : model->parameters()) parameter.fill_(0.5);
  return model;
}

GPipe pipe_on_devices(const std::shared_ptr<Ranks>& ranks, const Sequential& model) {
  return GPipe(model, Balance{1, 2}, GPipeOptions().devices({device(ranks->rank())}).chunks(2).ranks(ranks));
}

TEST(RanksOnDevicesByWires, ReplicasHaveWiresOfTheirOwn) {
  const auto step = [](GPipe& pipe, const Tensor& input) {
    pipe->step(input, input, kMse);
    return pipe->parameters().front().grad().cpu();
  };
  const auto whole = torch::arange(32).reshape({8, 4}) / 32;
  auto alone = GPipe(two_layers(), Balance{1, 2}, GPipeOptions().devices({torch::kCPU, torch::kCPU}).chunks(4));
  const auto expected = step(alone, whole);
  stream_order().take_violations();
  const auto wires = std::make_shared<Wires>();
  std::vector<Tensor> gradients(4);
  const auto errors = run_ranks(4, patient().replicas(2), wires, [&](const auto& ranks) {
    auto pipe = pipe_on_devices(ranks, two_layers());
    const auto [begin, end] = ranks->part(8);
    gradients[ranks->rank()] = step(pipe, whole.slice(0, begin, end));
  });
  ASSERT_THAT(errors, Each(IsEmpty()));
  EXPECT_THAT(stream_order().take_violations(), IsEmpty());
  for (const int rank : {0, 1}) expect_close({gradients[rank]}, {expected}, 1e-5, 1e-6);  // these have the first stage
}

/// What the third of three steps of 1F1B on two ranks per replica asks for.
struct Asked {
  int host_waits = 0;
  accelerator::Log log;
};

Asked steady_step(int replicas, int micro_batches) {
  const auto step = [&](const std::shared_ptr<Ranks>& ranks) {
    const auto own = GPipeOptions().devices({device(ranks->rank())}).chunks(micro_batches).ranks(ranks);
    GPipe pipe(two_layers(), Balance{1, 2}, GPipeOptions(own).schedule("1f1b"));
    const auto x = torch::ones({32 * micro_batches, 4}, device(ranks->rank()));
    for (int i = 0; i < 3; ++i) {
      pipe->team().largest(0);  // all ranks have ended the call before
      if (ranks->rank() == 0) stream_order().take_counts(), stream_order().keep_log();
      pipe->team().largest(0);
      pipe->step(x, x, kMse);
    }
  };
  const auto options = patient().replicas(replicas);
  EXPECT_THAT(run_ranks(2 * replicas, options, std::make_shared<Wires>(), step), Each(IsEmpty()));
  Asked asked{.log = stream_order().take_log()};
  for (const auto& [action, count] : stream_order().take_counts()) asked.host_waits += count.host_waits;
  return asked;
}

// Each worker waits for its last transfer. The last one reads the loss, which goes to all ranks, and with replicas its own
// part of it before.
TEST(RanksOnDevicesByWires, TheHostWaitsOnlyAtTheEndOfACall) {
  EXPECT_EQ(steady_step(/*replicas=*/1, 4).host_waits, 2 + 1);
  EXPECT_EQ(steady_step(/*replicas=*/1, 16).host_waits, 2 + 1);
  EXPECT_EQ(steady_step(/*replicas=*/2, 4).host_waits, 2 * (2 + 2));
}

TEST(RanksOnDevicesByWires, MemoryIsTheSameForAnyNumberOfMicroBatches) {
  const auto reserved = [](int micro_batches) {
    return accelerator::replay(steady_step(/*replicas=*/1, micro_batches).log, {.scale = 1e6}).reserved;
  };
  EXPECT_EQ(reserved(4), reserved(64));
}

// A device runs one transfer at a time. Two ranks send to each other, and neither receives first.
TEST(VirtualCommunicator, TellsOfADeadlock) {
  accelerator::Log log{.threads = {}, .devices = {0, 1}};
  for (const int rank : {0, 1}) {
    const auto transfer = [&](std::int64_t number, const char* operation) {
      return accelerator::Request{
          .kind = accelerator::Request::kLaunch, .stream = rank, .work = {.transfer = number}, .operation = operation};
    };
    log.threads[rank] = {transfer(1 + rank, "send"), transfer(2 - rank, "receive")};
  }
  EXPECT_THAT([&] { accelerator::replay(log, {}); }, throws<std::logic_error>("device 0 has begun the send"));
}

// The devices stand still, so the first rank waits for its own. Returns the errors.
std::vector<std::string> stand_still(const std::shared_ptr<Wires>& wires, std::chrono::seconds timeout,
                                     bool last_fails) {
  const absl::Cleanup release = [] { held() = false; };
  return run_ranks(2, patient().timeout(timeout), wires, [&](const auto& ranks) {
    const auto faults = std::make_shared<FaultPlan>();
    auto pipe = pipe_on_devices(ranks, two_layers(faults));
    pipe->forward(torch::ones({4, 4}));
    faults->arm(FaultPlan::kForward, [last_fails, calls = 0]() mutable {
      if (++calls == 2 && last_fails) throw std::runtime_error("the layer fails");
    });
    pipe->team().largest(0);  // all ranks have ended the first call
    held() = true;
    pipe->forward(torch::ones({4, 4}));
  });
}

TEST(RanksOnDevicesByWires, AFailureRousesARankThatWaitsForItsDevice) {
  const auto wires = std::make_shared<Wires>();
  EXPECT_THAT(stand_still(wires, kPatience, /*last_fails=*/true),
              ElementsAre(HasSubstr("a rank has failed: rank 1 failed"), HasSubstr("the layer fails")));
  EXPECT_EQ(wires->aborted.size(), 2);  // which lets the devices go on
}

TEST(RanksOnDevicesByWires, ADeviceThatStandsStillIsReported) {
  EXPECT_THAT(stand_still(std::make_shared<Wires>(), std::chrono::seconds(1), /*last_fails=*/false),
              Each(AllOf(HasSubstr("a rank has failed"), HasSubstr("waited for"))));
}

// A device runs one transfer or sum at a time, and the hosts' launches take any time.
TEST(RanksOnDevicesByWires, NoScheduleMakesADeadlock) {
  const auto names = accelerator::name_actions();
  int programs = 0;
  testing::for_each_shape(4, 2, {4}, [&](const std::string& schedule, const Layout& layout) {
    const int size = layout.workers();
    if (size == 1 || layout.stages > 6 || !too_few_stages(schedule, layout.placement).empty()) return;
    const auto step = [&](const std::shared_ptr<Ranks>& ranks) {
      Sequential model(Stash("skip"), Linear(4, 4));
      for (int s = 2; s < layout.stages; ++s) model->push_back(Linear(4, 4));
      model->push_back(Pop("skip"));
      model->push_back(Linear(4, 4));
      Balance balance(layout.stages, 1);
      balance.front() = balance.back() = 2;
      const auto own = GPipeOptions().devices({device(ranks->rank())}).ranks(ranks);
      GPipe pipe(model, balance, GPipeOptions(own).chunks(4).schedule(schedule).placement(layout.placement));
      pipe->step(torch::ones({4, 4}), torch::ones({4, 4}), kMse);
    };
    for (int replicas = 1; replicas * size <= 4; ++replicas) {
      stream_order().keep_log();
      const auto options = patient().replicas(replicas);
      EXPECT_THAT(run_ranks(replicas * size, options, std::make_shared<Wires>(), step), Each(IsEmpty()));
      const auto log = stream_order().take_log();
      for (std::uint64_t seed = 0; seed < 8; ++seed) {
        EXPECT_NO_THROW(accelerator::replay(log, {.seed = seed})) << replicas << " " << seed;
      }
      ++programs;
    }
  });
  EXPECT_GT(programs, 30);
}

TEST(RanksOnDevicesByWires, RanksThatDifferAreTold) {
  const auto run = [](const auto& ranks) { pipe_on_devices(ranks, two_layers()); };
  EXPECT_THAT(run_ranks(2, patient(), std::make_shared<Wires>(), run, /*without_wires=*/1),
              Each(HasSubstr("the ranks differ in how tensors travel: rank 0 has from GPU to GPU, but rank 1 has "
                             "through the hosts")));
}

}  // namespace
}  // namespace gpipe
