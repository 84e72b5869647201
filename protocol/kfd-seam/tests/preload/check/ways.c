/* Ways to the service's files that few programs take: descriptors of links, libc's other names, streams that are opened anew. */
#define _GNU_SOURCE
#include <dirent.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "check.h"

/* What glibc also calls them. */
int __open(const char *path, int flags, ...);
int __open64(const char *path, int flags, ...);
int __dup2(int fd, int copy);
int __fcntl(int fd, int command, ...);
off_t __lseek(int fd, off_t offset, int whence);

static void other_names(void)
{
    int kfd = __open("/dev/kfd", O_RDWR), again = __open64("/dev/kfd", O_RDWR);
    CHECK(kfd >= 0 && again >= 0 && file_id(kfd) != file_id(again));
    CHECK(__dup2(kfd, again) == again && file_id(kfd) == file_id(again));
    int copy = __fcntl(kfd, F_DUPFD, 90);
    CHECK(copy >= 90 && file_id(copy) == file_id(kfd));
    FAILS(__lseek(kfd, 0, SEEK_SET), ESPIPE);
    CHECK(close(copy) == 0 && close(again) == 0 && close(kfd) == 0);
}

/* An empty path is the descriptor itself. */
static void empty_paths(void)
{
    const char *target = "../../devices/virtual/kfd/kfd";
    char text[64];
    struct stat st;
    struct statx stx;
    int link = open("/sys/class/kfd/kfd", O_PATH | O_NOFOLLOW);
    CHECK(link >= 0 && fstat(link, &st) == 0 && S_ISLNK(st.st_mode));
    CHECK(readlinkat(link, "", text, sizeof text) == (ssize_t)strlen(target));
    CHECK(memcmp(text, target, strlen(target)) == 0);
    int directory = open("/sys/class/kfd", O_PATH);
    FAILS(readlinkat(directory, "", text, sizeof text), ENOENT);
    FAILS(readlinkat(AT_FDCWD, "", text, sizeof text), ENOENT);
    FAILS(fstatat(directory, "", &st, 0), ENOENT);
    CHECK(faccessat(directory, "", R_OK, AT_EMPTY_PATH) == 0);
    errno = 77;
    CHECK(faccessat(AT_FDCWD, "/etc/passwd", R_OK, AT_EACCESS) == 0 && errno == 77);
    CHECK(close(link) == 0 && close(directory) == 0);

    /* Shared memory has one size, however it is asked. */
    int shared = memfd_create("shared", 0);
    CHECK(ftruncate(shared, 3 * 4096) == 0);
    CHECK(fstatat(shared, "", &st, AT_EMPTY_PATH) == 0 && st.st_size == 3 * 4096);
    CHECK(lseek(shared, (off_t)1 << 40, SEEK_SET) == (off_t)1 << 40);
    CHECK(fstatat(shared, "", &st, AT_EMPTY_PATH) == 0 && st.st_size == 4096 && errno == 77);
    CHECK(statx(shared, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &stx) == 0 && stx.stx_size == 4096 && errno == 77);
    CHECK(close(shared) == 0);
}

static void listings(void)
{
    struct dirent **entries;
    int directory = open("/sys/class/kfd", O_PATH), real = open("/sys", O_RDONLY);
    CHECK(scandirat(directory, "kfd", &entries, NULL, alphasort) == 6 && !strcmp(entries[2]->d_name, "dev"));
    CHECK(scandirat(real, "class/kfd/kfd/topology", &entries, NULL, alphasort) == 5);
    CHECK(scandirat(AT_FDCWD, TOPOLOGY, &entries, NULL, alphasort) == 5);
    CHECK(scandirat(real, ".", &entries, NULL, alphasort) > 3);
    FAILS(scandirat(real, "class/kfd/none", &entries, NULL, NULL), ENOENT);
    CHECK(close(directory) == 0 && close(real) == 0);
}

/* The stream keeps its number, and what it stands on is the service's. */
static void streams(void)
{
    char text[64];
    struct stat st;
    FILE *stream = fopen("/dev/null", "r");
    int number = fileno(stream);
    errno = 77;
    CHECK(freopen(TOPOLOGY "/generation_id", "r", stream) == stream && fileno(stream) == number && errno == 77);
    CHECK(fgets(text, sizeof text, stream) && strcmp(text, "2\n") == 0);
    CHECK(fstat(number, &st) == 0 && st.st_mode == (S_IFREG | 0444));
    CHECK(freopen("/dev/kfd", "r+", stream) == stream && fileno(stream) == number && file_id(number) != 0);
    int observer = open("/dev/dri/renderD128", O_RDWR);
    pair before = counts(observer);
    CHECK(freopen("/etc/passwd", "re", stream) == stream && fgets(text, sizeof text, stream));
    FAILS(ioctl(number, FILE_ID, &before), ENOTTY);
    CHECK(counts(observer).second == before.second + 1);
    /* What fails closes the stream. */
    int lowest = open("/dev/null", O_RDONLY);
    CHECK(lowest > number && close(lowest) == 0);
    errno = 0;
    CHECK(freopen(TOPOLOGY "/none", "r", stream) == NULL && errno == ENOENT);
    FAILS(fcntl(number, F_GETFD), EBADF);
    CHECK(close(observer) == 0);
}

void test_ways(void)
{
    other_names();
    empty_paths();
    listings();
    streams();
}
