#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "gpipe/schedule/action.h"

namespace gpipe {

/// Data that goes from one stage to a later one, once a micro-batch; its gradient runs back along it. The activation
/// between neighbours is one edge, each skip another.
struct Edge {
  int from = 0;
  int to = 0;
  /// Micro-batches that may lie on the edge at once, in either direction: a producer that would exceed it waits.
  int capacity = 1;
  /// For drawings and messages only; UTF-8.
  std::string name;
};

/// A skip, by the layers that hold its ends.
struct LayerLink {
  int from = 0;
  int to = 0;
  std::string name;
};

/// The layer behind each stage of a balance; the last one is the number of layers. Errors: std::invalid_argument for a
/// number that is not positive, or for more layers than an int can count.
std::vector<int> stage_ends(const std::vector<std::int64_t>& balance);

/// The edges of a model that a balance cuts: the activations between neighbours first, then the links that cross a cut,
/// in their order. `crossing`, when given, gets the indices of those links. Errors: those of stage_ends();
/// std::out_of_range for a layer that the balance does not have.
std::vector<Edge> cut_edges(const std::vector<std::int64_t>& balance, const std::vector<LayerLink>& links,
                            std::vector<int>* crossing = nullptr);

/// One ordered list of actions a worker.
using Schedule = std::vector<std::vector<Action>>;

/// The most cells, stages x micro-batches, that a layout may have. A program of so many takes about a gigabyte.
inline constexpr int kMostCells = 1 << 22;

/// How a pipeline is laid out: what a schedule is generated from, and what a program is verified against.
struct Layout {
  int stages = 1;
  int micro_batches = 1;
  /// Stage -> worker; as long as there are stages. Workers are 0..max, each with at least one stage.
  std::vector<int> placement;

  int workers() const;
};

/// Which edges meet which stage, and so what each action waits for and tells: the rule that verifier, simulator and
/// executor share. An F moves data along the edges, a B or I moves gradients back; R and W stay within their cell.
struct Wiring {
  Wiring() = default;
  /// The edges' stages must be 0..stages-1.
  Wiring(int stages, const std::vector<Edge>& edges);

  /// The edges that an action takes before it runs, and puts when it has: indices, ascending, valid as long as this.
  std::span<const int> takes(const Action& action) const;
  std::span<const int> puts(const Action& action) const;

  /// Per stage: indices of the edges that enter and leave it, ascending.
  std::vector<std::vector<int>> in;
  std::vector<std::vector<int>> out;
};

/// A verified schedule with its edges: what the executor runs and the simulator prices. Immutable; safe to share
/// between threads.
class Program {
 public:
  /// Checks the schedule (see verifier.h) and binds it to its edges.
  /// Errors: InvalidArgument for a layout or edge that makes no sense, an action that is missing, repeated, out of
  /// order within its cell or on the wrong worker; FailedPrecondition for a deadlock, naming the blocked actions.
  static absl::StatusOr<Program> make(Layout layout, std::vector<Edge> edges, Schedule schedule);

  const Layout& layout() const { return layout_; }
  const std::vector<Edge>& edges() const { return edges_; }
  const Schedule& schedule() const { return schedule_; }
  int workers() const { return static_cast<int>(schedule_.size()); }

  /// Indices into edges() of those that enter and leave a stage, ascending.
  const std::vector<int>& in_edges(int stage) const { return wiring_.in[stage]; }
  const std::vector<int>& out_edges(int stage) const { return wiring_.out[stage]; }
  const Wiring& wiring() const { return wiring_; }

  /// True where the cell has an R: its F then stores inputs and no graph.
  bool recomputes(int stage, int micro_batch) const;
  /// True where the schedule has backward actions at all; false for inference.
  bool has_backward() const { return has_backward_; }
  /// The number of leading F in a worker's list: what runs before a backward may begin.
  int leading_forwards(int worker) const { return leading_forwards_[worker]; }
  /// True where every worker has all its F before anything else, so that forward and backward can be two runs.
  bool two_phase() const;

 private:
  Program() = default;

  Layout layout_;
  std::vector<Edge> edges_;
  Schedule schedule_;
  Wiring wiring_;
  std::vector<bool> recomputes_;
  std::vector<int> leading_forwards_;
  bool has_backward_ = false;
};

}  // namespace gpipe
