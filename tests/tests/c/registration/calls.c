// The calls with their checks, and what the process holds.
#include "parts.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>

void fail(const char *what, long found, long expected) {
    printf("FAILED: %s: %ld, expected %ld\n", what, found, expected);
    fflush(stdout);
    _exit(1);
}

char *own(size_t size) {
    char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        fail("mmap", errno, 0);
    return memory;
}

void ok(const char *what, HSAKMT_STATUS status) {
    if (status != HSAKMT_STATUS_SUCCESS) {
        printf("FAILED: %s: %s\n", what, status_name(status));
        fflush(stdout);
        _exit(1);
    }
}

void given(char *start, size_t size) {
    HSAuint64 gpu = 0;
    ok("register", hsaKmtRegisterMemory(start, size));
    ok("map", hsaKmtMapMemoryToGPU(start, size, &gpu));
    if (gpu % PAGE != (uintptr_t)start % PAGE)
        fail("offset of the address on GPUs", gpu % PAGE, (uintptr_t)start % PAGE);
}

void taken(char *start) {
    ok("unmap", hsaKmtUnmapMemoryToGPU(start));
    ok("deregister", hsaKmtDeregisterMemory(start));
}

void given_and_taken(char *start, size_t size) {
    given(start, size);
    taken(start);
}

// Lines of /proc/self/maps.
long mappings(void) {
    FILE *maps = fopen("/proc/self/maps", "r");
    long lines = 0;
    for (int byte; (byte = getc(maps)) != EOF;)
        lines += byte == '\n';
    fclose(maps);
    return lines;
}

long descriptors(void) {
    long count = 0;
    for (int fd = 0; fd < 1024; fd++)
        count += fcntl(fd, F_GETFD) >= 0;
    return count;
}

long resident(void) {
    long size, pages;
    FILE *statm = fopen("/proc/self/statm", "r");
    if (fscanf(statm, "%ld %ld", &size, &pages) != 2)
        fail("statm", 0, 2);
    fclose(statm);
    return pages * (long)PAGE / 1024;
}

unsigned random_number(void) {
    static unsigned state = 12345;
    state = state * 1664525u + 1013904223u;
    return state >> 8;
}

int child_status(pid_t child) {
    int status;
    if (waitpid(child, &status, 0) != child)
        return -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

bool is_private(char *address) {
    FILE *maps = fopen("/proc/self/maps", "r");
    unsigned long start, end;
    char permissions[8];
    bool found = false;
    for (char line[512]; fgets(line, sizeof line, maps);)
        if (sscanf(line, "%lx-%lx %7s", &start, &end, permissions) == 3 && start <= (uintptr_t)address &&
            (uintptr_t)address < end)
            found = !strcmp(permissions, "rw-p");
    fclose(maps);
    return found;
}

struct debugger debugger(void) {
    struct debugger it;
    if (pipe(it.begin) || pipe(it.end))
        fail("pipe", errno, 0);
    pid_t parent = getpid();
    it.process = fork();
    if (it.process == 0) {
        char byte;
        alarm(60);
        if (read(it.begin[0], &byte, 1) != 1 || ptrace(PTRACE_SEIZE, parent, NULL, NULL) ||
            write(it.end[1], "x", 1) != 1)
            _exit(1);
        // Its children tell their parent, which is stopped for that.
        for (int status; waitpid(parent, &status, __WALL) == parent && WIFSTOPPED(status);)
            ptrace(PTRACE_CONT, parent, NULL, (void *)(uintptr_t)(status >> 16 ? 0 : WSTOPSIG(status)));
        _exit(0);
    }
    if (it.process < 0)
        fail("fork", errno, 0);
    return it;
}

void debug(struct debugger *it) {
    char byte;
    prctl(PR_SET_PTRACER, it->process, 0, 0, 0);
    if (write(it->begin[1], "x", 1) != 1 || read(it->end[0], &byte, 1) != 1)
        fail("a debugger", errno, 0);
}

void end_debugger(struct debugger *it) {
    kill(it->process, SIGKILL);
    child_status(it->process);
    for (int index = 0; index < 2; index++)
        close(it->begin[index]), close(it->end[index]);
}
