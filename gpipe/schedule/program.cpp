#include "gpipe/program.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "gpipe/base/bytes.h"
#include "gpipe/base/checks.h"
#include "gpipe/schedule/verifier.h"

namespace gpipe {

char to_char(Kind kind) { return "FRBIW"[static_cast<std::size_t>(kind)]; }

std::string to_string(const Action& action) {
  return absl::StrFormat("%d%c%d", action.stage, to_char(action.kind), action.micro_batch);
}

std::map<std::string, Checkpoint> checkpoints() {
  return {{"never", Checkpoint::kNever}, {"except_last", Checkpoint::kExceptLast}, {"always", Checkpoint::kAlways}};
}

std::string to_string(Checkpoint checkpoint) {
  for (const auto& [name, mode] : checkpoints()) {
    if (mode == checkpoint) return name;
  }
  return std::to_string(checkpoint.count_);
}

Checkpoint Checkpoint::in_flight(int count) {
  if (count < 0) refuse_argument("checkpoint is ", count, ", but the number of micro-batches must not be negative");
  return Checkpoint(count);
}

bool Checkpoint::recomputes(int micro_batch, int micro_batches, int in_flight) const {
  if (*this == kExceptLast) return micro_batch + 1 < micro_batches;
  return micro_batch % in_flight < count_;
}

int Checkpoint::recomputed(int micro_batches) const {
  return *this == kExceptLast ? micro_batches - 1 : std::min(count_, micro_batches);
}

void Checkpoints::check(int stages) const {
  if (modes.size() == 1 || std::ssize(modes) == stages) return;
  refuse_argument("checkpoint has ", modes.size(), " modes, but there are ", stages,
                  " stages; give one mode for all, or one per stage");
}

std::string to_string(const Checkpoints& checkpoints) {
  const auto append = [](std::string* out, Checkpoint mode) { *out += to_string(mode); };
  const auto text = absl::StrJoin(checkpoints.modes, ", ", append);
  return checkpoints.modes.size() == 1 ? text : absl::StrCat("[", text, "]");
}

int Layout::workers() const { return placement.empty() ? 0 : std::ranges::max(placement) + 1; }

std::vector<int> stage_ends(const std::vector<std::int64_t>& balance) {
  constexpr int kMost = std::numeric_limits<int>::max();
  std::vector<int> ends;
  int first = 0;
  for (const auto layers : balance) {
    if (layers < 1) {
      refuse_argument("balance is [", absl::StrJoin(balance, ", "), "], but every stage needs at least one layer");
    }
    if (layers > kMost - first) {
      refuse_argument("balance [", absl::StrJoin(balance, ", "), "] sums to more than ", kMost,
                      ", the largest number of layers");
    }
    ends.push_back(first += static_cast<int>(layers));
  }
  return ends;
}

void check_balance(const std::vector<std::int64_t>& balance, std::size_t layers) {
  if (layers == 0) refuse_argument("the model has no layers");
  if (balance.empty()) {
    refuse_argument("balance is empty; give the number of layers of each stage, such as [", layers, "] for one stage");
  }
  if (const auto sum = static_cast<std::size_t>(stage_ends(balance).back()); sum != layers) {
    refuse_argument("balance [", absl::StrJoin(balance, ", "), "] sums to ", sum, ", but the model has ", layers,
                    " layers");
  }
}

void check_chunks(std::int64_t chunks) {
  if (chunks <= 0) refuse_argument("chunks must be positive, but is ", chunks);
}

std::vector<Edge> cut_edges(const std::vector<std::int64_t>& balance, const std::vector<LayerLink>& links,
                            const std::vector<int>& placement, std::vector<int>* cut_links) {
  const auto ends = stage_ends(balance);
  const int layers = ends.empty() ? 0 : ends.back();
  const auto stage_of = [&](int layer) {
    if (layer < 0 || layer >= layers) {
      throw std::out_of_range(
          absl::StrFormat("[gpipe] a skip names layer %d, but the balance has %d layers", layer, layers));
    }
    return static_cast<int>(std::upper_bound(ends.begin(), ends.end(), layer) - ends.begin());
  };
  std::vector<Edge> edges;
  for (int stage = 1; stage < std::ssize(ends); ++stage) edges.push_back({stage - 1, stage, "activation"});
  for (std::size_t i = 0; i < links.size(); ++i) {
    const int origin = stage_of(links[i].from);
    std::set<int> readers;
    for (const int layer : links[i].readers) readers.insert(stage_of(layer));
    readers.erase(origin);
    const auto worker_of = [&](int stage) { return placement.empty() ? stage : placement[stage]; };
    std::map<int, int> holders{{worker_of(origin), origin}};  // the last stage of each worker that has the value
    int last = origin;                                        // of any worker
    for (const int reader : readers) {
      auto& holder = holders.try_emplace(worker_of(reader), last).first->second;
      edges.push_back({holder, reader, "skip " + links[i].name});
      holder = last = reader;
      if (cut_links != nullptr) cut_links->push_back(static_cast<int>(i));
    }
  }
  return edges;
}

Wiring::Wiring(int stages, const std::vector<Edge>& edges) : in(stages), out(stages) {
  for (std::size_t e = 0; e < edges.size(); ++e) {
    out[edges[e].from].push_back(static_cast<int>(e));
    in[edges[e].to].push_back(static_cast<int>(e));
  }
}

Program Program::make(Layout layout, std::vector<Edge> edges, Schedule schedule) {
  verify(layout, edges, schedule);
  Program program;
  program.layout_ = std::move(layout);
  program.edges_ = std::move(edges);
  program.schedule_ = std::move(schedule);
  program.wiring_ = Wiring(program.layout_.stages, program.edges_);
  const auto micro_batches = static_cast<std::size_t>(program.layout_.micro_batches);
  Hash hash;
  program.recomputes_.assign(program.layout_.stages * micro_batches, false);
  for (const auto& list : program.schedule_) {
    const auto other = std::ranges::find_if(
        list, [](Kind kind) { return kind != Kind::F; }, &Action::kind);
    program.leading_forwards_.push_back(static_cast<int>(other - list.begin()));
    if (other != list.end()) program.has_backward_ = true;
    for (const Action& action : list) {
      const auto [kind, stage, micro_batch] = action;
      for (const auto part : {static_cast<int>(kind), stage, micro_batch}) hash.add(part);
      if (action.kind == Kind::R) program.recomputes_[action.stage * micro_batches + action.micro_batch] = true;
    }
  }
  program.hash_ = hash.value();
  return program;
}

bool Program::recomputes(int stage) const {
  const auto first = recomputes_.begin() + static_cast<std::ptrdiff_t>(stage) * layout_.micro_batches;
  return std::any_of(first, first + layout_.micro_batches, std::identity());
}

bool Program::two_phase() const {
  // Their sum is at most kMostCells.
  return std::accumulate(leading_forwards_.begin(), leading_forwards_.end(), 0) ==
         layout_.stages * layout_.micro_batches;
}

}  // namespace gpipe
