// Host memory in the pool (docs/adr/0003-ordinary-pages.md), as CPU and GPU see it. Lines that begin with @ are requests to
// the harness, which looks through the GPU's page table (tests/src/gpu_view.rs).
//
//   pool share BYTES...   new memory is zero, and each sees what the other wrote
//   pool hold BYTES       allocates, maps, writes to each page, then waits for the end of its input
//   pool zero BYTES...    whether what such processes wrote is gone from new memory
#include "kmt.h"

#include <stdbool.h>
#include <stdint.h>
#include <sys/random.h>
#include <unistd.h>

static HSAuint32 gpu_id;

// As the harness computes it.
static uint8_t pattern(uint64_t seed, uint64_t number) {
    return (uint8_t)(seed * 37 + number * 11 + (number >> 8) * 5 + (number >> 12) * 3 + (number >> 20) * 7 + 1);
}

static uint8_t *allocate(uint64_t size) {
    HsaMemFlags flags;
    memset(&flags, 0, sizeof flags);
    flags.ui32.HostAccess = 1;
    void *at = NULL;
    HSAuint64 alternate = 0;
    need("allocate", hsaKmtAllocMemory(0, size, flags, &at));
    need("map", hsaKmtMapMemoryToGPU(at, size, &alternate));
    return at;
}

static void release(uint8_t *at, uint64_t size) {
    need("unmap", hsaKmtUnmapMemoryToGPU(at));
    need("free", hsaKmtFreeMemory(at, size));
}

// Whether the mapping at an address is of a file of the mount.
static bool is_pooled(const uint8_t *at) {
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512];
    bool pooled = false;
    while (maps && fgets(line, sizeof line, maps)) {
        unsigned long begin, end;
        if (sscanf(line, "%lx-%lx", &begin, &end) == 2 && begin <= (uintptr_t)at && (uintptr_t)at < end)
            pooled = strstr(line, " /run/virtio-kfd/") != NULL;
    }
    if (maps)
        fclose(maps);
    return pooled;
}

static const char *ask(const char *what, const char *token, const uint8_t *at, uint64_t size, unsigned seed) {
    static char answer[512];
    printf("@%s %s %u %#lx %#lx %u\n", what, token, gpu_id, (unsigned long)at, (unsigned long)size, seed);
    fflush(stdout);
    if (!fgets(answer, sizeof answer, stdin))
        _exit(1);
    answer[strcspn(answer, "\n")] = 0;
    return answer;
}

static void meet(char *token, size_t length) {
    uint64_t random[2];
    uint8_t *page = allocate(4096);
    if (getrandom(random, sizeof random, 0) != sizeof random)
        _exit(1);
    memcpy(page, random, sizeof random);
    snprintf(token, length, "%016lx%016lx", (unsigned long)random[0], (unsigned long)random[1]);
    const char *answer = ask("meet", token, page, 0, 0);
    if (strcmp(answer, "met")) {
        printf("the harness: %s\n", answer);
        _exit(1);
    }
    release(page, 4096);
}

static void share(const char *token, uint64_t size) {
    uint8_t *at = allocate(size);
    bool zero = true, right = true;
    for (uint64_t i = 0; i < size; i++) {
        zero &= at[i] == 0;
        at[i] = pattern(3, i);
    }
    const char *what = is_pooled(at) ? "pooled" : "not pooled";
    printf("%lu bytes: %s, %s\n", (unsigned long)size, what, zero ? "zero" : "dirty");
    printf("the GPU reads: %s\n", ask("check", token, at, size, 3));
    printf("the GPU writes: %s\n", ask("fill", token, at, size, 4));
    for (uint64_t i = 0; i < size; i++)
        right &= at[i] == pattern(4, i);
    printf("the CPU reads: %s\n", right ? "same" : "something else");
    fflush(stdout);
    release(at, size);
}

int main(int count, char **arguments) {
    if (count < 3)
        return 2;
    int node = start();
    HsaNodeProperties properties;
    need("node properties", hsaKmtGetNodeProperties(node, &properties));
    gpu_id = properties.KFDGpuID;
    if (!strcmp(arguments[1], "hold")) {
        uint64_t size = strtoull(arguments[2], NULL, 0);
        uint8_t *at = allocate(size);
        for (uint64_t i = 0; i < size; i += 4096)
            at[i] = 0xee;
        printf("held, %s\n", is_pooled(at) ? "pooled" : "not pooled");
        fflush(stdout);
        char line[16];
        while (fgets(line, sizeof line, stdin)) {}
        return 0;
    }
    if (!strcmp(arguments[1], "zero")) {
        for (int number = 2; number < count; number++) {
            uint64_t size = strtoull(arguments[number], NULL, 0);
            uint8_t *at = allocate(size);
            // Memory that was given back counts until the kernel has let go of its file and the host's worker of its place.
            for (int again = 0; again < 100 && !is_pooled(at); again++) {
                release(at, size);
                usleep(100000);
                at = allocate(size);
            }
            bool zero = true;
            for (uint64_t i = 0; i < size; i += 4096)
                zero &= at[i] == 0;
            printf("%s, %s\n", is_pooled(at) ? "pooled" : "not pooled", zero ? "zero" : "dirty");
            release(at, size);
        }
        return 0;
    }
    char token[40];
    meet(token, sizeof token);
    for (int number = 2; number < count; number++)
        share(token, strtoull(arguments[number], NULL, 0));
    need("close", hsaKmtCloseKFD());
    return 0;
}
