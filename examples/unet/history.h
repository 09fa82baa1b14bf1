#pragma once

#include <filesystem>
#include <fstream>

namespace gpipe::unet {

struct EpochRecord {
  int epoch = 0;
  double train_loss = 0;
  double val_loss = 0;
  double val_dice = 0;
  double val_iou = 0;
  double images_per_second = 0;
  double seconds = 0;
};

/// A CSV file with a header and a line an epoch, each on disk as soon as it is added: a run that stops leaves whole
/// lines. Numbers are written with a decimal point, whatever the locale. Errors are std::runtime_error that names the
/// path.
class History {
 public:
  /// Creates or replaces the file.
  explicit History(std::filesystem::path path);
  void add(const EpochRecord& record);

 private:
  void flush();

  std::filesystem::path path_;
  std::ofstream file_;
};

}  // namespace gpipe::unet
