// A static libstdc++ calls this for std::random_device where it was built with glibc 2.36 or newer. A wheel
// that is to run with an older glibc brings its own.
#include <stdint.h>
#include <stdlib.h>
#include <sys/random.h>

__attribute__((visibility("hidden"))) uint32_t arc4random(void) {
    uint32_t value;
    if (getentropy(&value, sizeof value) != 0) abort();
    return value;
}
