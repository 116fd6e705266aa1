// The software libibverbs of tests/native/transport/soft_verbs, beside the program.
#pragma once

#include <dlfcn.h>
#include <doctest/doctest.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "soft_verbs/controls.hpp"

namespace moonpool::testing {

// The path of a library that the Makefile puts beside the program.
inline std::string beside_program(const std::string& library) {
    char self[4096] = {};
    REQUIRE(::readlink("/proc/self/exe", self, sizeof(self) - 1) > 0);
    std::string path = self;
    return path.substr(0, path.rfind('/') + 1) + library;
}

inline std::string soft_verbs_library() { return beside_program("libsoftverbs.so"); }

// MOONPOOL_TEST_VERBS=real: the suite runs over the NICs of this machine (in a virtual machine: soft RoCE),
// those named a* for one engine, those named b* for the other.
inline bool real_verbs() {
    const char* chosen = std::getenv("MOONPOOL_TEST_VERBS");
    return chosen != nullptr && std::strcmp(chosen, "real") == 0;
}

struct SoftVerbs {
    void* library = ::dlopen(soft_verbs_library().c_str(), RTLD_NOW | RTLD_LOCAL);
#define MOONPOOL_DECLARE(result, name, arguments) \
    result(*name) arguments = reinterpret_cast<result(*) arguments>(::dlsym(library, #name));
    MOONPOOL_SOFT_VERBS_CONTROLS(MOONPOOL_DECLARE)
#undef MOONPOOL_DECLARE
};
inline SoftVerbs& soft_verbs() {
    static SoftVerbs controls;
    REQUIRE(controls.library != nullptr);
    return controls;
}

// While one lives, engines of the test have the NICs of a script. Its end checks that all was given back, in
// an order that real NICs allow.
class VerbsBed {
   public:
    explicit VerbsBed(const std::string& script = "") {
        in_use() = true;
        if (!real_verbs()) soft_verbs().soft_verbs_script(script.c_str());
    }
    ~VerbsBed() {
        in_use() = false;
        if (real_verbs()) return;
        (void)soft_verbs().soft_verbs_release();
        CHECK(count("objects") == 0);
        CHECK(count("violations") == 0);
    }
    VerbsBed(const VerbsBed&) = delete;

    static uint64_t count(const char* what) { return soft_verbs().soft_verbs_count(what); }
    static bool& in_use() {
        static bool used = false;
        return used;
    }
};

}  // namespace moonpool::testing
