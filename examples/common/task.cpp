#include "examples/common/task.h"

namespace gpipe::examples {

std::vector<std::string> history_columns(const std::vector<ScoreName>& scores) {
  std::vector<std::string> columns = {"epoch", "train_loss"};
  for (const auto& score : scores) columns.push_back(score.column);
  columns.insert(columns.end(), {"learning_rate", "images_per_second"});
  return columns;
}

}  // namespace gpipe::examples
