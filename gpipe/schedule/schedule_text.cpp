#include "gpipe/schedule/schedule_text.h"

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <map>
#include <optional>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace gpipe {
namespace {

constexpr std::string_view kSeparators = " \t\r,";

/// Reads one action, such as "2F0", from front to back.
class ActionReader {
 public:
  explicit ActionReader(std::string_view text) : rest_(text) {}

  std::optional<Action> read() {
    const auto stage = number();
    const auto kind = this->kind();
    const auto micro_batch = number();
    if (!stage || !kind || !micro_batch || !rest_.empty()) return std::nullopt;
    return Action{*kind, *stage, *micro_batch};
  }

 private:
  std::optional<int> number() {
    int value = 0;
    const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), value);
    if (error != std::errc() || value < 0 || value >= kMostCells) return std::nullopt;
    rest_.remove_prefix(end - rest_.data());
    return value;
  }

  std::optional<Kind> kind() {
    for (const Kind kind : {Kind::F, Kind::R, Kind::B, Kind::I, Kind::W}) {
      if (!rest_.starts_with(to_char(kind))) continue;
      rest_.remove_prefix(1);
      return kind;
    }
    return std::nullopt;
  }

  std::string_view rest_;
};

class Parser {
 public:
  absl::StatusOr<ParsedSchedule> parse(std::string_view text) {
    for (std::size_t line = 1; !text.empty(); ++line) {
      const auto end = std::min(text.find('\n'), text.size());
      if (auto status = add_line(text.substr(0, end), line); !status.ok()) return status;
      text.remove_prefix(std::min(end + 1, text.size()));
    }
    if (result_.schedule.empty()) {
      return absl::InvalidArgumentError("the schedule is empty: give one line of actions, such as 0F0 0B0, per worker");
    }
    return finish();
  }

 private:
  absl::Status add_line(std::string_view text, std::size_t line) {
    const auto content = text.substr(0, text.find('#'));
    if (content.find_first_not_of(kSeparators) == content.npos) return absl::OkStatus();
    auto& list = result_.schedule.emplace_back();
    const int worker = static_cast<int>(result_.schedule.size()) - 1;
    for (std::size_t at = 0; (at = content.find_first_not_of(kSeparators, at)) != content.npos;) {
      const auto word = content.substr(at, content.find_first_of(kSeparators, at) - at);
      const auto fail = [&](const std::string& reason) {
        return absl::InvalidArgumentError(absl::StrFormat("line %d, column %d: %s", line, at + 1, reason));
      };
      const auto action = ActionReader(word).read();
      if (!action) {
        return fail(
            absl::StrFormat("'%s' is not an action: write stage, kind (F, R, B, I or W) and micro-batch, such as "
                            "2F0",
                            std::string(word.substr(0, 20))));
      }
      const auto [place, first] = workers_.emplace(action->stage, worker);
      if (!first && place->second != worker) {
        return fail(absl::StrFormat("stage %d is on worker %d already: keep all its actions in one line", action->stage,
                                    place->second));
      }
      list.push_back(*action);
      at += word.size();
    }
    return absl::OkStatus();
  }

  absl::StatusOr<ParsedSchedule> finish() {
    auto& layout = result_.layout;
    layout.stages = workers_.rbegin()->first + 1;
    if (static_cast<int>(workers_.size()) != layout.stages) {
      int missing = 0;
      while (workers_.contains(missing)) ++missing;
      return absl::InvalidArgumentError(absl::StrFormat(
          "stage %d has no action, but stage %d has: number the stages without gaps", missing, layout.stages - 1));
    }
    for (const auto& [stage, worker] : workers_) layout.placement.push_back(worker);
    for (const auto& list : result_.schedule) {
      for (const auto& action : list) layout.micro_batches = std::max(layout.micro_batches, action.micro_batch + 1);
    }
    return std::move(result_);
  }

  ParsedSchedule result_;
  std::map<int, int> workers_;  // by stage
};

}  // namespace

std::string to_text(const Schedule& schedule) {
  std::string text;
  for (const auto& list : schedule) {
    text += absl::StrJoin(list, " ", [](std::string* out, const Action& action) { *out += to_string(action); });
    text += '\n';
  }
  return text;
}

absl::StatusOr<ParsedSchedule> parse_schedule(std::string_view text) { return Parser().parse(text); }

}  // namespace gpipe
