#include "gpipe/ranks/lifelines.h"

#include <span>
#include <utility>
#include <vector>

namespace gpipe {
namespace {

constexpr int kTag = 0;
constexpr std::chrono::hours kForEver{24 * 365};

}  // namespace

Lifelines::Lifelines(Connections& connections, int rank, int size, std::function<void(int rank)> on_loss)
    : connections_(connections), rank_(rank), on_loss_(std::move(on_loss)) {
  for (int r = rank == 0 ? 1 : 0; r < (rank == 0 ? size : 1); ++r) lines_.push_back({r, {}, {}, {}});
  std::vector<std::shared_ptr<Transfer>> transfers;
  for (auto& line : lines_) transfers.push_back(connections_.receive(line.rank, kTag, std::span(&line.received, 1)));
  for (std::size_t i = 0; i < lines_.size(); ++i) {
    lines_[i].thread =
        std::thread([this, &line = lines_[i], transfer = std::move(transfers[i])] { watch(line, *transfer); });
  }
}

Lifelines::~Lifelines() {
  for (auto& line : lines_) line.thread.join();
}

void Lifelines::watch(Line& line, Transfer& transfer) {
  bool lost = false;
  try {
    transfer.wait(kForEver);
  } catch (const ConnectionError&) {
    lost = true;
  }
  bool is_failure = false;
  {
    MutexLock lock(mutex_);
    lost_ = lost_ || lost;
    if (!lost) ++ends_;
    is_failure = lost && !leaving_;
  }
  changed_.notify_all();
  if (is_failure) on_loss_(line.rank);
}

void Lifelines::leave(std::chrono::milliseconds limit) noexcept {
  const auto end = std::chrono::steady_clock::now() + limit;
  const auto send_ends = [&] {
    std::vector<std::shared_ptr<Transfer>> transfers;
    for (auto& line : lines_) transfers.push_back(connections_.send(line.rank, kTag, std::span(&line.sent, 1)));
    for (const auto& transfer : transfers) transfer->wait(limit);
  };
  try {
    {
      MutexLock lock(mutex_);
      leaving_ = true;
    }
    if (rank_ != 0) send_ends();
    {
      MutexLock lock(mutex_);
      while (ends_ < lines_.size() && !lost_ && std::chrono::steady_clock::now() < end) {
        changed_.wait_for(mutex_, std::chrono::ceil<std::chrono::milliseconds>(end - std::chrono::steady_clock::now()));
      }
    }
    if (rank_ == 0) send_ends();      // all have ended
  } catch (const ConnectionError&) {  // a rank is lost, or has failed
  }
}

}  // namespace gpipe
