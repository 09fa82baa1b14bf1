#include "examples/unet/carvana.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <stdexcept>
#include <string>
#include <system_error>

#include "absl/strings/ascii.h"
#include "examples/common/image.h"
#include "examples/common/random.h"

namespace gpipe::examples::unet {
namespace {

namespace fs = std::filesystem;

constexpr char kMaskSuffix[] = "_mask";

using FilesByStem = std::map<std::string, fs::path>;

FilesByStem files_by_stem(const fs::path& folder, const std::vector<std::string>& extensions) {
  std::error_code error;
  fs::directory_iterator entries(folder, error);
  if (error) throw std::runtime_error("cannot read the folder " + folder.string() + ": " + error.message());
  FilesByStem files;
  for (const auto& entry : entries) {
    const auto extension = absl::AsciiStrToLower(entry.path().extension().string());
    if (std::find(extensions.begin(), extensions.end(), extension) == extensions.end()) continue;
    const auto [other, is_new] = files.emplace(entry.path().stem().string(), entry.path());
    if (!is_new) {
      throw std::runtime_error("two files have the same stem: " + other->second.string() + " and " +
                               entry.path().string());
    }
  }
  return files;
}

// Names up to five stems of `wanted` that `present` lacks.
std::string missing_stems(const FilesByStem& wanted, const FilesByStem& present) {
  std::string text;
  int missing = 0;
  for (const auto& [stem, path] : wanted) {
    if (present.count(stem) != 0) continue;
    if (++missing <= 5) text += (missing > 1 ? ", " : "") + stem;
  }
  if (missing > 5) text += " and " + std::to_string(missing - 5) + " more";
  return text;
}

FilesByStem masks_by_image_stem(const fs::path& folder) {
  FilesByStem masks;
  for (const auto& [stem, path] : files_by_stem(folder, {".gif", ".png"})) {
    if (!stem.ends_with(kMaskSuffix)) {
      throw std::runtime_error(path.string() + ": the name of a mask must be <image>" + kMaskSuffix +
                               path.extension().string());
    }
    masks.emplace(stem.substr(0, stem.size() - std::size(kMaskSuffix) + 1), path);
  }
  return masks;
}

}  // namespace

std::vector<Sample> list_samples(const fs::path& folder) {
  const auto images = files_by_stem(folder / "imgs", {".jpg", ".jpeg", ".png"});
  const auto masks = masks_by_image_stem(folder / "masks");
  if (images.empty()) throw std::runtime_error((folder / "imgs").string() + ": no .jpg, .jpeg or .png file");
  if (const auto stems = missing_stems(images, masks); !stems.empty()) {
    throw std::runtime_error((folder / "masks").string() + ": no mask (<image>" + kMaskSuffix +
                             ".gif or .png) for: " + stems);
  }
  if (const auto stems = missing_stems(masks, images); !stems.empty()) {
    throw std::runtime_error((folder / "imgs").string() + ": no image for the masks of: " + stems);
  }

  std::vector<Sample> samples;
  for (const auto& [stem, image] : images) {
    const Sample sample{image, masks.at(stem)};
    const Size size = image_size(sample.image);
    const Size mask_size = image_size(sample.mask);
    if (size != mask_size) {
      throw std::runtime_error(sample.image.string() + " is " + to_string(size) + ", but its mask " +
                               sample.mask.string() + " is " + to_string(mask_size));
    }
    samples.push_back(sample);
  }
  return samples;
}

Split split(const std::vector<Sample>& samples, double validation_percent, uint64_t seed) {
  if (!(validation_percent >= 0 && validation_percent < 100)) {
    throw std::invalid_argument("the validation percentage must be at least 0 and below 100, but is " +
                                std::to_string(validation_percent));
  }
  if (validation_percent == 0) return {samples, {}};
  const auto count = samples.size();
  if (count < 2) {
    throw std::invalid_argument("cannot split " + std::to_string(count) +
                                " sample into training and validation; give at least two");
  }
  const auto wanted = static_cast<size_t>(std::llround(static_cast<double>(count) * validation_percent / 100));
  const auto validation_count = std::clamp<size_t>(wanted, 1, count - 1);

  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), size_t{0});
  Random(seed).shuffle(order);
  std::vector<bool> is_validation(count);
  for (size_t i = 0; i < validation_count; ++i) is_validation[order[i]] = true;

  Split parts;
  for (size_t i = 0; i < count; ++i) (is_validation[i] ? parts.validation : parts.training).push_back(samples[i]);
  return parts;
}

}  // namespace gpipe::examples::unet
