// Times of work on queues, for `cargo xtask bench dispatch`. It prints one line for each measurement:
//
//   NAME BYTES MEDIAN P99     in seconds, of one round
//
// Arguments: the kinds to measure, or none for all. The same program runs on any library. The GPU is the model, whose clock
// counts this machine's CLOCK_MONOTONIC_RAW (GET_CLOCK_COUNTERS): that is what time stamps of packets are held against.

#include "../tests/c/kmt.h"
#include <pthread.h>
#include <sched.h>
#include <stdint.h>

#define KIB ((HSAuint64)1 << 10)
#define MIB ((HSAuint64)1 << 20)
#define RING (64 * KIB)
#define MOST 20000
// What a copy packet of any generation can do (ROCr: kMaxSingleCopySize is a little less than 4 MiB).
#define PIECE (2 * MIB)

static HSAuint32 gpu;
static double times[MOST];

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print(const char *name, HSAuint64 bytes, int count) {
    qsort(times, count, sizeof *times, by_value);
    printf("%s %llu %.9f %.9f\n", name, (unsigned long long)bytes, times[count / 2], times[count * 99 / 100]);
    fflush(stdout);
}

static void *memory(int on_gpu, HSAuint64 size) {
    HsaMemFlags flags = {0};
    void *address = NULL;
    HSAuint64 alternate = 0;
    flags.ui32.HostAccess = !on_gpu;
    flags.ui32.NonPaged = on_gpu;
    flags.ui32.CoarseGrain = on_gpu;
    flags.ui32.ExecuteAccess = !on_gpu;
    need("allocate", hsaKmtAllocMemory(on_gpu ? gpu : 0, size, flags, &address));
    need("map", hsaKmtMapMemoryToGPU(address, size, &alternate));
    if (!on_gpu)
        memset(address, 0, size);
    return address;
}

static void release(void *address, HSAuint64 size) {
    need("unmap", hsaKmtUnmapMemoryToGPU(address));
    need("free", hsaKmtFreeMemory(address, size));
}

static double raw(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC_RAW, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

static inline void relax(void) { __builtin_ia32_pause(); }

// amd_signal_t of amd_hsa_signal.h.
struct signal {
    int64_t kind;
    volatile int64_t value;
    uint64_t mailbox;
    uint32_t event_id;
    uint32_t reserved1;
    volatile uint64_t start;
    volatile uint64_t end;
    uint64_t reserved2[2];
} __attribute__((aligned(64)));

// A queue of AQL packets, of which one at a time is on its way.
struct aql {
    HsaQueueResource queue;
    char *ring;
    char *pointers;
    struct signal *signal;
    // What packets wait for, if anything.
    struct signal *dependency;
    uint64_t index;
};

static void begin_aql(struct aql *aql) {
    memset(aql, 0, sizeof *aql);
    aql->ring = memory(0, RING);
    aql->pointers = memory(0, 4 * KIB);
    aql->signal = memory(0, 4 * KIB);
    for (unsigned at = 0; at < RING; at += 64)
        *(uint16_t *)(aql->ring + at) = 1; // HSA_PACKET_TYPE_INVALID
    aql->queue.Queue_write_ptr_aql = (HSAuint64 *)aql->pointers;
    aql->queue.Queue_read_ptr_aql = (HSAuint64 *)(aql->pointers + 128);
    need("create an AQL queue", hsaKmtCreateQueue(gpu, HSA_QUEUE_COMPUTE_AQL, 100, HSA_QUEUE_PRIORITY_NORMAL, aql->ring,
                                                  RING, NULL, &aql->queue));
}

static void end_aql(struct aql *aql) {
    need("destroy", hsaKmtDestroyQueue(aql->queue.QueueId));
    release(aql->ring, RING);
    release(aql->pointers, 4 * KIB);
    release(aql->signal, 4 * KIB);
}

// An empty barrier packet that ends with the signal.
static void submit(struct aql *aql) {
    char *packet = aql->ring + aql->index * 64 % RING;
    aql->signal->value = 1;
    memset(packet + 4, 0, 60);
    *(uint64_t *)(packet + 8) = (uint64_t)(uintptr_t)aql->dependency;
    *(uint64_t *)(packet + 56) = (uint64_t)(uintptr_t)aql->signal;
    // BARRIER_AND with the barrier bit, acquire and release of the system's scope.
    __atomic_store_n((uint32_t *)packet, 3 | 1 << 8 | 2 << 9 | 2 << 11, __ATOMIC_RELEASE);
    __atomic_store_n((uint64_t *)aql->pointers, aql->index + 1, __ATOMIC_RELEASE);
    __atomic_store_n((uint64_t *)aql->queue.Queue_DoorBell_aql, aql->index, __ATOMIC_RELEASE);
    aql->index++;
}

static void spin(struct aql *aql) {
    while (__atomic_load_n(&aql->signal->value, __ATOMIC_ACQUIRE))
        relax();
}

static void dispatch_spinning(void) {
    struct aql aql;
    begin_aql(&aql);
    for (int i = -200; i < MOST; i++) {
        double begin = now();
        submit(&aql);
        spin(&aql);
        if (i >= 0)
            times[i] = now() - begin;
    }
    print("dispatch-spinning", 0, MOST);
    end_aql(&aql);
}

// Ticks of the GPU's clock in a second.
static double frequency(void) {
    HsaClockCounters first, second;
    need("clocks", hsaKmtGetClockCounters(gpu, &first));
    usleep(200 * 1000);
    need("clocks", hsaKmtGetClockCounters(gpu, &second));
    double hertz = (double)(second.GPUClockCounter - first.GPUClockCounter) /
                   ((double)(second.CPUClockCounter - first.CPUClockCounter) * 1e-9);
    // Whole megahertz: two looks are not exact to the last one.
    return (double)(uint64_t)(hertz / 1e6 + 0.5) * 1e6;
}

// The time stamp of a packet's begin against the store to the doorbell, after a pause.
static void fetch(const char *name, int rounds, int pause_us) {
    struct aql aql;
    double hertz = frequency();
    begin_aql(&aql);
    for (int i = -2; i < rounds; i++) {
        if (pause_us)
            usleep(pause_us);
        double begin = raw();
        submit(&aql);
        spin(&aql);
        if (i >= 0)
            times[i] = aql.signal->start / hertz - begin;
    }
    print(name, 0, rounds);
    end_aql(&aql);
}

static void dispatch_waiting(void) {
    struct aql aql;
    HsaEvent *event = signal_event(false);
    const int rounds = 3000;
    begin_aql(&aql);
    aql.signal->mailbox = event->EventData.HWData2;
    aql.signal->event_id = event->EventId;
    for (int i = -50; i < rounds; i++) {
        double begin = now();
        submit(&aql);
        while (__atomic_load_n(&aql.signal->value, __ATOMIC_ACQUIRE))
            hsaKmtWaitOnEvent(event, 1000);
        if (i >= 0)
            times[i] = now() - begin;
    }
    print("dispatch-waiting", 0, rounds);
    end_aql(&aql);
    need("destroy", hsaKmtDestroyEvent(event));
}

struct releaser {
    struct signal *dependency;
    HsaEvent *go;
    int rounds;
};

// Lets a packet end whose waiter sleeps.
static void *release_later(void *argument) {
    struct releaser *releaser = argument;
    for (int i = 0; i < releaser->rounds; i++) {
        need("wait", hsaKmtWaitOnEvent(releaser->go, 60000));
        usleep(500);
        __atomic_store_n(&releaser->dependency->value, 0, __ATOMIC_RELEASE);
    }
    return NULL;
}

// From the time stamp of a packet's end to the thread that slept until its interrupt.
static void interrupt_wake(void) {
    struct aql aql;
    pthread_t thread;
    HsaEvent *event = signal_event(false);
    double hertz = frequency();
    begin_aql(&aql);
    struct releaser releaser = {aql.signal + 1, signal_event(false), 2000};
    aql.signal->mailbox = event->EventData.HWData2;
    aql.signal->event_id = event->EventId;
    aql.dependency = releaser.dependency;
    if (pthread_create(&thread, NULL, release_later, &releaser))
        exit(1);
    for (int i = 0; i < releaser.rounds; i++) {
        releaser.dependency->value = 1;
        submit(&aql);
        need("set", hsaKmtSetEvent(releaser.go));
        while (__atomic_load_n(&aql.signal->value, __ATOMIC_ACQUIRE))
            hsaKmtWaitOnEvent(event, 1000);
        times[i] = raw() - aql.signal->end / hertz;
    }
    pthread_join(thread, NULL);
    print("interrupt-wake", 0, releaser.rounds);
    end_aql(&aql);
    need("destroy", hsaKmtDestroyEvent(event));
    need("destroy", hsaKmtDestroyEvent(releaser.go));
}

struct sdma {
    HsaQueueResource queue;
    uint32_t *ring;
    volatile uint32_t *fence;
    uint64_t written;
    uint32_t last;
};

static void put(struct sdma *sdma, const uint32_t *words, unsigned count) {
    for (unsigned i = 0; i < count; i++, sdma->written += 4)
        sdma->ring[sdma->written % RING / 4] = words[i];
}

// A linear copy (SDMA_PKT_COPY_LINEAR of vega10_sdma_pkt_open.h), then a fence; the time until it is seen.
static double copy(struct sdma *sdma, uint64_t to, uint64_t from, HSAuint64 size) {
    // Packets do not go round the ring's end.
    if (sdma->written % RING > RING / 2)
        while (sdma->written % RING)
            put(sdma, &(uint32_t){0}, 1);
    for (HSAuint64 done = 0; done < size; done += PIECE) {
        HSAuint64 bytes = size - done < PIECE ? size - done : PIECE;
        uint64_t source = from + done, target = to + done;
        put(sdma,
            (uint32_t[]){1, bytes - 1, 0, source, source >> 32, target, target >> 32}, 7);
    }
    uint64_t fence = (uint64_t)(uintptr_t)sdma->fence;
    put(sdma, (uint32_t[]){5, fence, fence >> 32, ++sdma->last}, 4);
    double begin = now();
    __atomic_store_n(sdma->queue.Queue_write_ptr_aql, sdma->written, __ATOMIC_RELEASE);
    __atomic_store_n(sdma->queue.Queue_DoorBell_aql, sdma->written, __ATOMIC_RELEASE);
    while (__atomic_load_n(sdma->fence, __ATOMIC_ACQUIRE) != sdma->last)
        relax();
    return now() - begin;
}

static void copies(const char *name, int from_gpu, int to_gpu) {
    struct sdma sdma = {0};
    sdma.ring = memory(0, RING);
    sdma.fence = memory(0, 4 * KIB);
    need("create an SDMA queue",
         hsaKmtCreateQueue(gpu, HSA_QUEUE_SDMA, 100, HSA_QUEUE_PRIORITY_NORMAL, sdma.ring, RING, NULL, &sdma.queue));
    for (HSAuint64 size = 4 * KIB; size <= 256 * MIB; size *= 4) {
        int rounds = size <= 64 * KIB ? 2000 : size <= 4 * MIB ? 300 : size <= 64 * MIB ? 40 : 12;
        void *from = memory(from_gpu, size), *to = memory(to_gpu, size);
        for (int i = -2; i < rounds; i++) {
            double time = copy(&sdma, (uint64_t)(uintptr_t)to, (uint64_t)(uintptr_t)from, size);
            if (i >= 0)
                times[i] = time;
        }
        print(name, size, rounds);
        release(from, size);
        release(to, size);
    }
    need("destroy", hsaKmtDestroyQueue(sdma.queue.QueueId));
    release(sdma.ring, RING);
    release((void *)sdma.fence, 4 * KIB);
}

struct waker {
    HsaEvent *event, *back;
    double set;
    int rounds;
};

static void *wake(void *argument) {
    struct waker *waker = argument;
    for (int i = 0; i < waker->rounds; i++) {
        need("wait", hsaKmtWaitOnEvent(waker->back, 60000));
        // The other thread sleeps by then.
        usleep(300);
        waker->set = now();
        need("set", hsaKmtSetEvent(waker->event));
    }
    return NULL;
}

static void event_wake(void) {
    struct waker waker = {signal_event(false), signal_event(false), 0, 3000};
    pthread_t thread;
    if (pthread_create(&thread, NULL, wake, &waker))
        exit(1);
    for (int i = 0; i < waker.rounds; i++) {
        need("set", hsaKmtSetEvent(waker.back));
        need("wait", hsaKmtWaitOnEvent(waker.event, 60000));
        times[i] = now() - waker.set;
    }
    pthread_join(thread, NULL);
    print("event-wake", 0, waker.rounds);
    need("destroy", hsaKmtDestroyEvent(waker.event));
    need("destroy", hsaKmtDestroyEvent(waker.back));
}

static int wanted(int count, char **names, const char *name) {
    for (int i = 1; i < count; i++)
        if (!strcmp(names[i], name))
            return 1;
    return count < 2;
}

int main(int count, char **names) {
    int node = start();
    if (node < 0)
        exit(1);
    gpu = node;
    if (wanted(count, names, "dispatch-spinning"))
        dispatch_spinning();
    if (wanted(count, names, "dispatch-waiting"))
        dispatch_waiting();
    if (wanted(count, names, "fetch-busy"))
        fetch("fetch-busy", 5000, 0);
    if (wanted(count, names, "fetch-idle"))
        fetch("fetch-idle", 200, 5000);
    if (wanted(count, names, "fetch-still"))
        fetch("fetch-still", 8, 600 * 1000);
    if (wanted(count, names, "interrupt-wake"))
        interrupt_wake();
    if (wanted(count, names, "event-wake"))
        event_wake();
    if (wanted(count, names, "copy-up"))
        copies("copy-up", 0, 1);
    if (wanted(count, names, "copy-down"))
        copies("copy-down", 1, 0);
    need("close", hsaKmtCloseKFD());
    return 0;
}
