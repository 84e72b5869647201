/* Other processes, threads and signal handlers. */
#define _GNU_SOURCE
#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "check.h"

void test_fork(void)
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

void test_signals(void)
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

void test_threads(void)
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
void test_blocking(void)
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

/* A device that a library's constructor opened. */
void test_early(void)
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

void test_popen(void)
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
