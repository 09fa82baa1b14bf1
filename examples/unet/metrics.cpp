#include "examples/unet/metrics.h"

#include <sstream>
#include <stdexcept>

namespace gpipe::examples::unet {
namespace {

double dice_of(int64_t both, int64_t sum) {
  return sum == 0 ? 1 : 2 * static_cast<double>(both) / static_cast<double>(sum);
}

double iou_of(int64_t both, int64_t sum) {
  return sum == 0 ? 1 : static_cast<double>(both) / static_cast<double>(sum - both);
}

}  // namespace

void Metrics::add(const at::Tensor& predicted, const at::Tensor& truth) {
  if (predicted.dim() < 1 || predicted.sizes() != truth.sizes()) {
    std::ostringstream text;
    text << "predicted masks have shape " << predicted.sizes() << ", true ones " << truth.sizes()
         << "; they must agree";
    throw std::invalid_argument(text.str());
  }
  const auto floats = [](const at::Tensor& tensor) { return tensor.detach().to(at::kCPU, at::kFloat).contiguous(); };
  const at::Tensor a = floats(predicted);
  const at::Tensor b = floats(truth);
  const int64_t images = a.size(0);
  const int64_t pixels = images == 0 ? 0 : a.numel() / images;
  const auto* in_a = a.const_data_ptr<float>();
  const auto* in_b = b.const_data_ptr<float>();
  for (int64_t image = 0; image < images; ++image) {
    int64_t both = 0;
    int64_t sum = 0;
    for (int64_t i = 0; i < pixels; ++i, ++in_a, ++in_b) {
      const bool is_a = *in_a > 0.5f;
      const bool is_b = *in_b > 0.5f;
      both += is_a && is_b;
      sum += is_a + is_b;
    }
    both_ += both;
    sum_ += sum;
    image_dice_ += dice_of(both, sum);
    image_iou_ += iou_of(both, sum);
  }
  images_ += images;
}

Metrics::Scores Metrics::scores() const {
  if (images_ == 0) return {};
  const auto count = static_cast<double>(images_);
  return {dice_of(both_, sum_), iou_of(both_, sum_), image_dice_ / count, image_iou_ / count};
}

}  // namespace gpipe::examples::unet
