// SDMA queues of the thunk's API: rings of FENCE packets (vega10_sdma_pkt_open.h), with pauses after which doorbells trap.
#include <hsakmt/hsakmt.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define RING 4096u
// Longer than doorbells have to be still before they trap.
#define PAUSE_MS 900
#define PATIENCE_S 60

#define CHECK(call)                                                                                \
    do {                                                                                           \
        HSAKMT_STATUS status_ = (call);                                                            \
        if (status_ != HSAKMT_STATUS_SUCCESS) {                                                    \
            printf("line %d: %s: status %d\n", __LINE__, #call, status_);                          \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

struct writer {
    HsaQueueResource queue;
    uint32_t *ring;
    uint32_t *target;
    uint64_t written;
    uint32_t last;
};

static HSAuint32 gpu;

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void *mapped(uint64_t size) {
    HsaMemFlags flags;
    void *address = NULL;
    memset(&flags, 0, sizeof flags);
    flags.ui32.HostAccess = 1;
    CHECK(hsaKmtAllocMemory(0, size, flags, &address));
    CHECK(hsaKmtMapMemoryToGPU(address, size, NULL));
    return address;
}

static void unmapped(void *address, uint64_t size) {
    CHECK(hsaKmtUnmapMemoryToGPU(address));
    CHECK(hsaKmtFreeMemory(address, size));
}

static void begin(struct writer *writer) {
    memset(writer, 0, sizeof *writer);
    writer->ring = mapped(RING);
    writer->target = mapped(4096);
    CHECK(hsaKmtCreateQueue(gpu, HSA_QUEUE_SDMA, 100, HSA_QUEUE_PRIORITY_NORMAL, writer->ring, RING, NULL,
                            &writer->queue));
}

static void end(struct writer *writer) {
    CHECK(hsaKmtDestroyQueue(writer->queue.QueueId));
    unmapped(writer->ring, RING);
    unmapped(writer->target, 4096);
}

static void ring(struct writer *writer) {
    uint64_t address = (uint64_t)(uintptr_t)writer->target;
    uint32_t *packet = writer->ring + writer->written % RING / 4;
    packet[0] = 5;
    packet[1] = (uint32_t)address;
    packet[2] = (uint32_t)(address >> 32);
    packet[3] = ++writer->last;
    writer->written += 16;
    __atomic_store_n(writer->queue.Queue_write_ptr_aql, writer->written, __ATOMIC_RELEASE);
    __atomic_store_n(writer->queue.Queue_DoorBell_aql, writer->written, __ATOMIC_RELEASE);
}

static void await(struct writer *writer) {
    double start = seconds();
    while (__atomic_load_n(writer->target, __ATOMIC_ACQUIRE) != writer->last) {
        if (seconds() - start > PATIENCE_S) {
            printf("%u was not written, %u is there\n", writer->last, *writer->target);
            exit(1);
        }
        sched_yield();
    }
}

static void *many(void *argument) {
    struct writer *writer = argument;
    for (int round = 0; round < 20; round++) {
        ring(writer);
        await(writer);
    }
    return NULL;
}

static void child_dies(struct writer *writer) {
    pid_t pid = fork();
    int status = 0;
    if (pid == 0) {
        __atomic_store_n(writer->queue.Queue_DoorBell_aql, writer->written + 16, __ATOMIC_RELEASE);
        _exit(0);
    }
    if (waitpid(pid, &status, 0) != pid || !WIFSIGNALED(status) || WTERMSIG(status) != SIGSEGV) {
        printf("a child rang: %#x\n", status);
        exit(1);
    }
}

int main(void) {
    HsaSystemProperties system;
    struct writer writers[4];
    setvbuf(stdout, NULL, _IOLBF, 0);
    CHECK(hsaKmtOpenKFD());
    CHECK(hsaKmtAcquireSystemProperties(&system));
    for (HSAuint32 node = 0; node < system.NumNodes; node++) {
        HsaNodeProperties properties;
        CHECK(hsaKmtGetNodeProperties(node, &properties));
        if (properties.NumFComputeCores)
            gpu = node;
    }
    for (int i = 0; i < 4; i++)
        begin(&writers[i]);
    double start = seconds();
    for (int round = 0; round < 300; round++) {
        ring(&writers[0]);
        await(&writers[0]);
    }
    printf("%.0f us from a ring to its end\n", (seconds() - start) / 300 * 1e6);
    for (int round = 0; round < 4; round++) {
        usleep(PAUSE_MS * 1000);
        start = seconds();
        ring(&writers[0]);
        await(&writers[0]);
        printf("%.0f us after a pause\n", (seconds() - start) * 1e6);
    }
    for (int round = 0; round < 3; round++) {
        pthread_t threads[4];
        usleep(PAUSE_MS * 1000);
        for (int i = 0; i < 4; i++)
            pthread_create(&threads[i], NULL, many, &writers[i]);
        for (int i = 0; i < 4; i++)
            pthread_join(threads[i], NULL);
    }
    child_dies(&writers[0]);
    usleep(PAUSE_MS * 1000);
    child_dies(&writers[0]);
    ring(&writers[0]);
    await(&writers[0]);
    for (int i = 1; i < 4; i++)
        end(&writers[i]);
    // One queue is left to the close.
    CHECK(hsaKmtCloseKFD());
    puts("queues: every ring arrived");
    return 0;
}
