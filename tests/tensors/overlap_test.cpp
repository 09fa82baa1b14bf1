#include "gpipe/tensors/parcel.h"

#include "tests/gpipe/helpers.h"

namespace gpipe {
namespace {

TEST(Overlap, AgreesWithCountingElements) {
  const auto base = torch::arange(48);
  std::vector<Tensor> views = {base, base.slice(0, 0, 24), base.slice(0, 24, 48), torch::arange(48),
                               base.slice(0, 5, 5)};
  for (const auto& shape : {std::vector<std::int64_t>{6, 8}, {4, 3, 4}}) {
    const auto whole = base.view(shape);
    for (std::int64_t d = 0; d < whole.dim(); ++d) {
      for (std::int64_t start = 0; start < 3; ++start) {
        views.push_back(whole.slice(d, start, start + 2));
        views.push_back(whole.slice(d, start, whole.size(d), 2));
        views.push_back(whole.select(d, start).t());
      }
    }
  }
  views.push_back(base.slice(0, 3, 4).expand({5}));
  views.push_back(base.as_strided({4, 4}, {1, 1}, 7));
  for (const auto& a : views) {
    for (const auto& b : views) {
      // The elements of the base are all different.
      const bool shared = a.is_alias_of(b) && torch::isin(a.flatten(), b.flatten()).any().item<bool>();
      EXPECT_EQ(overlap(a, b), shared) << a.sizes() << a.strides() << a.storage_offset() << b.sizes() << b.strides()
                                       << b.storage_offset();
    }
  }
}

}  // namespace
}  // namespace gpipe
