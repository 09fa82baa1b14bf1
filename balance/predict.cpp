#include "balance/predict.h"

#include <stdexcept>
#include <string>
#include <utility>

#include "gpipe/schedule/generators.h"
#include "gpipe/schedule/schedules.h"
#include "gpipe/schedule/simulator.h"

namespace gpipe {

Prediction predict(const Profile& profile, const std::vector<std::int64_t>& balance, const RunOptions& options) {
  const StageCost stage(profile);
  stage.check(options);
  const auto costs = stage.costs(balance, options);
  const int stages = static_cast<int>(balance.size());
  const Layout layout{stages, static_cast<int>(options.chunks), looped_placement(stages, stages)};
  const auto program = make_program(layout, stage.edges(balance), fill_drain(layout, options.checkpoint));
  auto simulation = simulate(program, costs);
  Prediction prediction{.balance = balance,
                        .seconds = simulation.makespan,
                        .bubble = simulation.bubble,
                        .bytes = simulation.timeline.peak_bytes(),
                        .timeline = std::move(simulation.timeline)};
  auto alone = options;
  alone.bandwidth = 0;
  int first = 0;
  for (const int end : stage.ends(balance)) {
    prediction.bytes[prediction.stages.size()] += stage.static_bytes(first, end);
    prediction.stages.push_back(stage.seconds(first, end, alone));
    first = end;
  }
  return prediction;
}

}  // namespace gpipe
