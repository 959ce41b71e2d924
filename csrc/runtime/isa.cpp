#include "runtime/isa.h"

#include <stdexcept>

namespace potok {

std::vector<std::string> supported_isas() {
    std::vector<std::string> names;
#if defined(POTOK_HAS_AVX2)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
        names.push_back("avx2");
    }
#endif
    names.push_back("scalar");
    return names;
}

const Kernels& kernels_of(const std::string& isa) {
    for (const std::string& name : supported_isas()) {
        if (name != isa) continue;
#if defined(POTOK_HAS_AVX2)
        if (isa == "avx2") return avx2::kernels();
#endif
        return scalar::kernels();
    }
    throw std::invalid_argument("instruction set '" + isa + "' is not supported by this CPU or build");
}

}  // namespace potok
