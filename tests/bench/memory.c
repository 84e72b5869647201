// Times of the thunk's memory calls, for `cargo xtask bench memory`. It prints one line for each measurement:
//
//   NAME BYTES SECONDS        the median of one round, or
//   NAME BYTES refused        where the library refuses the call.
//
// Arguments: the kinds to measure, or none for all. The same program runs on any library.

#include "../tests/c/kmt.h"
#include <pthread.h>
#include <stdint.h>
#include <sys/mman.h>

#define KIB ((HSAuint64)1 << 10)
#define MIB ((HSAuint64)1 << 20)
#define GIB ((HSAuint64)1 << 30)
#define PAGE ((HSAuint64)4096)
#define THREADS 4

static HSAuint32 gpu;

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int count) {
    qsort(values, count, sizeof *values, by_value);
    return values[count / 2];
}

static int rounds_for(HSAuint64 size) {
    return size <= 64 * KIB ? 301 : size <= 16 * MIB ? 101 : size <= 256 * MIB ? 21 : 11;
}

struct kind {
    const char *name;
    int on_gpu;
    HsaMemFlags flags;
};

static HsaMemFlags host_flags(void) {
    HsaMemFlags flags = {0};
    flags.ui32.HostAccess = 1;
    flags.ui32.CoarseGrain = 1;
    return flags;
}

static HsaMemFlags vram_flags(int host_access) {
    HsaMemFlags flags = {0};
    flags.ui32.NonPaged = 1;
    flags.ui32.CoarseGrain = 1;
    flags.ui32.HostAccess = host_access;
    return flags;
}

// One round: memory that a GPU can use and that is given back. Returns 0 where the library refuses.
static int round_of(const struct kind *kind, HSAuint64 size) {
    void *memory = NULL;
    HSAuint64 alternate = 0;
    if (hsaKmtAllocMemory(kind->on_gpu ? gpu : 0, size, kind->flags, &memory) != HSAKMT_STATUS_SUCCESS)
        return 0;
    need("map", hsaKmtMapMemoryToGPU(memory, size, &alternate));
    need("unmap", hsaKmtUnmapMemoryToGPU(memory));
    need("free", hsaKmtFreeMemory(memory, size));
    return 1;
}

static void latency(const struct kind *kind, HSAuint64 size) {
    double times[512];
    int rounds = rounds_for(size);
    if (!round_of(kind, size)) {
        printf("%s %llu refused\n", kind->name, (unsigned long long)size);
        return;
    }
    for (int i = 0; i < rounds; i++) {
        double begin = now();
        if (!round_of(kind, size))
            need("alloc", HSAKMT_STATUS_NO_MEMORY);
        times[i] = now() - begin;
    }
    printf("%s %llu %.9f\n", kind->name, (unsigned long long)size, median(times, rounds));
    fflush(stdout);
}

struct work {
    const struct kind *kind;
    HSAuint64 size;
    int rounds;
};

static void *worker(void *argument) {
    struct work *work = argument;
    for (int i = 0; i < work->rounds; i++)
        if (!round_of(work->kind, work->size))
            need("alloc", HSAKMT_STATUS_NO_MEMORY);
    return NULL;
}

// Seconds for one round while THREADS threads do rounds at once.
static void throughput(const struct kind *kind, HSAuint64 size) {
    char name[64];
    pthread_t threads[THREADS];
    struct work work = {kind, size, rounds_for(size)};
    snprintf(name, sizeof name, "%s-x%d", kind->name, THREADS);
    if (!round_of(kind, size)) {
        printf("%s %llu refused\n", name, (unsigned long long)size);
        return;
    }
    double begin = now();
    for (int i = 0; i < THREADS; i++)
        if (pthread_create(&threads[i], NULL, worker, &work))
            exit(1);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    printf("%s %llu %.9f\n", name, (unsigned long long)size, (now() - begin) / (THREADS * work.rounds));
    fflush(stdout);
}

// The CPU fills memory that it has seen before.
static void fill(const struct kind *kind, HSAuint64 size) {
    char name[64];
    double times[64];
    void *memory = NULL;
    HSAuint64 alternate = 0;
    int rounds = 15;
    snprintf(name, sizeof name, "%s-fill", kind->name);
    if (hsaKmtAllocMemory(kind->on_gpu ? gpu : 0, size, kind->flags, &memory) != HSAKMT_STATUS_SUCCESS) {
        printf("%s %llu refused\n", name, (unsigned long long)size);
        return;
    }
    need("map", hsaKmtMapMemoryToGPU(memory, size, &alternate));
    memset(memory, 1, size);
    for (int i = 0; i < rounds; i++) {
        double begin = now();
        memset(memory, i, size);
        times[i] = now() - begin;
    }
    printf("%s %llu %.9f\n", name, (unsigned long long)size, median(times, rounds));
    need("unmap", hsaKmtUnmapMemoryToGPU(memory));
    need("free", hsaKmtFreeMemory(memory, size));
    fflush(stdout);
}

static void registration(HSAuint64 size) {
    double times[512];
    int rounds = size <= MIB ? 101 : size <= 16 * MIB ? 31 : 11;
    // Apart from neighbours, so that each range is one of its own.
    char *memory = mmap(NULL, size + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory + PAGE, size, PROT_READ | PROT_WRITE))
        exit(1);
    memory += PAGE;
    memset(memory, 1, size);
    for (int i = -1; i < rounds; i++) {
        HSAuint64 alternate = 0;
        double begin = now();
        if (hsaKmtRegisterMemory(memory, size) != HSAKMT_STATUS_SUCCESS) {
            printf("register %llu refused\n", (unsigned long long)size);
            return;
        }
        need("map", hsaKmtMapMemoryToGPU(memory, size, &alternate));
        need("unmap", hsaKmtUnmapMemoryToGPU(memory));
        need("deregister", hsaKmtDeregisterMemory(memory));
        if (i >= 0)
            times[i] = now() - begin;
    }
    printf("register %llu %.9f\n", (unsigned long long)size, median(times, rounds));
    munmap(memory - PAGE, size + 2 * PAGE);
    fflush(stdout);
}

int main(void) {
    const struct kind kinds[] = {
        {"system", 0, host_flags()}, {"vram", 1, vram_flags(0)}, {"visible-vram", 1, vram_flags(1)}};
    const HSAuint64 sizes[] = {4 * KIB, 2 * MIB, GIB};
    const HSAuint64 registered[] = {4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB};
    int node = start();
    if (node < 0)
        exit(1);
    gpu = node;
    for (unsigned k = 0; k < sizeof kinds / sizeof *kinds; k++)
        for (unsigned s = 0; s < sizeof sizes / sizeof *sizes; s++) {
            latency(&kinds[k], sizes[s]);
            throughput(&kinds[k], sizes[s]);
        }
    fill(&kinds[0], 64 * MIB);
    fill(&kinds[2], 64 * MIB);
    for (unsigned s = 0; s < sizeof registered / sizeof *registered; s++)
        registration(registered[s]);
    need("close", hsaKmtCloseKFD());
    return 0;
}
