// Which tables this build has and this CPU can run, best first.
#pragma once

#include <string>
#include <vector>

#include "kernels/table.h"

namespace potok {

std::vector<std::string> supported_isas();
// Throws std::invalid_argument when the name is not among supported_isas().
const Kernels& kernels_of(const std::string& isa);

}  // namespace potok
