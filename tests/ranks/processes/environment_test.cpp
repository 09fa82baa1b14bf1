// Ranks as launchers start them: by the environment. Attempts to run a job.

#include <arpa/inet.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <thread>

#include "gpipe/ranks/job.h"
#include "gpipe/timeline.h"
#include "tests/ranks/processes/job.h"

namespace gpipe {
namespace {

RANKS_TEST(StoreFailure, AStoreThatDoesNotAnswer, 1) {
  const auto use = [] {
    for (;;) pause();
    return 0;
  };
  EXPECT_THAT([&] { apart(use, milliseconds(120), nullptr); },
              throws<StoreTimeout>("the store of the job has not answered within 120 ms"));
  EXPECT_THROW(apart(use, seconds(20), [] { throw std::domain_error("stop"); }), std::domain_error);
}

using Variables = std::vector<std::pair<std::string, std::string>>;

void set(const Variables& variables) {
  for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), /*overwrite=*/1);
}
void unset(const std::vector<std::string>& names) {
  for (const auto& name : names) unsetenv(name.c_str());
}

/// Listens on the loopback interface, at a port that the system chooses. Returns the socket and the port.
std::pair<int, int> listen_somewhere() {
  const int own = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* any = reinterpret_cast<sockaddr*>(&address);
  if (bind(own, any, size) != 0 || listen(own, 1) != 0 || getsockname(own, any, &size) != 0) {
    throw std::runtime_error("cannot listen");
  }
  return {own, ntohs(address.sin_port)};
}

int free_port() {
  const auto [socket, port] = listen_somewhere();
  close(socket);
  return port;
}

Variables loopback(int rank, int size, int port) {
  return {{"RANK", std::to_string(rank)},
          {"WORLD_SIZE", std::to_string(size)},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", std::to_string(port)}};
}

GPipe make_pipe(const std::shared_ptr<Ranks>& ranks) {
  torch::manual_seed(1);
  return GPipe(Sequential(Linear(4, 4), Linear(4, 4)), Balance{1, 1}, GPipeOptions().chunks(2).ranks(ranks));
}

/// Trains one step over two ranks. Gathers the timeline.
void step(const std::shared_ptr<Ranks>& ranks, const std::shared_ptr<Timeline>& timeline = nullptr) {
  auto pipe = make_pipe(ranks);
  if (timeline) pipe->trace(timeline);
  pipe->step(torch::ones({4, 4}), torch::ones({4, 4}), kMse);
  if (timeline) *timeline = pipe->team().gather(*timeline);
}

RANKS_TEST(RanksEnvironment, VariablesAreChecked, 1) {
  const std::vector<std::string> names = {"RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR", "LOCAL_RANK"};
  const auto from_environment = [] { Ranks::from_environment(); };
  const auto good = loopback(0, 1, free_port());
  for (const auto& [name, value] : good) {
    set(good);
    unset({name});
    EXPECT_THAT(from_environment, throws<std::invalid_argument>(name)) << "without " << name;
  }
  const Variables bad = {
      {"RANK", "one"},         {"RANK", "1x"},     {"RANK", "-1"},           {"RANK", "1"},
      {"RANK", "99999999999"}, {"WORLD_SIZE", ""}, {"MASTER_PORT", "70000"}, {"MASTER_PORT", "2950 "},
      {"MASTER_PORT", "0"},    {"LOCAL_RANK", "x"}};
  for (const auto& [name, value] : bad) {
    set(good);
    set({{name, value}});
    EXPECT_THAT(from_environment, throws<std::invalid_argument>(name + " is '" + value + "'"));
    unset({"LOCAL_RANK"});
  }
  set(good);
  EXPECT_EQ(Ranks::from_environment()->size(), 1);
  unset(names);
}

RANKS_TEST(RanksEnvironment, TheStoreCannotBeServedOrReached, 1) {
  const int taken = listen_somewhere().second;  // until the process ends, because a thread waits for its answer
  const auto error_of = [](int rank, int port, const Variables& more = {}) {
    set(loopback(rank, 2, port));
    set(more);
    return message_from([] { Ranks::from_environment(RanksOptions().join_timeout(milliseconds(300))); });
  };
  const auto at = [](int port) { return " at 127.0.0.1:" + std::to_string(port); };
  EXPECT_THAT(error_of(0, taken), HasSubstr("rank 0 cannot listen" + at(taken)));
  const Variables elsewhere = {{"MASTER_ADDR", "192.0.2.1"}};  // not an address of this host
  EXPECT_THAT(error_of(0, taken, elsewhere), HasSubstr("rank 0 cannot listen at 192.0.2.1"));
  const int unserved = free_port();
  EXPECT_THAT(error_of(1, unserved), HasSubstr("rank 1 cannot reach the store" + at(unserved)));
  EXPECT_THAT(error_of(1, taken),  // by a program that does not answer
              HasSubstr("rank 1 cannot reach the store" + at(taken) + ": no answer within 300 ms"));
  unset({"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"});
}

/// The local addresses of this process's sockets that are in a state, as /proc/net writes them.
enum State { kConnected = 1, kListening = 10 };
std::vector<std::string> addresses(State state) {
  std::set<std::string> own;  // inodes
  for (const auto& file : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    const auto target = std::filesystem::read_symlink(file, error).string();
    if (target.rfind("socket:[", 0) == 0) own.insert(target.substr(8, target.size() - 9));
  }
  std::vector<std::string> addresses;
  for (const auto* table : {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
    std::ifstream file(table);
    std::string line;
    std::getline(file, line);  // the titles
    while (std::getline(file, line)) {
      std::istringstream text(line);
      const std::vector<std::string> words{std::istream_iterator<std::string>(text), {}};
      if (std::stoi(words.at(3), nullptr, 16) == state && own.count(words.at(9)) != 0)
        addresses.push_back(words[1].substr(0, words[1].find(':')));
    }
  }
  return addresses;
}

RANKS_TEST(RanksEnvironment, RanksConnectOnlyOnTheLoopbackInterface, 2) {
  EXPECT_THAT(addresses(kListening), IsEmpty());
  const auto port = ranks->share(std::to_string(ranks->rank() == 0 ? free_port() : 0));
  set(loopback(ranks->rank(), 2, std::stoi(port)));
  const auto named = Ranks::from_environment(patient());
  EXPECT_EQ(named->rank(), ranks->rank());
  EXPECT_EQ(named->size(), 2);
  step(named);
  // Rank 0 serves the store.
  EXPECT_THAT(addresses(kListening), std::vector<std::string>(ranks->rank() == 0 ? 1 : 0, "0100007F"));
  EXPECT_THAT(addresses(kConnected), AllOf(Not(IsEmpty()), Each(EndsWith("0100007F"))));
  set({{"LOCAL_RANK", std::to_string(ranks->rank())}});
  EXPECT_EQ(new_ranks(2)->local_rank(), ranks->rank());
}

/// Two processes come as rank 1.
RANKS_TEST(RanksEnvironment, ASecondProcessOfARankIsRefused, 3) {
  const auto port = ranks->share(std::to_string(ranks->rank() == 0 ? free_port() : 0));
  set(loopback(std::min(ranks->rank(), 1), 2, std::stoi(port)));
  std::shared_ptr<Ranks> named;
  const auto error = message_from([&] { named = Ranks::from_environment(patient()); });
  const bool is_refused = error.find("rank 1 has already come to this job") != error.npos;
  EXPECT_TRUE(error == "nothing" || (ranks->rank() > 0 && is_refused)) << error;
  ranks->finish();  // the store lives until all have come
}

TEST(RanksEnvironment, ARankWithAnotherClock) {
  const auto set_clock = [](int rank) {  // of a child, which then is the rank
    if (rank == 0 || unshare(CLONE_NEWTIME) != 0) return;
    std::ofstream("/proc/self/timens_offsets") << "monotonic 5000 0" << std::endl;
    int status = 0;
    if (const auto child = fork()) std::_Exit(waitpid(child, &status, 0) == child ? WEXITSTATUS(status) : 3);
  };
  const auto body = [](const std::shared_ptr<Ranks>& ranks) {
    const auto all = std::make_shared<Timeline>();
    step(ranks, all);
    if (ranks->rank() != 0) return;
    EXPECT_EQ(all->spans.size(), 10U);
    EXPECT_LT(all->makespan(), 1000) << "on one axis";
  };
  expect_job(2, body, {.before = set_clock});
}

}  // namespace
}  // namespace gpipe
