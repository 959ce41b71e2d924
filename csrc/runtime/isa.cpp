#include "runtime/isa.h"

#include <stdexcept>

namespace potok {

std::vector<std::string> supported_isas() {
    std::vector<std::string> names;
#if defined(POTOK_HAS_X86)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#if defined(POTOK_SIMDE)
    const bool avx512vnni = avx2;
#else
    const bool avx512vnni = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                            __builtin_cpu_supports("avx512vnni");
#endif
    if (avx512vnni) names.push_back("avx512vnni");
    if (avx2) names.push_back("avx2");
#endif
    names.push_back("scalar");
    return names;
}

const Kernels& kernels_of(const std::string& isa) {
    for (const std::string& name : supported_isas()) {
        if (name != isa) continue;
#if defined(POTOK_HAS_X86)
        if (isa == "avx512vnni") return avx512vnni::kernels();
        if (isa == "avx2") return avx2::kernels();
#endif
        return scalar::kernels();
    }
    throw std::invalid_argument("instruction set '" + isa + "' is not supported by this CPU or build");
}

}  // namespace potok
