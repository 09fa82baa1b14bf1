#include "gpipe/ranks/team.h"

#include "gpipe/ranks/gradient_reduction.h"

namespace gpipe {

std::unique_ptr<GradientReduction> Alone::begin_sum(std::vector<std::vector<at::Tensor>>) { return nullptr; }

}  // namespace gpipe
