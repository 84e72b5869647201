// Opening, topology and an allocation under a fast interval timer (case C35): nothing is lost to EINTR.
#include "kmt.h"

#include <signal.h>
#include <sys/time.h>

static volatile long ticks;

static void tick(int signal) {
    (void)signal;
    ticks++;
}

int main(void) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = tick; // without SA_RESTART, so that every call that sleeps is interrupted
    sigaction(SIGALRM, &action, NULL);
    struct itimerval timer = {{0, 500}, {0, 500}};
    setitimer(ITIMER_REAL, &timer, NULL);
    int gpu = start();
    void *memory = NULL;
    HsaMemFlags flags;
    memset(&flags, 0, sizeof flags);
    flags.ui32.HostAccess = 1;
    need("allocate", hsaKmtAllocMemory(0, 4096, flags, &memory));
    need("free", hsaKmtFreeMemory(memory, 4096));
    HsaEvent *event = signal_event(false);
    HSAKMT_STATUS waited = hsaKmtWaitOnEvent(event, 50);
    need("close", hsaKmtCloseKFD());
    memset(&timer, 0, sizeof timer);
    setitimer(ITIMER_REAL, &timer, NULL);
    printf("gpu node %d, wait %s, ticks %s\n", gpu, status_name(waited), ticks > 3 ? "came" : "did not come");
    return 0;
}
