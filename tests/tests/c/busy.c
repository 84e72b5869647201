// A program whose work is broken off, for tests that kill what is under it. Modes:
//
//   busy      queues, waits and memory calls without end; when the connection is lost, prints what each thread was told
//   steady    the same until it gets a line; everything must work
//   check     everything once: "works", and the VRAM that is left
//
// Spins give up after a while and ask by a control call whether the connection is lost: no GPU store tells that.
#include "kmt.h"

#include <pthread.h>
#include <stdint.h>

#define RING 4096u
#define COPY 65536u
#define PATIENCE 0.05

static HSAuint32 gpu;
static volatile int ended;

struct worker {
    const char *name;
    // Works until told to end. Gives what a call answered that failed.
    HSAKMT_STATUS (*work)(long rounds);
    HSAKMT_STATUS status;
    pthread_t thread;
};

static HSAKMT_STATUS mapped(int on_gpu, HSAuint64 size, void **address) {
    HsaMemFlags flags = {0};
    HSAuint64 alternate = 0;
    flags.ui32.HostAccess = !on_gpu;
    flags.ui32.NonPaged = on_gpu;
    HSAKMT_STATUS status = hsaKmtAllocMemory(on_gpu ? gpu : 0, size, flags, address);
    if (status == HSAKMT_STATUS_SUCCESS)
        status = hsaKmtMapMemoryToGPU(*address, size, &alternate);
    if (status == HSAKMT_STATUS_SUCCESS && !on_gpu)
        memset(*address, 0, size);
    return status;
}

static HSAKMT_STATUS released(void *address, HSAuint64 size) {
    HSAKMT_STATUS status = hsaKmtUnmapMemoryToGPU(address);
    return status == HSAKMT_STATUS_SUCCESS ? hsaKmtFreeMemory(address, size) : status;
}

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        HSAKMT_STATUS status_ = (call);                                                                                \
        if (status_ != HSAKMT_STATUS_SUCCESS)                                                                          \
            return status_;                                                                                            \
    } while (0)

static int goes_on(long rounds, long round) { return !ended && (!rounds || round < rounds); }

// amd_signal_t
struct signal {
    int64_t kind;
    int64_t value;
    uint64_t mailbox;
    uint32_t event_id, reserved;
    uint64_t stamps[2], more[2];
};

// Barrier packets of an AQL queue, waited for by an interrupt or without one.
static HSAKMT_STATUS dispatches(long rounds, bool interrupts) {
    char *ring, *pointers, *page;
    HsaQueueResource queue = {0};
    HsaEvent *event = NULL;
    TRY(create(HSA_EVENTTYPE_SIGNAL, false, false, &event));
    TRY(mapped(0, RING, (void **)&ring));
    TRY(mapped(0, RING, (void **)&pointers));
    TRY(mapped(0, RING, (void **)&page));
    struct signal *signal = (struct signal *)page;
    for (unsigned at = 0; at < RING; at += 64)
        *(uint16_t *)(ring + at) = 1;
    queue.Queue_write_ptr_aql = (HSAuint64 *)pointers;
    queue.Queue_read_ptr_aql = (HSAuint64 *)(pointers + 128);
    TRY(hsaKmtCreateQueue(gpu, HSA_QUEUE_COMPUTE_AQL, 100, HSA_QUEUE_PRIORITY_NORMAL, ring, RING, NULL, &queue));
    if (interrupts) {
        signal->mailbox = event->EventData.HWData2;
        signal->event_id = event->EventId;
    }
    for (long round = 0; goes_on(rounds, round); round++) {
        char *packet = ring + round * 64 % RING;
        signal->value = 1;
        memset(packet + 4, 0, 60);
        *(uint64_t *)(packet + 56) = (uint64_t)(uintptr_t)signal;
        __atomic_store_n((uint32_t *)packet, 3 | 1 << 8, __ATOMIC_RELEASE);
        __atomic_store_n((uint64_t *)pointers, round + 1, __ATOMIC_RELEASE);
        __atomic_store_n((uint64_t *)queue.Queue_DoorBell_aql, round, __ATOMIC_RELEASE);
        double begin = now();
        while (__atomic_load_n(&signal->value, __ATOMIC_ACQUIRE)) {
            if (interrupts) {
                HSAKMT_STATUS status = hsaKmtWaitOnEvent(event, 1000);
                if (status != HSAKMT_STATUS_SUCCESS && status != HSAKMT_STATUS_WAIT_TIMEOUT)
                    return status;
            } else if (now() - begin > PATIENCE) {
                TRY(hsaKmtResetEvent(event));
                begin = now();
            }
        }
    }
    TRY(hsaKmtDestroyQueue(queue.QueueId));
    TRY(released(ring, RING));
    TRY(released(pointers, RING));
    TRY(released(page, RING));
    return hsaKmtDestroyEvent(event);
}

static HSAKMT_STATUS spinning(long rounds) { return dispatches(rounds, false); }
static HSAKMT_STATUS interrupted(long rounds) { return dispatches(rounds, true); }

// Copies of an SDMA queue of gfx9, each compared.
static HSAKMT_STATUS copies(long rounds) {
    uint32_t *ring, *from, *to;
    volatile uint32_t *fence;
    HsaQueueResource queue = {0};
    HsaEvent *event = NULL;
    uint64_t written = 0;
    TRY(create(HSA_EVENTTYPE_SIGNAL, false, false, &event));
    TRY(mapped(0, RING, (void **)&ring));
    TRY(mapped(0, RING, (void **)&fence));
    TRY(mapped(0, COPY, (void **)&from));
    TRY(mapped(0, COPY, (void **)&to));
    TRY(hsaKmtCreateQueue(gpu, HSA_QUEUE_SDMA, 100, HSA_QUEUE_PRIORITY_NORMAL, ring, RING, NULL, &queue));
    for (long round = 0; goes_on(rounds, round); round++) {
        uint64_t source = (uint64_t)(uintptr_t)from, target = (uint64_t)(uintptr_t)to;
        uint64_t at = (uint64_t)(uintptr_t)fence;
        uint32_t words[16] = {1,           COPY - 1, 0, source, source >> 32, target, target >> 32, 5, at, at >> 32,
                              round + 1};
        for (unsigned i = 0; i < COPY / 4; i += 64)
            from[i] = (uint32_t)round * 2654435761u + i;
        // The rest of the 16 words is NOPs: packets do not go round the ring's end.
        memcpy(ring + written % RING / 4, words, sizeof words);
        written += sizeof words;
        __atomic_store_n(queue.Queue_write_ptr_aql, written, __ATOMIC_RELEASE);
        __atomic_store_n(queue.Queue_DoorBell_aql, written, __ATOMIC_RELEASE);
        double begin = now();
        while (__atomic_load_n(fence, __ATOMIC_ACQUIRE) != (uint32_t)round + 1)
            if (now() - begin > PATIENCE) {
                TRY(hsaKmtResetEvent(event));
                begin = now();
            }
        for (unsigned i = 0; i < COPY / 4; i += 64)
            if (to[i] != (uint32_t)round * 2654435761u + i) {
                printf("round %ld: word %u is %#x\n", round, i, to[i]);
                _exit(3);
            }
    }
    TRY(hsaKmtDestroyQueue(queue.QueueId));
    TRY(released(ring, RING));
    TRY(released((void *)fence, RING));
    TRY(released(from, COPY));
    TRY(released(to, COPY));
    return hsaKmtDestroyEvent(event);
}

// Waits for what does not come; the rest of the threads end it.
static HSAKMT_STATUS waits(long rounds) {
    HsaEvent *event = NULL;
    TRY(create(HSA_EVENTTYPE_SIGNAL, false, false, &event));
    do {
        // A wait without end, but where the program means to end.
        HSAKMT_STATUS status = hsaKmtWaitOnEvent(event, rounds ? 1 : 0xffffffff);
        if (status != HSAKMT_STATUS_WAIT_TIMEOUT)
            return status;
    } while (!rounds);
    return hsaKmtDestroyEvent(event);
}

// Made before any thread begins, so that the wait for it tells nothing but the loss.
static HsaEvent *hardware;

// The GPU's memory is lost with the connection, which is what these events tell.
static HSAKMT_STATUS exception(long rounds) {
    HsaEvent *event = hardware;
    do {
        HSAKMT_STATUS status = hsaKmtWaitOnEvent(event, rounds ? 1 : 0xffffffff);
        HsaHwException *data = &event->EventData.EventData.HwException;
        if (!rounds && status == HSAKMT_STATUS_SUCCESS && (data->NodeId != gpu || data->MemoryLost != 1))
            return HSAKMT_STATUS_INVALID_NODE_UNIT;
        if (status != HSAKMT_STATUS_WAIT_TIMEOUT)
            return status;
    } while (!rounds);
    return hsaKmtDestroyEvent(event);
}

static HSAKMT_STATUS memory(long rounds) {
    for (long round = 0; goes_on(rounds, round); round++) {
        void *vram, *host;
        TRY(mapped(1, 256 * 1024, &vram));
        TRY(mapped(0, 64 * 1024, &host));
        TRY(released(vram, 256 * 1024));
        TRY(released(host, 64 * 1024));
    }
    return HSAKMT_STATUS_SUCCESS;
}

static struct worker workers[] = {
    {.name = "spinning", .work = spinning}, {.name = "interrupted", .work = interrupted},
    {.name = "copies", .work = copies},     {.name = "memory", .work = memory},
    {.name = "waits", .work = waits},       {.name = "exception", .work = exception},
};
#define WORKERS (int)(sizeof workers / sizeof *workers)
// The last ones are ended by a loss alone.
#define ENDLESS 2

static void *work(void *argument) {
    struct worker *worker = argument;
    worker->status = worker->work(0);
    return NULL;
}

int main(int count, char **arguments) {
    const char *mode = count > 1 ? arguments[1] : "check";
    int node = start();
    if (node < 0)
        return 1;
    gpu = node;
    need("create", create(HSA_EVENTTYPE_HW_EXCEPTION, false, false, &hardware));
    if (!strcmp(mode, "check")) {
        HSAuint64 left = 0;
        for (int i = 0; i < WORKERS; i++)
            need(workers[i].name, workers[i].work(3));
        puts("works");
        need("available memory", hsaKmtAvailableMemory(gpu, &left));
        printf("vram %llu\n", (unsigned long long)left);
        need("close", hsaKmtCloseKFD());
        return 0;
    }
    int steady = !strcmp(mode, "steady");
    int started = steady ? WORKERS - ENDLESS : WORKERS;
    for (int i = 0; i < started; i++)
        if (pthread_create(&workers[i].thread, NULL, work, &workers[i]))
            return 1;
    puts("busy");
    fflush(stdout);
    if (steady) {
        char line[16];
        ended = !fgets(line, sizeof line, stdin) || 1;
    }
    for (int i = 0; i < started; i++) {
        pthread_join(workers[i].thread, NULL);
        say(workers[i].name, workers[i].status);
    }
    HsaEvent *event = NULL;
    if (!steady)
        say("afterwards", create(HSA_EVENTTYPE_SIGNAL, false, false, &event));
    say("close", hsaKmtCloseKFD());
    return 0;
}
