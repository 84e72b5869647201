/* Threads that are cancelled. */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>

#include "check.h"

static volatile int came_back;

static void *in_a_request(void *fd)
{
    CHECK(ioctl(*(int *)fd, POLL) == 0);
    came_back = 1;
    pthread_testcancel();
    return NULL;
}

static void *in_a_lock(void *fd)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    fcntl(*(int *)fd, F_SETLKW, &lock);
    return NULL;
}

/* ioctl is no cancellation point (pthreads(7)), whatever the service does in it; fcntl(F_SETLKW) is one. */
void test_cancellation(void)
{
    pthread_t thread;
    void *result;
    int fd = open_kfd();
    CHECK(pthread_create(&thread, NULL, in_a_request, &fd) == 0);
    usleep(20000);
    CHECK(pthread_cancel(thread) == 0);
    usleep(20000);
    CHECK(!came_back && file_id(fd) != 0);
    CHECK(ioctl(fd, WAKE) == 0);
    CHECK(pthread_join(thread, &result) == 0 && result == PTHREAD_CANCELED && came_back);

    FILE *file = tmpfile();
    int locked = fileno(file), ends[2], status;
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    char byte;
    CHECK(pipe(ends) == 0);
    pid_t child = fork();
    if (child == 0) {
        CHECK(fcntl(locked, F_SETLK, &lock) == 0 && write(ends[1], "l", 1) == 1);
        close(ends[1]);
        /* Until the parent has no more use for it. */
        pause();
    }
    CHECK(read(ends[0], &byte, 1) == 1);
    CHECK(pthread_create(&thread, NULL, in_a_lock, &locked) == 0);
    usleep(20000);
    CHECK(pthread_cancel(thread) == 0 && pthread_join(thread, &result) == 0 && result == PTHREAD_CANCELED);
    CHECK(kill(child, SIGKILL) == 0 && waitpid(child, &status, 0) == child);
}
