// Which sanitizer a test runs under.
#pragma once

namespace moonpool::testing {

// ThreadSanitizer takes ten times as long: it skips what has one thread, and repeats less of what is random.
#if defined(__SANITIZE_THREAD__)
inline constexpr bool kUnderTsan = true;
#else
inline constexpr bool kUnderTsan = false;
#endif

}  // namespace moonpool::testing
