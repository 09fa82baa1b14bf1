#include "balance/report.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "balance/cut.h"
#include "balance/stage_cost.h"
#include "gpipe/base/checks.h"
#include "gpipe/schedules.h"

namespace gpipe {
namespace {

/// Aligns columns: the first two to the left, the others to the right.
class Table {
 public:
  explicit Table(std::vector<std::string> head) { add(std::move(head)); }

  void add(std::vector<std::string> cells) {
    widths_.resize(std::max(widths_.size(), cells.size()));
    for (std::size_t i = 0; i < cells.size(); ++i) widths_[i] = std::max(widths_[i], cells[i].size());
    rows_.push_back(std::move(cells));
  }

  std::string text() const {
    std::string text;
    for (const auto& cells : rows_) {
      std::string line;
      for (std::size_t i = 0; i < cells.size(); ++i) {
        const std::string space(widths_[i] - cells[i].size(), ' ');
        absl::StrAppend(&line, i > 0 ? "  " : "", i < 2 ? cells[i] : space, i < 2 ? space : cells[i]);
      }
      line.erase(line.find_last_not_of(' ') + 1);
      absl::StrAppend(&text, line, "\n");
    }
    return text;
  }

 private:
  std::vector<std::size_t> widths_;
  std::vector<std::vector<std::string>> rows_;
};

/// Formats three significant digits.
std::string number(double value) { return absl::StrFormat("%.*f", value < 9.995 ? 2 : value < 99.95 ? 1 : 0, value); }

std::vector<std::string> row(std::string index, std::string name, const LayerProfile& layer,
                             const std::string& output) {
  return {std::move(index),
          std::move(name),
          seconds_to_text(layer.forward),
          seconds_to_text(layer.recompute),
          seconds_to_text(layer.backward),
          output,
          bytes_to_text(layer.saved),
          bytes_to_text(layer.parameters)};
}

// E.g. "zb_v", "gpipe, 2 per worker" or "greedy, V".
std::string schedule_of(const Candidate& candidate) {
  const auto name = candidate.schedule.empty() ? "forward" : candidate.schedule;
  const auto& placement = candidate.placement;
  const auto stages = static_cast<int>(placement.size());
  const auto workers = static_cast<int>(candidate.bytes.size());
  if (placement.empty() || name.starts_with('@')) return name;
  const auto looped = looped_placement(workers, stages);
  if (placement == looped) return stages == workers ? name : absl::StrCat(name, ", ", stages / workers, " per worker");
  const auto& rule = schedule_rule(candidate.schedule.empty() ? kFillAndDrain : candidate.schedule);
  if (!rule.misfit({stages, 1, looped}).empty()) return name;  // it has one placement
  if (stages == 2 * workers && placement == v_placement(stages)) return name + ", V";
  return absl::StrCat(name, " on ", absl::StrJoin(placement, ","));
}

std::string percent(double part) { return absl::StrFormat("%.0f %%", 100 * part); }

/// A line that tells that no candidate is as fast as the unpartitioned model, or nothing.
std::string advice(const std::vector<Candidate>& candidates, const std::optional<Candidate>& unpartitioned) {
  if (!unpartitioned || !unpartitioned->fits || candidates.empty()) return "";
  const double faster = candidates.front().seconds / unpartitioned->seconds;
  if (faster <= 1) return "";
  return absl::StrFormat(
      "Plain PyTorch on one device, on a CPU with all threads, is predicted to be %.2f times as fast as the best "
      "pipeline.\n",
      faster);
}

}  // namespace

std::string profile_table(const Profile& profile, const std::vector<std::int64_t>& balance) {
  Table table({"layer", "name", "forward", "recompute", "backward", "output", "saved", "parameters", "cut"});
  const auto cuts = cut_bytes(profile);
  const auto layers = static_cast<int>(profile.layers.size());
  const StageCost cost(profile);
  for (int first = 0, stage = 0; const int end : balance.empty() ? std::vector<int>{layers} : cost.ends(balance)) {
    for (int i = first; i < end; ++i) {
      const auto& layer = profile.layers[i];
      auto cells = row(absl::StrCat(i), layer.name, layer, bytes_to_text(layer.output));
      if (i + 1 < layers) cells.push_back(cuts[i] ? bytes_to_text(*cuts[i]) : "-");
      if (i + 1 == end && end < layers) cells.emplace_back("<- cut here");
      table.add(std::move(cells));
    }
    table.add(row("", balance.empty() ? "all" : absl::StrCat("stage ", stage++), cost.sum(first, end), ""));
    first = end;
  }
  return absl::StrFormat(
      "Per micro-batch of %d %s, measured on %s with %d %s at once.\n%s"
      "output: bytes passed to the next layer. saved: bytes kept for the backward. parameters: bytes without "
      "gradients. cut: bytes that a cut after the layer sends forward, of the output, skips and lent parameters; -: "
      "cannot be cut.\n",
      profile.samples, profile.samples == 1 ? "sample" : "samples", profile.device, profile.workers,
      profile.workers == 1 ? "stage" : "stages", table.text());
}

std::string prediction_table(const Prediction& prediction) {
  const auto ends = stage_ends(prediction.balance);
  const auto& placement = prediction.placement;
  if (prediction.stages.size() != ends.size() || placement.size() != ends.size()) {
    refuse_argument("the prediction's fields have different numbers of stages: balance ", ends.size(), ", seconds ",
                    prediction.stages.size(), ", placement ", placement.size());
  }
  const bool shared = prediction.bytes.size() < ends.size();  // workers with several stages
  Table table(shared ? std::vector<std::string>{"stage", "layers", "worker", "micro-batch", "memory"}
                     : std::vector<std::string>{"stage", "layers", "micro-batch", "memory"});
  int first = 0;
  for (std::size_t stage = 0; stage < ends.size(); ++stage) {
    std::vector<std::string> cells = {absl::StrCat(stage), absl::StrCat(first, "-", ends[stage] - 1)};
    if (shared) cells.push_back(absl::StrCat(placement[stage]));
    cells.push_back(seconds_to_text(prediction.stages[stage]));
    const auto first_of_worker = std::find(placement.begin(), placement.end(), placement[stage]) - placement.begin();
    const bool names_worker = static_cast<std::size_t>(first_of_worker) == stage;
    cells.push_back(names_worker ? bytes_to_text(prediction.bytes.at(placement[stage])) : "");
    table.add(std::move(cells));
    first = ends[stage];
  }
  return absl::StrFormat(
      "%sstep: %s, bubble %.0f %%\n"
      "micro-batch: a stage's work for one micro-batch. memory: peak of a %s. step: forward and backward of one "
      "mini-batch. bubble: share of the step during which workers wait.\n",
      table.text(), seconds_to_text(prediction.seconds), 100 * prediction.bubble, shared ? "worker" : "stage");
}

std::string candidate_table(const std::vector<Candidate>& candidates, const std::optional<Candidate>& unpartitioned,
                            int rows) {
  std::set<std::string> seen;
  std::vector<Candidate> first;  // of each schedule
  for (const auto& candidate : candidates) {
    if (seen.insert(schedule_of(candidate)).second) first.push_back(candidate);
  }
  const bool several = first.size() > 1;
  std::vector<std::string> head = {"balance", "checkpoint", "chunks", "step", "bubble", "memory"};
  if (several) head.insert(head.begin(), "schedule");
  if (several) head.emplace_back("crossing");
  if (unpartitioned) head.emplace_back("speed-up");
  Table table(std::move(head));
  const auto add = [&](const std::string& schedule, const Candidate& candidate, const std::string& note) {
    const auto most = std::max_element(candidate.bytes.begin(), candidate.bytes.end());
    std::vector<std::string> cells = {
        balance_to_text(candidate.balance), to_string(candidate.checkpoint),
        absl::StrCat(candidate.chunks),     seconds_to_text(candidate.seconds),
        percent(candidate.bubble),          bytes_to_text(most == candidate.bytes.end() ? 0 : *most)};
    if (several) cells.insert(cells.begin(), schedule);
    if (several) cells.push_back(bytes_to_text(candidate.crossing));
    if (unpartitioned) cells.push_back(absl::StrFormat("%.2f", unpartitioned->seconds / candidate.seconds));
    cells.push_back(absl::StrCat(note, candidate.fits ? "" : "too large"));
    table.add(std::move(cells));
  };
  const absl::Span<const Candidate> all = several ? std::as_const(first) : candidates;
  for (const auto& candidate : all.subspan(0, rows)) {
    add(schedule_of(candidate), candidate, "");
  }
  if (unpartitioned) add("", *unpartitioned, unpartitioned->fits ? "one device" : "one device, ");
  return absl::StrCat(
      table.text(), several ? "The best of each schedule. " : "",
      "step: forward and backward of one mini-batch. bubble: share of the step during which workers wait. memory: "
      "peak of the worker that needs the most.",
      several ? " crossing: bytes that a forward of the mini-batch sends to other workers." : "",
      unpartitioned ? " speed-up: over the unpartitioned model on one device." : "", "\n",
      advice(candidates, unpartitioned));
}

std::string plan_table(const ClusterPlan& plan) {
  Table table(
      {"replicas", "schedule", "workers", "stages", "checkpoint", "chunks", "step", "bubble", "sums", "memory"});
  for (const auto& candidate : plan.candidates) {
    table.add({absl::StrCat(candidate.replicas), schedule_of(candidate), absl::StrCat(candidate.bytes.size()),
               absl::StrCat(candidate.balance.size()), to_string(candidate.checkpoint), absl::StrCat(candidate.chunks),
               seconds_to_text(candidate.seconds), percent(candidate.bubble), seconds_to_text(candidate.reduction),
               bytes_to_text(std::ranges::max(candidate.bytes)), candidate.fits ? "" : "too large"});
  }
  const auto& first = plan.candidates.front();
  return absl::StrCat(
      table.text(),
      "The best for each number of replicas. All figures are predicted. workers, stages: of a replica. chunks: "
      "micro-batches of a replica. step: forward and backward of one mini-batch, until the replicas have summed the "
      "gradients. sums: the part of it after the last backward. bubble: share of the step during which workers wait. "
      "memory: peak of the device that needs the most.\nbalance of the first: ",
      balance_to_text(first.balance), "\n");
}

std::string bytes_to_text(std::int64_t bytes) {
  double value = static_cast<double>(bytes);
  for (const char* unit : {"B", "KiB", "MiB", "GiB"}) {
    if (std::abs(value) < 999.5) return unit[0] == 'B' ? absl::StrCat(bytes, " B") : number(value) + " " + unit;
    value /= 1024;
  }
  return number(value) + " TiB";
}

std::string seconds_to_text(double seconds) {
  if (seconds < 0.9995e-3) return number(seconds * 1e6) + " us";
  if (seconds < 0.9995) return number(seconds * 1e3) + " ms";
  return number(seconds) + " s";
}

std::string balance_to_text(const std::vector<std::int64_t>& balance) { return absl::StrJoin(balance, ","); }

}  // namespace gpipe
