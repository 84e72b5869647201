// Thread-local variables, and what the kernel writes beside them for restartable sequences.
#include "parts.h"

#include <dlfcn.h>
#include <signal.h>
#include <stddef.h>

enum { INSIDE = 3 * PAGE, GIVEN = 8 * PAGE };

// So much that what glibc has registered for restartable sequences lies far below the thread pointer, from 2.41 on.
static __thread volatile unsigned char variable[16 * PAGE];

// Where that is for this thread; NULL where this C library registers nothing.
static volatile char *sequences(void) {
    ptrdiff_t *offset = dlsym(RTLD_DEFAULT, "__rseq_offset");
    unsigned *size = dlsym(RTLD_DEFAULT, "__rseq_size");
    return offset && size && *size ? (char *)__builtin_thread_pointer() + *offset : NULL;
}

static int child_of(unsigned char seed) {
    pid_t child = fork();
    if (child == 0) {
        errno = 3;
        for (unsigned at = 0; at < sizeof variable; at++)
            if (variable[at] != (unsigned char)(seed + at / 7))
                _exit(1);
        memset((void *)variable, 0xee, sizeof variable);
        _exit(0);
    }
    return child_status(child);
}

static void rounds_here(int rounds) {
    for (int round = 0; round < rounds; round++) {
        unsigned char seed = random_number();
        for (unsigned at = 0; at < sizeof variable; at++)
            variable[at] = seed + at / 7;
        given((char *)variable + INSIDE, GIVEN);
        if (is_private((char *)variable + INSIDE + PAGE) == variables_are_adopted())
            fail("a thread-local variable is private", !variables_are_adopted(), variables_are_adopted());
        int status = child_of(seed);
        if (status)
            fail("status of a child", status, 0);
        taken((char *)variable + INSIDE);
        for (unsigned at = 0; at < sizeof variable; at++)
            if (variable[at] != (unsigned char)(seed + at / 7))
                fail("a byte of a thread-local variable", variable[at], (unsigned char)(seed + at / 7));
        volatile char *area = sequences();
        if (!area)
            continue;
        HSAKMT_STATUS found = hsaKmtRegisterMemory((void *)area, 8);
        HSAKMT_STATUS expected = variables_are_adopted() ? HSAKMT_STATUS_NOT_SUPPORTED : HSAKMT_STATUS_SUCCESS;
        if (found != expected)
            fail("what the kernel writes for restartable sequences", found, expected);
        status = child_of(seed);
        if (status)
            fail("status of a child behind that", status, 0);
        if (found == HSAKMT_STATUS_SUCCESS)
            ok("deregister", hsaKmtDeregisterMemory((void *)area));
    }
}

static void *in_a_thread(void *rounds) {
    rounds_here((int)(intptr_t)rounds);
    return NULL;
}

static atomic_int forked = -1;

// For ever: its end would be told by a shared futex in memory that is adopted.
static void *forks_and_stays(void *argument) {
    (void)argument;
    pid_t child = fork();
    if (child == 0)
        _exit(0);
    forked = child_status(child);
    for (;;)
        pause();
}

// A thread whose data has come to lie in memory that was registered before: its child is ended, and nobody waits for ever.
static void on_registered_memory(void) {
    size_t size = 64 * PAGE;
    char *memory = own(size);
    given(memory, size);
    pthread_attr_t attributes;
    pthread_t thread;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstack(&attributes, memory, size);
    if (pthread_create(&thread, &attributes, forks_and_stays, NULL))
        fail("a thread", errno, 0);
    while (forked < 0)
        usleep(1000);
    bool ends = variables_are_adopted() && sequences();
    if (forked != (ends ? 1000 + SIGKILL : 0))
        fail("status of a child without room for restartable sequences", forked, ends ? 1000 + SIGKILL : 0);
    // It runs on there.
    taken(memory);
}

void thread_locals(int rounds) {
    rounds_here(rounds);
    pthread_t thread;
    pthread_create(&thread, NULL, in_a_thread, (void *)(intptr_t)rounds);
    pthread_join(thread, NULL);
    on_registered_memory();
    printf("threads: what is theirs alone stays so\n");
}
