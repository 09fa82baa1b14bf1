#include <array>
#include <nlohmann/json.hpp>

#include "gpipe/base/clock.h"
#include "gpipe/blame.h"
#include "gpipe/schedule/advice.h"

namespace gpipe {
namespace {

nlohmann::json to_json(const Piece& piece) {
  const auto [kind, stage, micro_batch] = piece.action;
  constexpr std::array kCauses = {"work", "queued", "blocked", "wire", "caller"};
  const auto* cause = kCauses[static_cast<std::size_t>(piece.cause)];
  return {cause, piece.worker, stage, std::string(1, to_char(kind)), micro_batch, piece.edge, piece.seconds};
}

nlohmann::json to_json(const std::vector<Piece>& pieces) {
  auto list = nlohmann::json::array();
  for (const auto& piece : pieces) list.push_back(to_json(piece));
  return list;
}

nlohmann::json to_json(const std::vector<Advice>& advice) {
  auto list = nlohmann::json::array();
  for (const auto& [change, seconds, low, high] : advice) list.push_back({change, seconds, low, high});
  return list;
}

}  // namespace

std::string to_json_lines(const Timeline& timeline) {
  std::string lines;
  const auto steps = blame(timeline);
  const auto gained = gains(timeline, steps);
  std::vector<double> seconds;
  for (const auto& step : steps) seconds.push_back(step.end - step.start);
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const auto& [step, start, end, waits, critical_path, parts, replayed, transfers, slack] = steps[i];
    nlohmann::json line = {{"step", step},   {"start", start},      {"end", end}, {"workers", timeline.workers},
                           {"parts", parts}, {"replayed", replayed}};
    for (const auto& edge : timeline.edges) line["edges"].push_back({edge.from, edge.to, edge.name});
    for (const auto& span : timeline.spans) {
      if (span.step != step) continue;
      const auto [kind, stage, m] = span.action;
      const auto [before, peak, after] = span.bytes;
      line["spans"].push_back({span.worker, stage, std::string(1, to_char(kind)), m, span.start, span.end, span.lead,
                               span.queued, span.blocked, before, peak, after});
    }
    line["waits"] = nlohmann::json::array();
    for (const auto& wait : waits) line["waits"].push_back({wait.worker, wait.start, wait.end, to_json(wait.pieces)});
    line["critical_path"] = to_json(critical_path);
    line["gains"] = gained[i];
    if (i + 1 == steps.size()) {
      line["advice"] = to_json(advice(gained, median(seconds)));
      for (const auto& layer : timeline.layers) line["layers"].push_back({layer.stage, layer.seconds});
    }
    for (const auto& each : slack) {
      line["slack"].push_back({each.stage, std::string(1, to_char(each.kind)), each.slower, each.gain});
    }
    lines += line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + '\n';
  }
  return lines;
}

}  // namespace gpipe
