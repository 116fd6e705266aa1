#include "base/cpu.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace moonpool {

static Cpu probe() {
    Cpu found;
#if defined(__x86_64__)
    __builtin_cpu_init();  // callers may run before constructors do
    found.crc32 = __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
    // libgcc asks XGETBV too, so "avx512f" means that the kernel saves the registers.
    found.clmul512 = found.crc32 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;  // not every compiler's __builtin_cpu_supports knows "sha"
    bool leaf7 = __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0;
    found.sha256 = leaf7 && (ebx & (1u << 29)) != 0 && __builtin_cpu_supports("sse4.1");
#elif defined(__aarch64__)
    constexpr unsigned long kHwcapCrc32 = 1ul << 7;
    found.crc32 = (getauxval(AT_HWCAP) & kHwcapCrc32) != 0;
#endif
    return found;
}

const Cpu& cpu() {
    static const Cpu found = probe();
    return found;
}

}  // namespace moonpool
