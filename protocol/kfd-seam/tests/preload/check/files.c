/* Files and directories of the service, and errno. */
#define _GNU_SOURCE
#include <dirent.h>
#include <limits.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "check.h"

/* The number that open(2) has to give out. */
static int lowest(void)
{
    int fd = open("/dev/null", O_RDONLY);
    CHECK(fd >= 0 && close(fd) == 0);
    return fd;
}

void test_files(void)
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

void test_directories(void)
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
void test_errno(void)
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
