// For ThreadSanitizer: accesses that another process's message orders, which it cannot see. An initiator
// tells its own threads that a transfer has ended; when it lives in the target's process, as in tests, the
// target's access and that of the initiator's user meet without a lock that TSan knows.
#pragma once

#if defined(__SANITIZE_THREAD__)

extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}

namespace moonpool {

struct OrderedByThePeer {
    OrderedByThePeer() {
        AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
        AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
    }
    ~OrderedByThePeer() {
        AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
        AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
    }
};

}  // namespace moonpool

#else

namespace moonpool {

struct OrderedByThePeer {
    OrderedByThePeer() {}  // not trivial: an unused variable of it is no warning
};

}  // namespace moonpool

#endif
