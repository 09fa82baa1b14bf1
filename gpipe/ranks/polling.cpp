#include "gpipe/ranks/polling.h"

#include <chrono>
#include <future>

namespace gpipe {
namespace {

constexpr std::chrono::milliseconds kPeriodOfPolls{50};

}  // namespace

void while_polling(const std::function<void()>& poll, absl::FunctionRef<void()> wait,
                   absl::FunctionRef<void(const std::exception&)> on_stop) {
  if (!poll) return wait();
  auto waiting = std::async(std::launch::async, [&] { wait(); });
  std::exception_ptr stopped;
  while (waiting.wait_for(kPeriodOfPolls) == std::future_status::timeout) {
    if (stopped) continue;
    try {
      poll();
    } catch (const std::exception& error) {
      stopped = std::current_exception();
      on_stop(error);
    }
  }
  if (stopped) std::rethrow_exception(stopped);
  waiting.get();
}

}  // namespace gpipe
