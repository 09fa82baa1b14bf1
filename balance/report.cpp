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
#include "gpipe/schedule_source.h"
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
          seconds_to_text(layer.backward),
          output,
          bytes_to_text(layer.saved),
          bytes_to_text(layer.parameters)};
}

// How many layers are recomputed, at least for some micro-batches.
std::string recomputed_of(const Plan& plan) {
  std::int64_t layers = 0;
  std::int64_t all = 0;
  for (std::size_t s = 0; s < plan.balance.size(); ++s) {
    all += plan.balance[s];
    if (plan.checkpoint.of(static_cast<int>(s)) != Checkpoint::kNever) layers += plan.balance[s];
  }
  return layers == 0 ? "none" : absl::StrCat(layers, " of ", all, " layers");
}

}  // namespace

std::string schedule_to_text(const Plan& plan) {
  const bool is_listed = has_lists(plan.schedule) && !plan.schedule.starts_with('@');
  const std::string name = is_listed ? "lists" : plan.schedule;
  std::vector<int> placement;  // without segments
  for (const int worker : plan.placement) {
    if (placement.empty() || placement.back() != worker) placement.push_back(worker);
  }
  const auto stages = static_cast<int>(placement.size());
  const auto workers = static_cast<int>(plan.bytes.size());
  if (stages <= workers || name.starts_with('@')) return name;
  const bool is_looped = stages % workers == 0 && placement == looped_placement(workers, stages);
  if (is_looped) return absl::StrCat(name, ", ", stages / workers, " per worker");
  const Layout looped{2 * workers, 1, looped_placement(workers, 2 * workers)};
  const bool is_always_v = !is_listed && !schedule_rule(name).misfit(looped).empty();
  return is_always_v ? name : name + ", V";
}

std::string profile_table(const Profile& profile, const std::vector<std::int64_t>& balance) {
  Table table({"layer", "name", "forward", "backward", "output", "saved", "parameters", "cut"});
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

std::string plan_table(const Plans& plans, int rows) {
  std::set<std::string> seen;
  std::vector<Plan> first;  // of each schedule and number of replicas
  for (const auto& plan : plans.plans) {
    if (seen.insert(absl::StrCat(schedule_to_text(plan), " ", plan.replicas)).second) first.push_back(plan);
  }
  const bool replicated = std::ranges::any_of(first, [](const Plan& plan) { return plan.replicas > 1; });
  std::vector<std::string> head = {"schedule", "layers per worker", "chunks", "recomputed", "step", "bubble", "memory"};
  head.emplace_back("crossing");
  if (replicated) head.insert(head.end(), {"replicas", "sums"});
  const auto& whole = plans.unpartitioned;
  if (whole) head.emplace_back("speed-up");
  Table table(std::move(head));
  const auto add = [&](const std::string& schedule, const Plan& plan, const std::string& note) {
    std::vector<std::int64_t> layers;  // of consecutive stages of a worker
    for (std::size_t s = 0; s < plan.balance.size(); ++s) {
      const bool is_next = s > 0 && plan.placement[s] == plan.placement[s - 1];
      is_next ? layers.back() += plan.balance[s] : layers.emplace_back(plan.balance[s]);
    }
    std::vector<std::string> cells = {schedule,
                                      balance_to_text(layers),
                                      absl::StrCat(plan.chunks),
                                      recomputed_of(plan),
                                      seconds_to_text(plan.seconds),
                                      absl::StrFormat("%.0f %%", 100 * plan.bubble),
                                      bytes_to_text(std::ranges::max(plan.bytes)),
                                      bytes_to_text(plan.crossing)};
    if (replicated) cells.insert(cells.end(), {absl::StrCat(plan.replicas), seconds_to_text(plan.reduction)});
    if (whole) cells.push_back(absl::StrFormat("%.2f", whole->seconds / plan.seconds));
    cells.push_back(absl::StrCat(note, plan.fits() ? "" : "too large"));
    table.add(std::move(cells));
  };
  for (const auto& plan : absl::MakeConstSpan(first).subspan(0, rows)) add(schedule_to_text(plan), plan, "");
  if (whole) add("", *whole, whole->fits() ? "one device" : "one device, ");
  auto text = absl::StrCat(
      table.text(),
      "The best of each schedule, predicted. recomputed: layers that run again in the backward. step: forward and "
      "backward of one mini-batch. bubble: share of the step during which workers wait. memory: peak of the worker "
      "that "
      "needs the most. crossing: bytes that a forward of the mini-batch sends to other workers.",
      replicated ? " sums: the part of the step after the last backward, until all gradients are summed." : "",
      whole ? " speed-up: over the unpartitioned model on one device." : "", "\n");
  if (whole && whole->fits() && !first.empty() && first.front().seconds > whole->seconds) {
    absl::StrAppendFormat(
        &text, "Plain PyTorch on one device, on a CPU with all threads, is predicted to be %.2f times as fast.\n",
        first.front().seconds / whole->seconds);
  }
  if (!plans.fits()) return text + plans.reason + '\n';
  const double seconds = plans.best().seconds;
  absl::StrAppendFormat(&text, "No plan takes less than %s, %.0f %% of the first one's step.\n",
                        seconds_to_text(plans.least_seconds), 100 * plans.least_seconds / seconds);
  if (plans.more_memory_saves > 0) {
    absl::StrAppendFormat(&text, "With 5 %% more memory on each device, a step would take %s less.\n",
                          seconds_to_text(plans.more_memory_saves));
  }
  return text;
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
