#include "examples/unet/data.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "examples/common/processes.h"
#include "examples/common/progress.h"
#include "examples/common/random.h"
#include "gpipe/options.h"

namespace gpipe::examples::unet {
namespace {

namespace fs = std::filesystem;

using FilesByStem = std::map<std::string, fs::path>;

FilesByStem files_by_stem(const fs::path& folder, const std::string& suffix = "") {
  std::error_code error;
  fs::directory_iterator entries(folder, error);
  if (error) throw std::runtime_error("cannot read the folder " + folder.string() + ": " + error.message());
  FilesByStem files;
  for (const auto& entry : entries) {
    if (!is_named_as_image(entry.path())) continue;
    auto stem = entry.path().stem().string();
    if (!stem.ends_with(suffix)) {
      throw std::runtime_error(entry.path().string() + ": the name of a mask must be <image>" + suffix +
                               entry.path().extension().string());
    }
    stem.resize(stem.size() - suffix.size());
    const auto [other, is_new] = files.emplace(stem, entry.path());
    if (is_new) continue;
    throw std::runtime_error("two files have the same stem: " + other->second.string() + " and " +
                             entry.path().string());
  }
  return files;
}

// Refuses stems of `wanted` that `present` lacks. Names up to five.
void check_stems(const FilesByStem& wanted, const FilesByStem& present, const std::string& what) {
  std::vector<std::string> missing;
  for (const auto& [stem, path] : wanted) {
    if (!present.contains(stem)) missing.push_back(stem);
  }
  if (missing.empty()) return;
  const auto more = missing.size() > 5 ? absl::StrCat(" and ", missing.size() - 5, " more") : "";
  missing.resize(std::min<std::size_t>(missing.size(), 5));
  throw std::runtime_error(what + absl::StrJoin(missing, ", ") + more);
}

torch::Tensor random_order(std::size_t count, const Random& random) {
  auto copy = random;
  return torch::randperm(static_cast<std::int64_t>(count), at::detail::createCPUGenerator(copy.seed()));
}

// Shifts by up to an eighth of each side and repeats the edge. Recolours the image only.
void augment(torch::Tensor& image, torch::Tensor& mask, Random random) {
  const bool mirror = random.chance(0.5);
  for (const int side : {-1, -2}) {
    const auto pixels = mask.size(side);
    const auto shift = static_cast<std::int64_t>(random.between(-1, 1) * static_cast<double>(pixels) / 8);
    auto places = (torch::arange(pixels) - shift).clamp(0, pixels - 1);
    if (side == -1 && mirror) places = pixels - 1 - places;
    image = image.index_select(side, places);
    mask = mask.index_select(side, places);
  }
  const double contrast = random.between(0.8, 1.2);
  const double brightness = random.between(-0.1, 0.1);
  const auto tint = [&] { return static_cast<float>(random.between(0.9, 1.1)); };
  const std::vector<float> tints = {tint(), tint(), tint()};
  image = ((image - 0.5) * contrast + 0.5 + brightness).mul_(torch::tensor(tints).view({3, 1, 1})).clamp_(0, 1);
}

constexpr std::int64_t kGrey = (std::int64_t{1} << 32) + (1 << 16) + 1;  // the lightest but black

// The colours, whose parts are in the first dimension, as numbers.
torch::Tensor to_numbers(const torch::Tensor& colors) {
  const auto parts = colors.to(torch::kLong);
  return parts[0] * (std::int64_t{1} << 32) + parts[1] * (1 << 16) + parts[2];
}

}  // namespace

std::vector<Sample> list_samples(const fs::path& folder) {
  const auto images = files_by_stem(folder / "imgs");
  const auto masks = files_by_stem(folder / "masks", "_mask");
  if (images.empty()) throw std::runtime_error((folder / "imgs").string() + ": no image, such as <image>.jpg");
  check_stems(images, masks, (folder / "masks").string() + ": no mask (<image>_mask.png) for: ");
  check_stems(masks, images, (folder / "imgs").string() + ": no image for the masks of: ");
  std::vector<Sample> samples;
  for (const auto& [stem, image] : images) {
    const auto& mask = masks.at(stem);
    if (const Size size = image_size(image), of_mask = image_size(mask); size != of_mask) {
      throw std::runtime_error(image.string() + " is " + to_string(size) + ", but its mask " + mask.string() + " is " +
                               to_string(of_mask));
    }
    samples.push_back({image, mask});
  }
  return samples;
}

void check_masks(const std::vector<Sample>& samples, int classes, int workers) {
  std::set<std::uint8_t> found;
  std::deque<std::future<torch::Tensor>> read;
  for (std::size_t next = 0, done = 0; done < samples.size(); ++done) {
    for (; next < samples.size() && next < done + static_cast<std::size_t>(std::max(1, workers)); ++next) {
      read.push_back(std::async(workers > 0 ? std::launch::async : std::launch::deferred, [&, next] {
        return std::get<0>(at::_unique(read_labels(samples[next].mask, classes)));
      }));
    }
    const auto labels = read.front().get();
    read.pop_front();
    found.insert(labels.const_data_ptr<std::uint8_t>(), labels.const_data_ptr<std::uint8_t>() + labels.numel());
    show_percent("masks", static_cast<double>(done + 1) / static_cast<double>(samples.size()));
  }
  if (found.size() > 1) return;
  throw std::runtime_error(absl::StrCat(samples.front().mask.parent_path().string(),
                                        ": all pixels of all masks are of class ", static_cast<int>(*found.begin()),
                                        "; masks need black and the classes' colours"));
}

Split split(const std::vector<Sample>& samples, double validation_percent, std::uint64_t seed) {
  const auto count = static_cast<std::int64_t>(samples.size());
  if (count < 2) throw std::invalid_argument("cannot split a single image into training and validation; give two");
  const auto wanted = std::llround(static_cast<double>(count) * validation_percent / 100);
  const auto validation = std::clamp<std::int64_t>(wanted, 1, count - 1);
  const auto order = random_order(samples.size(), Random(seed));
  Split parts;
  for (std::int64_t i = 0; i < count; ++i) {
    auto& part = order[i].item<std::int64_t>() < validation ? parts.validation : parts.training;
    part.push_back(samples[static_cast<std::size_t>(i)]);
  }
  return parts;
}

// Each three bits of the class, from the lowest, give the next lower bit of red, green and blue.
torch::Tensor class_colors(int classes) {
  if (classes == 2) return torch::tensor({0, 255}, torch::kByte).view({2, 1}).expand({2, 3});
  const auto labels = torch::arange(classes).view({classes, 1});
  auto colors = torch::zeros({classes, 3}, torch::kLong);
  for (int round = 0; round < 2; ++round) {
    const auto bits = labels.bitwise_right_shift(torch::arange(3) + 3 * round).bitwise_and(1);
    colors += bits * (128 >> round);
  }
  return colors.to(torch::kByte);
}

torch::Tensor read_labels(const fs::path& path, int classes) {
  const auto image = read_numbers(path);
  const auto colors = to_numbers(image);
  if (classes == 2) {
    const auto light = image.amax(0).to(torch::kLong);
    const auto things = colors.masked_select(colors > 0);
    const bool greys = light.max().item<int>() >= kMaxClasses && colors.eq(light * kGrey).all().item<bool>();
    if (!greys && things.numel() > 0 && things.ne(things[0]).any().item<bool>()) {
      throw std::runtime_error(path.string() +
                               ": a mask of two classes has one colour beside black, or greys up to white");
    }
    return (2 * light > light.max()).to(torch::kByte);
  }
  const auto of_classes = to_numbers(class_colors(classes).t());
  auto labels = torch::full_like(colors, classes, torch::kByte);
  for (int k = 0; k < classes; ++k) labels.masked_fill_((colors == of_classes[k]) | (colors == k * kGrey), k);
  const auto others = colors.masked_select(labels == classes);
  if (others.numel() == 0) return labels;
  const auto color = others[0].item<std::int64_t>();
  throw std::runtime_error(absl::StrCat(path.string(), ": the colour ", color >> 32, ",", color >> 16 & 0xffff, ",",
                                        color & 0xffff, " belongs to none of the ", classes, " classes"));
}

torch::Tensor paint_labels(const torch::Tensor& labels, int classes) {
  if (classes == 2) return labels * 255;
  return class_colors(classes).index({labels.to(torch::kLong)}).permute({2, 0, 1});
}

Loader::Loader(std::vector<Sample> samples, Size size, LoaderOptions options)
    : samples_(std::move(samples)), size_(size), options_(std::move(options)), next_(options_.first_batch) {
  if (options_.epoch) {
    const auto order =
        random_order(samples_.size(), Random(options_.seed, static_cast<std::uint64_t>(*options_.epoch)));
    const auto in_order = std::exchange(samples_, {});
    for (std::int64_t i = 0; i < order.numel(); ++i) samples_.push_back(in_order[order[i].item<std::int64_t>()]);
  }
  start_workers();
}

void Loader::start_workers() {
  const auto count = static_cast<std::int64_t>(samples_.size());
  while (next_ * options_.batch_size < count && static_cast<int>(decoded_.size()) < std::max(1, options_.workers)) {
    const auto policy = options_.workers > 0 ? std::launch::async : std::launch::deferred;
    decoded_.push_back(std::async(policy, [this, batch = next_++] {
      if (options_.workers > 0) set_intraop_threads_of_this_thread(1);
      return decode(batch);
    }));
  }
}

std::optional<Example> Loader::next() {
  if (decoded_.empty()) return std::nullopt;
  auto batch = decoded_.front().get();
  decoded_.pop_front();
  start_workers();
  return batch;
}

Example Loader::decode(std::int64_t batch) const {
  const auto first = batch * options_.batch_size;
  const auto count = std::min(options_.batch_size, static_cast<std::int64_t>(samples_.size()) - first);
  const auto [begin, end] = part_of(options_.ranks, count);
  auto images = torch::empty({end - begin, 3, size_.height, size_.width});
  auto labels = torch::zeros({end - begin, 1, size_.height, size_.width}, torch::kByte);
  for (auto i = begin; i < end; ++i) {
    const auto& sample = samples_[static_cast<std::size_t>(first + i)];
    auto image = read_image(sample.image, size_).to(torch::kFloat).div_(255);
    auto mask = labels[i - begin][0];
    if (!sample.mask.empty()) mask = resize_nearest(read_labels(sample.mask, options_.classes), size_);
    if (options_.augment) {
      const auto epoch = static_cast<std::uint64_t>(options_.epoch.value_or(0));
      augment(image, mask, Random(options_.seed, (epoch << 32) + static_cast<std::uint64_t>(first + i) + 1));
    }
    images[i - begin].copy_(image);
    labels[i - begin][0].copy_(mask);
  }
  return {images, labels};
}

}  // namespace gpipe::examples::unet
