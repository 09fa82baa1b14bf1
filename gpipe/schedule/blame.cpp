#include "gpipe/blame.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <numeric>
#include <stdexcept>

#include "gpipe/base/checks.h"
#include "gpipe/base/clock.h"
#include "gpipe/schedule/advice.h"
#include "gpipe/schedule/verifier.h"

namespace gpipe {
namespace {

/// What a simulation can be without.
enum Factor { kJitter, kCores, kLocks, kWires, kRecompute, kImbalance, kSchedule, kFactors };
constexpr std::array kFactorNames = {"jitter", "cores", "locks", "wires", "recompute", "imbalance", "schedule"};
using Without = unsigned;  // a bit per factor

bool has(Without without, Factor factor) { return (without >> factor & 1) != 0; }

constexpr double kNoCost = 1e-3;  // of a step; a smaller difference is rounding

/// An action, from when it could begin. Stages count over all replicas.
struct Node {
  Span span;
  double begin = 0;
  int before = -1;     // the node before it on the worker
  int input = -1;      // the node whose data came last
  int edge = -1;       // of that data
  double came = 0;     // when it came, if its transfer took as long as others
  double between = 0;  // seconds after `before` that the worker sent or received data
  double late = 0;     // seconds after `came`, below 0 if its data came sooner

  double own() const { return span.end - begin - span.queued - span.blocked; }
};

/// The typical seconds of actions that take equal times but for jitter: by stage, kind, and whether the cell recomputes.
using Likes = std::tuple<int, Kind, bool>;
using Typical = std::map<Likes, double>;

/// One step as a graph of actions.
class Step {
 public:
  /// Errors: std::invalid_argument unless the spans, which are sorted by worker and start, make a program.
  Step(const Timeline& timeline, const std::vector<Span>& spans, int stages)
      : stages_(stages), edges_(std::ssize(timeline.edges)), program_(program_of(spans, edges_of(timeline, stages))) {
    if (program_.layout().stages != stages * timeline.replicas) refuse_argument("a replica has no actions");
    places_.resize(static_cast<std::size_t>(program_.layout().stages) * program_.layout().micro_batches * 5, -1);
    for (const auto& span : spans) {
      Node node{.span = span, .begin = span.start - span.lead};
      if (!nodes_.empty() && nodes_.back().span.worker == span.worker) {
        node.before = static_cast<int>(nodes_.size()) - 1;
        node.begin = std::max(node.begin, nodes_.back().span.end);
      }
      place(span.action) = static_cast<int>(nodes_.size());
      nodes_.push_back(node);
    }
    start_ = std::ranges::min(nodes_, {}, &Node::begin).begin;
    last_ =
        static_cast<int>(std::ranges::max_element(nodes_, {}, [](auto& it) { return it.span.end; }) - nodes_.begin());
    find_pause();
    transfers_.resize(program_.edges().size());
    for (auto& node : nodes_) find_input(node);
    find_transfers();
    for (auto& node : nodes_) find_input(node);
    for (auto& node : nodes_) {
      const double free = node.before < 0 ? start_ : nodes_[node.before].span.end;
      if (binding(node) == node.before) {
        node.between = node.begin - free - paused(free, node.begin);
      } else {
        node.late = node.begin - node.came - paused(nodes_[node.input].span.end, node.begin);
      }
    }
  }

  double start() const { return start_; }
  double end() const { return nodes_[last_].span.end; }
  const std::vector<Node>& nodes() const { return nodes_; }
  /// Seconds from the first action to the last, without what the caller does between forward and backward.
  double makespan() const { return end() - start_ - paused(start_, end()); }

  Likes likes(const Node& node) const {
    const auto [kind, stage, micro_batch] = node.span.action;
    return {stage, kind, program_.recomputes(stage, micro_batch)};
  }

  /// The waits from `opens` to the end of the step.
  std::vector<Wait> waits(double opens) const {
    std::vector<Wait> waits;
    const auto add = [&](int worker, double from, double to, const Node* taker) {
      from = std::max(from, opens);
      if (to > from) waits.push_back({worker, from, to, explain(taker, from, to)});
    };
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      const auto& node = nodes_[i];
      add(node.span.worker, node.before < 0 ? opens : nodes_[node.before].span.end, node.begin, &node);
      const bool is_last = i + 1 == nodes_.size() || nodes_[i + 1].before < 0;
      if (is_last) add(node.span.worker, node.span.end, end(), nullptr);
    }
    return waits;
  }

  std::vector<Piece> critical_path() const { return explain(nullptr, start_, end()); }

  /// Of the first replica.
  std::vector<double> transfers() const { return {transfers_.begin(), transfers_.begin() + edges_}; }

  /// Seconds of the step in a simulation without some factors, if actions take `scale` times as long.
  double simulate(Without without, const Typical& typical, absl::FunctionRef<double(const Action&)> scale) const {
    std::vector<double> seconds(nodes_.size());
    std::vector<double> loads(program_.workers());
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      const auto& node = nodes_[i];
      if (has(without, kRecompute) && node.span.action.kind == Kind::R) continue;
      seconds[i] = has(without, kJitter) ? typical.at(likes(node)) : node.own();
      if (!has(without, kCores)) seconds[i] += node.span.queued;
      if (!has(without, kLocks)) seconds[i] += node.span.blocked;
      seconds[i] *= scale(node.span.action);
      loads[node.span.worker] += seconds[i];
    }
    const double mean = std::accumulate(loads.begin(), loads.end(), 0.0) / program_.workers();
    if (has(without, kSchedule)) return has(without, kImbalance) ? mean : std::ranges::max(loads);
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      const double load = loads[nodes_[i].span.worker];
      if (has(without, kImbalance) && load > 0) seconds[i] *= mean / load;
      if (has(without, kWires)) continue;
      seconds[i] += nodes_[i].between + (has(without, kJitter) ? 0 : nodes_[i].late);
    }
    const auto latencies = has(without, kWires) ? std::vector<double>(transfers_.size()) : transfers_;
    const auto run = replay(
        program_.layout(), program_.edges(), program_.wiring(), program_.schedule(),
        [&](const Action& action) { return seconds[place(action)]; }, latencies);
    double last = 0;
    for (const auto& spans : run.spans) last = std::max(last, spans.empty() ? 0 : spans.back().end);
    return last;
  }

 private:
  static std::vector<Edge> edges_of(const Timeline& timeline, int stages) {
    std::vector<Edge> edges;
    for (int replica = 0; replica < timeline.replicas; ++replica) {
      for (const auto& [from, to, name] : timeline.edges) {
        edges.push_back({from + replica * stages, to + replica * stages, name});
      }
    }
    return edges;
  }

  int& place(const Action& action) { return places_[index(action)]; }
  int place(const Action& action) const { return places_[index(action)]; }
  std::size_t index(const Action& action) const {
    const auto cell = static_cast<std::size_t>(action.stage) * program_.layout().micro_batches + action.micro_batch;
    return cell * 5 + static_cast<std::size_t>(action.kind);
  }

  void find_input(Node& node) const {
    node.input = -1;
    const auto [kind, stage, micro_batch] = node.span.action;
    for (const int edge : program_.wiring().takes(node.span.action)) {
      const auto& ends = program_.edges()[edge];
      int from = place({kind == Kind::F ? Kind::F : Kind::B, kind == Kind::F ? ends.from : ends.to, micro_batch});
      if (from < 0) from = place({Kind::I, ends.to, micro_batch});
      const double came = nodes_[from].span.end + transfers_[edge];
      if (node.input >= 0 && node.came >= came) continue;
      node.input = from;
      node.edge = edge;
      node.came = came;
    }
  }

  /// Finds when the caller had all outputs and had not begun the backward.
  void find_pause() {
    if (!program_.two_phase() || !program_.has_backward()) return;
    double forwards_end = start_;
    double backwards_start = end();
    for (const auto& node : nodes_) {
      const bool forward = node.span.action.kind == Kind::F;
      if (forward) forwards_end = std::max(forwards_end, node.span.end);
      if (!forward) backwards_start = std::min(backwards_start, node.begin);
    }
    pause_ = {forwards_end, std::max(forwards_end, backwards_start)};
  }
  double paused(double from, double to) const {
    return std::max(0.0, std::min(to, pause_.second) - std::max(from, pause_.first));
  }

  /// What a node waited for: `before` or `input`; -1 if there is neither.
  int binding(const Node& node) const {
    if (node.before < 0 || node.input < 0) return std::max(node.before, node.input);
    return node.came > nodes_[node.before].span.end ? node.input : node.before;
  }

  void find_transfers() {
    std::vector<std::vector<double>> seen(program_.edges().size());
    for (const auto& node : nodes_) {
      if (node.input < 0 || binding(node) != node.input || node.input == node.before) continue;
      const double sent = nodes_[node.input].span.end;
      seen[node.edge].push_back(std::max(0.0, node.begin - sent - paused(sent, node.begin)));
    }
    for (std::size_t e = 0; e < seen.size(); ++e) transfers_[e] = median(std::move(seen[e]));
  }

  Piece piece(Cause cause, double seconds, int of, int edge = -1) const {
    const auto& span = nodes_[of].span;
    const auto [kind, stage, micro_batch] = span.action;
    return {cause, span.worker, {kind, stage % stages_, micro_batch}, edge < 0 ? -1 : edge % edges_, seconds};
  }

  /// Walks back from `to`, when `taker` began or, if that is null, the step ended, to `from`.
  std::vector<Piece> explain(const Node* taker, double from, double to) const {
    std::vector<Piece> pieces;
    const auto add = [&](const Piece& piece) {
      if (piece.seconds > 0) pieces.push_back(piece);
    };
    for (double time = to; time > from;) {
      const int by = taker == nullptr ? last_ : binding(*taker);
      if (by < 0) {
        add({.cause = Cause::kCaller, .seconds = time - from});
        break;
      }
      const auto& span = nodes_[by].span;
      const double begin = nodes_[by].begin;
      const double sent = std::clamp(span.end, from, time);
      const double pause = paused(sent, time);
      const auto puts = program_.wiring().puts(span.action);
      const int on = taker != nullptr && taker->input == by ? taker->edge : puts.empty() ? -1 : puts.front();
      add({.cause = Cause::kCaller, .seconds = pause});
      add(piece(Cause::kWire, time - sent - pause, by, on));
      const double ran_from = std::clamp(begin, from, sent);
      const double share = sent > ran_from ? (sent - ran_from) / (span.end - begin) : 0;
      add(piece(Cause::kBlocked, share * span.blocked, by));
      add(piece(Cause::kQueued, share * span.queued, by));
      add(piece(Cause::kWork, sent - ran_from - share * (span.blocked + span.queued), by));
      time = ran_from;
      taker = &nodes_[by];
    }
    return pieces;
  }

  const int stages_;  // of one replica
  const int edges_;
  const Program program_;
  std::vector<Node> nodes_;
  std::vector<int> places_;        // of each action in nodes_
  std::vector<double> transfers_;  // seconds per edge until workers that waited for its data could take it
  double start_ = 0;
  int last_ = 0;  // the node that ends last
  std::pair<double, double> pause_;
};

double unscaled(const Action& /*action*/) { return 1; }

/// The Shapley values of the factors: each is the mean of what the step gains without it, over all orders of leaving
/// factors out. So they sum to what it gains without any.
std::map<std::string, double> parts_of(const Step& step, const Typical& typical) {
  constexpr unsigned kAll = 1U << kFactors;
  std::array<double, kAll> seconds{};
  for (Without without = 0; without < kAll; ++without) {
    seconds[without] = step.simulate(without, typical, unscaled);
    if (!has(without, kSchedule) || has(without, kWires)) continue;
    // A better schedule would not make wires faster.
    const Without scheduled = without ^ 1U << kSchedule;
    seconds[without] += seconds[scheduled] - seconds[scheduled | 1U << kWires];
  }
  std::array<double, kFactors> orders{};  // of which a set of this size precedes a factor, as a share
  for (int size = 0; size < kFactors; ++size)
    orders[size] = std::tgamma(size + 1) * std::tgamma(kFactors - size) / std::tgamma(kFactors + 1);
  std::map<std::string, double> parts{{"work", seconds[kAll - 1]}};
  for (int factor = 0; factor < kFactors; ++factor) {
    double& part = parts[kFactorNames[factor]];
    for (Without without = 0; without < kAll; ++without) {
      if (has(without, Factor(factor))) continue;
      part += orders[std::popcount(without)] * (seconds[without] - seconds[without | 1U << factor]);
    }
  }
  return parts;
}

std::vector<Slack> slack_of(const Step& step, const Typical& typical, double replayed, int stages) {
  std::vector<Slack> slack;
  std::map<std::pair<int, Kind>, bool> seen;
  for (const auto& node : step.nodes()) {
    const auto [kind, stage, micro_batch] = node.span.action;
    if (!seen.emplace(std::pair(stage % stages, kind), true).second) continue;
    const auto with = [&, kind = kind, stage = stage](double factor) {
      return step.simulate(0, typical, [&](const Action& action) {
        return action.kind == kind && action.stage % stages == stage % stages ? factor : 1;
      });
    };
    double slower = 0;
    for (double more = 1; more > 1. / 128; more /= 2) {
      if (slower + more <= 1 && with(1 + slower + more) <= replayed * (1 + kNoCost)) slower += more;
    }
    slack.push_back({stage % stages, kind, slower, replayed - with(0.9)});
  }
  std::ranges::sort(slack, {}, [](const Slack& each) { return std::pair(each.stage, each.kind); });
  return slack;
}

}  // namespace

std::vector<StepBlame> blame(const Timeline& timeline) {
  int stages = 0;
  for (const auto& span : timeline.spans) stages = std::max(stages, span.action.stage + 1);
  std::map<int, std::vector<Span>> spans;
  for (Span span : timeline.spans) {
    if (timeline.replicas > 1) span.action.stage += span.worker / (timeline.workers / timeline.replicas) * stages;
    spans[span.step].push_back(span);
  }
  std::map<int, Step> steps;
  std::map<Likes, std::vector<double>> times;
  for (auto& [number, of_step] : spans) {
    std::ranges::stable_sort(of_step, {}, [](const Span& span) { return std::pair(span.worker, span.start); });
    try {
      const auto& step = steps.try_emplace(number, timeline, of_step, stages).first->second;
      for (const auto& node : step.nodes()) times[step.likes(node)].push_back(node.own());
    } catch (const std::invalid_argument&) {  // not all actions ran
    }
  }
  Typical typical;
  for (const auto& [likes, seconds] : times) typical[likes] = median(seconds);
  std::vector<StepBlame> blamed;
  for (const auto& [number, step] : steps) {
    const double opens = blamed.empty() ? step.start() : std::min(step.start(), blamed.back().end);
    const double replayed = step.simulate(0, typical, unscaled);
    auto parts = parts_of(step, typical);
    parts["caller"] = step.end() - opens - step.makespan();
    blamed.push_back({number, opens, step.end(), step.waits(opens), step.critical_path(), std::move(parts), replayed,
                      step.transfers()});
  }
  if (!blamed.empty()) {
    blamed.back().slack = slack_of(steps.rbegin()->second, typical, blamed.back().replayed, stages);
  }
  return blamed;
}

}  // namespace gpipe
