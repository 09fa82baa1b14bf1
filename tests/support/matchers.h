// GoogleMock, and the matchers that tests use most.
#pragma once

#include <gmock/gmock.h>

#include "tests/support/support.h"

namespace gpipe {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;
using ::testing::ThrowsMessage;

}  // namespace gpipe
