#include "examples/unet/loader.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "examples/common/processes.h"
#include "examples/common/random.h"
#include "examples/unet/augment.h"
#include "examples/unet/classes.h"

namespace gpipe::examples::unet {
namespace {

const LoaderOptions& checked(const std::vector<Sample>& samples, Size size, const LoaderOptions& options) {
  if (samples.empty()) throw std::invalid_argument("there are no samples to load");
  if (size.width < 1 || size.height < 1) throw std::invalid_argument("cannot load images at " + to_string(size));
  if (options.batch_size < 1) {
    throw std::invalid_argument("the batch size must be at least 1, but is " + std::to_string(options.batch_size));
  }
  if (options.workers < 0) {
    throw std::invalid_argument("the number of workers must be at least 0, but is " + std::to_string(options.workers));
  }
  return options;
}

}  // namespace

Loader::Loader(std::vector<Sample> samples, Size size, LoaderOptions options)
    : samples_(std::move(samples)),
      size_(size),
      options_(checked(samples_, size, options)),
      end_((static_cast<int64_t>(samples_.size()) + options.batch_size - 1) / options.batch_size),
      claimed_(std::min(options.first_batch, end_)),
      taken_(claimed_) {
  if (options_.shuffle) Random(options_.seed, static_cast<uint64_t>(options_.epoch)).shuffle(samples_);
  for (int i = 0; i < options_.workers; ++i) {
    workers_.emplace_back([this](std::stop_token stop) { work(stop); });
  }
}

Loader::~Loader() {
  for (auto& worker : workers_) worker.request_stop();
}

std::optional<Batch> Loader::next() {
  MutexLock lock(mutex_);
  if (taken_ == end_) return std::nullopt;
  if (workers_.empty()) {
    Batch batch = decode(taken_, {});
    ++taken_;
    return batch;
  }
  auto result = results_.find(taken_);
  while (result == results_.end()) {
    changed_.wait(mutex_);
    result = results_.find(taken_);
  }
  if (result->second.error) std::rethrow_exception(result->second.error);
  Batch batch = std::move(result->second.batch);
  results_.erase(result);
  ++taken_;
  changed_.notify_all();
  return batch;
}

void Loader::work(std::stop_token stop) {
  const std::stop_callback wake(stop, [this] {
    MutexLock lock(mutex_);
    changed_.notify_all();
  });
  for (;;) {
    int64_t index = 0;
    {
      MutexLock lock(mutex_);
      const auto full = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return claimed_ - taken_ > options_.workers; };
      while (!stop.stop_requested() && claimed_ < end_ && full()) changed_.wait(mutex_);
      if (stop.stop_requested() || claimed_ == end_) return;
      index = claimed_++;
    }
    Result result;
    try {
      result.batch = decode(index, stop);
    } catch (...) {
      result.error = std::current_exception();
    }
    MutexLock lock(mutex_);
    results_.emplace(index, std::move(result));
    changed_.notify_all();
  }
}

Batch Loader::decode(int64_t index, const std::stop_token& stop) const {
  const int64_t first_of_all = index * options_.batch_size;
  const auto [begin, end] = part_of(
      options_.ranks, std::min<int64_t>(options_.batch_size, static_cast<int64_t>(samples_.size()) - first_of_all));
  const int64_t first = first_of_all + begin;
  const int64_t count = end - begin;
  Batch batch{at::empty({count, 3, size_.height, size_.width}, at::kFloat),
              at::zeros({count, 1, size_.height, size_.width}, at::kByte)};
  auto* image_out = batch.images.mutable_data_ptr<float>();
  auto* mask_out = batch.masks.mutable_data_ptr<uint8_t>();
  for (int64_t i = first; i < first + count && !stop.stop_requested(); ++i) {
    const auto& sample = samples_[static_cast<size_t>(i)];
    Image image = read_image(sample.image, size_);
    Image mask = sample.mask.empty() ? Image(size_, 1) : read_labels(sample.mask, options_.classes, size_);
    if (options_.augment) {
      Random random(options_.seed, (static_cast<uint64_t>(options_.epoch) << 32) + static_cast<uint64_t>(i) + 1);
      augment(image, mask, random);
    }
    for (size_t channel = 0; channel < 3; ++channel) {
      for (size_t at = channel; at < image.pixels.size(); at += 3)
        *image_out++ = static_cast<float>(image.pixels[at]) / 255;
    }
    mask_out = std::copy(mask.pixels.begin(), mask.pixels.end(), mask_out);
  }
  return batch;
}

}  // namespace gpipe::examples::unet
