// A sleeper while the last reference is closed (case C26): it comes back.
#include "kmt.h"

#include <pthread.h>

static void *sleep_on(void *event) {
    hsaKmtWaitOnEvent(event, 0xffffffff);
    return NULL;
}

int main(void) {
    pthread_t thread;
    alarm(30);
    start();
    HsaEvent *event = signal_event(false);
    if (pthread_create(&thread, NULL, sleep_on, event))
        return 2;
    usleep(200 * 1000);
    double before = now();
    say("close under a sleeper", hsaKmtCloseKFD());
    pthread_join(thread, NULL);
    printf("the sleeper came back: %s\n", now() - before < 5 ? "soon" : "late");
    return 0;
}
