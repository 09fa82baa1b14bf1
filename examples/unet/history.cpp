#include "examples/unet/history.h"

#include <locale>
#include <stdexcept>
#include <string>
#include <utility>

namespace gpipe::unet {

History::History(std::filesystem::path path) : path_(std::move(path)), file_(path_) {
  file_.imbue(std::locale::classic());
  file_.precision(6);
  file_ << "epoch,train_loss,val_loss,val_dice,val_iou,images_per_second,seconds\n";
  flush();
}

void History::add(const EpochRecord& record) {
  file_ << record.epoch << ',' << record.train_loss << ',' << record.val_loss << ',' << record.val_dice << ','
        << record.val_iou << ',' << record.images_per_second << ',' << record.seconds << '\n';
  flush();
}

void History::flush() {
  file_.flush();
  if (!file_) throw std::runtime_error("cannot write the history " + path_.string());
}

}  // namespace gpipe::unet
