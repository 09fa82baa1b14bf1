#include "examples/unet/metrics.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <string>

namespace gpipe::examples::unet {

Score mean(const std::vector<Score>& scores) {
  Score sum;
  for (const auto& score : scores) {
    sum.dice += score.dice;
    sum.iou += score.iou;
  }
  const auto count = static_cast<double>(scores.size());
  return {sum.dice / count, sum.iou / count};
}

Score Metrics::Count::score() const {
  if (sum == 0) return {1, 1};
  const auto overlap = static_cast<double>(both);
  return {2 * overlap / static_cast<double>(sum), overlap / static_cast<double>(sum - both)};
}

Metrics::Metrics(int classes) : total_(static_cast<size_t>(std::max(classes, 1))), image_sum_(total_.size() - 1) {
  if (classes < 2) throw std::invalid_argument("metrics need at least 2 classes, not " + std::to_string(classes));
}

Metrics::Metrics(int classes, const std::vector<double>& sums) : Metrics(classes) {
  auto next = sums.begin();
  images_ = static_cast<int64_t>(*next++);
  for (auto& count : total_) {
    count.both = static_cast<int64_t>(*next++);
    count.sum = static_cast<int64_t>(*next++);
  }
  for (auto& score : image_sum_) {
    score.dice = *next++;
    score.iou = *next++;
  }
}

std::vector<double> Metrics::sums() const {
  std::vector<double> sums = {static_cast<double>(images_)};
  for (const auto& count : total_) {
    sums.insert(sums.end(), {static_cast<double>(count.both), static_cast<double>(count.sum)});
  }
  for (const auto& score : image_sum_) sums.insert(sums.end(), {score.dice, score.iou});
  return sums;
}

void Metrics::add(const at::Tensor& predicted, const at::Tensor& truth) {
  if (predicted.dim() < 1 || predicted.sizes() != truth.sizes()) {
    std::ostringstream text;
    text << "predicted masks have shape " << predicted.sizes() << ", true ones " << truth.sizes()
         << "; they must agree";
    throw std::invalid_argument(text.str());
  }
  const at::Tensor a = predicted.cpu().contiguous();
  const at::Tensor b = truth.cpu().contiguous();
  const int64_t pixels = a.size(0) == 0 ? 0 : a.numel() / a.size(0);
  const auto* in_a = a.const_data_ptr<uint8_t>();
  const auto* in_b = b.const_data_ptr<uint8_t>();
  for (int64_t image = 0; image < a.size(0); ++image) {
    std::vector<Count> counts(total_.size());
    for (int64_t i = 0; i < pixels; ++i, ++in_a, ++in_b) {
      auto& count = counts.at(*in_a);
      ++count.sum;
      ++counts.at(*in_b).sum;
      if (*in_a == *in_b) ++count.both;
    }
    for (size_t k = 0; k < counts.size(); ++k) {
      total_[k].both += counts[k].both;
      total_[k].sum += counts[k].sum;
      if (k == 0) continue;
      image_sum_[k - 1].dice += counts[k].score().dice;
      image_sum_[k - 1].iou += counts[k].score().iou;
    }
    ++images_;
  }
}

Metrics::Scores Metrics::scores() const {
  Scores scores{image_sum_, image_sum_};
  if (images_ == 0) return scores;
  for (size_t k = 0; k < image_sum_.size(); ++k) {
    scores.pixels[k] = total_[k + 1].score();
    scores.images[k].dice /= static_cast<double>(images_);
    scores.images[k].iou /= static_cast<double>(images_);
  }
  return scores;
}

}  // namespace gpipe::examples::unet
