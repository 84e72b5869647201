/* What the cases share: checks, and the fixture's requests. The file that includes this defines _GNU_SOURCE. */
#ifndef CHECK_H
#define CHECK_H

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#define CHECK(condition)                                                                       \
    do {                                                                                       \
        if (!(condition)) {                                                                    \
            fprintf(stderr, "%s:%d: %s (errno %d: %s)\n", __FILE__, __LINE__, #condition, errno, \
                    strerror(errno));                                                          \
            exit(1);                                                                           \
        }                                                                                      \
    } while (0)

#define FAILS(call, code)            \
    do {                             \
        errno = 0;                   \
        CHECK((long)(call) == -1);   \
        CHECK(errno == (code));      \
    } while (0)

typedef struct {
    uint64_t first, second;
} pair;

/* The fixture's requests. */
#define FILE_ID _IOWR('S', 1, pair)
#define FAIL_WITH _IOWR('S', 2, pair)
#define WAIT _IO('S', 3)
#define WAKE _IO('S', 4)
#define COUNTS _IOR('S', 5, pair)
#define PANIC _IO('S', 6)
#define REENTER _IOWR('S', 7, pair)
/* WAIT in a function of libc in which threads can be cancelled. */
#define POLL _IO('S', 8)

#define TOPOLOGY "/sys/class/kfd/kfd/topology"
#define REAL_TOPOLOGY "/sys/devices/virtual/kfd/kfd/topology"

static inline int open_kfd(void)
{
    int fd = open("/dev/kfd", O_RDWR | O_CLOEXEC);
    CHECK(fd >= 0);
    return fd;
}

static inline uint64_t file_id(int fd)
{
    pair p = {0};
    CHECK(ioctl(fd, FILE_ID, &p) == 42);
    return p.first;
}

static inline pair counts(int fd)
{
    pair p = {0};
    CHECK(ioctl(fd, COUNTS, &p) == 0);
    return p;
}

/* The cases. */
void test_device(void);
void test_mmap(void);
void test_copies(void);
void test_escapes(void);
void test_files(void);
void test_directories(void);
void test_errno(void);
void test_fork(void);
void test_signals(void);
void test_threads(void);
void test_blocking(void);
void test_panic(void);
void test_reentry(void);
void test_failed(void);
void test_popen(void);
void test_early(void);
void test_shared(void);
void test_ways(void);
void test_vfork(void);
void test_vfork_first(void);
void test_cancellation(void);
#ifdef OWN_MALLOC
void test_handlers(void);
void test_scandir(void);
#endif

#endif
