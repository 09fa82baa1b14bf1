#include "gpipe/ranks.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <unistd.h>

#include <cstdlib>
#include <limits>
#include <random>

#include "absl/strings/numbers.h"
#include "gpipe/base/checks.h"
#include "gpipe/ranks/job.h"

namespace gpipe {
namespace {

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

int number_in(const char* name, int least, int most) {
  const auto text = variable(name);
  int number = 0;
  const bool is_number = absl::SimpleAtoi(text, &number) && absl::StrCat(number) == text;
  if (!is_number || number < least || number > most) {
    refuse_argument("the environment variable ", name, " is '", text, "', but must be a number from ", least, " to ",
                    most, "; start the program with torchrun");
  }
  return number;
}

/// This process's number on its host, unless the environment describes a job of another size.
std::optional<int> local_rank_in(int size) {
  if (variable("LOCAL_RANK").empty()) return 0;
  if (variable("WORLD_SIZE") != std::to_string(size)) return std::nullopt;
  return number_in("LOCAL_RANK", 0, size - 1);
}

Mesh divide(int size, int replicas) {
  if (replicas < 1 || size % replicas != 0) {
    refuse_argument("the number of replicas is ", replicas, ", but must divide the number of ranks, ", size);
  }
  return {size / replicas, replicas};
}

std::string choose_address(const RanksOptions& options) {
  if (!options.interface().empty()) return address_of_interface(options.interface());
  if (const auto interface = variable("GLOO_SOCKET_IFNAME"); !interface.empty()) return address_of_interface(interface);
  const auto master = variable("MASTER_ADDR");
  if (master.empty()) return address_of_this_host();
  const auto address = local_address_towards(master);
  const bool is_loopback = address.starts_with("127.") || address == "::1";
  if (is_loopback && variable("LOCAL_WORLD_SIZE") != variable("WORLD_SIZE") && !variable("LOCAL_WORLD_SIZE").empty()) {
    refuse_argument("MASTER_ADDR is '", master, "', which is ", address,
                    " on this host, where other hosts cannot reach it; give the interface");
  }
  return address;
}

// Tells the store that this process is a rank. Errors: std::runtime_error if another process has come as this rank.
void claim_rank(const c10::intrusive_ptr<c10d::Store>& store, int rank, std::chrono::milliseconds limit,
                const Poll& poll) {
  char host[256] = {};
  gethostname(host, sizeof host - 1);
  // Containers may share a host's name and the numbers of processes.
  static const auto number = std::random_device()();
  const auto mine = absl::StrCat("process ", getpid(), " (", number, ") on host '", host, "'");
  const auto claim = [=] { return store->compareSet(absl::StrCat("rank ", rank), "", mine); };
  const std::string first = apart(claim, limit, poll);
  if (first == mine) return;
  throw_error("rank ", rank, " has already come to this job: ", first, ", but this is ", mine,
              "; give each job a MASTER_PORT of its own, and each process a RANK of its own");
}

}  // namespace

std::shared_ptr<Ranks> Ranks::from_environment(RanksOptions options, const std::function<void()>& poll) {
  constexpr int kMost = std::numeric_limits<int>::max();
  const int size = number_in("WORLD_SIZE", 1, kMost);
  const int rank = number_in("RANK", 0, size - 1);
  const int port = number_in("MASTER_PORT", 1, std::numeric_limits<std::uint16_t>::max());
  const auto host = variable("MASTER_ADDR");
  if (host.empty()) refuse_argument("the environment variable MASTER_ADDR is not set; start the program with torchrun");
  c10d::TCPStoreOptions store;
  store.port = static_cast<std::uint16_t>(port);
  const bool outlives_job = variable("TORCHELASTIC_USE_AGENT_STORE") == "True";
  store.isServer = rank == 0 && !outlives_job;
  store.waitWorkers = false;
  store.timeout = options.join_timeout();
  if (store.isServer) store.masterListenFd = gpipe::listen_at(rank, host, port);
  const auto limit = options.join_timeout();
  const auto cannot_reach = [&](const auto&... why) {
    throw_error("rank ", rank, " cannot reach the store at ", host, ":", port, ": ", why...);
  };
  try {
    constexpr std::chrono::seconds kGrace{1};  // c10d's own time-out comes first, with its reason
    const auto open = [=] {
      return c10::make_intrusive<c10d::PrefixStore>("gpipe", c10::make_intrusive<c10d::TCPStore>(host, store));
    };
    const auto opened = apart(open, at_most_a_year(limit) + kGrace, poll);
    if (!outlives_job) claim_rank(opened, rank, limit, poll);
    return std::make_shared<Ranks>(opened, rank, size, std::move(options), nullptr, poll);
  } catch (const c10::Error& error) {
    cannot_reach(error.what_without_backtrace());
  } catch (const StoreTimeout&) {
    cannot_reach("no answer within ", limit.count(),
                 " ms; another program may have the port, or rank 0 may be stopped");
  }
  return nullptr;
}

Ranks::Ranks(c10::intrusive_ptr<c10d::Store> store, int rank, int size, RanksOptions options,
             const JoinDevices& join_devices, const std::function<void()>& poll)
    : rank_(rank),
      size_(size),
      local_rank_(local_rank_in(size)),
      options_(std::move(options)),
      mesh_(divide(size, options_.replicas())),
      address_(choose_address(options_)) {
  if (!store) refuse_argument("the store of the ranks is null; pass one");
  if (rank < 0 || rank >= size) refuse_argument("the rank is ", rank, ", but must be from 0 to ", size - 1);
  const auto timeout = options_.timeout().count();
  const auto join_timeout = options_.join_timeout().count();
  if (timeout <= 0 || join_timeout <= 0) {
    refuse_argument("the time-outs of the ranks must be positive, but are ", timeout, " ms and ", join_timeout, " ms");
  }
  job_ = std::make_unique<Job>(std::move(store), *this, join_devices, poll);
}

Ranks::~Ranks() = default;

std::pair<std::int64_t, std::int64_t> Ranks::part(std::int64_t samples, int replica) const {
  const auto begin = [&](std::int64_t of) { return (samples * of + replicas() - 1) / replicas(); };
  return {begin(replica), begin(replica + 1)};
}

void Ranks::finish(const std::string& error, const std::function<void()>& poll) {
  job_->finish(error.empty() ? "" : "rank " + std::to_string(rank_) + " failed: " + error, poll);
}

std::string Ranks::share(const std::string& text, const std::function<void()>& poll) { return job_->share(text, poll); }

}  // namespace gpipe
