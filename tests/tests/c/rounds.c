// rounds COUNT THREADS [beside]: allocates, maps, writes, unmaps and frees memory of mixed sizes and kinds, COUNT times in all, from
// THREADS threads at once; then tells what the process and the GPU have less than before. Beside others of its kind the
// GPU's memory tells nothing: with no rounds it only tells how much there is.
#include "kmt.h"

#include <dirent.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>

// Bits of HsaMemFlags.Value: NonPaged, HostAccess, CoarseGrain, AQLQueueMemory, Execute.
#define NON_PAGED (1u << 0)
#define HOST_ACCESS (1u << 6)
#define EXECUTE (1u << 12)
#define COARSE (1u << 13)
#define AQL (1u << 14)

static const HSAuint32 kinds[] = {
    HOST_ACCESS,
    HOST_ACCESS | COARSE,
    HOST_ACCESS | EXECUTE,
    HOST_ACCESS | AQL,
    NON_PAGED | HOST_ACCESS,
    NON_PAGED | COARSE,
    NON_PAGED | HOST_ACCESS | COARSE,
    NON_PAGED | HOST_ACCESS | COARSE,
};

static HSAuint32 gpu;
static atomic_uint wrong, failed;

struct share {
    unsigned rounds, number;
};

static unsigned next(unsigned *state) {
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static void *work(void *argument) {
    const struct share *share = argument;
    unsigned state = share->number * 2654435761u + 1;
    for (unsigned round = 0; round < share->rounds; round++) {
        HsaMemFlags flags;
        flags.Value = kinds[next(&state) % (sizeof kinds / sizeof *kinds)];
        // From a page to 4 MiB, small ones more often.
        HSAuint64 size = (HSAuint64)4096 * (1 + next(&state) % (1u << (next(&state) % 11)));
        bool shared = !(flags.Value & NON_PAGED) || (flags.Value & HOST_ACCESS);
        void *memory = NULL;
        HSAuint64 alternate;
        if (hsaKmtAllocMemory(flags.Value & NON_PAGED ? gpu : 0, size, flags, &memory) != HSAKMT_STATUS_SUCCESS) {
            failed++;
            continue;
        }
        if (hsaKmtMapMemoryToGPU(memory, size, &alternate) != HSAKMT_STATUS_SUCCESS)
            failed++;
        if (shared) {
            // The first and the last bytes of each page: another thread's would show.
            unsigned char mark = (unsigned char)(share->number * 31 + round);
            volatile unsigned char *bytes = memory;
            for (HSAuint64 page = 0; page < size; page += 4096)
                bytes[page] = bytes[page + 4095] = mark;
            for (HSAuint64 page = 0; page < size; page += 4096)
                if (bytes[page] != mark || bytes[page + 4095] != mark)
                    wrong++;
        }
        if (hsaKmtUnmapMemoryToGPU(memory) != HSAKMT_STATUS_SUCCESS)
            failed++;
        if (hsaKmtFreeMemory(memory, size) != HSAKMT_STATUS_SUCCESS)
            failed++;
    }
    return NULL;
}

static void rounds(unsigned count, unsigned threads) {
    pthread_t thread[64];
    struct share share[64];
    for (unsigned number = 0; number < threads; number++) {
        share[number].rounds = (count + threads - 1) / threads;
        share[number].number = number;
        if (pthread_create(&thread[number], NULL, work, &share[number]))
            _exit(2);
    }
    for (unsigned number = 0; number < threads; number++)
        pthread_join(thread[number], NULL);
}

static unsigned descriptors(void) {
    unsigned count = 0;
    DIR *directory = opendir("/proc/self/fd");
    while (readdir(directory))
        count++;
    closedir(directory);
    return count;
}

static unsigned maps(void) {
    unsigned count = 0;
    FILE *file = fopen("/proc/self/maps", "r");
    for (int byte; (byte = getc(file)) != EOF;)
        count += byte == '\n';
    fclose(file);
    return count;
}

static HSAuint64 available(void) {
    HSAuint64 bytes = 0;
    need("available memory", hsaKmtAvailableMemory(gpu, &bytes));
    return bytes;
}

int main(int count, char **arguments) {
    if (count < 3)
        return 2;
    unsigned total = atoi(arguments[1]), threads = atoi(arguments[2]);
    if (threads == 0 || threads > 64)
        return 2;
    // One heap, so that maps are the library's.
    mallopt(M_ARENA_MAX, 1);
    gpu = (HSAuint32)start();
    HSAuint64 before = available();
    if (!total) {
        printf("VRAM: %llu MiB\n", (unsigned long long)before >> 20);
        return 0;
    }
    rounds(threads * 4, threads);
    // Whoever asks gets it exactly: what is only held back for the next allocations goes first.
    available();
    unsigned few_descriptors = descriptors(), few_maps = maps();
    double begin = now();
    rounds(total, threads);
    fprintf(stderr, "%u rounds took %.1f s\n", total, now() - begin);
    HSAuint64 after = available();
    printf("failed calls: %u\nwrong bytes: %u\n", failed, wrong);
    printf("descriptors: %+d\n", (int)descriptors() - (int)few_descriptors);
    int more = (int)maps() - (int)few_maps;
    printf("maps: %s\n", more > 16 ? "many more" : "as before");
    if (more > 16)
        printf("maps: %+d\n", more);
    if (count == 3)
        printf("VRAM: %lld MiB less\n", ((long long)before - (long long)after) >> 20);
    say("close", hsaKmtCloseKFD());
    return 0;
}
