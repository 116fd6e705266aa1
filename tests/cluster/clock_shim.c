/* Preloaded into a process: its wall clock is off by as many seconds as the file CLOCK_SHIM says, now.
 * Only CLOCK_REALTIME jumps, as when somebody sets the date: the monotonic clock never does on a living system. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long long offset_s(void) {
    static volatile long long *shared;
    if (shared == NULL) {
        const char *path = getenv("CLOCK_SHIM");
        int fd = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0) return 0;
        void *page = mmap(NULL, sizeof(*shared), PROT_READ, MAP_SHARED, fd, 0);
        close(fd);
        if (page == MAP_FAILED) return 0;
        shared = page;
    }
    return *shared;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (real == NULL) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += offset_s();
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec precise;
    int result = clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return result;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out != NULL) *out = now.tv_sec;
    return now.tv_sec;
}
