#include "tests/ranks/processes/job.h"

#include <fcntl.h>
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

int this_rank = -1;            // in a process of a job
std::filesystem::path folder;  // of the present job

std::filesystem::path output_of(int rank) { return folder / ("output" + std::to_string(rank)); }

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

[[noreturn]] void run_as_rank(int rank, int size, const Body& body, const JobOptions& options) {
  this_rank = rank;
  const int output = open(output_of(rank).c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  dup2(output, STDOUT_FILENO);
  dup2(output, STDERR_FILENO);
  close(output);
  torch::set_num_threads(1);
  torch::manual_seed(1);
  try {
    if (options.before) options.before(rank);
    body(new_ranks(size, options.ranks));
  } catch (const std::exception& error) {
    std::cout << error.what() << std::endl;
    std::_Exit(2);
  }
  std::cout << std::flush;
  std::_Exit(::testing::Test::HasFailure() ? 1 : 0);
}

}  // namespace

std::shared_ptr<Ranks> new_ranks(int size, RanksOptions options) {
  static int made = 0;
  const auto file = folder / ("store" + std::to_string(made++));
  return std::make_shared<Ranks>(c10::make_intrusive<c10d::FileStore>(file.string(), /*numWorkers=*/-1), this_rank,
                                 size, options.interface("lo"));
}

std::vector<End> run_job(int size, const Body& body, const JobOptions& options) {
  static int jobs = 0;
  folder = std::filesystem::temp_directory_path() /
           ("gpipe_ranks_" + std::to_string(getpid()) + "_" + std::to_string(jobs++));
  std::filesystem::create_directories(folder);
  std::cout << std::flush;
  std::vector<pid_t> processes;
  for (int rank = 0; rank < size; ++rank) {
    processes.push_back(fork());
    if (processes.back() == 0) run_as_rank(rank, size, body, options);
  }
  std::vector<End> ends;
  for (const int status : await(std::move(processes), options.limit)) {
    std::ostringstream output;
    output << std::ifstream(output_of(static_cast<int>(ends.size()))).rdbuf();
    ends.push_back({status, output.str()});
  }
  std::filesystem::remove_all(folder);
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

std::filesystem::path job_folder() { return folder; }

}  // namespace gpipe

int main(int count, char** arguments) {
  ::testing::InitGoogleMock(&count, arguments);
  return RUN_ALL_TESTS();
}
