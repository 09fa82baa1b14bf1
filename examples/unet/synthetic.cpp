#include "examples/unet/synthetic.h"

#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "examples/common/files.h"
#include "examples/common/random.h"
#include "examples/unet/carvana.h"
#include "examples/unet/classes.h"
#include "examples/unet/scene.h"

namespace gpipe::examples::unet {
namespace {

namespace fs = std::filesystem;

void make_folder_for(const fs::path& folder, const std::set<fs::path>& files) {
  make_directory(folder);
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (files.count(entry.path()) != 0) continue;
    throw std::runtime_error("cannot write synthetic data: " + folder.string() + " holds another file, " +
                             entry.path().filename().string() + "; remove it or choose another folder");
  }
}

}  // namespace

void write_synthetic(const std::filesystem::path& folder, int count, Size size, uint64_t seed, int classes) {
  if (count < 1) throw std::invalid_argument("cannot write " + std::to_string(count) + " images; give at least 1");
  const fs::path images = folder / "imgs";
  const fs::path masks = folder / "masks";
  std::vector<Sample> samples;
  std::set<fs::path> files;
  const std::string mask_suffix = classes == 2 ? "_mask.gif" : "_mask.png";
  for (int i = 0; i < count; ++i) {
    const std::string stem = absl::StrFormat("%04d", i);
    samples.push_back({images / (stem + ".jpg"), masks / (stem + mask_suffix)});
    files.insert({samples.back().image, samples.back().mask});
  }
  make_folder_for(images, files);
  make_folder_for(masks, files);
  for (size_t i = 0; i < samples.size(); ++i) {
    Random random(seed, i);
    const Scene scene = draw_scene(random, size, classes);
    write_jpeg(samples[i].image, scene.image);
    if (classes == 2) {
      write_gif(samples[i].mask, scene.mask);
    } else {
      write_png(samples[i].mask, paint_labels(scene.mask, classes));
    }
  }
}

}  // namespace gpipe::examples::unet
