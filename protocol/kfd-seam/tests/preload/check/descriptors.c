/* Copies of descriptors, and descriptors that change hands. */
#define _GNU_SOURCE
#include <limits.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>

#include "check.h"

void test_copies(void)
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
void test_escapes(void)
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
