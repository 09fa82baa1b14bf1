#include "examples/common/trainer.h"

#include <torch/cuda.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <limits>
#include <numbers>
#include <ostream>
#include <stdexcept>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "balance/report.h"
#include "balance/trial.h"
#include "examples/common/autocast.h"
#include "examples/common/codecs.h"
#include "examples/common/files.h"
#include "examples/common/interrupt.h"
#include "examples/common/outputs.h"
#include "examples/common/progress.h"
#include "gpipe/micro_batch.h"

namespace gpipe::examples {
namespace {

constexpr int kPatience = 5;
constexpr double kPlateauFactor = 0.1;
constexpr std::int64_t kTracedStep = 2;  // the first ones still warm memory and caches

std::vector<std::string> columns_of(const Task& task) {
  std::vector<std::string> columns = {"epoch", "train_loss"};
  for (auto& name : task.score_names()) columns.push_back(std::move(name));
  columns.insert(columns.end(), {"learning_rate", "images_per_second"});
  return columns;
}

// How often a tenth has been taken: whenever the score had not risen for so many epochs.
int drops(const std::vector<double>& scores) {
  int count = 0;
  int waited = 0;
  double best = -std::numeric_limits<double>::infinity();
  for (const double score : scores) {
    waited = score > best ? 0 : waited + 1;
    best = std::max(best, score);
    if (waited < kPatience) continue;
    ++count;
    waited = 0;
  }
  return count;
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
      optimizer_(pipe_->parameters(), torch::optim::AdamOptions(options_.learning_rate)),
      columns_(columns_of(task)) {}

int Trainer::run() {
  if (start_) resume(*start_);
  start_.reset();
  try_smallest();

  remove_earlier_training(options_);
  std::vector<std::vector<double>> rows;
  for (int epoch = 1; epoch <= epoch_; ++epoch) rows.push_back(row(epoch));
  history_file_ = std::make_unique<History>(path(kHistoryFile), columns_, rows);
  files_.push_back(path(kHistoryFile));
  events_ = std::make_unique<EventFile>(options_.output);
  files_.push_back(events_->path());

  out_ << "training: " << options_.epochs - epoch_ << " epochs, mini-batches of " << options_.batch_size << " as "
       << options_.chunks << " micro-batches, checkpoint " << to_string(options_.checkpoint) << ", learning rate "
       << options_.learning_rate << " (" << options_.schedule << ")" << std::endl;
  const Interrupt interrupt;
  while (epoch_ < options_.epochs) {
    const bool whole = train(epoch_ + 1, interrupt);
    if (whole) {
      finish(epoch_ + 1);
    } else {
      save(kLatestSnapshot);
    }
    if (interrupt.signal() == 0 || epoch_ == options_.epochs) continue;
    compare();
    out_ << "stopped; to go on, give the same flags and --resume " << path(kLatestSnapshot).string() << std::endl;
    return interrupt.signal();
  }
  compare();
  return 0;
}

void Trainer::compare() const {
  if (!step_seconds_.empty()) {
    out_ << "a step, forward and backward, took " << seconds_to_text(median(step_seconds_)) << " (median of "
         << step_seconds_.size() << ")";
    if (prediction_) out_ << "; predicted were " << seconds_to_text(prediction_->seconds);
    out_ << std::endl;
  }
  if (!step_bytes_.empty()) {
    const auto add_bytes = [](std::string* text, std::int64_t bytes) { text->append(bytes_to_text(bytes)); };
    out_ << "most in use by its stages, beside model and optimizer: " << absl::StrJoin(step_bytes_, ", ", add_bytes);
    if (prediction_) {
      out_ << "; predicted were " << absl::StrJoin(prediction_->timeline.peak_bytes(), ", ", add_bytes);
    }
    out_ << std::endl;
  }
}

void Trainer::resume(const Snapshot& snapshot) {
  check_identity(identity_, snapshot, options_.resume);
  const auto refuse = [&](const std::string& why) {
    throw std::runtime_error(options_.resume.string() + " is not of this program: " + why);
  };
  for (const auto& column : columns_) {
    const auto found = snapshot.history.find(column);
    if (found == snapshot.history.end() || found->second.size() != static_cast<std::size_t>(snapshot.epoch)) {
      refuse("its history has no " + column);
    }
  }
  const auto loss_sum = snapshot.history.find("loss_sum");
  if (loss_sum == snapshot.history.end() || loss_sum->second.size() != 1 || snapshot.position.count("batch") == 0 ||
      snapshot.position.count("images") == 0) {
    refuse("it does not say where in an epoch it was made");
  }
  restore_optimizer(optimizer_, *pipe_, snapshot.optimizer);
  restore_random(snapshot.random);
  epoch_ = static_cast<int>(snapshot.epoch);
  batch_ = snapshot.position.at("batch");
  seen_ = snapshot.position.at("images");
  history_ = snapshot.history;
  loss_sum_ = loss_sum->second.front();
  const auto epochs = snapshot.options.find("--epochs");
  if (options_.schedule != "cosine" || epochs == snapshot.options.end()) return;
  if (const auto now = absl::StrCat(options_.epochs); epochs->second != now) {
    out_ << "note: the learning rate now falls towards 0 after epoch " << now
         << "; the snapshot was made with --epochs " << epochs->second << "\n";
  }
}

bool Trainer::train(int epoch, const Interrupt& interrupt) {
  pipe_->train();
  set_learning_rate(epoch);
  auto examples = task_.training(epoch, batch_);
  Progress progress(out_, terminal_, "epoch " + std::to_string(epoch),
                    std::max<std::int64_t>(1, task_.training_images() - seen_));
  while (auto example = examples()) {
    const double before = loss_sum_;
    step(*example);
    const auto images = example->input.size(0);
    progress.add(images, (loss_sum_ - before) / static_cast<double>(images));
    if (interrupt.signal() != 0) return false;
  }
  images_per_second_ = progress.images_per_second();
  return true;
}

void Trainer::step(const Example& example) {
  const bool last = epoch_ + 1 == options_.epochs && seen_ + example.input.size(0) == task_.training_images();
  const bool whole = example.input.size(0) == options_.batch_size;
  const bool trace = !traced_ && (last || (steps_ >= kTracedStep && whole));
  auto timeline = trace ? std::make_shared<Timeline>() : nullptr;
  pipe_->trace(timeline);
  optimizer_.zero_grad();
  const auto start = std::chrono::steady_clock::now();
  torch::Tensor loss;
  {
    const Autocast autocast(options_.amp, pipe_->devices());
    const auto output = pipe_->forward(example.input);
    loss = task_.loss(output, example.target.to(output.device()));
  }
  loss.backward();
  if (loss.is_cuda()) torch::cuda::synchronize();
  if (steps_ >= kTracedStep && whole && !trace) {
    step_seconds_.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  if (options_.clip > 0) clip_gradients();
  optimizer_.step();
  const double value = loss.item<double>();
  if (!std::isfinite(value)) throw std::runtime_error("the loss is not finite; try a lower --learning-rate");
  traced_ = traced_ || trace;
  if (trace && whole) step_bytes_ = timeline->peak_bytes();
  if (trace && !options_.trace.empty()) {
    write_file(options_.trace, to_chrome_json(*timeline));
    files_.push_back(options_.trace);
  }
  loss_sum_ += value * static_cast<double>(example.input.size(0));
  seen_ += example.input.size(0);
  ++batch_;
  ++steps_;
}

// Batch norm in training mode refuses one value a channel, which an epoch's last mini-batch may bring about; better to
// know before anything is written than after an epoch.
void Trainer::try_smallest() {
  const auto rest = task_.training_images() % options_.batch_size;
  const auto smallest = [&](std::int64_t batch) { return micro_batch_sizes(batch, options_.chunks, 0).back(); };
  if (smallest(options_.batch_size) > 1 && (rest == 0 || smallest(rest) > 1)) return;
  const auto example = task_.training(/*epoch=*/1, /*first=*/0)();
  const auto model = capture_model(*pipe_);
  const auto random = capture_random();
  try {
    const torch::NoGradGuard no_grad;
    pipe_->train();
    pipe_->forward(example->input.narrow(0, 0, 1));
  } catch (const c10::Error& error) {
    throw std::runtime_error("some micro-batch would be a single image, and " +
                             std::string(error.what_without_backtrace()) +
                             "; choose --batch-size and --chunks so that all have more");
  }
  restore_model(*pipe_, model);
  restore_random(random);
}

// As clip_grad_norm_, which takes no gradients on several devices.
void Trainer::clip_gradients() {
  double squares = 0;
  for (const auto& parameter : pipe_->parameters()) {
    if (parameter.grad().defined()) squares += std::pow(parameter.grad().norm().item<double>(), 2);
  }
  const double factor = options_.clip / (std::sqrt(squares) + 1e-6);
  if (!(factor < 1)) return;
  for (const auto& parameter : pipe_->parameters()) {
    if (parameter.grad().defined()) parameter.mutable_grad().mul_(factor);
  }
}

void Trainer::finish(int epoch) {
  std::vector<double> scores;
  {
    pipe_->trace(nullptr);
    pipe_->eval();
    const torch::NoGradGuard no_grad;
    const Autocast autocast(options_.amp, pipe_->devices());
    scores = task_.validate(pipe_, epoch, *events_, files_);
  }
  std::vector<double> row = {static_cast<double>(epoch), loss_sum_ / static_cast<double>(seen_)};
  row.insert(row.end(), scores.begin(), scores.end());
  row.insert(row.end(), {optimizer_.param_groups().front().options().get_lr(), images_per_second_});
  for (std::size_t i = 0; i < columns_.size(); ++i) {
    history_[columns_[i]].push_back(row[i]);
    if (i > 0) events_->add_scalar(columns_[i], epoch, row[i]);
  }
  events_->flush();
  epoch_ = epoch;
  batch_ = 0;
  seen_ = 0;
  loss_sum_ = 0;

  // The latest snapshot is the last: a run that is killed before it repeats the epoch, with all that it writes.
  history_file_->add(row);
  const auto& best = history_.at(columns_[2]);
  const bool is_best = std::all_of(best.begin(), best.end() - 1, [&](double score) { return best.back() > score; });
  if (is_best) save(kBestSnapshot);
  save(kLatestSnapshot);

  out_ << "epoch " << epoch << "/" << options_.epochs << ":";
  for (std::size_t i = 1; i + 2 < columns_.size(); ++i) {
    char text[64];
    std::snprintf(text, sizeof text, "%s %s %.4f", i > 1 ? "," : "", columns_[i].c_str(), row[i]);
    out_ << text;
  }
  out_ << std::endl;
}

// Depends on the epoch and the scores alone, so that a snapshot needs to say nothing about it.
void Trainer::set_learning_rate(int epoch) {
  double factor = 0;
  if (options_.schedule == "plateau") {
    factor = std::pow(kPlateauFactor, drops(history_[columns_[2]]));
  } else {
    const double done = static_cast<double>(epoch - 1) / static_cast<double>(options_.epochs);
    factor = (1 + std::cos(std::numbers::pi * done)) / 2;
  }
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
  for (const auto& column : columns_) snapshot.history[column];  // none yet is an empty list
  snapshot.history["loss_sum"] = {loss_sum_};
  write_snapshot(path(name), snapshot);
  if (std::find(files_.begin(), files_.end(), path(name)) == files_.end()) files_.push_back(path(name));
}

std::vector<double> Trainer::row(int epoch) const {
  std::vector<double> values;
  for (const auto& column : columns_) values.push_back(history_.at(column).at(static_cast<std::size_t>(epoch - 1)));
  return values;
}

void show_picture(const Image& picture, const std::filesystem::path& path, const std::string& tag, int epoch,
                  EventFile& events, std::vector<std::filesystem::path>& files) {
  const auto png = encode_png(picture);
  write_file(path, png);
  events.add_image(tag, epoch, png, picture.width, picture.height);
  files.push_back(path);
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
