#include "examples/common/task.h"

#include "examples/common/codecs.h"
#include "examples/common/files.h"

namespace gpipe::examples {

std::vector<std::string> history_columns(const std::vector<ScoreName>& scores) {
  std::vector<std::string> columns = {"epoch", "train_loss"};
  for (const auto& score : scores) columns.push_back(score.column);
  columns.insert(columns.end(), {"learning_rate", "images_per_second"});
  return columns;
}

void show_picture(const Image& picture, const std::filesystem::path& path, const std::string& tag, int epoch,
                  EventFile& events, std::vector<std::filesystem::path>& files) {
  const auto png = encode_png(picture);
  write_file(path, png);
  events.add_image(tag, epoch, png, picture.width, picture.height);
  files.push_back(path);
}

}  // namespace gpipe::examples
