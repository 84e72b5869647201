/* A library whose constructor runs before that of a preloaded one, as the dynamic linker orders them. */
#include <fcntl.h>

static int fd = -1;

__attribute__((constructor)) static void early(void)
{
    fd = open("/dev/kfd", O_RDWR);
}

int early_fd(void)
{
    return fd;
}
