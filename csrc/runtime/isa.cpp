#include "runtime/isa.h"

#include <stdexcept>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace potok {
namespace {

#if defined(POTOK_HAS_X86) && !defined(POTOK_SIMDE)
// Linux keeps the 8 KiB of tile registers from a process until it asks: a thread's context grows by them. Asked once;
// threads that start later have the permission too.
bool tiles_permitted() {
#if defined(__linux__) && defined(SYS_arch_prctl)
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    static const bool permitted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return permitted;
#else
    return false;
#endif
}
#endif

}  // namespace

std::vector<std::string> supported_isas() {
    std::vector<std::string> names;
#if defined(POTOK_HAS_X86)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#if defined(POTOK_SIMDE)
    const bool avxvnni = avx2, avx512vnni = avx2, amx = avx2;
#else
    const bool avxvnni = avx2 && __builtin_cpu_supports("avxvnni");
    const bool avx512vnni = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                            __builtin_cpu_supports("avx512vnni");
    const bool amx =
        avx512vnni && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8") && tiles_permitted();
#endif
    if (amx) names.push_back("amx");
    if (avx512vnni) names.push_back("avx512vnni");
    if (avxvnni) names.push_back("avxvnni");
    if (avx2) names.push_back("avx2");
#endif
    names.push_back("scalar");
    return names;
}

const Kernels& kernels_of(const std::string& isa) {
    for (const std::string& name : supported_isas()) {
        if (name != isa) continue;
#if defined(POTOK_HAS_X86)
        if (isa == "amx") return amx::kernels();
        if (isa == "avx512vnni") return avx512vnni::kernels();
        if (isa == "avxvnni") return avxvnni::kernels();
        if (isa == "avx2") return avx2::kernels();
#endif
        return scalar::kernels();
    }
    throw std::invalid_argument("instruction set '" + isa + "' is not supported by this CPU or build");
}

}  // namespace potok
