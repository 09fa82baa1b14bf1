// gpipe-balance profile: measures each layer.

#include <iostream>

#include "balance/report.h"
#include "examples/common/files.h"
#include "examples/common/flags.h"
#include "examples/gpipe_balance/model.h"
#include "examples/gpipe_balance/verbs.h"

namespace gpipe::examples::balance {
namespace {

void add_flags(CLI::App& app, Options& options) {
  add_chunks_flag(app, options);
  app.add_option("-o,--output", options.output, "file to write the profile to, as JSON, for 'cut --profile'")
      ->transform(path_name())
      ->always_capture_default(false);
}

int run(const Options& options) {
  if (!options.output.empty()) check_writable_file(options.output);
  const auto profile = profile_of(options, options.chunks);
  const auto json = profile_to_json(profile);
  if (!options.output.empty()) write_file(options.output, json);
  std::cout << (options.json ? json + "\n" : profile_table(profile));
  return 0;
}

}  // namespace

Verb profile_verb() { return {"profile", "measure each layer, for micro-batches of one size", add_flags, run}; }

}  // namespace gpipe::examples::balance
