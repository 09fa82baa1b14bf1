#include "gpipe/schedule/schedule_source.h"

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <stdexcept>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "gpipe/schedules.h"

namespace gpipe {
namespace {

bool has_recomputes(const Schedule& schedule) {
  return std::any_of(schedule.begin(), schedule.end(), [](const auto& list) {
    return std::any_of(list.begin(), list.end(), [](const Action& action) { return action.kind == Kind::R; });
  });
}

ScheduleSource from_file(const std::string& path, int stages, const std::vector<int>& wanted) {
  auto parsed = read_schedule(path);
  if (parsed.layout.stages != stages) {
    throw std::invalid_argument(absl::StrFormat("[gpipe] the schedule '%s' has %d stages, but balance has %d", path,
                                                parsed.layout.stages, stages));
  }
  auto placement = parsed.layout.placement;
  if (!wanted.empty() && wanted != placement) {
    throw std::invalid_argument(absl::StrFormat(
        "[gpipe] the schedule '%s' has its stages on workers %s, but placement is %s; leave placement out", path,
        absl::StrJoin(placement, ", "), absl::StrJoin(wanted, ", ")));
  }
  auto make = [path, parsed = std::move(parsed)](const Layout& layout, Checkpoint checkpoint) {
    if (layout.micro_batches != parsed.layout.micro_batches) {
      throw std::invalid_argument(
          absl::StrFormat("[gpipe] the schedule '%s' has %d micro-batches, but the mini-batch is cut into %d; change "
                          "chunks or the file",
                          path, parsed.layout.micro_batches, layout.micro_batches));
    }
    if (has_recomputes(parsed.schedule)) return parsed.schedule;
    return with_recomputes(parsed.schedule, checkpoint, layout.micro_batches);
  };
  return {std::move(placement), std::move(make)};
}

}  // namespace

ParsedSchedule read_schedule(const std::string& path) {
  constexpr std::size_t kLargest = std::size_t{64} << 20;
  std::ifstream file(path, std::ios::binary);
  std::string text(kLargest + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (!file.eof()) {
    throw std::invalid_argument("[gpipe] cannot read the schedule '" + path + "'" +
                                (file ? ": it is larger than 64 MiB" : ""));
  }
  text.resize(file.gcount());
  auto parsed = parse_schedule(text);
  if (!parsed.ok()) throw std::invalid_argument("[gpipe] " + path + ": " + std::string(parsed.status().message()));
  return *std::move(parsed);
}

ScheduleSource schedule_source(const std::string& schedule, int stages, int stages_per_worker,
                               std::vector<int> placement) {
  if (schedule.starts_with('@')) {
    if (stages_per_worker == 1) return from_file(schedule.substr(1), stages, placement);
    throw std::invalid_argument(absl::StrFormat(
        "[gpipe] the schedule '%s' places its stages itself, but stages_per_worker is %d; leave it at 1",
        schedule.substr(1), stages_per_worker));
  }
  if (!placement.empty() && stages_per_worker != 1) {
    throw std::invalid_argument(absl::StrFormat(
        "[gpipe] placement and stages_per_worker (%d) exclude each other; set only one of them", stages_per_worker));
  }
  if (placement.empty()) placement = schedule_rule(schedule).place(stages, stages_per_worker);
  ScheduleSource source{std::move(placement), [schedule](const Layout& layout, Checkpoint checkpoint) {
                          return make_schedule(schedule, layout, checkpoint);
                        }};
  source.make({stages, 1, source.placement}, Checkpoint::kNever);  // refuses a name or placement now
  return source;
}

}  // namespace gpipe
