// Random cases: a model and calls of a pipeline, compared with a plain loop over the same layers.
#pragma once

#include "tests/gpipe/generated_units.h"

namespace gpipe {

/// A unit in a model.
struct Use {
  const Unit* unit;
  int variant = 0;
  int pair = 0;  // the number of its pair, for a unit that belongs to one
};

/// The schedule of a case with a list schedule for its placement.
inline constexpr char kLists[] = "lists";

struct Spec {
  std::uint64_t seed = 0;
  // The model.
  std::vector<Use> uses = {};
  std::int64_t width = 4;
  bool single = false;  // precision
  bool autocast = false;
  bool several_inputs = false;
  bool several_outputs = false;
  bool no_input_gradient = false;
  int frozen = 0;  // bit l: parameters of every third layer, from layer l on
  // The pipeline.
  int workers = 1;
  std::vector<int> placement = {0};
  std::string schedule = {};  // of step(); empty: forward() and backward
  Checkpoints checkpoint = Checkpoint::kNever;
  bool deferred = false;   // batch norm
  bool factories = false;  // make the layers
  // The calls.
  int batch = 1;
  int chunks = 1;
  int calls = 1;
  bool backward_twice = false;
  bool eval = false;           // in the second call
  bool accumulates = false;    // gradients over all calls, without steps of the optimizer
  bool scaled = false;         // the loss of a step
  bool computes_loss = false;  // in place of a step
  bool switches = false;       // between training and evaluation, before a backward
  bool threads = false;        // of their own for each forward, backward and step

  int stages() const { return static_cast<int>(placement.size()); }
  /// Whether the schedule splits backwards.
  bool splits() const;
  /// Whether a unit has any of the flags.
  bool has(int flags) const;
  /// Whether the pipeline may refuse changes in place of tensors that share memory, as it documents.
  bool may_be_refused() const;
};

/// The features that a case has or has not, by name.
inline const std::pair<const char*, bool Spec::*> kSwitches[] = {
    {"single", &Spec::single},
    {"autocast", &Spec::autocast},
    {"several inputs", &Spec::several_inputs},
    {"several outputs", &Spec::several_outputs},
    {"no input gradient", &Spec::no_input_gradient},
    {"deferred", &Spec::deferred},
    {"factories", &Spec::factories},
    {"backward twice", &Spec::backward_twice},
    {"eval", &Spec::eval},
    {"accumulates", &Spec::accumulates},
    {"scaled", &Spec::scaled},
    {"computes the loss", &Spec::computes_loss},
    {"switches modes", &Spec::switches},
    {"threads", &Spec::threads},
};

std::string to_string(const Spec& spec);

/// `portable`: the pipeline runs the case on several devices or over ranks too.
Spec generate(std::uint64_t seed, bool portable);

Sequential build(const Spec& spec);

/// Tries a case for each seed, until three have failed. Reports each of these in its smallest form. `fault_of` returns
/// what is wrong with a case, or "". Operators run on one thread meanwhile.
void expect_no_fault(const Seeds& seeds, bool portable, const std::function<std::string(const Spec&)>& fault_of);

/// The features of a case, each of which must occur.
std::vector<std::string> features(const Spec& spec);
extern const std::size_t kFeatures;

/// Where a case runs. The loop runs on `reference`.
struct Devices {
  std::vector<torch::Device> workers;  // as many as Spec::workers, or more
  torch::Device input;
  torch::Device target;
  torch::Device reference;
};

struct Outcome {
  enum Verdict {
    kEqual,
    kDifferent,
    kRefused,  // see Spec::may_be_refused()
    kNoModel,  // the loop fails too: PyTorch refuses changes in place of tensors that a backward needs
  };
  Verdict verdict = kEqual;
  std::string what = {};  // the first difference, or the text of an error
};

/// Runs a case, on the CPU if no devices are given. On the CPU, its results must have the bits of the reference that is
/// cut like the pipeline. Everywhere they must equal those of the whole model to double precision. With ranks, every
/// rank must call this with the same case, and compares what it has. Replicas train on parts of the mini-batch.
Outcome compare(const Spec& spec, const std::optional<Devices>& devices = std::nullopt,
                const std::shared_ptr<Ranks>& ranks = nullptr);

}  // namespace gpipe
