#include "gpipe/schedule_source.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <fstream>
#include <optional>

#include "absl/strings/str_join.h"
#include "gpipe/base/checks.h"
#include "gpipe/schedule/list_schedule.h"
#include "gpipe/schedules.h"

namespace gpipe {
namespace {

constexpr std::string_view kSeparators = " \t\r,";

/// Reads an action such as "2F0".
std::optional<Action> parse_action(std::string_view word) {
  Action action;
  const auto number = [&](int& value) {
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
    word.remove_prefix(end - word.data());
    return error == std::errc() && value >= 0 && value < kMostCells;
  };
  if (!number(action.stage) || word.empty()) return std::nullopt;
  const auto kind = std::string_view("FRBIW").find(word.front());  // as to_char()
  if (kind == word.npos) return std::nullopt;
  action.kind = static_cast<Kind>(kind);
  word.remove_prefix(1);
  if (!number(action.micro_batch) || !word.empty()) return std::nullopt;
  return action;
}

ScheduleSource from_lists(const std::string& schedule, int stages, const std::vector<int>& wanted) {
  const bool is_file = schedule.starts_with('@');
  const auto name = is_file ? "the schedule '" + schedule.substr(1) + "'" : "the schedule";
  const auto parsed = lists_of(schedule);
  if (parsed.layout.stages != stages) {
    refuse_argument(name, " has ", parsed.layout.stages, " stages, but balance has ", stages);
  }
  const auto& placement = parsed.layout.placement;
  if (!wanted.empty() && wanted != placement) {
    refuse_argument(name, " has its stages on workers ", absl::StrJoin(placement, ", "), ", but placement is ",
                    absl::StrJoin(wanted, ", "), "; leave placement out");
  }
  const auto make = [is_file, name, parsed](const Layout& layout) {
    if (layout.micro_batches == parsed.layout.micro_batches) return parsed.schedule;
    if (!is_file && layout.micro_batches < parsed.layout.micro_batches) return list_schedule(layout);
    refuse_argument(name, " has ", parsed.layout.micro_batches, " micro-batches, but the mini-batch is cut into ",
                    layout.micro_batches, "; change chunks or the schedule");
  };
  return {placement, make};
}

}  // namespace

std::string to_text(const Schedule& schedule) {
  std::string text;
  for (const auto& list : schedule) {
    text += absl::StrJoin(list, " ", [](std::string* out, const Action& action) { *out += to_string(action); });
    text += '\n';
  }
  return text;
}

ParsedSchedule parse_schedule(std::string_view text) {
  ParsedSchedule result;
  std::map<int, int> workers;  // by stage
  std::int64_t actions = 0;
  for (int line = 1; !text.empty(); ++line) {
    const auto end = std::min(text.find('\n'), text.size());
    const auto content = text.substr(0, std::min(end, text.find('#')));
    text.remove_prefix(std::min(end + 1, text.size()));
    if (content.find_first_not_of(kSeparators) == content.npos) continue;
    const auto worker = static_cast<int>(result.schedule.size());
    auto& list = result.schedule.emplace_back();
    for (std::size_t at = 0; (at = content.find_first_not_of(kSeparators, at)) != content.npos;) {
      const auto word = content.substr(at, content.find_first_of(kSeparators, at) - at);
      const auto action = parse_action(word);
      if (!action.has_value()) {
        refuse_argument("line ", line, ", column ", at + 1, ": '", std::string(word.substr(0, 20)),
                        "' is not an action: write stage, kind (F, R, B, I or W) and micro-batch, such as 2F0");
      }
      const int owner = workers.emplace(action->stage, worker).first->second;
      if (owner != worker) {
        refuse_argument("line ", line, ", column ", at + 1, ": stage ", action->stage, " is on worker ", owner,
                        " already: keep all its actions in one line");
      }
      list.push_back(*action);
      ++actions;
      result.layout.micro_batches = std::max(result.layout.micro_batches, action->micro_batch + 1);
      at += word.size();
    }
  }
  if (workers.empty()) refuse_argument("the schedule is empty: give one line of actions, such as 0F0 0B0, per worker");
  result.layout.stages = workers.rbegin()->first + 1;
  for (const auto& [stage, worker] : workers) {
    const auto next = static_cast<int>(result.layout.placement.size());
    if (stage != next) {
      refuse_argument("stage ", next, " has no action, but stage ", result.layout.stages - 1,
                      " has: number the stages without gaps");
    }
    result.layout.placement.push_back(worker);
  }
  // Before a verifier allocates memory for all cells.
  const auto cells = static_cast<std::int64_t>(result.layout.stages) * result.layout.micro_batches;
  if (actions < cells) {
    refuse_argument("there are ", actions, " actions for ", result.layout.stages, " stages x ",
                    result.layout.micro_batches, " micro-batches: give each at least an F");
  }
  return result;
}

ParsedSchedule read_schedule(const std::string& path) {
  constexpr std::size_t kLargest = std::size_t{64} << 20;
  std::ifstream file(path, std::ios::binary);
  std::string text;
  std::array<char, 1 << 16> chunk;
  while (text.size() <= kLargest && (file.read(chunk.data(), chunk.size()), file.gcount() > 0)) {
    text.append(chunk.data(), file.gcount());
  }
  const bool is_large = text.size() > kLargest;
  if (!file.eof() || is_large) {
    refuse_argument("cannot read the schedule '", path, "'", is_large ? ": it is larger than 64 MiB" : "");
  }
  try {
    return parse_schedule(text);
  } catch (const std::invalid_argument& error) {
    refuse_argument(path, ": ", reason_of(error.what()));
  }
}

bool has_lists(std::string_view schedule) {
  const bool is_text = schedule.find_first_of(" \t\r\n,#") != schedule.npos || parse_action(schedule).has_value();
  return is_text || schedule.starts_with('@');
}

ParsedSchedule lists_of(const std::string& schedule) {
  return schedule.starts_with('@') ? read_schedule(schedule.substr(1)) : parse_schedule(schedule);
}

ScheduleSource schedule_source(const std::string& schedule, int stages, int stages_per_worker,
                               std::vector<int> placement) {
  if (has_lists(schedule)) {
    if (stages_per_worker == 1) return from_lists(schedule, stages, placement);
    refuse_argument("lists of actions place their stages themselves, but stages_per_worker is ", stages_per_worker,
                    "; leave it at 1");
  }
  if (placement.empty()) {
    placement = schedule_rule(schedule).place(stages, stages_per_worker);
  } else if (stages_per_worker != 1) {
    refuse_argument("placement and stages_per_worker (", stages_per_worker,
                    ") exclude each other; set only one of them");
  }
  ScheduleSource source{std::move(placement), [schedule](const Layout& layout) {
                          return make_schedule(schedule, layout, Checkpoint::kNever);
                        }};
  source.make({stages, 1, source.placement});  // refuses a name or placement now
  return source;
}

}  // namespace gpipe
