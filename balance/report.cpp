#include "balance/report.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <stdexcept>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "balance/stage_cost.h"

namespace gpipe {
namespace {

/// Columns as wide as their widest cell, the first two flush left, the others flush right.
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

/// Three digits.
std::string number(double value) { return absl::StrFormat("%.*f", value < 9.995 ? 2 : value < 99.95 ? 1 : 0, value); }

LayerProfile sum(const std::vector<LayerProfile>& layers, int first, int end) {
  LayerProfile sum;
  for (int i = first; i < end; ++i) {
    sum.forward += layers[i].forward;
    sum.recompute += layers[i].recompute;
    sum.backward += layers[i].backward;
    sum.saved += layers[i].saved;
    sum.parameters += layers[i].parameters;
  }
  return sum;
}

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

}  // namespace

std::string profile_table(const Profile& profile, const std::vector<std::int64_t>& balance) {
  Table table({"layer", "name", "forward", "recompute", "backward", "output", "saved", "parameters"});
  const auto layers = static_cast<int>(profile.layers.size());
  int first = 0;
  int stage = 0;
  for (const int end : balance.empty() ? std::vector<int>{layers} : StageCost(profile).ends(balance)) {
    for (int i = first; i < end; ++i) {
      const auto& layer = profile.layers[i];
      table.add(row(absl::StrCat(i), layer.name, layer, bytes_to_text(layer.output)));
    }
    table.add(row("", balance.empty() ? "all" : absl::StrCat("stage ", stage++), sum(profile.layers, first, end), ""));
    first = end;
  }
  return table.text();
}

std::string prediction_table(const Prediction& prediction) {
  const auto ends = stage_ends(prediction.balance);
  if (prediction.stages.size() != ends.size() || prediction.bytes.size() != ends.size()) {
    throw std::invalid_argument(
        absl::StrFormat("[balance] a prediction has a balance of %d stages, seconds of %d and bytes of %d", ends.size(),
                        prediction.stages.size(), prediction.bytes.size()));
  }
  Table table({"stage", "layers", "a micro-batch", "memory"});
  int first = 0;
  for (std::size_t stage = 0; stage < ends.size(); ++stage) {
    table.add({absl::StrCat(stage), absl::StrCat(first, "-", ends[stage] - 1),
               seconds_to_text(prediction.stages[stage]), bytes_to_text(prediction.bytes[stage])});
    first = ends[stage];
  }
  return absl::StrFormat("%sa step: %s, bubble %.0f %%\n", table.text(), seconds_to_text(prediction.seconds),
                         100 * prediction.bubble);
}

std::string candidate_table(const std::vector<Candidate>& candidates) {
  Table table({"balance", "checkpoint", "chunks", "a step", "bubble", "memory of a stage", ""});
  for (const auto& candidate : candidates) {
    table.add({balance_to_text(candidate.balance), to_string(candidate.checkpoint), absl::StrCat(candidate.chunks),
               seconds_to_text(candidate.seconds), absl::StrFormat("%.0f %%", 100 * candidate.bubble),
               bytes_to_text(std::accumulate(candidate.bytes.begin(), candidate.bytes.end(), std::int64_t{0},
                                             [](auto a, auto b) { return std::max(a, b); })),
               candidate.fits ? "" : "too large"});
  }
  return table.text();
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
