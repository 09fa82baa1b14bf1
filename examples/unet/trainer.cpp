#include "examples/unet/trainer.h"

#include <torch/nn/functional/loss.h>
#include <torch/optim/adam.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <numbers>
#include <ostream>
#include <utility>

#include "examples/unet/files.h"
#include "examples/unet/loader.h"
#include "examples/unet/metrics.h"
#include "examples/unet/picture.h"
#include "examples/unet/progress.h"

namespace gpipe::unet {
namespace {

constexpr int kPictureRows = 6;
constexpr long kTracedStep = 2;  // the first steps still warm memory and caches

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

torch::Tensor segmentation_loss(const torch::Tensor& logits, const torch::Tensor& masks) {
  const auto cross_entropy = torch::nn::functional::binary_cross_entropy_with_logits(logits, masks);
  const auto probabilities = logits.sigmoid();
  const auto both = (probabilities * masks).sum({1, 2, 3});
  const auto total = probabilities.sum({1, 2, 3}) + masks.sum({1, 2, 3});
  return cross_entropy + 1 - ((2 * both + 1) / (total + 1)).mean();
}

Trainer::Trainer(GPipe pipe, Split split, Size size, Options options, std::ostream& out, bool terminal)
    : pipe_(std::move(pipe)),
      split_(std::move(split)),
      size_(size),
      options_(std::move(options)),
      out_(out),
      terminal_(terminal),
      optimizer_(pipe_->parameters(), torch::optim::AdamOptions(options_.learning_rate)) {}

std::vector<EpochRecord> Trainer::run() {
  const auto history_path = options_.output / "history.csv";
  History history(history_path);
  files_.push_back(history_path);
  std::vector<EpochRecord> records;
  for (int epoch = 1; epoch <= options_.epochs; ++epoch) {
    EpochRecord record;
    record.epoch = epoch;
    const double start = seconds();
    train(record);
    validate(record);
    record.seconds = seconds() - start;
    history.add(record);
    records.push_back(record);
    char line[160];
    std::snprintf(
        line, sizeof line, "epoch %d/%d: loss %.4f, validation loss %.4f, Dice %.4f, IoU %.4f, %.1f images/s\n", epoch,
        options_.epochs, record.train_loss, record.val_loss, record.val_dice, record.val_iou, record.images_per_second);
    out_ << line << std::flush;
  }
  return records;
}

void Trainer::train(EpochRecord& record) {
  pipe_->train();
  Loader loader(split_.training, size_,
                {.batch_size = options_.batch_size,
                 .workers = options_.workers,
                 .shuffle = true,
                 .seed = options_.seed,
                 .epoch = record.epoch});
  const long steps = static_cast<long>(options_.epochs) * loader.batches();
  const long traced = std::min<long>(kTracedStep, steps - 1);
  Progress progress(out_, terminal_, "epoch " + std::to_string(record.epoch),
                    static_cast<std::int64_t>(split_.training.size()));
  double loss_sum = 0;
  while (auto batch = loader.next()) {
    for (auto& group : optimizer_.param_groups()) {
      const double done = static_cast<double>(step_) / static_cast<double>(steps);
      group.options().set_lr(options_.learning_rate * (1 + std::cos(std::numbers::pi * done)) / 2);
    }
    auto timeline = !options_.trace.empty() && step_ == traced ? std::make_shared<Timeline>() : nullptr;
    pipe_->trace(timeline);
    optimizer_.zero_grad();
    const auto logits = pipe_->forward(batch->images);
    const auto loss = segmentation_loss(logits, batch->masks.to(logits.device()));
    loss.backward();
    optimizer_.step();
    if (timeline) write_trace(*timeline);
    ++step_;
    const auto images = batch->images.size(0);
    const double value = loss.item<double>();
    if (!std::isfinite(value)) throw std::runtime_error("the loss is not finite; try a lower --learning-rate");
    loss_sum += value * static_cast<double>(images);
    progress.add(images, value);
  }
  record.train_loss = loss_sum / static_cast<double>(split_.training.size());
  record.images_per_second = progress.images_per_second();
}

void Trainer::validate(EpochRecord& record) {
  pipe_->eval();
  torch::NoGradGuard no_grad;
  Loader loader(split_.validation, size_, {.batch_size = options_.batch_size, .workers = options_.workers});
  Metrics metrics;
  double loss_sum = 0;
  bool first = true;
  while (auto batch = loader.next()) {
    const auto logits = pipe_->forward(batch->images);
    const auto masks = batch->masks.to(logits.device());
    const auto probabilities = logits.sigmoid();
    loss_sum += segmentation_loss(logits, masks).item<double>() * static_cast<double>(batch->images.size(0));
    metrics.add(probabilities, masks);
    if (!std::exchange(first, false)) continue;
    char name[32];
    std::snprintf(name, sizeof name, "epoch_%03d.png", record.epoch);
    const auto rows = std::min<std::int64_t>(kPictureRows, batch->images.size(0));
    write_picture(options_.output / name, batch->images.narrow(0, 0, rows), batch->masks.narrow(0, 0, rows),
                  probabilities.narrow(0, 0, rows));
    files_.push_back(options_.output / name);
  }
  const auto scores = metrics.scores();
  record.val_loss = loss_sum / static_cast<double>(split_.validation.size());
  record.val_dice = scores.dice;
  record.val_iou = scores.iou;
}

void Trainer::write_trace(const Timeline& timeline) {
  const auto json = to_chrome_json(timeline);
  write_file(options_.trace, {json.begin(), json.end()});
  files_.push_back(options_.trace);
}

}  // namespace gpipe::unet
