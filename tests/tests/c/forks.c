// Children of fork (cases C32 and C34): before the first use, after it, with exec, and while threads are in the library.
#include "kmt.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>

static int child_status(pid_t child) {
    int status;
    if (waitpid(child, &status, 0) != child)
        return -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

// What a process does that comes fresh to the library.
static int use(void) {
    HsaVersionInfo version;
    alarm(60);
    if (hsaKmtOpenKFD() != HSAKMT_STATUS_SUCCESS)
        return 10;
    HsaSystemProperties system;
    if (hsaKmtAcquireSystemProperties(&system) != HSAKMT_STATUS_SUCCESS)
        return 11;
    if (hsaKmtGetVersion(&version) != HSAKMT_STATUS_SUCCESS || version.KernelInterfaceMajorVersion != 1)
        return 12;
    void *memory = NULL;
    HsaMemFlags flags;
    memset(&flags, 0, sizeof flags);
    flags.ui32.HostAccess = 1;
    if (hsaKmtAllocMemory(0, 4096, flags, &memory) != HSAKMT_STATUS_SUCCESS)
        return 13;
    memset(memory, 7, 4096);
    if (hsaKmtFreeMemory(memory, 4096) != HSAKMT_STATUS_SUCCESS)
        return 14;
    if (hsaKmtCloseKFD() != HSAKMT_STATUS_SUCCESS)
        return 15;
    return 0;
}

static atomic_bool stop;

static void *busy(void *unused) {
    HsaEvent *event = signal_event(true);
    while (!stop) {
        void *memory = NULL;
        HsaMemFlags flags;
        memset(&flags, 0, sizeof flags);
        flags.ui32.HostAccess = 1;
        if (hsaKmtAllocMemory(0, 4096, flags, &memory) == HSAKMT_STATUS_SUCCESS)
            hsaKmtFreeMemory(memory, 4096);
        hsaKmtWaitOnEvent(event, 0);
    }
    return unused;
}

int main(int count, char **arguments) {
    if (count == 2)
        return use();
    int rounds = 25;

    pid_t child = fork();
    if (!child)
        _exit(use());
    printf("fork before the first use: %d\n", child_status(child));

    start();
    child = fork();
    if (!child) {
        execl("/proc/self/exe", arguments[0], "again", NULL);
        _exit(99);
    }
    printf("fork and exec: %d\n", child_status(child));

    child = fork();
    if (!child) {
        HsaClockCounters counters;
        alarm(20);
        _exit(hsaKmtGetClockCounters(0, &counters) == HSAKMT_STATUS_SUCCESS ? 1 : 0);
    }
    printf("fork and a call without opening again is refused: %d\n", child_status(child));
    HsaClockCounters counters;
    say("the parent afterwards", hsaKmtGetClockCounters(0, &counters));

    child = fork();
    if (!child)
        _exit(use());
    printf("fork and opening again: %d\n", child_status(child));
    say("the parent afterwards", hsaKmtGetClockCounters(0, &counters));

    pthread_t threads[4];
    for (int number = 0; number < 4; number++)
        if (pthread_create(&threads[number], NULL, busy, NULL))
            return 2;
    int failed = 0;
    for (int round = 0; round < rounds; round++) {
        child = fork();
        if (!child)
            _exit(use());
        int status = child_status(child);
        if (status) {
            printf("child %d while threads are in the library: %d\n", round, status);
            failed++;
        }
    }
    stop = true;
    for (int number = 0; number < 4; number++)
        pthread_join(threads[number], NULL);
    printf("children that failed while threads were in the library: %d of %d\n", failed, rounds);
    say("the parent at the end", hsaKmtGetClockCounters(0, &counters));
    say("close", hsaKmtCloseKFD());
    return 0;
}
