#include "tests/ranks/processes/job.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

namespace gpipe {
namespace {

using Clock = std::chrono::steady_clock;

/// What the tests ask of the server: a process that forks the ranks. It has loaded the libraries, so a rank starts at
/// once, and has no threads, which a fork would lose.
struct Request {
  char test[256] = {};
  int size = 0;
  int job = 0;
  int number = 0;  // of a repeated job
  seconds limit{0};
};

pid_t tests_process = 0;
int server = -1;  // the socket to the server
Request present;  // in a rank: its job; else the last one
int this_rank = -1;

/// A folder that all processes of these tests share.
std::filesystem::path shared_folder() {
  return std::filesystem::temp_directory_path() / ("gpipe_ranks_" + std::to_string(tests_process));
}
std::filesystem::path folder_of(const Request& request) {
  return shared_folder() / ("job" + std::to_string(request.job));
}
std::filesystem::path output_of(const Request& request, int rank) {
  return folder_of(request) / ("output" + std::to_string(rank));
}

void become_rank(const Request& request, int rank) {
  present = request;
  this_rank = rank;
  const int output = open(output_of(request, rank).c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  dup2(output, STDOUT_FILENO);
  dup2(output, STDERR_FILENO);
  close(output);
  GTEST_FLAG_SET(filter, request.test);
  GTEST_FLAG_SET(brief, true);
}

/// Waits until the processes of a job have ended. Returns their statuses, as in End.
std::vector<int> await(std::vector<pid_t> processes, seconds limit) {
  const auto begin = Clock::now();
  std::vector<int> ends(processes.size());
  std::set<pid_t> stopped;
  for (auto left = processes.size(); left > 0; std::this_thread::sleep_for(milliseconds(1))) {
    for (std::size_t r = 0; r < processes.size(); ++r) {
      int status = 0;
      if (processes[r] == 0 || waitpid(processes[r], &status, WNOHANG | WUNTRACED) == 0) continue;
      if (WIFSTOPPED(status)) {
        stopped.insert(processes[r]);
        continue;
      }
      stopped.erase(std::exchange(processes[r], 0));
      ends[r] = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
      --left;
    }
    if (left > stopped.size() && Clock::now() - begin < limit) continue;
    for (const auto process : processes) {
      if (process != 0) kill(process, SIGKILL);
    }
  }
  return ends;
}

/// Serves the tests until they have ended. Returns in each rank.
void serve(int tests) {
  for (Request request; read(tests, &request, sizeof request) == sizeof request;) {
    std::vector<pid_t> processes;
    for (int rank = 0; rank < request.size; ++rank) {
      processes.push_back(fork());
      if (processes.back() != 0) continue;
      close(tests);
      return become_rank(request, rank);
    }
    const auto ends = await(processes, request.limit);
    if (write(tests, ends.data(), ends.size() * sizeof(int)) < 0) break;
  }
  std::_Exit(0);
}

void start_server() {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) throw std::runtime_error("cannot make sockets");
  const bool is_server = fork() == 0;
  close(ends[is_server ? 0 : 1]);
  if (is_server) return serve(ends[1]);
  server = ends[0];
}

[[noreturn]] void run_as_rank(int size, const Body& body, const JobOptions& options) {
  torch::set_num_threads(1);
  torch::manual_seed(1);
  try {
    if (options.before) options.before(rank_of_this_process());
    body(new_ranks(size, options.ranks));
  } catch (const std::exception& error) {
    std::cout << error.what() << std::endl;
    std::_Exit(2);
  }
  std::cout << std::flush;
  std::_Exit(::testing::Test::HasFailure() ? 1 : 0);
}

}  // namespace

int rank_of_this_process() { return this_rank; }

std::shared_ptr<Ranks> new_ranks(int size, RanksOptions options) {
  static int made = 0;
  const auto file = folder_of(present) / ("store" + std::to_string(made++));
  return std::make_shared<Ranks>(c10::make_intrusive<c10d::FileStore>(file.string(), /*numWorkers=*/-1),
                                 rank_of_this_process(), size, options.interface("lo"));
}

std::vector<End> run_job(int size, const Body& body, const JobOptions& options) {
  if (rank_of_this_process() >= 0) run_as_rank(size, body, options);
  const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
  std::snprintf(present.test, sizeof present.test, "%s.%s", info->test_suite_name(), info->name());
  present.size = size;
  ++present.job;
  present.limit = options.limit;
  std::filesystem::create_directories(folder_of(present));
  std::vector<int> statuses(size);
  const auto bytes = static_cast<ssize_t>(size * sizeof(int));
  if (write(server, &present, sizeof present) < 0 || recv(server, statuses.data(), bytes, MSG_WAITALL) != bytes) {
    throw std::runtime_error("the server of jobs has ended");
  }
  std::vector<End> ends;
  for (int rank = 0; rank < size; ++rank) {
    std::ostringstream output;
    output << std::ifstream(output_of(present, rank)).rdbuf();
    ends.push_back({statuses[rank], output.str()});
  }
  std::filesystem::remove_all(folder_of(present));
  return ends;
}

void expect_job(int size, const Body& body, const JobOptions& options) {
  const auto ends = run_job(size, body, options);
  for (std::size_t r = 0; r < ends.size(); ++r) {
    EXPECT_EQ(ends[r].status, 0) << "rank " << r << " of " << size << ":\n" << ends[r].output;
  }
}

void expect_failed(const std::vector<End>& ends, int culprit, const std::string& cause) {
  for (int r = 0; r < static_cast<int>(ends.size()); ++r) {
    if (r == culprit) continue;
    EXPECT_EQ(ends[r].status, 2) << "rank " << r << ":\n" << ends[r].output;
    EXPECT_THAT(ends[r].output, HasSubstr(cause)) << "rank " << r;
  }
}

void repeat_job(int count, const std::function<void(int number)>& run) {
  if (rank_of_this_process() >= 0) return run(present.number);
  for (int number = 0; number < count && !::testing::Test::HasFailure(); ++number) {
    present.number = number;
    run(number);
  }
}

std::string message_from(const std::function<void()>& function) {
  try {
    function();
  } catch (const std::exception& error) {
    return text_of(error);
  }
  return "nothing";
}

void expect_part_of(const Record& part, const Record& whole) {
  for (const auto& [name, tensor] : part) {
    const auto found = whole.find(name);
    ASSERT_NE(found, whole.end()) << name;
    EXPECT_TRUE(same(tensor, found->second)) << name;
  }
}

Record gradients_of(const GPipe& pipe) {
  Record record;
  for (const auto& parameter : pipe->named_parameters()) record[parameter.key()] = parameter->grad();
  return record;
}

Snapshot capture(const GPipe& pipe, const torch::optim::Optimizer& optimizer) {
  Snapshot snapshot;
  snapshot.model = capture_model(*pipe);
  snapshot.optimizer = capture_optimizer(optimizer, *pipe);
  return snapshot;
}

void restore(GPipe& pipe, torch::optim::Optimizer& optimizer, const Snapshot& whole) {
  const auto part = own_part(*pipe, whole);
  restore_model(*pipe, part.model);
  restore_optimizer(optimizer, *pipe, part.optimizer);
}

}  // namespace gpipe

int main(int count, char** arguments) {
  ::testing::InitGoogleMock(&count, arguments);
  gpipe::tests_process = getpid();
  gpipe::start_server();
  const int result = RUN_ALL_TESTS();
  std::filesystem::remove_all(gpipe::shared_folder());
  return result;
}
