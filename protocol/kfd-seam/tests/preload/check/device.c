/* Devices, their maps, what goes wrong in the service, and a descriptor that came from another process. */
#define _GNU_SOURCE
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include "check.h"

void test_device(void)
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

void test_mmap(void)
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
    /* do_mmap(), before the driver sees it. */
    FAILS(mmap(NULL, SIZE_MAX, PROT_READ, MAP_SHARED, fd, 0), ENOMEM);
    FAILS(mmap(NULL, (size_t)1 << 47, PROT_READ, MAP_SHARED, fd, 0), ENOMEM);
    CHECK(close(fd) == 0);

    /* Ordinary maps are untouched. */
    int own = open("/proc/self/exe", O_RDONLY);
    CHECK(own >= 0);
    char *elf = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, own, 0);
    CHECK(elf != MAP_FAILED && memcmp(elf, "\177ELF", 4) == 0);
    char *anonymous = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(anonymous != MAP_FAILED && *anonymous == 0);
}

/* A fault of the service fails the call and nothing else. */
void test_panic(void)
{
    int fd = open_kfd();
    FAILS(ioctl(fd, PANIC), EIO);
    CHECK(file_id(fd) != 0);
}

/* What the service itself asks on the way, the real system answers, also about the program's descriptors. */
void test_reentry(void)
{
    int fd = open_kfd();
    CHECK(dup2(fd, 0) == 0);
    pair p = {9, 9};
    CHECK(ioctl(fd, REENTER, &p) == 0 && p.first == 0 && p.second == 0);
}

/* The service could not be made. */
void test_failed(void)
{
    struct stat st;
    FAILS(open("/dev/kfd", O_RDWR), ENODEV);
    FAILS(stat(TOPOLOGY, &st), ENODEV);
    CHECK(stat("/etc/passwd", &st) == 0);
}

/* A descriptor that stands for the second page of a file, by its position: as one that came from another process,
 * without a service in this one. */
void test_shared(void)
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
