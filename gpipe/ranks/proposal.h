#pragma once

#include <optional>
#include <string>

#include "gpipe/ranks/mesh.h"

namespace gpipe {

/// A call that all ranks begin together.
struct Proposal {
  std::string what;                        ///< the same on all ranks of a replica
  std::string same_on_all = "";            ///< the same on all ranks; empty: `what`
  std::string same_for_counterparts = "";  ///< the same on all ranks with the same stages
  std::uint64_t program = 0;               ///< a hash of what runs; the same on all ranks of a replica
  std::uint64_t number = 0;                ///< the agreement has the largest
  double weight = 0;                       ///< of the replica's part of the mini-batch; 0 on ranks that do not know it
  int micro_batches = 0;                   ///< of the replica
  bool has_loaded = false;                 ///< a state, since the last call that took the first replica's
  bool failed_before = false;   ///< whether this rank's last backward ended with an exception after it was agreed on
  bool has_one_caller = false;  ///< Job::has_one_caller()
};

/// What the ranks have agreed on.
struct Agreement {
  std::uint64_t largest = 0;
  /// Of each replica.
  std::vector<double> weights;
  std::vector<int> micro_batches;
  bool has_loaded = false;  ///< of any rank
};

/// The words before a call: each rank tells rank 0, the leader, one of the first three. It decides, and tells all.
std::string encode(Proposal proposal);
std::string encode_refusal(const std::string& reason);  ///< this rank cannot make the call
std::string encode_leaving(const std::string& reason);  ///< this rank will make no more calls
std::string decide(const std::vector<std::string>& words, const Mesh& mesh);

/// Returns what a rank calls, if one thread of it makes all calls; else an empty text.
std::string awaited_call(const std::string& words);

/// Returns the reason if the words say that a rank leaves.
std::optional<std::string> reason_for_leaving(const std::string& words);

/// Reads a decision. Errors: std::runtime_error unless all ranks agreed.
Agreement decode_agreement(const std::string& decision, const Mesh& mesh);

}  // namespace gpipe
