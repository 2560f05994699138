/* Library that wraps the C library's file calls (LD_PRELOAD) and limits the storage bandwidth.
 *
 * All processes with the same clock file share the bandwidth, for reads and writes together, of files
 * below a directory:
 *
 *     TRAIN_LIMIT_ROOT     the directory
 *     TRAIN_LIMIT_BYTES_S  bytes per second
 *     TRAIN_LIMIT_CLOCK    a file of 8 bytes: the time at which all requested work ends, CLOCK_MONOTONIC
 *
 * The real storage does the work of a call. The call returns when the limited storage would return.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static const char *root;
static double bytes_s;
static _Atomic int64_t *free_at;

__attribute__((constructor)) static void begin(void) {
    const char *rate = getenv("TRAIN_LIMIT_BYTES_S"), *clock = getenv("TRAIN_LIMIT_CLOCK");
    root = getenv("TRAIN_LIMIT_ROOT");
    if (root == NULL || rate == NULL || clock == NULL)
        return;
    int fd = syscall(SYS_openat, AT_FDCWD, clock, O_RDWR | O_CLOEXEC, 0);
    if (fd < 0)
        return;
    void *mapped = mmap(NULL, sizeof *free_at, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    if (mapped != MAP_FAILED) {
        bytes_s = atof(rate);
        free_at = mapped;
    }
}

static int concerns(int fd) {
    char link[64], path[PATH_MAX];
    if (free_at == NULL)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    size_t of_root = strlen(root);
    return length > (ssize_t)of_root && !strncmp(path, root, of_root) && path[of_root] == '/';
}

/* Wait until the limited storage would have transferred `nbytes`. */
static void await(int fd, ssize_t nbytes) {
    if (nbytes <= 0 || !concerns(fd))
        return;
    int before = errno;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    int64_t now_ns = now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
    int64_t took_ns = nbytes / bytes_s * 1e9, former = atomic_load(free_at), until;
    do {
        until = (former > now_ns ? former : now_ns) + took_ns;
    } while (!atomic_compare_exchange_weak(free_at, &former, until));
    struct timespec deadline = {until / 1000000000, until % 1000000000};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &deadline, NULL) == EINTR)
        ;
    errno = before;
}

#define LIMITED(name, declared, given) \
    ssize_t name declared { \
        static ssize_t (*real) declared; \
        if (real == NULL) \
            *(void **)&real = dlsym(RTLD_NEXT, #name); \
        ssize_t result = real given; \
        await(fd, result); \
        return result; \
    }

LIMITED(read, (int fd, void *to, size_t n), (fd, to, n))
LIMITED(readv, (int fd, const struct iovec *to, int n), (fd, to, n))
LIMITED(pread, (int fd, void *to, size_t n, off_t at), (fd, to, n, at))
LIMITED(pread64, (int fd, void *to, size_t n, off64_t at), (fd, to, n, at))
LIMITED(preadv, (int fd, const struct iovec *to, int n, off_t at), (fd, to, n, at))
LIMITED(preadv64, (int fd, const struct iovec *to, int n, off64_t at), (fd, to, n, at))
LIMITED(preadv2, (int fd, const struct iovec *to, int n, off_t at, int f), (fd, to, n, at, f))
LIMITED(preadv64v2, (int fd, const struct iovec *to, int n, off64_t at, int f), (fd, to, n, at, f))
LIMITED(write, (int fd, const void *from, size_t n), (fd, from, n))
LIMITED(writev, (int fd, const struct iovec *from, int n), (fd, from, n))
LIMITED(pwrite, (int fd, const void *from, size_t n, off_t at), (fd, from, n, at))
LIMITED(pwrite64, (int fd, const void *from, size_t n, off64_t at), (fd, from, n, at))
LIMITED(pwritev, (int fd, const struct iovec *from, int n, off_t at), (fd, from, n, at))
LIMITED(pwritev64, (int fd, const struct iovec *from, int n, off64_t at), (fd, from, n, at))
LIMITED(pwritev2, (int fd, const struct iovec *from, int n, off_t at, int f), (fd, from, n, at, f))
LIMITED(pwritev64v2, (int fd, const struct iovec *from, int n, off64_t at, int f), (fd, from, n, at, f))
