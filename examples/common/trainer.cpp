#include "examples/common/trainer.h"

#include <torch/cuda.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <ostream>
#include <stdexcept>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "examples/common/autocast.h"
#include "examples/common/codecs.h"
#include "examples/common/files.h"
#include "examples/common/learning_rate.h"
#include "examples/common/outputs.h"
#include "examples/common/processes.h"
#include "examples/common/progress.h"
#include "gpipe/gradients.h"
#include "gpipe/rank_state.h"
#include "gpipe/run/micro_batch.h"

namespace gpipe::examples {
namespace {

// The tag of values by step. All other tags have values by epoch.
constexpr char kStepLoss[] = "loss/train_step";

std::string on_replicas(const TrainingOptions& options) {
  return options.replicas == 1 ? "" : absl::StrCat(" on each of ", options.replicas, " replicas");
}

}  // namespace

Trainer::Trainer(GPipe pipe, Task& task, TrainingOptions options, Identity identity, std::optional<Snapshot> start,
                 std::optional<Prediction> prediction, std::ostream& out, bool terminal)
    : pipe_(std::move(pipe)),
      task_(task),
      options_(std::move(options)),
      identity_(std::move(identity)),
      start_(std::move(start)),
      prediction_(std::move(prediction)),
      out_(out),
      terminal_(terminal),
      loss_(tensor_loss(
          [&task](const torch::Tensor& output, const torch::Tensor& target) { return task.loss(output, target); })),
      optimizer_(pipe_->parameters(), torch::optim::AdamOptions(options_.learning_rate)),
      scores_(task.scores()),
      columns_(history_columns(scores_)),
      writes_(is_first(options_.ranks)),
      record_(options_.trace) {}

int Trainer::run() {
  if (start_) resume(*start_);
  start_.reset();
  check_smallest_micro_batch();
  open_files();

  out_ << "training: " << options_.epochs - epoch_ << " epochs, mini-batches of " << options_.batch_size << " as "
       << options_.chunks << " micro-batches" << on_replicas(options_) << ", schedule " << options_.schedule
       << ", checkpoint " << to_string(options_.checkpoint) << ", learning rate " << options_.learning_rate << " ("
       << options_.learning_rate_schedule << ")" << std::endl;
  const Interrupt interrupt(options_.ranks ? Interrupt::Second::kIgnored : Interrupt::Second::kEnds);
  while (epoch_ < options_.epochs && !stops(interrupt)) {
    if (!train(epoch_ + 1, interrupt) || !finish(epoch_ + 1, interrupt)) save(kLatestSnapshot);
  }
  record_.print(out_, prediction_);
  if (record_.wrote_trace()) files_.push_back(options_.trace);
  if (epoch_ == options_.epochs) return 0;
  out_ << "stopped; to continue, give the same flags and --resume " << path(kLatestSnapshot).string() << std::endl;
  return signal_;
}

bool Trainer::stops(const Interrupt& interrupt) {
  if (signal_ == 0) signal_ = static_cast<int>(pipe_->largest(interrupt.signal()));
  return signal_ != 0;
}

void Trainer::resume(const Snapshot& snapshot) {
  restore_optimizer(optimizer_, *pipe_, own_part(*pipe_, snapshot).optimizer);
  restore_random(snapshot.random);
  epoch_ = static_cast<int>(snapshot.epoch);
  batch_ = snapshot.position.at("batch");
  seen_ = snapshot.position.at("images");
  history_ = snapshot.history;
  loss_sum_ = history_.at("loss_sum").front();
  const auto epochs = snapshot.options.find("--epochs");
  if (options_.learning_rate_schedule != "cosine" || epochs == snapshot.options.end()) return;
  if (const auto now = absl::StrCat(options_.epochs); epochs->second != now) {
    out_ << "note: the learning rate now falls towards 0 after epoch " << now
         << "; the snapshot was made with --epochs " << epochs->second << "\n";
  }
}

void Trainer::open_files() {
  if (!writes_) return;
  remove_earlier_training(options_);
  std::vector<std::vector<double>> rows;
  for (int epoch = 1; epoch <= epoch_; ++epoch) rows.push_back(row(epoch));
  history_file_ = std::make_unique<History>(path(kHistoryFile), columns_, rows);
  files_.push_back(path(kHistoryFile));
  // A run that was killed may have logged more than its snapshot has.
  cut_event_files(options_.output, [&](std::string_view tag, std::int64_t step) {
    return step <= (tag == kStepLoss ? steps() : epoch_);
  });
  events_ = std::make_unique<EventFile>(options_.output);
  files_.push_back(events_->path());
}

bool Trainer::train(int epoch, const Interrupt& interrupt) {
  pipe_->train();
  set_learning_rate(epoch);
  auto examples = task_.training(epoch, batch_);
  Progress progress(out_, terminal_, "epoch " + std::to_string(epoch),
                    std::max<std::int64_t>(1, task_.training_images() - seen_));
  while (auto example = examples()) {
    const double before = loss_sum_;
    const auto images = std::min(options_.batch_size, task_.training_images() - seen_);
    step(*example, images);
    const double loss = (loss_sum_ - before) / static_cast<double>(images);
    progress.add(images, loss);
    add_scalar(kStepLoss, steps(), loss);
    if (events_) events_->flush();
    if (stops(interrupt)) return false;
    if (options_.snapshot_every > 0 && batch_ % options_.snapshot_every == 0) save(kLatestSnapshot);
  }
  images_per_second_ = progress.images_per_second();
  return true;
}

void Trainer::step(const Example& example, std::int64_t images) {
  const bool last = epoch_ + 1 == options_.epochs && seen_ + images == task_.training_images();
  optimizer_.zero_grad();
  record_.begin(pipe_, /*whole=*/images == options_.batch_size, last);
  torch::Tensor loss;
  {
    const Autocast autocast(options_.amp, pipe_->devices());
    loss = pipe_->step(example.input, example.target, loss_).loss;
  }
  for (const auto& device : pipe_->devices()) {
    if (device.is_cuda()) torch::cuda::synchronize(device.index());
  }
  record_.end(pipe_);
  if (options_.clip > 0) clip_grad_norm_(*pipe_, options_.clip);
  optimizer_.step();
  const double value = loss.item<double>();
  if (!std::isfinite(value)) throw std::runtime_error("the loss is not finite; try a lower --learning-rate");
  loss_sum_ += value * static_cast<double>(images);
  seen_ += images;
  ++batch_;
}

// Batch norm in training mode refuses a single value per channel, which the last mini-batch of an epoch can have. So the
// model runs one image before anything is written.
void Trainer::check_smallest_micro_batch() {
  const auto rest = task_.training_images() % options_.batch_size;
  std::vector<std::int64_t> smallest;
  for (const auto images : {options_.batch_size, rest}) {
    for (const auto part : part_sizes(options_.ranks, images)) {
      smallest.push_back(micro_batch_sizes(part, options_.chunks, 0).back());
    }
  }
  if (std::find(smallest.begin(), smallest.end(), 1) == smallest.end()) return;
  auto shape = task_.training(/*epoch=*/1, /*first=*/0)()->input.sizes().vec();
  shape.front() = 1;
  const auto model = capture_model(*pipe_);
  const auto random = capture_random();
  try {
    const torch::NoGradGuard no_grad;
    pipe_->train();
    pipe_->forward(torch::full(shape, 0.5));
  } catch (const c10::Error& error) {
    throw std::runtime_error("a micro-batch would have a single image, which the model refuses: " +
                             std::string(error.what_without_backtrace()) +
                             "; choose --batch-size and --chunks so that each has at least two");
  }
  restore_model(*pipe_, model);
  restore_random(random);
}

bool Trainer::finish(int epoch, const Interrupt& interrupt) {
  std::vector<double> values;
  const auto random = capture_random();
  {
    pipe_->trace(nullptr);
    pipe_->eval();
    const torch::NoGradGuard no_grad;
    const Autocast autocast(options_.amp, pipe_->devices());
    values = task_.validate(
        pipe_,
        [&](const Image& picture, const std::string& name, const std::string& tag) {
          if (writes_) show(picture, name, tag, epoch);
        },
        [&] { return stops(interrupt); });
  }
  if (values.empty()) {
    restore_random(random);  // the resumed run validates from the start
    return false;
  }
  std::vector<std::string> tags = {"loss/train"};
  for (const auto& score : scores_) tags.push_back(score.tag);
  tags.insert(tags.end(), {"training/learning_rate", "training/images_per_second"});
  values.insert(values.begin(), loss_sum_ / static_cast<double>(seen_));
  values.insert(values.end(), {optimizer_.param_groups().front().options().get_lr(), images_per_second_});
  for (std::size_t i = 0; i < tags.size(); ++i) add_scalar(tags[i], epoch, values[i]);
  if (events_) events_->flush();
  values.insert(values.begin(), epoch);
  for (std::size_t i = 0; i < columns_.size(); ++i) history_[columns_[i]].push_back(values[i]);
  epoch_ = epoch;
  batch_ = 0;
  seen_ = 0;
  loss_sum_ = 0;

  // latest.snapshot is written last: a run that is killed before this repeats the epoch and all its files.
  if (history_file_) history_file_->add(values);
  const auto& best = history_.at(columns_[2]);
  const bool is_best = std::all_of(best.begin(), best.end() - 1, [&](double score) { return best.back() > score; });
  if (is_best) save(kBestSnapshot);
  save(kLatestSnapshot);

  out_ << "epoch " << epoch << "/" << options_.epochs << ":";
  for (std::size_t i = 1; i + 2 < columns_.size(); ++i) {
    out_ << absl::StrFormat("%s %s %.4f", i > 1 ? "," : "", columns_[i], values[i]);
  }
  out_ << std::endl;
  return true;
}

void Trainer::add_scalar(const std::string& tag, std::int64_t step, double value) {
  if (events_) events_->add_scalar(tag, step, value);
}

void Trainer::show(const Image& picture, const std::string& name, const std::string& tag, int epoch) {
  files_.push_back(path(absl::StrFormat("%s_%03d.png", name, epoch)));
  const auto png = encode_png(picture);
  write_file(files_.back(), png);
  events_->add_image(tag, epoch, png, picture.width, picture.height);
}

std::int64_t Trainer::steps() const {
  const auto per_epoch = (task_.training_images() + options_.batch_size - 1) / options_.batch_size;
  return epoch_ * per_epoch + batch_;
}

void Trainer::set_learning_rate(int epoch) {
  const double factor =
      learning_rate_factor(options_.learning_rate_schedule, epoch, options_.epochs, history_[columns_[2]]);
  for (auto& group : optimizer_.param_groups()) group.options().set_lr(options_.learning_rate * factor);
}

void Trainer::save(const std::string& name) {
  Snapshot snapshot;
  snapshot.model = capture_model(*pipe_);
  snapshot.optimizer = capture_optimizer(optimizer_, *pipe_);
  snapshot.epoch = epoch_;
  snapshot.position = {{"batch", batch_}, {"images", seen_}};
  snapshot.random = capture_random();
  snapshot.options = identity_;
  snapshot.history = history_;
  for (const auto& column : columns_) snapshot.history[column];  // an empty list before the first epoch
  snapshot.history["loss_sum"] = {loss_sum_};
  snapshot = gather(*pipe_, snapshot);
  if (!writes_) return;
  write_snapshot(path(name), snapshot);
  if (std::find(files_.begin(), files_.end(), path(name)) == files_.end()) files_.push_back(path(name));
}

std::vector<double> Trainer::row(int epoch) const {
  std::vector<double> values;
  for (const auto& column : columns_) values.push_back(history_.at(column).at(static_cast<std::size_t>(epoch - 1)));
  return values;
}

int run_and_report(Trainer& trainer, const std::filesystem::path& drawn, std::ostream& out) {
  const int signal = trainer.run();
  out << "wrote\n";
  if (!drawn.empty()) out << "  " << drawn.string() << "/\n";
  for (const auto& file : trainer.files()) out << "  " << file.string() << "\n";
  out << std::flush;
  return signal == 0 ? 0 : 128 + signal;
}

}  // namespace gpipe::examples
