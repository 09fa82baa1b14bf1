#pragma once

#include <cstddef>
#include <span>

#include "gpipe/action.h"
#include "gpipe/api.h"

namespace gpipe {

/// Carries data from one stage to a later one, once per micro-batch, and the data's gradient back. The activation
/// between neighbouring stages is one edge; each skip is another.
struct Edge {
  int from = 0;
  int to = 0;
  /// For drawings and messages only; UTF-8.
  std::string name;

  friend bool operator==(const Edge&, const Edge&) = default;
};

/// A value of a layer that later layers read. A skip has one or more readers.
struct LayerLink {
  int from = 0;
  std::vector<int> readers;
  std::string name;
};

/// Returns for each stage the index after its last layer. Errors: std::invalid_argument for numbers < 1 or too large.
GPIPE_API std::vector<int> stage_ends(const std::vector<std::int64_t>& balance);

/// Returns the edges of a model cut by a balance: first the activations between neighbouring stages, then the edges of
/// each link that crosses a cut. A reading stage gets the value from the one before it on its worker, else from the one
/// before it on any worker; the stage that makes the value counts as the first. So the value crosses to a worker at
/// most once, and one summed gradient comes back. `placement` has the worker of each stage; if empty, each has its own.
/// Appends the index of each of these edges' links to `cut_links` unless it is null. Errors: as stage_ends();
/// std::out_of_range if a link names a layer that the balance does not have.
GPIPE_API std::vector<Edge> cut_edges(const std::vector<std::int64_t>& balance, const std::vector<LayerLink>& links,
                                      const std::vector<int>& placement = {}, std::vector<int>* cut_links = nullptr);

/// Errors: std::invalid_argument for no layers, or a balance that is not positive or does not sum to their number.
GPIPE_API void check_balance(const std::vector<std::int64_t>& balance, std::size_t layers);

/// Errors: std::invalid_argument unless `chunks` is positive.
GPIPE_API void check_chunks(std::int64_t chunks);

/// Most cells (stages x micro-batches) in a layout. A program of this size takes about a gigabyte.
inline constexpr int kMostCells = 1 << 22;

/// The numbers of stages and micro-batches and the placement: the input of a schedule generator and of the verifier.
struct GPIPE_API Layout {
  int stages = 1;
  int micro_batches = 1;
  /// The worker of each stage. Workers are numbered from 0 without gaps.
  std::vector<int> placement;

  int workers() const;
};

/// The edges of each stage, and the edges that each action takes and puts: F moves data along the edges, B and I move
/// gradients back, R and W exchange nothing. The verifier, the simulator and the executor share these rules.
struct GPIPE_API Wiring {
  Wiring() = default;
  /// REQUIRES: the edges' stages are in 0..stages-1.
  Wiring(int stages, const std::vector<Edge>& edges);

  /// The indices of the edges that an action takes before and puts after it runs, ascending, in this object's memory.
  std::span<const int> takes(const Action& action) const {
    if (action.kind == Kind::R || action.kind == Kind::W) return {};
    return (action.kind == Kind::F ? in : out)[action.stage];
  }
  std::span<const int> puts(const Action& action) const {
    if (action.kind == Kind::R || action.kind == Kind::W) return {};
    return (action.kind == Kind::F ? out : in)[action.stage];
  }

  /// Per stage: indices of the edges that enter it and of those that leave it, ascending.
  std::vector<std::vector<int>> in;
  std::vector<std::vector<int>> out;
};

/// Which part of each worker's list a run executes. kForward and kBackward need Program::two_phase(), so that no edge
/// is put in one part and taken in the other.
enum class Part {
  kAll,
  kForward,   ///< the leading forwards
  kBackward,  ///< all actions after them
};

/// A verified schedule with its edges, ready for the executor and the simulator. Immutable.
class GPIPE_API Program {
 public:
  /// Verifies the schedule (see verifier.h) and combines it with its edges. Errors: std::invalid_argument for what
  /// breaks a rule; for a deadlock, with the blocked actions.
  static Program make(Layout layout, std::vector<Edge> edges, Schedule schedule);

  const Layout& layout() const { return layout_; }
  const std::vector<Edge>& edges() const { return edges_; }
  const Schedule& schedule() const { return schedule_; }
  /// A hash of the schedule.
  std::uint64_t hash() const { return hash_; }
  int workers() const { return static_cast<int>(schedule_.size()); }

  /// Indices into edges() of the edges that enter and leave a stage, ascending.
  const std::vector<int>& in_edges(int stage) const { return wiring_.in[stage]; }
  const std::vector<int>& out_edges(int stage) const { return wiring_.out[stage]; }
  const Wiring& wiring() const { return wiring_; }

  /// Whether the cell has an R. Its F then stores the inputs and builds no graph.
  bool recomputes(int stage, int micro_batch) const {
    return recomputes_[static_cast<std::size_t>(stage) * layout_.micro_batches + micro_batch];
  }
  /// Whether any cell of the stage has an R.
  bool recomputes(int stage) const;
  /// Whether the schedule has any backward actions. False for inference.
  bool has_backward() const { return has_backward_; }
  /// The actions of a worker in a part of the program.
  std::span<const Action> actions(int worker, Part part) const {
    const std::span<const Action> list = schedule_[worker];
    const auto leading = static_cast<std::size_t>(leading_forwards_[worker]);
    if (part == Part::kAll) return list;
    return part == Part::kForward ? list.first(leading) : list.subspan(leading);
  }
  /// Whether every worker has all its F before any other action, so that forward and backward can be separate runs.
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
  std::uint64_t hash_ = 0;
};

}  // namespace gpipe
