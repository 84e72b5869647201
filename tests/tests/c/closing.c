// A sleeper while the last reference is closed (case C26): it comes back.
#include "kmt.h"

#include <pthread.h>

static volatile pid_t number;

static void *sleep_on(void *event) {
    number = own_number();
    hsaKmtWaitOnEvent(event, 0xffffffff);
    return NULL;
}

int main(void) {
    pthread_t thread;
    alarm(120);
    start();
    HsaEvent *event = signal_event(false);
    if (pthread_create(&thread, NULL, sleep_on, event))
        return 2;
    until_asleep(&number);
    say("close under a sleeper", hsaKmtCloseKFD());
    pthread_join(thread, NULL);
    puts("the sleeper came back");
    return 0;
}
