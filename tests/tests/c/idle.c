// What waiting costs. Modes:
//
//   wait            one thread is blocked in WaitOnEvent
//   waits N         N threads are blocked, each on an event of its own, while this one makes control calls
//   queues N        N queues that have each run a packet, and nothing since
//   none            only the process, connected
//
// Prints "ready", and when it gets a line "used MICROSECONDS SWITCHES": the CPU time of this process since then (user and
// kernel), and how often its threads gave up the CPU or lost it.
#include "kmt.h"

#include <pthread.h>
#include <stdint.h>
#include <sys/resource.h>

#define RING 4096u
#define CALLS 300

static HSAuint32 gpu;

static double used(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1e6 + usage.ru_utime.tv_usec + usage.ru_stime.tv_usec;
}

static long switches(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_nvcsw + usage.ru_nivcsw;
}

static void measured(void) {
    char line[16];
    puts("ready");
    fflush(stdout);
    // What is called for the first time is looked up first, which is not the cost of waiting.
    if (read(STDIN_FILENO, line, 0) || used() < 0)
        exit(1);
    double before = used();
    long switched = switches();
    if (read(STDIN_FILENO, line, sizeof line) <= 0)
        exit(1);
    double after = used();
    printf("used %.0f %ld\n", after - before, switches() - switched);
    fflush(stdout);
}

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

static void *mapped(HSAuint64 size) {
    HsaMemFlags flags = {0};
    void *address = NULL;
    HSAuint64 alternate = 0;
    flags.ui32.HostAccess = 1;
    flags.ui32.ExecuteAccess = 1;
    need("allocate", hsaKmtAllocMemory(0, size, flags, &address));
    need("map", hsaKmtMapMemoryToGPU(address, size, &alternate));
    memset(address, 0, size);
    return address;
}

// An empty barrier packet of an AQL queue, and its read index after it.
static void queues(int count) {
    HsaQueueResource *queue = calloc(count, sizeof *queue);
    for (int i = 0; i < count; i++) {
        char *ring = mapped(RING), *pointers = mapped(RING);
        for (unsigned at = 0; at < RING; at += 64)
            *(uint16_t *)(ring + at) = 1;
        queue[i].Queue_write_ptr_aql = (HSAuint64 *)pointers;
        queue[i].Queue_read_ptr_aql = (HSAuint64 *)(pointers + 128);
        need("create", hsaKmtCreateQueue(gpu, HSA_QUEUE_COMPUTE_AQL, 100, HSA_QUEUE_PRIORITY_NORMAL, ring, RING, NULL,
                                         &queue[i]));
        *(uint32_t *)ring = 3 | 1 << 8;
        __atomic_store_n((uint64_t *)pointers, 1, __ATOMIC_RELEASE);
        __atomic_store_n((uint64_t *)queue[i].Queue_DoorBell_aql, 0, __ATOMIC_RELEASE);
        while (__atomic_load_n((uint64_t *)(pointers + 128), __ATOMIC_ACQUIRE) != 1)
            usleep(10);
    }
    // Long enough for everything to have gone to sleep.
    sleep(2);
    measured();
    for (int i = 0; i < count; i++)
        need("destroy", hsaKmtDestroyQueue(queue[i].QueueId));
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
