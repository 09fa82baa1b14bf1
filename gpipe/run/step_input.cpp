#include "gpipe/run/step_input.h"

#include <ATen/OpMathType.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/TypeCast.h>

#include <algorithm>
#include <cmath>

#include "gpipe/base/checks.h"

namespace gpipe {
CallerInputs::CallerInputs(Pipeline& pipeline, std::vector<Parcel> parcels, c10::Device device)
    : device_(device), parcels_(std::move(parcels)) {
  if (parcels_.empty()) return;
  for (const auto& tensor : parcels_.front().tensors) {
    ready_.push_back(record_events({}, tensor.device()));
    links_.push_back(pipeline.calls().link(tensor.device(), device_));
  }
  copied_.resize(links_.size());
}

Parcel CallerInputs::receive(int micro_batch) {
  auto parcel = std::move(parcels_[micro_batch]);
  for (std::size_t k = 0; k < parcel.tensors.size(); ++k) {
    const bool is_pinned = !device_.is_cpu() && parcel.tensors[k].is_cpu() && parcel.tensors[k].is_pinned();
    const auto copied = copy_to_device({&parcel.tensors[k], 1}, ready_[k], device_, links_[k]);
    if (is_pinned) copied_[k] = copied;
  }
  parcel.renew_versions();
  return parcel;
}

void CallerInputs::await_copies() const {
  for (const auto& copied : copied_) wait(copied, c10::kCPU);
}

std::vector<std::int64_t> micro_batch_sizes(std::int64_t samples, std::int64_t chunks, std::int64_t split_size,
                                            std::int64_t least) {
  if (split_size == 0 && chunks <= 0) check_chunks(chunks);
  if (samples < 0 || split_size < 0) {
    refuse_argument("a mini-batch of ", samples, " samples cannot be cut into ",
                    split_size != 0 ? absl::StrCat("micro-batches of ", split_size, " samples")
                                    : absl::StrCat(chunks, " micro-batches"));
  }
  const auto rest = split_size > 0 ? samples % split_size : 0;
  auto count = split_size > 0 ? samples / split_size + (rest > 0 ? 1 : 0) : std::min(chunks, samples);
  const bool is_split = split_size > 0 && samples > 0 && (split_size < least || rest == 0 || rest >= least);
  if (!is_split) count = std::clamp<std::int64_t>(samples / least, 1, std::max<std::int64_t>(count, 1));
  if (count > kMostCells) {
    refuse_argument("a mini-batch of ", samples, " samples would be cut into ", count, " micro-batches, but at most ",
                    kMostCells, " are possible; use fewer and larger ones");
  }
  std::vector<std::int64_t> sizes(std::max<std::int64_t>(count, 1));
  for (std::int64_t i = 0; i < std::ssize(sizes); ++i) {
    const bool is_last = i + 1 == count;
    sizes[i] = is_split ? (is_last && rest > 0 ? rest : split_size) : samples / count + (i < samples % count ? 1 : 0);
  }
  return sizes;
}

std::int64_t batch_size(const Value& value, const std::string& what) {
  if (value.tensors().empty()) refuse_argument("the ", what, " has no tensors; pass at least one");
  std::vector<std::int64_t> sizes;
  for (const auto& tensor : value.tensors()) {
    if (!tensor.defined()) refuse_argument("a tensor of the ", what, " is undefined; pass a defined one");
    if (tensor.is_meta()) refuse_argument("a tensor of the ", what, " is on the meta device; pass one with data");
    if (tensor.dim() == 0) {
      refuse_argument("a tensor of the ", what,
                      " has no dimensions; dimension 0 is the batch, which is cut into micro-batches, so expand it to "
                      "the batch, or keep it in a layer");
    }
    sizes.push_back(tensor.size(0));
  }
  if (std::ranges::count(sizes, sizes.front()) != std::ssize(sizes)) {
    refuse_argument("the tensors of the ", what, " have unequal batch sizes (", c10::str(at::IntArrayRef(sizes)),
                    "); dimension 0 must be the same for all");
  }
  return sizes.front();
}

std::vector<Parcel> scatter(const Value& input, const std::vector<std::int64_t>& sizes) {
  at::NoGradGuard no_grad;
  std::vector<Parcel> parts(sizes.size());
  const auto groups = alias_groups_of_inputs(input.tensors());
  for (std::size_t k = 0; k < groups.size(); ++k) {
    const auto& tensor = input.tensors()[k];
    auto pieces = tensor.detach().split_with_sizes(sizes);
    const bool is_expanded = tensor.layout() == at::kStrided && !tensor.is_nested() && tensor.stride(0) == 0;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      parts[i].form = input.form();
      // Micro-batches of the same memory would see each other's writes. The copy stores one sample.
      if (is_expanded && sizes.size() > 1) pieces[i] = copy_of(pieces[i]);
      // variable_data() gives each micro-batch a version counter of its own.
      parts[i].add(pieces[i].variable_data(), tensor.requires_grad(), groups[k]);
    }
  }
  return parts;
}

Gathered gather(const std::vector<Parcel>& parts, const std::vector<std::int64_t>& sizes, const std::string& layer) {
  at::NoGradGuard no_grad;
  const auto& first = parts.front();
  const auto outputs = first.tensors.size();
  Gathered gathered{{}, std::vector<bool>(outputs)};
  std::vector<at::Tensor> joined;
  for (std::size_t k = 0; k < outputs; ++k) {
    std::vector<at::Tensor> pieces;
    for (const auto& part : parts) {
      if (part.form != first.form || part.tensors.size() != first.tensors.size()) {
        throw_error("layer '", layer, "' returned ", first.value().describe(), " for one micro-batch and ",
                    part.value().describe(), " for another");
      }
      pieces.push_back(part.tensors[k]);
      gathered.wants_gradient[k] = gathered.wants_gradient[k] || part.wants_gradient[k];
    }
    if (parts.size() == 1) {
      const bool own = first.alias_groups[k].number == AliasGroup::kNone;
      joined.push_back(own ? pieces.front() : copy_of(pieces.front()));
      continue;
    }
    const auto undefined = std::ranges::count(pieces, false, &at::Tensor::defined);
    if (undefined == std::ssize(pieces)) {
      joined.emplace_back();
      continue;
    }
    const auto output = absl::StrCat("output ", k, " of layer '", layer, "'");
    if (undefined > 0) throw_error(output, " is undefined for only some of the micro-batches");
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      if (pieces[i].dim() == 0) {
        throw_error(output,
                    " has no dimensions, so the micro-batches cannot be joined; compute a loss outside the pipeline, "
                    "or use chunks = 1");
      }
      if (pieces[i].size(0) != sizes[i]) {
        throw_error(output, " has the shape ", c10::str(pieces[i].sizes()), " for a micro-batch of ", sizes[i],
                    " samples, but dimension 0 of an output must be its samples; transpose it in the layer, leave it "
                    "out, or use chunks = 1");
      }
      if (pieces[i].is_nested()) continue;
      const auto other = pieces.front().sizes();
      if (const auto shape = pieces[i].sizes(); shape.slice(1) != other.slice(1)) {
        throw_error(output, " has the shape ", c10::str(other), " for one micro-batch and ", c10::str(shape),
                    " for another; pad it to a size that does not depend on the micro-batch, as total_length of "
                    "pad_packed_sequence does, or use chunks = 1");
      }
    }
    joined.push_back(at::cat(pieces, 0));
  }
  gathered.value = Value(first.form, std::move(joined));
  return gathered;
}

void Outputs::add(int micro_batch, Parcel part) {
  for (const auto& tensor : part.tensors) note_device(tensor);
  parts_[micro_batch] = std::move(part);
}

void Outputs::note_device(const at::Tensor& result) {
  if (!result.defined() || result.device() == last_.device) return;
  const auto found = std::ranges::find(other_devices_, result.device());
  if (found == other_devices_.end()) other_devices_.push_back(result.device());
}

Gathered Outputs::gather() {
  const auto parts = std::exchange(parts_, {});
  for (const auto& part : parts) {
    for (const auto& tensor : part.tensors) use_on_current_stream(tensor);
  }
  return gpipe::gather(parts, sizes_, last_.name_of(static_cast<int>(last_.layers.size()) - 1));
}

std::vector<at::Tensor> scatter_gradient(const at::Tensor& gradient, const std::vector<std::int64_t>& sizes) {
  if (!gradient.defined() || sizes.size() == 1) return std::vector<at::Tensor>(sizes.size(), gradient);
  return gradient.split_with_sizes(sizes);
}

at::Tensor gather_gradient(std::vector<at::Tensor> parts, const std::vector<std::int64_t>& sizes) {
  if (parts.size() == 1) return std::move(parts.front());
  const auto like = std::ranges::find_if(parts, &at::Tensor::defined);
  if (like == parts.end()) return {};
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].defined()) continue;
    auto shape = like->sizes().vec();
    shape[0] = sizes[i];
    parts[i] = at::zeros(shape, like->options());
  }
  return at::cat(parts, 0);
}

Count::Count(double number) : at::Tensor(at::scalar_tensor(number, at::kDouble)) {}

CountFunction count_of_classes(at::Tensor weight, std::int64_t ignore_index) {
  return [weight = std::move(weight), ignore_index](const Value& value) -> Count {
    const auto target = value.tensor();
    if (target.is_floating_point()) return static_cast<double>(target.size(0));  // probabilities: a mean over samples
    // As the number of a class of type uint8, -100 would be 156.
    const bool ignores = target.scalar_type() != at::kByte || !c10::overflows<std::uint8_t>(ignore_index, true);
    if (!weight.defined())
      return ignores ? target.ne(ignore_index).count_nonzero() : Count(static_cast<double>(target.numel()));
    const auto ignored = ignores ? target.eq(ignore_index) : at::zeros_like(target, at::kBool);
    const auto classes = target.masked_fill(ignored, 0).to(at::kLong).flatten();
    const auto weights = weight.detach().to(target.device()).index_select(0, classes);
    return weights.masked_fill(ignored.flatten(), 0).sum(at::toOpMathType(weights.scalar_type()));
  };
}

StepOptions complete(StepOptions options, const LossFunction& loss, const Value& target, std::int64_t samples) {
  if (!loss) refuse_argument("the loss function is empty; pass one");
  if (const auto targets = batch_size(target, "target"); targets != samples) {
    refuse_argument("the target has ", targets, " samples, but the input has ", samples, "; give as many");
  }
  for (const auto& tensor : target.tensors()) {
    if (tensor.requires_grad()) refuse_argument("a target requires grad, but step() gives it no gradient; detach it");
  }
  if (!std::isfinite(options.scale()) || options.scale() <= 0) {
    refuse_argument("scale must be finite and positive, but is ", options.scale());
  }
  if (options.count() && options.reduction() == Reduction::kSum) {
    refuse_argument("count weights a mean, but reduction is the sum; leave one of them out");
  }
  if (options.reduction() == Reduction::kSum) options.check(false);
  if (!options.count() && loss.reduction && options.reduction().value_or(*loss.reduction) == *loss.reduction) {
    options.reduction(loss.reduction).count(loss.count).check(false);
  }
  return options.reduction(options.reduction().value_or(Reduction::kMean));
}

std::vector<at::Tensor> counts_of(const StepOptions& options, const std::vector<Parcel>& targets) {
  std::vector<at::Tensor> counts;
  if (options.reduction() == Reduction::kSum || !options.count()) return counts;
  at::NoGradGuard no_grad;
  for (const auto& target : targets) {
    const at::Tensor count = options.count()(target.value());
    if (!count.defined() || count.numel() != 1) {
      refuse_argument("count returned ", count.defined() ? c10::str("a tensor of shape ", count.sizes()) : "no tensor",
                      " for micro-batch ", counts.size(), "; return a number, or a tensor of one element");
    }
    counts.push_back(count.detach().reshape({}).to(at::kDouble));
  }
  return counts;
}

std::vector<double> loss_weights(const StepOptions& options, const std::vector<std::int64_t>& sizes,
                                 const std::vector<at::Tensor>& counts) {
  if (options.reduction() == Reduction::kSum) return std::vector<double>(sizes.size(), 1);
  std::vector<double> weights(sizes.begin(), sizes.end());
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const double count = weights[i] = counts[i].item<double>();
    if (std::isfinite(count) && count >= 0) continue;
    refuse_argument("count returned ", std::to_string(count), " for micro-batch ", i,
                    "; return a finite number that is not negative");
  }
  return weights;
}

void normalize_weights(std::vector<double>& weights, double total, Reduction reduction) {
  if (reduction == Reduction::kSum) return;
  if (total == 0) {
    refuse_argument(
        "every target is ignored (count is 0 for every micro-batch), or there are no samples; skip this mini-batch");
  }
  for (auto& weight : weights) weight /= total;
}

}  // namespace gpipe
