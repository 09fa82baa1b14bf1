// GoogleMock, and the matchers that tests use most.
#pragma once

#include <gmock/gmock.h>

#include "tests/support/support.h"

namespace gpipe {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;
using ::testing::ThrowsMessage;

/// Matches a callable that throws an `Error` whose message contains the text.
template <class Error>
auto throws(const std::string& text) {
  return ThrowsMessage<Error>(HasSubstr(text));
}
inline auto refused(const std::string& why) { return throws<std::invalid_argument>(why); }

}  // namespace gpipe
