/* A library in front of the C library's file calls (LD_PRELOAD): storage with faults, by rules.
 *
 * FAULTY_STORAGE names a file of rules, one a line, which is read again whenever it changes:
 *
 *     root PATH                             only files below PATH are concerned
 *     fail CALL ERRNO SKIP TIMES PART       refuse a call whose path contains PART, after SKIP such
 *                                           calls, TIMES times (-1: for ever)
 *     after CALL ERRNO SKIP TIMES PART      do it, and report the error all the same
 *     late MS PART                          a new name is hidden from other processes for MS ms
 *     sometimes CALL RATE SEED NUMBERS PART  refuse RATE of 10,000 such calls, each with one of the
 *                                           errors NUMBERS (`5,116`); SEED decides which calls
 *     sometimes-after CALL RATE SEED NUMBERS PART  the same, and the call is done all the same
 *     sometimes-late MS SEED PART           `late`, by at most MS ms; SEED decides how much, for all
 *                                           names of a directory alike
 *     calm MOST MS                          a process meets at most MOST errors of `sometimes` in MS
 *
 * PART `*` is in every path. CALL is open, read, write, fsync, close, rename, link, unlink, mkdir,
 * rmdir, list, stat, fallocate or truncate. A close that fails closes all the same, as in
 * Linux. What was refused is appended to FAULTY_STORAGE.hits; the names that processes have made
 * stand in FAULTY_STORAGE.names, shared. A name that replaces another is visible at once. So is a
 * name to a process that has replaced it or was told of it (EEXIST), and a directory in which the
 * process has made one.
 *
 * What `sometimes` decides about a call depends on the seed, the call, the path below the root without
 * its random parts (8 and more hexadecimal digits), and how often the process has made that call. So
 * the same seed refuses the same calls again, as far as threads do the same. A descriptor that was
 * only read from is never refused its close.
 *
 * Counts are of one process and of one version of the rules. Own work is done by plain system
 * calls, so that nothing here calls itself.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum call { OPEN, READ, WRITE, FSYNC, CLOSE, RENAME, LINK, UNLINK, MKDIR, RMDIR, LIST, STAT,
            FALLOCATE, TRUNCATE, CALLS };
static const char *const call_names[CALLS] = {"open", "read", "write", "fsync", "close", "rename",
    "link", "unlink", "mkdir", "rmdir", "list", "stat", "fallocate", "truncate"};

enum verb { FAIL, AFTER, SOMETIMES, SOMETIMES_AFTER, LATE, SOMETIMES_LATE };
#define NUMBERS 64
struct rule {
    enum verb verb;
    enum call call;
    int number, ms;
    long skip, times;
    int rate, count, numbers[NUMBERS];
    unsigned long seed;
    char part[256];
    atomic_long seen;
};
struct rules {
    char root[PATH_MAX];
    int count, most, calm_ms;
    struct rule rule[64];
};
struct name {
    _Atomic uint64_t hash;
    _Atomic uint64_t made_ns;
    _Atomic int pid;
};
#define NAMES 16384

static _Atomic(struct rules *) current;
static struct name *_Atomic names;
static struct statx loaded;
static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;
static const char *rules_path;

/* ------------------------------------------------------------------ rules */

static int call_of(const char *name) {
    int call = 0;
    while (call < CALLS && strcmp(name, call_names[call]))
        call++;
    return call;
}

/* Read the rest of a rule that begins with `sometimes`; 0: it is none. */
static int read_sometimes(const char *line, struct rule *rule) {
    char verb[32], call[32], numbers[512], *each = numbers, *number;
    rule->count = 0;
    if (sscanf(line, "sometimes-late %d %lu %255s", &rule->ms, &rule->seed, rule->part) == 3) {
        rule->verb = SOMETIMES_LATE;
        return 1;
    }
    if (sscanf(line, "%31s %31s %d %lu %511s %255s", verb, call, &rule->rate, &rule->seed, numbers,
               rule->part) != 6)
        return 0;
    rule->verb = strcmp(verb, "sometimes") ? SOMETIMES_AFTER : SOMETIMES;
    rule->call = call_of(call);
    while ((number = strsep(&each, ",")) != NULL && rule->count < NUMBERS)
        rule->numbers[rule->count++] = atoi(number);
    return rule->call < CALLS && !strncmp(verb, "sometimes", 9);
}

static void load(const struct statx *now) {
    static char text[1 << 16];
    int fd = syscall(SYS_openat, AT_FDCWD, rules_path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    ssize_t length = syscall(SYS_read, fd, text, sizeof text - 1);
    syscall(SYS_close, fd);
    if (length < 0)
        return;
    text[length] = 0;
    /* Former rules are never freed: another thread may be looking at them. */
    struct rules *made = calloc(1, sizeof *made);
    char *rest = text, *line;
    while ((line = strsep(&rest, "\n")) != NULL && made->count < 64) {
        struct rule *rule = &made->rule[made->count];
        char call[32];
        if (sscanf(line, "root %4095[^\n]", made->root) == 1)
            continue;
        int is_fail = !strncmp(line, "fail ", 5), is_after = !strncmp(line, "after ", 6);
        if (is_fail || is_after) {
            if (sscanf(strchr(line, ' '), " %31s %d %ld %ld %255s", call, &rule->number,
                       &rule->skip, &rule->times, rule->part) != 5)
                continue;
            rule->verb = is_fail ? FAIL : AFTER;
            rule->call = call_of(call);
            made->count += rule->call < CALLS;
        } else if (sscanf(line, "late %d %255s", &rule->ms, rule->part) == 2) {
            rule->verb = LATE;
            made->count++;
        } else if (sscanf(line, "calm %d %d", &made->most, &made->calm_ms) == 2)
            continue;
        else
            made->count += read_sometimes(line, rule);
    }
    loaded = *now;
    atomic_store(&current, made);
}

static void open_names(void) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s.names", rules_path);
    int fd = syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0)
        return;
    syscall(SYS_ftruncate, fd, (long)(NAMES * sizeof(struct name)));
    void *memory = mmap(NULL, NAMES * sizeof(struct name), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    if (memory != MAP_FAILED)
        atomic_store(&names, memory);
}

static struct rules *rules_now(void) {
    struct statx now;
    if (rules_path == NULL && (rules_path = getenv("FAULTY_STORAGE")) == NULL)
        return NULL;
    if (syscall(SYS_statx, AT_FDCWD, rules_path, 0, STATX_BASIC_STATS, &now))
        return NULL;
    if (now.stx_ino != loaded.stx_ino || now.stx_mtime.tv_nsec != loaded.stx_mtime.tv_nsec) {
        pthread_mutex_lock(&loading);
        if (atomic_load(&names) == NULL)
            open_names();
        if (now.stx_ino != loaded.stx_ino || now.stx_mtime.tv_nsec != loaded.stx_mtime.tv_nsec)
            load(&now);
        pthread_mutex_unlock(&loading);
    }
    return atomic_load(&current);
}

/* ------------------------------------------------------------------ paths */

static int path_of_fd(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    return 1;
}

/* Make a path absolute; 0: it cannot be, or is not below the root. */
static int whole(const struct rules *rules, int dir, const char *name, char *path) {
    if (name != NULL && name[0] == '/')
        snprintf(path, PATH_MAX, "%s", name);
    else {
        char base[PATH_MAX];
        if (dir == AT_FDCWD) {
            if (syscall(SYS_getcwd, base, sizeof base) < 0)
                return 0;
        } else if (!path_of_fd(dir, base))
            return 0;
        if (name == NULL || !*name)
            snprintf(path, PATH_MAX, "%s", base);
        else if (snprintf(path, PATH_MAX, "%s/%s", base, name) >= PATH_MAX)
            return 0;
    }
    size_t length = strlen(rules->root);
    return length && !strncmp(path, rules->root, length) && (!path[length] || path[length] == '/');
}

static int concerns(const struct rule *rule, const char *path) {
    return !strcmp(rule->part, "*") || strstr(path, rule->part) != NULL;
}

/* ------------------------------------------------------------------ faults */

static void note_hit(enum call call, int number, const char *path) {
    char line[PATH_MAX + 64], hits[PATH_MAX];
    int length = snprintf(line, sizeof line, "%d %s %d %s\n", (int)syscall(SYS_getpid),
                          call_names[call], number, path);
    snprintf(hits, sizeof hits, "%s.hits", rules_path);
    int fd = syscall(SYS_openat, AT_FDCWD, hits, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (fd >= 0) {
        syscall(SYS_write, fd, line, (long)length);
        syscall(SYS_close, fd);
    }
}

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static uint64_t mixed(uint64_t value) {
    value = (value ^ (value >> 33)) * 0xff51afd7ed558ccdu;
    value = (value ^ (value >> 33)) * 0xc4ceb9fe1a85ec53u;
    return value ^ (value >> 33);
}

/* A number that is the same for all paths that differ in their random parts only. */
static uint64_t hash_of_place(const struct rules *rules, const char *path) {
    uint64_t hash = 1469598103934665603u;
    for (path += strlen(rules->root); *path;) {
        size_t digits = strspn(path, "0123456789abcdef");
        if (digits >= 8) {
            path += digits;
            continue;
        }
        for (size_t n = 0; n < (digits ? digits : 1); n++)
            hash = (hash ^ (unsigned char)*path++) * 1099511628211u;
    }
    return hash;
}

/* Whether this process may meet one more error by now; takes note of it. */
static int is_due(const struct rules *rules) {
    static pthread_mutex_t noting = PTHREAD_MUTEX_INITIALIZER;
    static uint64_t met[16];
    static unsigned count;
    int most = rules->most < 16 ? rules->most : 16, due = 1;
    if (!most)
        return 1;
    pthread_mutex_lock(&noting);
    if (count >= (unsigned)most
        && now_ns() - met[(count - (unsigned)most) % 16] < (uint64_t)rules->calm_ms * 1000000u)
        due = 0;
    if (due)
        met[count++ % 16] = now_ns();
    pthread_mutex_unlock(&noting);
    return due;
}

/* The error that the seed has for a call on `path`, 0: none. */
static int drawn(struct rules *rules, enum verb verb, enum call call, const char *path) {
    static atomic_uint times[4096];
    uint64_t place = 0;
    unsigned nth = 0;
    for (int n = 0; n < rules->count; n++) {
        const struct rule *rule = &rules->rule[n];
        if (rule->verb != verb || rule->call != call || !concerns(rule, path))
            continue;
        if (!place) {
            place = mixed(hash_of_place(rules, path) + call * 8 + verb);
            nth = atomic_fetch_add(&times[place % 4096], 1);
        }
        uint64_t draw = mixed(place ^ mixed(rule->seed + ((uint64_t)nth << 32)));
        if ((int)(draw % 10000) < rule->rate && is_due(rules)) {
            int number = rule->numbers[(draw >> 32) % (unsigned)rule->count];
            note_hit(call, number, path);
            return number;
        }
    }
    return 0;
}

/* The error for a call on `path`, 0: none. */
static int fault(struct rules *rules, enum verb verb, enum call call, const char *path) {
    for (int n = 0; n < rules->count; n++) {
        struct rule *rule = &rules->rule[n];
        if (rule->verb != verb || rule->call != call || !concerns(rule, path))
            continue;
        long before = atomic_fetch_add(&rule->seen, 1);
        if (before >= rule->skip && (rule->times < 0 || before < rule->skip + rule->times)) {
            note_hit(call, rule->number, path);
            return rule->number;
        }
    }
    return 0;
}

/* The same, with what is sometimes so. */
static int refusal(struct rules *rules, enum verb verb, enum call call, const char *path) {
    int number = fault(rules, verb, call, path);
    return number ? number : drawn(rules, verb == FAIL ? SOMETIMES : SOMETIMES_AFTER, call, path);
}

/* ------------------------------------------------------------------ names that come late */

static uint64_t hash_of(const char *path) {
    uint64_t hash = 1469598103934665603u;
    for (; *path; path++)
        hash = (hash ^ (unsigned char)*path) * 1099511628211u;
    return hash | 1;
}

static struct name *find(const char *path, int make) {
    struct name *table = atomic_load(&names);
    uint64_t hash = hash_of(path);
    for (int n = 0; table != NULL && n < NAMES; n++) {
        struct name *name = &table[(hash + (uint64_t)n) % NAMES];
        uint64_t free = 0;
        if (atomic_load(&name->hash) == hash)
            return name;
        if (atomic_load(&name->hash) == 0) {
            if (!make)
                return NULL;
            if (atomic_compare_exchange_strong(&name->hash, &free, hash))
                return name;
            n--;
        }
    }
    return NULL;
}

static int exists(const char *path) {
    return syscall(SYS_faccessat, AT_FDCWD, path, F_OK) == 0;
}

static void made(const char *path) {
    struct name *name = find(path, 1);
    if (name != NULL) {
        atomic_store(&name->pid, (int)syscall(SYS_getpid));
        atomic_store(&name->made_ns, now_ns());
    }
}

static _Atomic uint64_t known[4096];

/* Let this process see a name from now on. */
static void learn(const char *path) {
    uint64_t hash = hash_of(path);
    for (int n = 0; n < 4096; n++) {
        uint64_t free = 0;
        _Atomic uint64_t *place = &known[(hash + (uint64_t)n) % 4096];
        if (atomic_load(place) == hash || atomic_compare_exchange_strong(place, &free, hash))
            return;
    }
}

static int is_known(const char *path) {
    uint64_t hash = hash_of(path);
    for (int n = 0; n < 4096; n++) {
        uint64_t there = atomic_load(&known[(hash + (uint64_t)n) % 4096]);
        if (there == hash || there == 0)
            return there == hash;
    }
    return 0;
}

/* Learn from what came of making a name. */
static void learn_from(int result, const char *path) {
    char parent[PATH_MAX];
    int number = errno;
    char *end;
    if (result >= 0 || number == EEXIST)
        learn(path);
    if (result >= 0) {
        snprintf(parent, sizeof parent, "%s", path);
        if ((end = strrchr(parent, '/')) != NULL) {
            *end = 0;
            learn(parent);
        }
    }
    errno = number;
}

static int is_hidden(const struct rules *rules, const char *path) {
    char parent[PATH_MAX];
    if (is_known(path))
        return 0;
    snprintf(parent, sizeof parent, "%s", path);
    if (strcmp(path, rules->root))
        *strrchr(parent, '/') = 0;
    for (int n = 0; n < rules->count; n++) {
        const struct rule *rule = &rules->rule[n];
        uint64_t ms = (uint64_t)rule->ms;
        if ((rule->verb != LATE && rule->verb != SOMETIMES_LATE) || !concerns(rule, path))
            continue;
        if (rule->verb == SOMETIMES_LATE)
            ms = mixed(rule->seed ^ hash_of_place(rules, parent)) % (ms + 1);
        struct name *name = find(path, 0);
        if (name == NULL || atomic_load(&name->pid) == (int)syscall(SYS_getpid))
            continue;
        if (now_ns() - atomic_load(&name->made_ns) < ms * 1000000u)
            return 1;
    }
    return 0;
}

/* ------------------------------------------------------------------ the calls */

#define REAL(name) \
    static __typeof__(&name) real; \
    if (real == NULL) \
        real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define REFUSED(call, dir, name_, otherwise) \
    char path[PATH_MAX]; \
    struct rules *rules = rules_now(); \
    int ours = rules != NULL && whole(rules, dir, name_, path); \
    if (ours) { \
        int number = refusal(rules, FAIL, call, path); \
        if (number) { \
            errno = number; \
            return otherwise; \
        } \
    }

#define DONE(call, result, otherwise) \
    if (ours && (result) != (otherwise)) { \
        int number = refusal(rules, AFTER, call, path); \
        if (number) { \
            errno = number; \
            return otherwise; \
        } \
    } \
    return result

#define OPENING(dir, name_, flags, doing) \
    REFUSED(OPEN, dir, name_, -1) \
    if (ours && !((flags) & O_CREAT) && is_hidden(rules, path)) { \
        errno = ENOENT; \
        return -1; \
    } \
    int is_new = ours && ((flags) & O_CREAT) && !exists(path); \
    int fd = doing; \
    if (fd >= 0 && is_new) \
        made(path); \
    if (ours && ((flags) & O_CREAT)) \
        learn_from(fd, path); \
    return fd

#define MODE(flags) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | O_TMPFILE)) { \
        va_list more; \
        va_start(more, flags); \
        mode = va_arg(more, mode_t); \
        va_end(more); \
    }

int open(const char *name, int flags, ...) {
    REAL(open);
    MODE(flags);
    OPENING(AT_FDCWD, name, flags, real(name, flags, mode));
}

int open64(const char *name, int flags, ...) {
    REAL(open64);
    MODE(flags);
    OPENING(AT_FDCWD, name, flags, real(name, flags, mode));
}

int openat(int dir, const char *name, int flags, ...) {
    REAL(openat);
    MODE(flags);
    OPENING(dir, name, flags, real(dir, name, flags, mode));
}

int openat64(int dir, const char *name, int flags, ...) {
    REAL(openat64);
    MODE(flags);
    OPENING(dir, name, flags, real(dir, name, flags, mode));
}

int close(int fd) {
    REAL(close);
    char path[PATH_MAX];
    struct rules *rules = rules_now();
    int ours = rules != NULL && whole(rules, fd, NULL, path);
    int number = ours ? fault(rules, FAIL, CLOSE, path) : 0;
    if (ours && !number && (syscall(SYS_fcntl, fd, F_GETFL) & O_ACCMODE) != O_RDONLY)
        number = drawn(rules, SOMETIMES, CLOSE, path);
    int result = real(fd);
    if (number) {
        errno = number;
        return -1;
    }
    return result;
}

#define BY_FD(call, type, name, declared, given, fd) \
    type name declared { \
        REAL(name); \
        REFUSED(call, fd, NULL, -1) \
        type result = real given; \
        DONE(call, result, -1); \
    }

BY_FD(READ, ssize_t, read, (int fd, void *to, size_t n), (fd, to, n), fd)
BY_FD(READ, ssize_t, readv, (int fd, const struct iovec *to, int n), (fd, to, n), fd)
BY_FD(READ, ssize_t, pread, (int fd, void *to, size_t n, off_t at), (fd, to, n, at), fd)
BY_FD(READ, ssize_t, pread64, (int fd, void *to, size_t n, off64_t at), (fd, to, n, at), fd)
BY_FD(READ, ssize_t, preadv, (int fd, const struct iovec *to, int n, off_t at), (fd, to, n, at), fd)
BY_FD(READ, ssize_t, preadv64, (int fd, const struct iovec *to, int n, off64_t at), (fd, to, n, at), fd)
BY_FD(READ, ssize_t, preadv2, (int fd, const struct iovec *to, int n, off_t at, int f), (fd, to, n, at, f), fd)
BY_FD(READ, ssize_t, preadv64v2, (int fd, const struct iovec *to, int n, off64_t at, int f), (fd, to, n, at, f), fd)
BY_FD(WRITE, ssize_t, write, (int fd, const void *from, size_t n), (fd, from, n), fd)
BY_FD(WRITE, ssize_t, writev, (int fd, const struct iovec *from, int n), (fd, from, n), fd)
BY_FD(WRITE, ssize_t, pwrite, (int fd, const void *from, size_t n, off_t at), (fd, from, n, at), fd)
BY_FD(WRITE, ssize_t, pwrite64, (int fd, const void *from, size_t n, off64_t at), (fd, from, n, at), fd)
BY_FD(WRITE, ssize_t, pwritev, (int fd, const struct iovec *from, int n, off_t at), (fd, from, n, at), fd)
BY_FD(WRITE, ssize_t, pwritev64, (int fd, const struct iovec *from, int n, off64_t at), (fd, from, n, at), fd)
BY_FD(WRITE, ssize_t, pwritev2, (int fd, const struct iovec *from, int n, off_t at, int f), (fd, from, n, at, f), fd)
BY_FD(WRITE, ssize_t, pwritev64v2, (int fd, const struct iovec *from, int n, off64_t at, int f), (fd, from, n, at, f), fd)
BY_FD(FSYNC, int, fsync, (int fd), (fd), fd)
BY_FD(FSYNC, int, fdatasync, (int fd), (fd), fd)
BY_FD(FALLOCATE, int, fallocate, (int fd, int how, off_t at, off_t n), (fd, how, at, n), fd)
BY_FD(FALLOCATE, int, fallocate64, (int fd, int how, off64_t at, off64_t n), (fd, how, at, n), fd)
BY_FD(TRUNCATE, int, ftruncate, (int fd, off_t n), (fd, n), fd)
BY_FD(TRUNCATE, int, ftruncate64, (int fd, off64_t n), (fd, n), fd)

#define NAMING(call, name, declared, given, dir, target) \
    int name declared { \
        REAL(name); \
        REFUSED(call, dir, target, -1) \
        int is_new = ours && !exists(path); \
        int result = real given; \
        if (!result && is_new) \
            made(path); \
        if (ours) \
            learn_from(result, path); \
        DONE(call, result, -1); \
    }

NAMING(RENAME, rename, (const char *from, const char *to), (from, to), AT_FDCWD, to)
NAMING(RENAME, renameat, (int old, const char *from, int new, const char *to), (old, from, new, to), new, to)
NAMING(RENAME, renameat2, (int old, const char *from, int new, const char *to, unsigned f), (old, from, new, to, f), new, to)
NAMING(LINK, link, (const char *from, const char *to), (from, to), AT_FDCWD, to)
NAMING(LINK, linkat, (int old, const char *from, int new, const char *to, int f), (old, from, new, to, f), new, to)
NAMING(MKDIR, mkdir, (const char *to, mode_t mode), (to, mode), AT_FDCWD, to)
NAMING(MKDIR, mkdirat, (int new, const char *to, mode_t mode), (new, to, mode), new, to)

#define REMOVING(call, name, declared, given, dir, target) \
    int name declared { \
        REAL(name); \
        REFUSED(call, dir, target, -1) \
        int result = real given; \
        DONE(call, result, -1); \
    }

REMOVING(UNLINK, unlink, (const char *target), (target), AT_FDCWD, target)
REMOVING(RMDIR, rmdir, (const char *target), (target), AT_FDCWD, target)
REMOVING(((how & AT_REMOVEDIR) ? RMDIR : UNLINK), unlinkat, (int dir, const char *target, int how), (dir, target, how), dir, target)

#define LOOKING(name, declared, given, dir, target) \
    int name declared { \
        REAL(name); \
        REFUSED(STAT, dir, target, -1) \
        if (ours && (target) != NULL && is_hidden(rules, path)) { \
            errno = ENOENT; \
            return -1; \
        } \
        return real given; \
    }

LOOKING(stat, (const char *target, struct stat *to), (target, to), AT_FDCWD, target)
LOOKING(stat64, (const char *target, struct stat64 *to), (target, to), AT_FDCWD, target)
LOOKING(lstat, (const char *target, struct stat *to), (target, to), AT_FDCWD, target)
LOOKING(lstat64, (const char *target, struct stat64 *to), (target, to), AT_FDCWD, target)
LOOKING(fstatat, (int dir, const char *target, struct stat *to, int f), (dir, target, to, f), dir, target)
LOOKING(fstatat64, (int dir, const char *target, struct stat64 *to, int f), (dir, target, to, f), dir, target)
LOOKING(statx, (int dir, const char *target, int f, unsigned wanted, struct statx *to), (dir, target, f, wanted, to), dir, target)
LOOKING(access, (const char *target, int how), (target, how), AT_FDCWD, target)

int fstat(int fd, struct stat *to) {
    REAL(fstat);
    REFUSED(STAT, fd, NULL, -1)
    return real(fd, to);
}

int fstat64(int fd, struct stat64 *to) {
    REAL(fstat64);
    REFUSED(STAT, fd, NULL, -1)
    return real(fd, to);
}

DIR *opendir(const char *name) {
    REAL(opendir);
    REFUSED(LIST, AT_FDCWD, name, NULL)
    if (ours && is_hidden(rules, path)) {
        errno = ENOENT;
        return NULL;
    }
    return real(name);
}

DIR *fdopendir(int fd) {
    REAL(fdopendir);
    REFUSED(LIST, fd, NULL, NULL)
    return real(fd);
}

#define LISTING(name, type) \
    type *name(DIR *directory) { \
        REAL(name); \
        char path[PATH_MAX], child[PATH_MAX]; \
        struct rules *rules = rules_now(); \
        int ours = rules != NULL && whole(rules, dirfd(directory), NULL, path); \
        for (;;) { \
            type *entry = real(directory); \
            if (entry == NULL || !ours) \
                return entry; \
            if (snprintf(child, sizeof child, "%s/%s", path, entry->d_name) >= PATH_MAX \
                || !is_hidden(rules, child)) \
                return entry; \
        } \
    }

LISTING(readdir, struct dirent)
LISTING(readdir64, struct dirent64)
