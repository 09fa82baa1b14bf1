#include "gpipe/schedule/program.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "gpipe/schedule/verifier.h"

namespace gpipe {

int Layout::workers() const {
  const auto last = std::max_element(placement.begin(), placement.end());
  return last == placement.end() ? 0 : *last + 1;
}

Wiring::Wiring(int stages, const std::vector<Edge>& edges) : in(stages), out(stages) {
  for (std::size_t e = 0; e < edges.size(); ++e) {
    out[edges[e].from].push_back(static_cast<int>(e));
    in[edges[e].to].push_back(static_cast<int>(e));
  }
}

std::span<const int> Wiring::takes(const Action& action) const {
  switch (action.kind) {
    case Kind::F:
      return in[action.stage];
    case Kind::B:
    case Kind::I:
      return out[action.stage];
    case Kind::R:
    case Kind::W:
      break;
  }
  return {};
}

std::span<const int> Wiring::puts(const Action& action) const {
  switch (action.kind) {
    case Kind::F:
      return out[action.stage];
    case Kind::B:
    case Kind::I:
      return in[action.stage];
    case Kind::R:
    case Kind::W:
      break;
  }
  return {};
}

absl::StatusOr<Program> Program::make(Layout layout, std::vector<Edge> edges, Schedule schedule) {
  if (const auto peaks = verify(layout, edges, schedule); !peaks.ok()) return peaks.status();
  Program program;
  program.layout_ = std::move(layout);
  program.edges_ = std::move(edges);
  program.schedule_ = std::move(schedule);
  program.wiring_ = Wiring(program.layout_.stages, program.edges_);
  const auto micro_batches = static_cast<std::size_t>(program.layout_.micro_batches);
  program.recomputes_.assign(program.layout_.stages * micro_batches, false);
  for (const auto& list : program.schedule_) {
    const auto other = std::find_if(list.begin(), list.end(), [](const Action& a) { return a.kind != Kind::F; });
    program.leading_forwards_.push_back(static_cast<int>(other - list.begin()));
    if (other != list.end()) program.has_backward_ = true;
    for (const Action& action : list) {
      if (action.kind == Kind::R) program.recomputes_[action.stage * micro_batches + action.micro_batch] = true;
    }
  }
  return program;
}

bool Program::recomputes(int stage, int micro_batch) const {
  return recomputes_[static_cast<std::size_t>(stage) * layout_.micro_batches + micro_batch];
}

bool Program::two_phase() const {
  std::size_t leading = 0;
  for (const int forwards : leading_forwards_) leading += forwards;
  return leading == static_cast<std::size_t>(layout_.stages) * layout_.micro_batches;
}

}  // namespace gpipe
