// Case C21: processes with the same number, each in a PID namespace of its own, share memory; nobody takes one for the other.
#include "harness.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

enum { CHILDREN = 2, SIZE = 64 * 1024 };

struct told {
    HSAKMT_STATUS status;
    pid_t number;
    HsaSharedMemoryHandle handle;
};

// Shares memory with a pattern of its own until its input ends. What it prints is no part of the output.
int pids_child(char **arguments) {
    struct told told;
    memset(&told, 0, sizeof told);
    begin();
    char *a = quiet_alloc(machine.gpu[0], SIZE, VISIBLE);
    for (uint64_t byte = 0; byte < SIZE; byte++)
        a[byte] = (char)pattern((uint32_t)atoi(arguments[2]), byte);
    told.number = getpid();
    told.status = hsaKmtShareMemory(a, SIZE, &told.handle);
    if (write(STDERR_FILENO, &told, sizeof told) != sizeof told)
        return 1;
    char byte;
    while (read(STDIN_FILENO, &byte, 1) > 0) {}
    return 0;
}

// Starts one in namespaces of its own, for which a user needs no right but that to have them.
static pid_t start_child(unsigned number, int *input, int *output) {
    int to[2], from[2];
    if (pipe(to) || pipe(from))
        give_up("pipe");
    pid_t child = fork();
    if (child < 0)
        give_up("fork");
    if (child == 0) {
        char seed[16];
        snprintf(seed, sizeof seed, "%u", 80 + number);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (unshare(CLONE_NEWUSER | CLONE_NEWPID))
            _exit(2);
        pid_t first = fork();
        if (first == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            dup2(to[0], STDIN_FILENO);
            dup2(from[1], STDERR_FILENO);
            dup2(open("/dev/null", O_WRONLY), STDOUT_FILENO);
            for (int fd = 3; fd < 1024; fd++)
                close(fd);
            execl("/proc/self/exe", "memory", "pids-child", seed, NULL);
            _exit(3);
        }
        // Also what the process before it waits for.
        for (int fd = 3; fd < 1024; fd++)
            close(fd);
        int status = 0;
        waitpid(first, &status, 0);
        _exit(first > 0 && WIFEXITED(status) ? WEXITSTATUS(status) : 4);
    }
    close(to[0]);
    close(from[1]);
    *input = to[1];
    *output = from[0];
    return child;
}

void section_pids(void) {
    pid_t child[CHILDREN];
    int input[CHILDREN], output[CHILDREN];
    struct told told[CHILDREN];
    void *memory[CHILDREN] = {NULL};
    heading("processes with the same number");
    for (unsigned number = 0; number < CHILDREN; number++)
        child[number] = start_child(number, &input[number], &output[number]);
    for (unsigned number = 0; number < CHILDREN; number++) {
        if (read(output[number], &told[number], sizeof *told) != sizeof *told)
            give_up("process %u shares nothing", number);
        line("process %u: number %d, share = %s", number, told[number].number, status_name(told[number].status));
    }
    line("two handles: %s", memcmp(told[0].handle, told[1].handle, sizeof told->handle) ? "yes" : "no");
    for (unsigned number = 0; number < CHILDREN; number++) {
        HSAuint64 size = 0;
        HSAKMT_STATUS status = hsaKmtRegisterSharedHandle(&told[number].handle, &memory[number], &size);
        line("open the handle of process %u = %s, size %#lx", number, status_name(status), (unsigned long)size);
        if (status == HSAKMT_STATUS_SUCCESS)
            quiet_map(memory[number], SIZE);
    }
    // Both open at once, each with its own bytes.
    for (unsigned number = 0; number < CHILDREN; number++) {
        char label[16];
        snprintf(label, sizeof label, "memory %u", number);
        name(label, memory[number], SIZE);
        gpu_sees(0, memory[number], SIZE, 80 + number);
        forget(label);
    }
    for (unsigned number = 0; number < CHILDREN; number++) {
        hsaKmtUnmapMemoryToGPU(memory[number]);
        line("close it = %s", status_name(hsaKmtDeregisterMemory(memory[number])));
        close(input[number]);
        int status = 0;
        waitpid(child[number], &status, 0);
        line("process %u: exit %d", number, WIFEXITED(status) ? WEXITSTATUS(status) : -1);
        close(output[number]);
    }
}
