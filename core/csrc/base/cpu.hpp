// What this CPU can do, asked once. Only what base/ chooses code by.
#pragma once

namespace moonpool {

struct Cpu {
    bool crc32 = false;     // x86: crc32q and pclmulqdq; ARM64: the CRC32 extension
    bool clmul512 = false;  // x86: AVX-512 with VPCLMULQDQ (Ice Lake, Zen 4 and later)
    bool sha256 = false;    // x86: the SHA extension
};

const Cpu& cpu();

}  // namespace moonpool
