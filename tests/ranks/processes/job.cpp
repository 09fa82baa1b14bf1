#include "tests/ranks/processes/job.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <set>
#include <sstream>
#include <stdexcept>
#include <thread>

extern char** environ;

namespace gpipe {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kRank = "GPIPE_TEST_RANK";
constexpr const char* kFolder = "GPIPE_TEST_FOLDER";
constexpr const char* kNumber = "GPIPE_TEST_NUMBER";  // of a repeated job

std::string test_name() {
  const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
  return std::string(info->test_suite_name()) + "." + info->name();
}

[[noreturn]] void run_as_rank(int size, const std::function<void(std::shared_ptr<Ranks>)>& body,
                              const JobOptions& options) {
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

pid_t start(int rank, const std::string& folder) {
  std::vector<std::string> words{"/proc/self/exe", "--gtest_filter=" + test_name(), "--gtest_brief=1"};
  std::vector<std::string> variables{std::string(kRank) + "=" + std::to_string(rank),
                                     std::string(kFolder) + "=" + folder, "OMP_NUM_THREADS=1"};
  for (char** variable = environ; *variable != nullptr; ++variable) variables.emplace_back(*variable);
  std::vector<char*> arguments;
  for (auto& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  std::vector<char*> environment;
  for (auto& variable : variables) environment.push_back(variable.data());
  environment.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  const auto output = folder + "/output" + std::to_string(rank);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, output.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  posix_spawn_file_actions_adddup2(&actions, STDOUT_FILENO, STDERR_FILENO);
  pid_t process = 0;
  const int error = posix_spawn(&process, words[0].c_str(), &actions, nullptr, arguments.data(), environment.data());
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) throw std::runtime_error("cannot start a process");
  return process;
}

std::string content(const std::string& file) {
  std::ostringstream text;
  text << std::ifstream(file).rdbuf();
  return text.str();
}

}  // namespace

int rank_of_this_process() {
  const char* rank = std::getenv(kRank);
  return rank == nullptr ? -1 : std::atoi(rank);
}

std::shared_ptr<Ranks> new_ranks(int size, RanksOptions options) {
  static int made = 0;
  const auto file = std::string(std::getenv(kFolder)) + "/store" + std::to_string(made++);
  return std::make_shared<Ranks>(c10::make_intrusive<c10d::FileStore>(file, /*numWorkers=*/-1), rank_of_this_process(),
                                 size, options.interface("lo"));
}

std::vector<End> run_job(int size, const std::function<void(std::shared_ptr<Ranks>)>& body, const JobOptions& options) {
  if (rank_of_this_process() >= 0) run_as_rank(size, body, options);
  std::string folder = std::filesystem::temp_directory_path() / "gpipe_job_XXXXXX";
  if (mkdtemp(folder.data()) == nullptr) throw std::runtime_error("cannot make a folder");
  const auto begin = Clock::now();
  std::vector<pid_t> processes;
  for (int r = 0; r < size; ++r) processes.push_back(start(r, folder));
  std::vector<End> ends(size);
  std::set<pid_t> stopped;
  for (std::size_t left = size; left > 0; std::this_thread::sleep_for(std::chrono::milliseconds(5))) {
    for (int r = 0; r < size; ++r) {
      int status = 0;
      if (processes[r] == 0 || waitpid(processes[r], &status, WNOHANG | WUNTRACED) == 0) continue;
      if (WIFSTOPPED(status)) {
        stopped.insert(processes[r]);
        continue;
      }
      stopped.erase(processes[r]);
      processes[r] = 0;
      ends[r].status = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
      ends[r].output = content(folder + "/output" + std::to_string(r));
      ends[r].seconds = std::chrono::duration<double>(Clock::now() - begin).count();
      --left;
    }
    if (left > stopped.size() && Clock::now() - begin < options.limit) continue;
    for (const auto process : processes) {
      if (process != 0) kill(process, SIGKILL);
    }
  }
  std::filesystem::remove_all(folder);
  return ends;
}

void expect_job(int size, const std::function<void(std::shared_ptr<Ranks>)>& body, const JobOptions& options) {
  const auto ends = run_job(size, body, options);
  for (std::size_t r = 0; r < ends.size(); ++r) {
    EXPECT_EQ(ends[r].status, 0) << "rank " << r << " of " << size << ":\n" << ends[r].output;
  }
}

void repeat_job(int count, const std::function<void(int number)>& run) {
  if (rank_of_this_process() >= 0) return run(std::atoi(std::getenv(kNumber)));
  for (int number = 0; number < count && !::testing::Test::HasFailure(); ++number) {
    setenv(kNumber, std::to_string(number).c_str(), /*overwrite=*/1);
    run(number);
  }
  unsetenv(kNumber);
}

int number_of_kills() {
  const char* kills = std::getenv("GPIPE_KILLS");
  return kills == nullptr ? 3 : std::atoi(kills);
}

void kill_after(std::chrono::microseconds delay) {
  std::thread([delay] {
    std::this_thread::sleep_for(delay);
    raise(SIGKILL);
  }).detach();
}

}  // namespace gpipe
