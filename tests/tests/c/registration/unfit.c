// What cannot be adopted.
#include "parts.h"

#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>

static void refuses(const char *what, char *start, size_t size, HSAKMT_STATUS expected) {
    HSAKMT_STATUS status = hsaKmtRegisterMemory(start, size);
    if (status != expected) {
        printf("FAILED: %s: %s, expected ", what, status_name(status));
        printf("%s\n", status_name(expected));
        fflush(stdout);
        _exit(1);
    }
}

static pid_t vforked;

static void *vforks(void *unused) {
    // Its thread cannot be stopped until the child has ended.
    pid_t child = vfork();
    if (child == 0) {
        struct timespec long_time = {8, 0};
        nanosleep(&long_time, NULL);
        _exit(0);
    }
    vforked = child;
    return unused;
}

struct asked {
    char *start;
    HSAKMT_STATUS status;
};

static void *ask(void *argument) {
    struct asked *asked = argument;
    asked->status = hsaKmtRegisterMemory(asked->start, PAGE);
    if (asked->status == HSAKMT_STATUS_SUCCESS)
        ok("deregister", hsaKmtDeregisterMemory(asked->start));
    return NULL;
}

// Where threads cannot be stopped: writers held in another way let memory be adopted still, and it is given back later.
static void asks(const char *what, char *memory, HSAKMT_STATUS expected) {
    pthread_t other;
    struct asked asked = {memory, HSAKMT_STATUS_SUCCESS};
    // The thread that asks is not stopped, so that another one has to ask.
    pthread_create(&other, NULL, ask, &asked);
    pthread_join(other, NULL);
    fprintf(stderr, "%s: %s\n", what, status_name(asked.status));
    if (asked.status != expected)
        fail(what, asked.status, expected);
}

// What cannot be adopted is refused, and stays what it is.
void unfit(const char *hold) {
    // Writers held by faults let memory be adopted where threads cannot be stopped; it is given back later.
    HSAKMT_STATUS unstoppable = HSAKMT_STATUS_SUCCESS;
    if (strcmp(hold, "userfaultfd"))
        unstoppable = HSAKMT_STATUS_NOT_SUPPORTED;
    char *memory = own(16 * PAGE), local[64] = {0};
    memset(memory, 1, 16 * PAGE);
    static char data[64] = {1};
    if (!variables_are_adopted()) {
        refuses("a stack", local, sizeof local, HSAKMT_STATUS_NOT_SUPPORTED);
        refuses("data of the program", data, sizeof data, HSAKMT_STATUS_NOT_SUPPORTED);
    }
    mlock(memory, PAGE);
    refuses("locked", memory, 2 * PAGE, HSAKMT_STATUS_NOT_SUPPORTED);
    munlock(memory, PAGE);
    mprotect(memory + 2 * PAGE, PAGE, PROT_READ);
    refuses("read-only in part", memory, 4 * PAGE, HSAKMT_STATUS_NOT_SUPPORTED);
    mprotect(memory + 2 * PAGE, PAGE, PROT_READ | PROT_WRITE);
    madvise(memory, PAGE, MADV_DONTFORK);
    refuses("not for children", memory, PAGE, HSAKMT_STATUS_NOT_SUPPORTED);
    madvise(memory, PAGE, MADV_DOFORK);
    munmap(memory + 8 * PAGE, PAGE);
    refuses("a hole", memory, 16 * PAGE, HSAKMT_STATUS_ERROR);
    refuses("nothing", memory + 8 * PAGE, PAGE, HSAKMT_STATUS_ERROR);
    refuses("no size", memory, 0, HSAKMT_STATUS_ERROR);
    refuses("beyond all addresses", memory, ~0ul, HSAKMT_STATUS_ERROR);
    refuses("beyond all memory", memory, 1ul << 47, HSAKMT_STATUS_ERROR);
    char *shared = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    refuses("shared", shared, PAGE, HSAKMT_STATUS_NOT_SUPPORTED);
    int file = open("/proc/self/exe", O_RDONLY);
    char *mapped = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
    refuses("a file", mapped, PAGE, HSAKMT_STATUS_NOT_SUPPORTED);

    // A debugger has the main thread.
    int begin[2], end[2];
    char byte = 0;
    if (pipe(begin) || pipe(end))
        fail("pipe", errno, 0);
    pid_t parent = getpid(), tracer = fork();
    if (tracer == 0) {
        alarm(60);
        if (read(begin[0], &byte, 1) != 1 || ptrace(PTRACE_SEIZE, parent, NULL, NULL) || write(end[1], "x", 1) != 1)
            _exit(1);
        if (read(begin[0], &byte, 1) != 1)
            _exit(2);
        // Its own end lets the thread go.
        _exit(0);
    }
    prctl(PR_SET_PTRACER, tracer, 0, 0, 0);
    if (write(begin[1], "x", 1) != 1 || read(end[0], &byte, 1) != 1)
        fail("a tracer", errno, 0);
    asks("a debugger has a thread", memory, unstoppable);
    if (write(begin[1], "x", 1) != 1)
        fail("write", errno, 0);
    if (child_status(tracer))
        fail("the tracer", 1, 0);

    // A thread that does not stop.
    pthread_t other;
    pthread_create(&other, NULL, vforks, NULL);
    struct timespec moment = {0, 200 * 1000 * 1000};
    nanosleep(&moment, NULL);
    asks("a thread does not stop", memory, unstoppable);
    pthread_join(other, NULL);
    if (child_status(vforked))
        fail("the child of vfork", 1, 0);
    for (size_t at = 0; at < 8 * PAGE; at++)
        if (memory[at] != 1)
            fail("a byte", memory[at], 1);
    // It may take a while until the library tries again.
    for (int tries = 0;; tries++) {
        HSAKMT_STATUS status = hsaKmtRegisterMemory(memory, 8 * PAGE);
        if (status == HSAKMT_STATUS_SUCCESS) {
            ok("deregister", hsaKmtDeregisterMemory(memory));
            if (is_private(memory))
                break;
        }
        if (tries == 300)
            fail("private memory in the end", status, HSAKMT_STATUS_SUCCESS);
        struct timespec pause = {0, 100 * 1000 * 1000};
        nanosleep(&pause, NULL);
    }
    printf("unfit: refused\n");
}
