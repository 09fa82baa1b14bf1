#include "examples/unet/data.h"

#include <ATen/Parallel.h>
#include <torch/utils.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "examples/common/random.h"

namespace gpipe::examples::unet {
namespace {

namespace fs = std::filesystem;

// Refuses an image or a mask without its counterpart.
void check_stems(const FilesByStem& wanted, const FilesByStem& present, const std::string& what) {
  for (const auto& [stem, path] : wanted) {
    if (!present.contains(stem)) throw std::runtime_error(path.string() + " has no " + what);
  }
}

constexpr std::int64_t kGrey = (std::int64_t{1} << 32) + (1 << 16) + 1;  // the lightest but black

// The colours, whose parts are in the first dimension, as numbers.
torch::Tensor to_numbers(const torch::Tensor& colors) {
  const auto parts = colors.to(torch::kLong);
  return parts[0] * (std::int64_t{1} << 32) + parts[1] * (1 << 16) + parts[2];
}

}  // namespace

FilesByStem images_in(const fs::path& folder, const std::string& suffix) {
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
  if (files.empty()) throw std::runtime_error(folder.string() + ": no image, such as <image>" + suffix + ".png");
  return files;
}

std::vector<Sample> list_samples(const fs::path& folder) {
  const auto images = images_in(folder / "imgs");
  const auto masks = images_in(folder / "masks", "_mask");
  check_stems(images, masks, "mask, such as " + (folder / "masks" / "<image>_mask.png").string());
  check_stems(masks, images, "image in " + (folder / "imgs").string());
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

void check_masks(const std::vector<Sample>& samples, int classes) {
  std::vector<std::uint64_t> found(samples.size());  // a bit per class
  at::parallel_for(0, static_cast<std::int64_t>(samples.size()), 1, [&](std::int64_t begin, std::int64_t end) {
    for (auto i = begin; i < end; ++i) {
      const auto counts = torch::bincount(read_labels(samples[i].mask, classes).flatten());
      for (std::int64_t k = 0; k < counts.numel(); ++k) {
        if (counts[k].item<std::int64_t>() > 0) found[i] |= std::uint64_t{1} << k;
      }
    }
  });
  const auto all = std::accumulate(found.begin(), found.end(), std::uint64_t{0}, std::bit_or<>());
  if (std::popcount(all) > 1) return;
  throw std::runtime_error(absl::StrCat(samples.front().mask.parent_path().string(),
                                        ": all pixels of all masks are of class ", std::countr_zero(all),
                                        "; masks need black and the classes' colours"));
}

Split split(const std::vector<Sample>& samples, double validation_percent, std::uint64_t seed) {
  const auto count = static_cast<std::int64_t>(samples.size());
  if (count < 2) throw std::invalid_argument("cannot split a single image into training and validation; give two");
  const auto wanted = std::llround(static_cast<double>(count) * validation_percent / 100);
  const auto validation = std::clamp<std::int64_t>(wanted, 1, count - 1);
  const auto order = random_order(count, seed);
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

Example read_samples(const std::vector<Sample>& samples, Size size, int classes) {
  const auto count = static_cast<std::int64_t>(samples.size());
  auto images = torch::empty({count, 3, size.height, size.width});
  auto labels = torch::zeros({count, 1, size.height, size.width}, torch::kByte);
  at::parallel_for(0, count, 1, [&](std::int64_t from, std::int64_t to) {
    for (auto i = from; i < to; ++i) {
      const auto& sample = samples[i];
      images[i].copy_(read_image(sample.image, size)).div_(255);
      if (!sample.mask.empty()) labels[i][0].copy_(resize_nearest(read_labels(sample.mask, classes), size));
    }
  });
  return {images, labels};
}

}  // namespace gpipe::examples::unet
