// What waiting costs. Modes:
//
//   wait            one thread is blocked in WaitOnEvent
//   waits N         N threads are blocked, each on an event of its own, while this one makes control calls
//   queues N        N queues that have each run a packet, and nothing since
//   none            only the process, connected
//
// Prints "ready", and when it gets a line "used MICROSECONDS SWITCHES": the CPU time of this process since then (user and
// kernel), and how often its threads gave up the CPU or lost it.
#include "aql.h"
#include "measured.h"

#include <pthread.h>

#define CALLS 300

static HSAuint32 gpu;

struct waiter {
    HsaEvent *event;
    HSAKMT_STATUS status;
    pthread_t thread;
};

static void *blocked(void *argument) {
    struct waiter *waiter = argument;
    waiter->status = hsaKmtWaitOnEvent(waiter->event, 0xffffffff);
    return NULL;
}

static void block(struct waiter *waiters, int count) {
    for (int i = 0; i < count; i++)
        if (pthread_create(&waiters[i].thread, NULL, blocked, &waiters[i]))
            exit(1);
    // All of them have got as far as they get.
    usleep(500 * 1000);
}

// Every one is still blocked until its own event is set.
static void unblock(struct waiter *waiters, int count) {
    for (int i = 0; i < count; i++)
        need("set", hsaKmtSetEvent(waiters[i].event));
    for (int i = 0; i < count; i++) {
        pthread_join(waiters[i].thread, NULL);
        need("the wait", waiters[i].status);
    }
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// The median of the times of control calls, of one that is one round trip to the host. (A look at the clocks is up to four, more
// on a machine that has other work, which would say nothing of waits.)
static double call(void) {
    double times[CALLS];
    for (int i = 0; i < CALLS; i++) {
        HSAuint64 bytes;
        double begin = now();
        need("available", hsaKmtAvailableMemory(gpu, &bytes));
        times[i] = now() - begin;
    }
    qsort(times, CALLS, sizeof *times, by_value);
    return times[CALLS / 2];
}

static void waits(int count) {
    struct waiter *waiters = calloc(count, sizeof *waiters);
    double alone = 1e9, beside = 1e9;
    for (int i = 0; i < count; i++)
        waiters[i].event = signal_event(false);
    // In turns; the best of each is what the machine does when nothing else wants it.
    for (int round = 0; round < 5; round++) {
        double time = call();
        alone = time < alone ? time : alone;
        block(waiters, count);
        time = call();
        beside = time < beside ? time : beside;
        unblock(waiters, count);
    }
    printf("ratio %.3f (%.1f us alone, %.1f us beside %d waits)\n", beside / alone, alone * 1e6, beside * 1e6, count);
    block(waiters, count);
    measured();
    unblock(waiters, count);
    for (int i = 0; i < count; i++)
        need("destroy", hsaKmtDestroyEvent(waiters[i].event));
    free(waiters);
}

// Queues, each of which has run an empty barrier packet.
static void queues(int count) {
    struct aql *queue = calloc(count, sizeof *queue);
    for (int i = 0; i < count; i++) {
        aql_begin(&queue[i], gpu);
        aql_submit(&queue[i]);
        aql_wait(&queue[i]);
    }
    // Long enough for everything to have gone to sleep.
    sleep(2);
    measured();
    for (int i = 0; i < count; i++)
        need("destroy", hsaKmtDestroyQueue(queue[i].queue.QueueId));
    free(queue);
}

int main(int count, char **arguments) {
    int node = start();
    if (node < 0 || count < 2)
        return 1;
    gpu = node;
    int number = count > 2 ? atoi(arguments[2]) : 1;
    if (!strcmp(arguments[1], "wait")) {
        struct waiter waiter = {.event = signal_event(false)};
        block(&waiter, 1);
        measured();
        unblock(&waiter, 1);
    } else if (!strcmp(arguments[1], "waits")) {
        waits(number);
    } else if (!strcmp(arguments[1], "queues")) {
        queues(number);
    } else {
        measured();
    }
    say("close", hsaKmtCloseKFD());
    return 0;
}
