#include "gpipe/schedule/merged.h"

#include "gpipe/schedules.h"

namespace gpipe {

bool is_v(const Layout& layout) { return layout.stages % 2 == 0 && layout.placement == v_placement(layout.stages); }

Merged merge_segments(const Layout& layout) {
  Merged merged{{0, layout.micro_batches, {}}, {}};
  for (int s = 0; s < layout.stages; ++s) {
    if (s > 0 && layout.placement[s] == layout.placement[s - 1]) continue;
    merged.layout.placement.push_back(layout.placement[s]);
    merged.firsts.push_back(s);
  }
  merged.layout.stages = static_cast<int>(merged.firsts.size());
  merged.firsts.push_back(layout.stages);
  return merged;
}

std::optional<Merged> merge_as_v(const Layout& layout) {
  auto merged = merge_segments(layout);
  const int middle = merged.layout.stages / 2;
  const int segments = merged.firsts[middle + 1] - merged.firsts[middle];
  if (merged.layout.stages % 2 == 1 && segments > 1) {
    merged.firsts.insert(merged.firsts.begin() + middle + 1, merged.firsts[middle] + (segments + 1) / 2);
    merged.layout.placement.insert(merged.layout.placement.begin() + middle, merged.layout.placement[middle]);
    ++merged.layout.stages;
  }
  return is_v(merged.layout) ? std::optional(merged) : std::nullopt;
}

Schedule with_segments(const Schedule& schedule, const std::vector<int>& firsts) {
  Schedule lists(schedule.size());
  for (std::size_t w = 0; w < schedule.size(); ++w) {
    for (const auto& [kind, stage, m] : schedule[w]) {
      const int first = firsts[stage];
      const int end = firsts[stage + 1];
      for (int i = 0; i < end - first; ++i) {
        lists[w].push_back({kind, kind == Kind::F ? first + i : end - 1 - i, m});
      }
    }
  }
  return lists;
}

}  // namespace gpipe
