/* Exercises the front end from C, as programs call it. Run as `check CASE` with the fixture preloaded. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
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

#define TOPOLOGY "/sys/class/kfd/kfd/topology"
#define REAL_TOPOLOGY "/sys/devices/virtual/kfd/kfd/topology"

static int open_kfd(void)
{
    int fd = open("/dev/kfd", O_RDWR | O_CLOEXEC);
    CHECK(fd >= 0);
    return fd;
}

static uint64_t file_id(int fd)
{
    pair p = {0};
    CHECK(ioctl(fd, FILE_ID, &p) == 42);
    return p.first;
}

static pair counts(int fd)
{
    pair p = {0};
    CHECK(ioctl(fd, COUNTS, &p) == 0);
    return p;
}

static void test_device(void)
{
    struct stat st;
    int fd = open_kfd(), render = open("/dev/dri/renderD128", O_RDWR);
    CHECK(render >= 0);
    CHECK(file_id(fd) != file_id(render));
    CHECK(fstat(fd, &st) == 0 && S_ISCHR(st.st_mode) && st.st_rdev == makedev(511, 0));
    CHECK(fstat(render, &st) == 0 && S_ISCHR(st.st_mode) && st.st_rdev == makedev(226, 128));
    ino_t inode = st.st_ino;
    CHECK(stat("/dev/dri/renderD128", &st) == 0 && S_ISCHR(st.st_mode) && st.st_ino == inode);
    CHECK(fstatat(render, "", &st, AT_EMPTY_PATH) == 0 && st.st_rdev == makedev(226, 128));
    CHECK((fcntl(fd, F_GETFD) & FD_CLOEXEC) == FD_CLOEXEC);
    CHECK((fcntl(render, F_GETFD) & FD_CLOEXEC) == 0);
    CHECK(ioctl(render, FIOCLEX) == 0 && (fcntl(render, F_GETFD) & FD_CLOEXEC));

    /* The service's errors arrive as errno, its values as the result; pointers that are wrong are EFAULT. */
    pair p = {.first = EINTR};
    FAILS(ioctl(fd, FAIL_WITH, &p), EINTR);
    p.first = EBUSY;
    FAILS(ioctl(fd, FAIL_WITH, &p), EBUSY);
    FAILS(ioctl(fd, FILE_ID, NULL), EFAULT);
    FAILS(ioctl(fd, FILE_ID, (void *)0x1000), EFAULT);
    FAILS(ioctl(fd, _IO('S', 99)), ENOTTY);

    /* Opens that no device node allows. */
    FAILS(open("/dev/kfd", O_RDWR | O_DIRECTORY), ENOTDIR);
    FAILS(open("/dev/kfd", O_RDWR | O_CREAT | O_EXCL, 0600), EEXIST);
    FAILS(open("/dev/kfd/", O_RDWR), ENOTDIR);
    CHECK(close(fd) == 0 && close(render) == 0);
    FAILS(ioctl(fd, FILE_ID, &p), EBADF);
    FAILS(close(fd), EBADF);
}

static void test_mmap(void)
{
    int fd = open_kfd();
    char expected[64];
    char *map = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)(3ull << 62 | 4096));
    CHECK(map != MAP_FAILED);
    sprintf(expected, "file 0 kind 3 length 8192");
    CHECK(strcmp(map, expected) == 0);
    strcpy(map, "written");
    char *again = mmap64(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);
    CHECK(again != MAP_FAILED && again != map);
    void *fixed = mmap(again, 4096, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 2 * 4096);
    CHECK(fixed == again && strcmp(fixed, "file 0 kind 0 length 4096") == 0);
    CHECK(munmap(map, 8192) == 0 && munmap(again, 4096) == 0);
    FAILS(mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 64 * 4096), EINVAL);
    FAILS(mmap(NULL, 0, PROT_READ, MAP_SHARED, fd, 0), EINVAL);
    CHECK(close(fd) == 0);

    /* Ordinary maps are untouched. */
    int own = open("/proc/self/exe", O_RDONLY);
    CHECK(own >= 0);
    char *elf = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, own, 0);
    CHECK(elf != MAP_FAILED && memcmp(elf, "\177ELF", 4) == 0);
    char *anonymous = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(anonymous != MAP_FAILED && *anonymous == 0);
}

static void test_copies(void)
{
    int observer = open("/dev/dri/renderD128", O_RDWR);
    CHECK(observer >= 0);
    uint64_t before = counts(observer).second;

    int fd = open_kfd();
    uint64_t id = file_id(fd);
    int copies[] = {dup(fd), dup2(fd, 700), dup3(fd, 5000, O_CLOEXEC), fcntl(fd, F_DUPFD, 100),
                    fcntl(fd, F_DUPFD_CLOEXEC, 1500)};
    struct stat st;
    for (unsigned i = 0; i < sizeof copies / sizeof *copies; i++) {
        CHECK(copies[i] > 0 && file_id(copies[i]) == id);
        CHECK(fstat(copies[i], &st) == 0 && S_ISCHR(st.st_mode));
    }
    CHECK(copies[1] == 700 && copies[2] == 5000 && copies[3] >= 100 && copies[4] >= 1500);
    CHECK(fcntl(5000, F_GETFD) == FD_CLOEXEC && fcntl(700, F_GETFD) == 0);
    CHECK(close(fd) == 0);
    CHECK(file_id(copies[0]) == id);
    for (unsigned i = 0; i < sizeof copies / sizeof *copies; i++) {
        CHECK(counts(observer).second == before);
        CHECK(close(copies[i]) == 0);
    }
    CHECK(counts(observer).second == before + 1);

    /* Something foreign over one of ours is a close of ours; ours over something foreign is ours. */
    int null = open("/dev/null", O_RDWR);
    fd = open_kfd();
    CHECK(dup2(null, fd) == fd);
    CHECK(counts(observer).second == before + 2);
    FAILS(ioctl(fd, FILE_ID, &(pair){0}), ENOTTY);
    CHECK(fstat(fd, &st) == 0 && st.st_rdev == makedev(1, 3));
    int other = open_kfd();
    CHECK(dup2(other, null) == null && file_id(null) == file_id(other));
    CHECK(close(other) == 0 && close(null) == 0);
    CHECK(counts(observer).second == before + 3);

    /* What fails changes nothing. */
    fd = open_kfd();
    id = file_id(fd);
    FAILS(dup2(INT_MAX, fd), EBADF);
    FAILS(dup3(fd, fd, 0), EINVAL);
    FAILS(dup2(fd, INT_MAX), EBADF);
    CHECK(dup2(fd, fd) == fd && file_id(fd) == id);
    FAILS(dup2(INT_MAX, INT_MAX), EBADF);
    CHECK(counts(observer).second == before + 3);

    /* Ranges. */
    CHECK(dup2(fd, 900) == 900 && dup2(fd, 901) == 901);
    CHECK(close_range(900, 950, 0) == 0);
    FAILS(ioctl(900, FILE_ID, &(pair){0}), EBADF);
    CHECK(file_id(fd) == id);
    FAILS(close_range(950, 900, 0), EINVAL);
    CHECK(close_range(fd, fd, 0) == 0);
    CHECK(counts(observer).second == before + 4);
    fd = open_kfd();
    CHECK(dup2(fd, 3000) == 3000 && close(fd) == 0);
    closefrom(3000);
    CHECK(counts(observer).second == before + 5);
}

/* Descriptors that change hands without a call of the front end. */
static void test_escapes(void)
{
    int observer = open("/dev/dri/renderD128", O_RDWR);
    uint64_t before = counts(observer).second;
    int fd = open_kfd();
    syscall(SYS_close, fd);
    int pipes[2];
    CHECK(pipe(pipes) == 0 && (pipes[0] == fd || pipes[1] == fd));
    struct stat st;
    CHECK(fstat(fd, &st) == 0 && S_ISFIFO(st.st_mode));
    FAILS(ioctl(fd, FILE_ID, &(pair){0}), ENOTTY);
    CHECK(counts(observer).second == before + 1);

    FILE *stream = fopen("/dev/kfd", "r+");
    CHECK(stream != NULL && file_id(fileno(stream)) != 0);
    fd = fileno(stream);
    CHECK(fclose(stream) == 0);
    CHECK(open("/dev/null", O_RDONLY) == fd);
    CHECK(counts(observer).second == before + 2);
}

/* The number that open(2) has to give out. */
static int lowest(void)
{
    int fd = open("/dev/null", O_RDONLY);
    CHECK(fd >= 0 && close(fd) == 0);
    return fd;
}

static void test_files(void)
{
    char text[64];
    struct stat st;
    struct statx stx;
    /* The service is made, and may keep descriptors. */
    CHECK(access("/dev/kfd", F_OK) == 0);
    int free_number = lowest(), fd = open(TOPOLOGY "/generation_id", O_RDONLY);
    CHECK(fd == free_number && fcntl(fd, F_GETFD) == 0);
    CHECK(fstat(fd, &st) == 0 && st.st_mode == (S_IFREG | 0444) && st.st_size == 2);
    CHECK(read(fd, text, sizeof text) == 2 && memcmp(text, "2\n", 2) == 0);
    CHECK(read(fd, text, sizeof text) == 0);
    CHECK(pread(fd, text, 1, 1) == 1 && *text == '\n');
    FAILS(write(fd, "3", 1), EBADF);
    CHECK(ftruncate(fd, 0) == -1);
    CHECK(close(fd) == 0);

    FAILS(open(TOPOLOGY "/generation_id", O_RDWR), EACCES);
    FAILS(open(TOPOLOGY "/generation_id", O_RDONLY | O_TRUNC), EACCES);
    FAILS(open(TOPOLOGY "/generation_id", O_RDONLY | O_DIRECTORY), ENOTDIR);
    FAILS(open(TOPOLOGY "/generation_id/", O_RDONLY), ENOTDIR);
    FAILS(open(TOPOLOGY "/none", O_RDONLY), ENOENT);
    FAILS(open(TOPOLOGY "/none", O_RDWR | O_CREAT, 0644), EACCES);
    FAILS(open(TOPOLOGY "/secret", O_RDONLY), EACCES);
    FAILS(open("/sys/class/kfd/kfd/loop", O_RDONLY), ELOOP);
    FAILS(open("/sys/class/kfd/kfd", O_RDONLY | O_NOFOLLOW), ELOOP);
    FAILS(open(TOPOLOGY, O_RDWR), EISDIR);
    FAILS(open(NULL, O_RDONLY), EFAULT);

    FILE *stream = fopen(TOPOLOGY "/generation_id", "re");
    CHECK(stream != NULL && fgets(text, sizeof text, stream) && strcmp(text, "2\n") == 0);
    CHECK(fcntl(fileno(stream), F_GETFD) == FD_CLOEXEC && fclose(stream) == 0);
    errno = 0;
    CHECK(fopen(TOPOLOGY "/generation_id", "w") == NULL && errno == EACCES);
    errno = 0;
    CHECK(fopen(TOPOLOGY "/none", "r") == NULL && errno == ENOENT);

    /* A link that leads out of the service. */
    stream = fopen64("/sys/class/kfd/kfd/out", "r");
    CHECK(stream != NULL && fgets(text, sizeof text, stream) && strstr(text, "root"));
    fclose(stream);

    /* Paths in every shape. */
    const char *same[] = {TOPOLOGY "/generation_id",
                          REAL_TOPOLOGY "/generation_id",
                          "/sys/class/kfd/kfd/../kfd/topology/generation_id",
                          "//sys//class/./kfd/kfd/topology/nodes/../generation_id",
                          "/sys/dev/char/226:128/topology/generation_id",
                          "/dev/../sys/class/net/../kfd/kfd/topology/generation_id"};
    CHECK(stat(same[0], &st) == 0);
    ino_t inode = st.st_ino;
    for (unsigned i = 0; i < sizeof same / sizeof *same; i++) {
        CHECK(stat(same[i], &st) == 0 && st.st_ino == inode);
        CHECK(statx(AT_FDCWD, same[i], 0, STATX_BASIC_STATS, &stx) == 0);
        CHECK(stx.stx_ino == inode && stx.stx_mode == (S_IFREG | 0444) && stx.stx_size == 2);
        CHECK((fd = open(same[i], O_RDONLY)) >= 0 && close(fd) == 0);
        char *resolved = realpath(same[i], NULL);
        CHECK(resolved && strcmp(resolved, REAL_TOPOLOGY "/generation_id") == 0);
        free(resolved);
    }
    char buffer[PATH_MAX];
    CHECK(realpath("/sys/class/kfd/kfd/out", buffer) == buffer && strcmp(buffer, "/etc/passwd") == 0);
    errno = 0;
    CHECK(realpath(TOPOLOGY "/none", NULL) == NULL && errno == ENOENT);

    CHECK(lstat("/sys/class/kfd/kfd", &st) == 0 && S_ISLNK(st.st_mode));
    CHECK(stat("/sys/class/kfd/kfd", &st) == 0 && S_ISDIR(st.st_mode));
    FAILS(stat(TOPOLOGY "/none", &st), ENOENT);

    const char *target = "../../devices/virtual/kfd/kfd";
    CHECK(readlink("/sys/class/kfd/kfd", text, sizeof text) == (ssize_t)strlen(target));
    CHECK(memcmp(text, target, strlen(target)) == 0);
    memset(text, '#', sizeof text);
    CHECK(readlink("/sys/class/kfd/kfd", text, 5) == 5 && memcmp(text, "../..#", 6) == 0);
    FAILS(readlink(TOPOLOGY, text, sizeof text), EINVAL);
    FAILS(readlink(TOPOLOGY "/none", text, sizeof text), ENOENT);

    CHECK(access("/dev/kfd", R_OK | W_OK) == 0 && access(TOPOLOGY, F_OK | X_OK) == 0);
    FAILS(access(TOPOLOGY "/generation_id", X_OK), EACCES);
    FAILS(access(TOPOLOGY "/none", F_OK), ENOENT);
    if (geteuid() != 0)
        FAILS(access(TOPOLOGY "/generation_id", W_OK), EACCES);
}

static unsigned list(DIR *directory, char names[][256], unsigned char types[])
{
    unsigned n = 0;
    struct dirent *entry;
    errno = 0;
    while ((entry = readdir(directory)) != NULL) {
        CHECK(n < 4096);
        strcpy(names[n], entry->d_name);
        types[n++] = entry->d_type;
    }
    CHECK(errno == 0);
    return n;
}

static void test_directories(void)
{
    static char names[4096][256];
    static unsigned char types[4096];
    DIR *directory = opendir("/sys/class/kfd/kfd");
    CHECK(directory != NULL);
    CHECK(list(directory, names, types) == 6);
    CHECK(!strcmp(names[0], ".") && types[0] == DT_DIR && !strcmp(names[1], ".."));
    CHECK(!strcmp(names[2], "dev") && types[2] == DT_REG);
    CHECK(!strcmp(names[3], "topology") && types[3] == DT_DIR);
    CHECK(!strcmp(names[4], "out") && types[4] == DT_LNK);
    rewinddir(directory);
    CHECK(list(directory, names, types) == 6);
    seekdir(directory, 3);
    CHECK(telldir(directory) == 3 && list(directory, names, types) == 3);

    /* Paths that begin at it. */
    int fd = dirfd(directory);
    struct stat st;
    char text[8];
    CHECK(fd >= 0 && fstat(fd, &st) == 0 && S_ISDIR(st.st_mode));
    CHECK(fstatat(fd, "topology/generation_id", &st, 0) == 0 && st.st_size == 2);
    CHECK(fstatat(fd, "../kfd/dev", &st, 0) == 0 && st.st_size == 6);
    CHECK(fstatat(fd, "../../../../../etc/passwd", &st, 0) == 0 && S_ISREG(st.st_mode));
    CHECK(faccessat(fd, "dev", R_OK, 0) == 0);
    CHECK(readlinkat(fd, "loop", text, sizeof text) == 4);
    int file = openat(fd, "dev", O_RDONLY);
    CHECK(file >= 0 && read(file, text, sizeof text) == 6 && memcmp(text, "511:0\n", 6) == 0);
    /* What the real system is asked to do there, it does nowhere. */
    char before[PATH_MAX], after[PATH_MAX];
    CHECK(getcwd(before, sizeof before) == before);
    FAILS(fchdir(fd), ENOTDIR);
    CHECK(getcwd(after, sizeof after) == after && strcmp(before, after) == 0);
    FAILS(unlinkat(fd, "none", 0), ENOTDIR);
    int free_number = lowest(), place = open(TOPOLOGY, O_PATH);
    CHECK(place == free_number && fcntl(place, F_GETFD) == 0);
    FAILS(fchdir(place), ENOTDIR);
    CHECK(close(place) == 0);
    CHECK(closedir(directory) == 0);
    FAILS(fcntl(fd, F_GETFD), EBADF);

    fd = open(TOPOLOGY "/nodes", O_RDONLY | O_DIRECTORY);
    CHECK(fd >= 0 && (directory = fdopendir(fd)) != NULL);
    CHECK(list(directory, names, types) == 2 && closedir(directory) == 0);

    errno = 0;
    CHECK(opendir(TOPOLOGY "/generation_id") == NULL && errno == ENOTDIR);
    errno = 0;
    CHECK(opendir(TOPOLOGY "/none") == NULL && errno == ENOENT);

    /* A directory that shows the real one through, and one that is only real. */
    const char *merged[] = {"/usr/share", "/etc"};
    for (int i = 0; i < 2; i++) {
        CHECK((directory = opendir(merged[i])) != NULL);
        unsigned n = list(directory, names, types), added = 0;
        CHECK(closedir(directory) == 0 && n > 3);
        for (unsigned k = 0; k < n; k++) {
            added += !strcmp(names[k], "kfd-seam-fixture");
            for (unsigned j = 0; j < k; j++)
                CHECK(strcmp(names[j], names[k]) != 0);
            char path[600];
            sprintf(path, "%s/%s", merged[i], names[k]);
            CHECK(lstat(path, &st) == 0);
        }
        CHECK(added == (i == 0));
    }
}

/* A call that goes well leaves errno alone, whatever it took. */
static void test_errno(void)
{
    struct stat st;
    char text[64];
    errno = ESTALE;
    int fd = open("/dev/kfd", O_RDWR);
    CHECK(fd >= 0 && errno == ESTALE);
    pair p;
    CHECK(ioctl(fd, COUNTS, &p) == 0 && errno == ESTALE);
    void *map = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);
    CHECK(map != MAP_FAILED && errno == ESTALE);
    CHECK(fstat(fd, &st) == 0 && errno == ESTALE);
    int copy = dup(fd);
    CHECK(copy >= 0 && errno == ESTALE);
    CHECK(close(copy) == 0 && close(fd) == 0 && errno == ESTALE);
    int file = open(TOPOLOGY "/generation_id", O_RDONLY);
    CHECK(file >= 0 && close(file) == 0 && errno == ESTALE);
    CHECK(stat(TOPOLOGY, &st) == 0 && access(TOPOLOGY, R_OK) == 0 && errno == ESTALE);
    CHECK(readlink("/sys/class/kfd/kfd", text, sizeof text) > 0 && errno == ESTALE);
    DIR *directory = opendir(TOPOLOGY);
    CHECK(directory != NULL && errno == ESTALE);
    while (readdir(directory))
        ;
    CHECK(closedir(directory) == 0 && errno == ESTALE);
    FILE *stream = fopen(TOPOLOGY "/generation_id", "r");
    CHECK(stream != NULL && errno == ESTALE);
}

static void test_fork(void)
{
    int fd = open_kfd();
    uint64_t id = file_id(fd);
    uint64_t before = counts(fd).second;
    pid_t child = fork();
    if (child == 0) {
        /* As amdkfd answers a process that did not open the file. */
        FAILS(ioctl(fd, FILE_ID, &(pair){0}), EBADF);
        FAILS(mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0), EBADF);
        struct stat st;
        CHECK(fstat(fd, &st) == 0 && S_ISCHR(st.st_mode));
        int copy = dup(fd);
        FAILS(ioctl(copy, FILE_ID, &(pair){0}), EBADF);
        CHECK(close(copy) == 0 && close(fd) == 0);
        /* Its own open is a new state. */
        int own = open_kfd();
        CHECK(file_id(own) == 1 << 8);
        CHECK(counts(own).first == 1 && counts(own).second == 0);
        CHECK(close(own) == 0);
        exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(file_id(fd) == id && counts(fd).second == before);

    /* A child of vfork closes its own descriptors and not the parent's. */
    child = vfork();
    if (child == 0) {
        close(fd);
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(file_id(fd) == id && counts(fd).second == before);

    /* A bare clone: another process all the same. */
    child = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    if (child == 0) {
        int r = ioctl(fd, FILE_ID, &(pair){0});
        _exit(r == -1 && errno == EBADF ? 0 : 1);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(file_id(fd) == id);
}

static volatile sig_atomic_t signals;

static void handler(int signal)
{
    (void)signal;
    /* What a handler may call goes through the front end too. */
    int saved = errno;
    struct stat st;
    int fd = open("/dev/null", O_RDONLY);
    fstat(fd, &st);
    close(fd);
    close(-1);
    errno = saved;
    signals++;
}

static void *closer(void *stop)
{
    while (!*(volatile int *)stop) {
        int fd = open_kfd(), copy = dup(fd);
        file_id(copy);
        close(copy);
        close(fd);
    }
    return NULL;
}

static void test_signals(void)
{
    struct sigaction action = {.sa_handler = handler};
    sigaction(SIGUSR1, &action, NULL);
    volatile int stop = 0;
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, closer, (void *)&stop) == 0);
    for (int i = 0; i < 500; i++) {
        int seen = signals;
        CHECK(pthread_kill(thread, SIGUSR1) == 0);
        while (signals == seen)
            sched_yield();
    }
    stop = 1;
    CHECK(pthread_join(thread, NULL) == 0 && signals == 500);
    int fd = open_kfd();
    CHECK(counts(fd).first == counts(fd).second + 1);
}

#ifdef OWN_MALLOC
/* The program's heap, for the libraries too: counts its calls. */
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
static volatile unsigned long heap_calls;

/* The last blocks, by the number of the call modulo the length. */
static struct {
    void *block;
    size_t size;
} blocks[1 << 16];

void *malloc(size_t size)
{
    unsigned long call = heap_calls++ % (sizeof blocks / sizeof *blocks);
    blocks[call].size = size;
    return blocks[call].block = __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
    heap_calls++;
    return __libc_calloc(count, size);
}

void *realloc(void *block, size_t size)
{
    heap_calls++;
    return __libc_realloc(block, size);
}

/* What malloc was last asked for when it gave this out. */
static size_t asked_for(void *block)
{
    for (unsigned long back = 1; back <= heap_calls && back <= sizeof blocks / sizeof *blocks; back++) {
        unsigned long call = (heap_calls - back) % (sizeof blocks / sizeof *blocks);
        if (blocks[call].block == block)
            return blocks[call].size;
    }
    return 0;
}

/* A copy of an entry is as long as it says. */
static void test_scandir(void)
{
    static const char *const paths[] = {TOPOLOGY, "/sys/class/kfd/kfd", "/usr/share",
                                        "/sys/class/kfd/kfd/../../../../../etc"};
    for (unsigned i = 0; i < sizeof paths / sizeof *paths; i++) {
        struct dirent **entries;
        int count = scandir(paths[i], &entries, NULL, alphasort);
        CHECK(count >= 3 && strcmp(entries[0]->d_name, ".") == 0);
        for (int n = 0; n < count; n++) {
            struct dirent *entry = entries[n];
            size_t used = offsetof(struct dirent, d_name) + strlen(entry->d_name) + 1;
            CHECK(entry->d_reclen >= used && asked_for(entry) >= entry->d_reclen);
            free(entry);
        }
        free(entries);
    }
}

static void asks(int signal)
{
    (void)signal;
    /* From /usr or another directory of the root's: some that cannot be the service's, and some that only a look at the directory
     * tells from its own. */
    static const char *const paths[] = {"none",           "../none/x",      "../../none",   "x/../../none",
                                        "../dev/none",    "../dev/kfdnone", "dev/none",     "./sys/none",
                                        "x/../dev/kfd",   "../sys/none/kfd", "class/kfd/x", "../sys/class/none/x",
                                        "../x/../dev/no", "kfd"};
    struct stat st;
    char text[8];
    for (unsigned i = 0; i < sizeof paths / sizeof *paths; i++) {
        FAILS(open(paths[i], O_RDONLY), ENOENT);
        FAILS(stat(paths[i], &st), ENOENT);
        FAILS(access(paths[i], R_OK), ENOENT);
        FAILS(readlink(paths[i], text, sizeof text), ENOENT);
    }
    signals++;
}

/* Calls that a handler may make take no heap, and little of a stack that has hardly more than what the kernel needs. */
static void test_handlers(void)
{
    size_t frame = getauxval(AT_MINSIGSTKSZ), page = 4096;
    size_t size = ((frame ? frame : 2048) + page + page - 1) / page * page;
    char *area = mmap(NULL, page + size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(area != MAP_FAILED && mprotect(area, page, PROT_NONE) == 0);
    stack_t stack = {.ss_sp = area + page, .ss_size = size};
    CHECK(sigaltstack(&stack, NULL) == 0);
    struct sigaction action = {.sa_handler = asks, .sa_flags = SA_ONSTACK};
    sigaction(SIGUSR1, &action, NULL);
    /* The first time, the dynamic linker may look for functions that are bound late. */
    CHECK(chdir("/usr") == 0);
    asks(0);
    unsigned long before = heap_calls;
    free(malloc(1));
    CHECK(heap_calls == before + 1);
    CHECK(raise(SIGUSR1) == 0 && signals == 2);
    CHECK(heap_calls == before + 1);
    /* The service is still reached that way, and only its own paths take the heap. */
    struct stat st;
    CHECK(stat("../dev/kfd", &st) == 0 && S_ISCHR(st.st_mode) && heap_calls > before + 1);
}
#endif

static void *opener(void *argument)
{
    struct stat st;
    for (int round = 0; round < 50; round++) {
        int fd = open_kfd(), copy = dup(fd), render = open("/dev/dri/renderD128", O_RDWR);
        CHECK(file_id(fd) == file_id(copy) && file_id(render) != file_id(fd));
        CHECK(close(fd) == 0);
        int file = open(TOPOLOGY "/generation_id", O_RDONLY);
        CHECK(file >= 0 && fstat(file, &st) == 0 && S_ISREG(st.st_mode) && close(file) == 0);
        CHECK(file_id(copy) != 0 && close(render) == 0);
        DIR *directory = opendir(TOPOLOGY);
        int names = 0;
        while (readdir(directory))
            names++;
        CHECK(names == 5 && closedir(directory) == 0);
        CHECK(close(copy) == 0);
    }
    return argument;
}

static void test_threads(void)
{
    pthread_t threads[64];
    int fd = open_kfd();
    for (int i = 0; i < 64; i++)
        CHECK(pthread_create(&threads[i], NULL, opener, NULL) == 0);
    for (int i = 0; i < 64; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    pair p = counts(fd);
    CHECK(p.first == 64 * 100 + 1 && p.second == 64 * 100);
    /* No descriptor is left behind. */
    int next = open("/dev/null", O_RDONLY);
    CHECK(next == fd + 1);
}

static void *waiter(void *fd)
{
    CHECK(ioctl(*(int *)fd, WAIT) == 0);
    return NULL;
}

/* A blocking request holds up no other, and a close of its descriptor does not end it. */
static void test_blocking(void)
{
    int fd = open_kfd(), other = open_kfd();
    pthread_t thread;
    uint64_t released = counts(other).second;
    CHECK(pthread_create(&thread, NULL, waiter, &fd) == 0);
    usleep(20000);
    CHECK(file_id(other) != 0);
    CHECK(ioctl(other, WAKE) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(close(fd) == 0 && counts(other).second == released + 1);
}

/* A fault of the service fails the call and nothing else. */
static void test_panic(void)
{
    int fd = open_kfd();
    FAILS(ioctl(fd, PANIC), EIO);
    CHECK(file_id(fd) != 0);
}

/* What the service itself asks on the way, the real system answers, also about the program's descriptors. */
static void test_reentry(void)
{
    int fd = open_kfd();
    CHECK(dup2(fd, 0) == 0);
    pair p = {9, 9};
    CHECK(ioctl(fd, REENTER, &p) == 0 && p.first == 0 && p.second == 0);
}

/* The service could not be made. */
static void test_failed(void)
{
    struct stat st;
    FAILS(open("/dev/kfd", O_RDWR), ENODEV);
    FAILS(stat(TOPOLOGY, &st), ENODEV);
    CHECK(stat("/etc/passwd", &st) == 0);
}

/* A device that a library's constructor opened. */
static void test_early(void)
{
#ifdef EARLY
    extern int early_fd(void);
    int fd = early_fd();
    CHECK(fd >= 0 && file_id(fd) == 1 << 8);
    pid_t child = fork();
    if (child == 0) {
        FAILS(ioctl(fd, FILE_ID, &(pair){0}), EBADF);
        int own = open_kfd();
        CHECK(file_id(own) == 1 << 8);
        exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
#endif
}

static void test_popen(void)
{
    char text[128];
    FILE *stream = popen("lsmod | grep amdgpu", "r");
    CHECK(stream != NULL && fgets(text, sizeof text, stream) != NULL);
    CHECK(strncmp(text, "amdgpu ", 7) == 0);
    CHECK(pclose(stream) == 0);
    stream = popen("echo other", "r");
    CHECK(stream != NULL && fgets(text, sizeof text, stream) && strcmp(text, "other\n") == 0);
    CHECK(pclose(stream) == 0);
}

/* A descriptor that stands for the second page of a file, by its position: as one that came from another process,
 * without a service in this one. */
static void test_shared(void)
{
    const off_t mark = (off_t)1 << 40;
    char page[4096];
    int fd = memfd_create("shared", 0);
    CHECK(fd >= 0);
    for (int number = 0; number < 3; number++) {
        memset(page, 'a' + number, sizeof page);
        CHECK(write(fd, page, sizeof page) == sizeof page);
    }
    struct stat st;
    CHECK(lseek(fd, 0, SEEK_END) == 3 * 4096 && fstat(fd, &st) == 0 && st.st_size == 3 * 4096);
    CHECK(lseek(fd, mark, SEEK_SET) == mark);
    /* From here on it is one page long, and its position is not moved. */
    CHECK(fstat(fd, &st) == 0 && st.st_size == 4096);
    CHECK(lseek(fd, 0, SEEK_END) == 4096 && lseek(fd, 0, SEEK_SET) == 0);
    FAILS(lseek(fd, 0, SEEK_CUR), EINVAL);
    FAILS(lseek(fd, 8, SEEK_SET), EINVAL);
    int copy = dup(fd);
    char *map = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, copy, 0);
    CHECK(map != MAP_FAILED && map[0] == 'b' && map[4095] == 'b');
    map[0] = 'B';
    CHECK(pread(fd, page, 1, 4096) == 1 && page[0] == 'B');
    CHECK((long)mmap(NULL, 4097, PROT_READ, MAP_SHARED, fd, 0) == -1 && errno == EINVAL);
    CHECK((long)mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 4096) == -1 && errno == EINVAL);
    /* Others are what they are. */
    errno = 77;
    int other = open("/dev/zero", O_RDWR), ends[2];
    CHECK(mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, other, 0) != MAP_FAILED && errno == 77);
    CHECK(lseek(other, 0, SEEK_END) == 0 && errno == 77);
    CHECK(pipe(ends) == 0);
    FAILS(lseek(ends[0], 0, SEEK_CUR), ESPIPE);
    FAILS(lseek(-1, 0, SEEK_CUR), EBADF);
    FAILS(lseek(999, 0, SEEK_CUR), EBADF);
    FAILS(fstat(999, &st), EBADF);
}

static const struct {
    const char *name;
    void (*run)(void);
} cases[] = {
    {"device", test_device},   {"mmap", test_mmap},       {"copies", test_copies},
    {"escapes", test_escapes}, {"files", test_files},     {"directories", test_directories},
    {"errno", test_errno},     {"fork", test_fork},       {"signals", test_signals},
    {"threads", test_threads}, {"blocking", test_blocking}, {"panic", test_panic},
    {"reentry", test_reentry}, {"failed", test_failed},   {"popen", test_popen}, {"early", test_early},
    {"shared", test_shared},
#ifdef OWN_MALLOC
    {"handlers", test_handlers}, {"scandir", test_scandir},
#endif
};

int main(int argc, char **argv)
{
    for (unsigned i = 0; argc == 2 && i < sizeof cases / sizeof *cases; i++) {
        if (strcmp(argv[1], cases[i].name) == 0) {
            cases[i].run();
            return 0;
        }
    }
    fprintf(stderr, "usage: %s CASE\n", *argv);
    return 2;
}
