#include "cpu/isa.h"

#include <atomic>
#include <cstring>

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace hswq {
namespace {

const char* const kNames[kIsaCount] = {"baseline", "avx2", "avx512", "amx"};

#if defined(__x86_64__)
// Linux hands out the 8 KB of tile state a thread only to processes that ask (arch_prctl,
// ARCH_REQ_XCOMP_PERM, XTILEDATA).
bool amx_permitted() {
#if defined(__linux__)
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}

bool cpuid_amx() {
    unsigned a = 7, b = 0, c = 0, d = 0;
    __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;
    return (d & (kBf16 | kTile | kInt8)) == (kBf16 | kTile | kInt8);
}
#endif

Isa detect() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("bmi2")) return Isa::baseline;
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni") &&
                        __builtin_cpu_supports("avx512bf16");
    if (!avx512) return Isa::avx2;
    return cpuid_amx() && amx_permitted() ? Isa::amx : Isa::avx512;
#else
    return Isa::baseline;
#endif
}

int level_of(const char* name) {
    for (int i = 0; i < kIsaCount; ++i) {
        if (std::strcmp(name, kNames[i]) == 0) return i;
    }
    return -1;
}

std::atomic<int>& limit() {
    static std::atomic<int> value{kIsaCount - 1};
    return value;
}

}  // namespace

const char* isa_name(Isa isa) {
    return kNames[static_cast<int>(isa)];
}

Isa hardware_isa() {
    static const Isa found = detect();
    return found;
}

Isa current_isa() {
    const int level = limit().load(std::memory_order_relaxed);
    const int found = static_cast<int>(hardware_isa());
    return static_cast<Isa>(level < found ? level : found);
}

int limit_isa(const char* name) {
    const int level = *name == 0 ? kIsaCount - 1 : level_of(name);
    if (level < 0) return -1;
    limit().store(level, std::memory_order_relaxed);
    return 0;
}

}  // namespace hswq
