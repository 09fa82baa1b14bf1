#include "gpipe/ranks/job.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <chrono>
#include <exception>
#include <limits>
#include <stdexcept>
#include <thread>
#include <utility>

#include "gpipe/ranks/gloo.h"

namespace gpipe {
namespace {

constexpr std::chrono::milliseconds kDoneInterval{5};

std::string done_key(int rank) { return "done/" + std::to_string(rank); }

}  // namespace

Job::Job(c10::intrusive_ptr<c10d::Store> store, const Ranks& ranks)
    : store_(std::move(store)),
      rank_(ranks.rank()),
      size_(ranks.size()),
      listen_at_(ranks.listen_at()),
      options_(ranks.options()),
      exceptions_(std::uncaught_exceptions()) {}

Job::~Job() {
  if (!board_) return;
  if (std::uncaught_exceptions() > exceptions_) {
    board_->report("rank " + std::to_string(rank_) + " ended with an exception outside of the pipeline");
  }
  try {
    await_others();
  } catch (const std::exception&) {  // the store's rank has ended already
  }
  connections_->close();
  board_.reset();  // first, because it refers to the connections
}

void Job::await_others() {
  store_->set(done_key(rank_), "");
  const auto end = std::chrono::steady_clock::now() + options_.timeout();
  for (int r = 0; r < size_; ++r) {
    while (board_->failure().empty() && std::chrono::steady_clock::now() < end && !store_->check({done_key(r)})) {
      std::this_thread::sleep_for(kDoneInterval);
    }
  }
}

int Job::join(const Manifest& manifest, int wires, const std::function<void()>& poll) {
  if (board_) board_->check("no pipeline can be made any more, because a rank has failed");
  const auto store = c10::make_intrusive<c10d::PrefixStore>("pipeline" + std::to_string(pipelines_++), store_);
  check_manifests(*store, rank_, size_, manifest, options_.join_timeout(), poll);
  if (!connections_) {
    connections_ = connect_by_gloo(store_, rank_, size_, listen_at_, options_.join_timeout());
    board_ = std::make_unique<FailureBoard>(store_, rank_, [this] { connections_->close(); });
  }
  if (wires > std::numeric_limits<int>::max() / kTagsPerWire - next_wire_) {
    throw std::runtime_error("[gpipe] the ranks have made so many pipelines that no tags are left; make fewer");
  }
  return std::exchange(next_wire_, next_wire_ + wires);
}

}  // namespace gpipe
