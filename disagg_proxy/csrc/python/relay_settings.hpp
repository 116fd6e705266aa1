// A relay's settings out of what Python gave: values by the names that they have in C++. A name that no
// setting has raises InvalidArgument; what is not named keeps its default.
#pragma once

#include <map>
#include <string>

#include "relay/settings.hpp"

namespace moonpool::python {

using Values = std::map<std::string, double>;

void take(const Values& values, relay::Limits& limits);
void take(const Values& values, relay::Deadlines& deadlines);
void take(const Values& values, relay::BreakerLimits& breaker);

}  // namespace moonpool::python
