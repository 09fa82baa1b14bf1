#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>

#include "gpipe/graph/argument.h"
#include "gpipe/graph/graph.h"

namespace gpipe {

/// The JSON description of a graph, read and checked. See Graph for the meaning of each member.
struct Graph::Description {
  /// A grad mode or an autocast around calls.
  struct Context {
    std::int64_t block = 0;  ///< tells blocks of equal settings apart
    std::optional<bool> grad = {};
    std::optional<at::ScalarType> dtype = {};  ///< default: the device's
    bool enabled = false;
    std::optional<bool> cache = {};  ///< default: as before

    friend bool operator==(const Context&, const Context&) = default;
  };

  struct Call {
    std::optional<c10::OperatorHandle> target;  ///< none for a Python function
    std::string name;                           ///< of the operator or the function
    std::vector<Argument> arguments;            ///< of an operator: all, in the order of its schema
    std::optional<std::size_t> result;
    std::optional<bool> mode;
    std::vector<Context> within;
    std::string at;
    bool is_batch_norm = false;
    std::vector<std::size_t> last_uses;  ///< the values that nothing uses afterwards
  };

  struct Guard {
    Argument holds;
    std::string text;
  };

  /// The shape of an input; none for an input that must be null. A size of -1 stands for any.
  using Shape = std::optional<std::vector<std::int64_t>>;

  /// Errors: std::invalid_argument, as Graph's constructor.
  explicit Description(const nlohmann::json& json);

  std::size_t values;
  std::vector<std::optional<std::size_t>> inputs;
  std::vector<std::string> tensors, pops, peeks, stashes, python_functions;
  std::vector<std::size_t> owned, popped, peeked;  ///< the values of tensors, pops and peeks
  std::vector<Argument> stashed, outputs;
  std::vector<Shape> shapes;
  std::vector<Guard> guards;
  std::vector<Call> calls;
  std::vector<std::size_t> unused;  ///< the values of inputs and skips that nothing uses
  CallPython call_python;

 private:
  void find_last_uses();
  /// The numbers of the values that an argument uses. Errors: std::invalid_argument for one out of range.
  std::vector<std::size_t> values_of(const Argument& from) const;
};

/// A function of Python that needs no Python.
inline constexpr std::string_view kItem = "operator:getitem";

}  // namespace gpipe
