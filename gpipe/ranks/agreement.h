#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "gpipe/action.h"
#include "gpipe/mesh.h"

namespace gpipe {

/// What a call is. All ranks make the same calls: they compare these values, and tell of a difference in words.
struct StepKey {
  enum Call { kOther, kForward, kForwardWithGradients, kStep, kBackward };
  Call call = kOther;
  std::string name = "";     ///< of another call
  std::uint64_t number = 0;  ///< kBackward: of the call that ran the forward
  bool retains_graph = false;
  bool measures = false;
  bool returns_output = false;
  bool sums_losses = false;
  bool counts = false;
  double scale = 1;
  bool training = true;
  Checkpoints checkpoints = Checkpoint::kNever;
  std::vector<std::int64_t> autocast = {};  ///< a type of devices, to which type it casts, and so on
  std::vector<std::int64_t> sizes = {};     ///< of the micro-batches of a replica

  friend bool operator==(const StepKey&, const StepKey&) = default;
};
std::string to_string(const StepKey& key);

/// A call that all ranks begin together.
struct Proposal {
  StepKey key;                      ///< the same on all ranks, the sizes on those of a replica
  std::uint64_t trained = 0;        ///< how many parameters get gradients; the same on all ranks with the same stages
  std::uint64_t trained_sizes = 0;  ///< a hash of their sizes, types and strides, also the same
  std::uint64_t program = 0;        ///< a hash of what runs; the same on all ranks of a replica
  std::uint64_t number = 0;         ///< the agreement has the largest
  double weight = 0;                ///< of the replica's part of the mini-batch; 0 on ranks that do not know it
  bool has_samples = true;          ///< whether the replica's part has any
  bool has_loaded = false;          ///< a state, since the last call that took the first replica's
  bool failed_before = false;  ///< whether this rank's last backward ended with an exception after it was agreed on
};

/// What the ranks have agreed on.
struct Agreement {
  std::uint64_t largest = 0;
  bool has_loaded = false;  ///< any rank
  /// Of each replica.
  std::vector<double> weights;
  std::vector<int> micro_batches;
};

/// Messages of the agreement. Each rank sends rank 0 a proposal, a refusal or a farewell; rank 0 answers all with the
/// decision.
std::string encode(const Proposal& proposal);
std::string encode_refusal(const std::string& reason);  ///< this rank cannot make the call
std::string encode_leaving(const std::string& reason);  ///< this rank will make no more calls
std::string decide(const std::vector<std::string>& messages, const Mesh& mesh);

/// Returns the reason if the message is a farewell.
std::optional<std::string> reason_for_leaving(const std::string& message);

/// Reads a decision. Errors: std::runtime_error unless all ranks agreed.
Agreement decode_agreement(const std::string& decision);

}  // namespace gpipe
