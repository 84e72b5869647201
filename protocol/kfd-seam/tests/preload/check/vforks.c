/* Children of vfork, which run in their parent's memory with descriptors of their own. */
#define _GNU_SOURCE
#include <sys/stat.h>
#include <sys/wait.h>

#include "check.h"

static int status_of(pid_t child)
{
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status));
    return WEXITSTATUS(status);
}

/* A child's directory takes the number of a device of the parent's, who keeps the device. */
void test_vfork(void)
{
    int fd = open_kfd();
    uint64_t id = file_id(fd), before = counts(fd).second;
    pid_t child = vfork();
    if (child == 0) {
        if (close(fd) != 0)
            _exit(1);
        struct stat st;
        int directory = open("/sys/class/kfd", O_RDONLY | O_DIRECTORY), error = errno;
        _exit(directory == -1 && error == EOPNOTSUPP && stat("/sys/class/kfd", &st) == 0 ? 0 : 2);
    }
    CHECK(status_of(child) == 0);
    struct stat st;
    CHECK(fstat(fd, &st) == 0 && S_ISCHR(st.st_mode));
    CHECK(file_id(fd) == id && counts(fd).second == before);
}

/* A child does not make its parent's service, of which it would have the descriptors. */
void test_vfork_first(void)
{
    pid_t child = vfork();
    if (child == 0) {
        struct stat st;
        int failed = stat("/dev/kfd", &st) == -1 && errno == EOPNOTSUPP;
        failed += open("/dev/kfd", O_RDWR) == -1 && errno == EOPNOTSUPP;
        _exit(failed == 2 && access("/etc/passwd", R_OK) == 0 ? 0 : 1);
    }
    CHECK(status_of(child) == 0);
    CHECK(file_id(open_kfd()) == 1 << 8);
}
