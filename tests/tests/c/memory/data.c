// What the CPU writes is what the GPU reads, and the other way round: every kind of memory, up to the last byte and not
// beyond it.
#include "harness.h"

static void both_ways(const char *label, char *memory, uint64_t size, bool cpu, uint32_t seed) {
    // Places where a mistake in pages, huge pages or the sign of a number shows.
    uint64_t places[] = {0, PAGE - 8, 2 * MIB - 8, 2 * GIB - 8, 4 * GIB - 8, size / 2, size - 16};
    unsigned bad = 0, tried = 0;
    for (unsigned number = 0; number < sizeof places / sizeof *places; number++) {
        uint64_t place = places[number];
        if (place > size - 16)
            continue;
        tried++;
        char *here = memory + place;
        if (cpu) {
            cpu_writes(here, 16, seed + number);
            bad += !gpu_has(0, here, 16, seed + number);
        }
        bad += !gpu_put(0, here, 16, seed + number + 100);
        bad += !gpu_has(0, here, 16, seed + number + 100);
        if (cpu)
            bad += !cpu_has(here, 16, seed + number + 100);
    }
    line("%s: %u places, %u wrong, last byte %s, behind it %s", label, tried, bad,
         gpu_faults(0, memory + size - 1) ? "faults" : "there", gpu_faults(0, memory + size) ? "faults" : "there");
}

static void kind(HSAuint32 node, uint32_t flags) {
    static const uint64_t sizes[] = {PAGE, 3 * PAGE, 64 * KIB, 2 * MIB - PAGE, 2 * MIB, 2 * MIB + PAGE, 16 * MIB};
    bool cpu = !(flags & NON_PAGED) || (flags & HOST_ACCESS);
    for (unsigned number = 0; number < sizeof sizes / sizeof *sizes; number++) {
        uint64_t size = sizes[number];
        char *a = alloc("a", node, size, flags);
        if (!a)
            continue;
        map(a, size);
        both_ways("a", a, size, cpu, number + flags);
        if (cpu && size <= 64 * KIB) {
            cpu_writes(a, size, 71);
            gpu_sees(0, a, size, 71);
            gpu_writes(0, a, size, 72);
            cpu_sees(a, size, 72);
        }
        if (flags & AQL) {
            // The ring is there twice for the GPU.
            gpu_writes(0, a, 64, 73);
            gpu_sees(0, a + size, 64, 73);
            gpu_writes(0, a + 2 * size - 64, 64, 74);
            cpu_sees(a + size - 64, 64, 74);
            line("behind the second: %s", gpu_faults(0, a + 2 * size) ? "faults" : "there");
        }
        unmap(a);
        line("unmapped: %s", gpu_faults(0, a) ? "faults" : "there");
        if (cpu)
            line("the CPU can %s at %s", reach(a + size - 1), at(a + size - 1));
        drop("a", a, size);
    }
}

// A fresh buffer has nothing of an old one's.
static void fresh(HSAuint32 node, uint32_t flags) {
    static const uint8_t zero[PAGE];
    unsigned dirty = 0;
    for (unsigned round = 0; round < 20; round++) {
        char *a = quiet_alloc(node, 64 * KIB, flags);
        quiet_map(a, 64 * KIB);
        for (unsigned page = 0; page < 16; page++)
            dirty += memcmp(a + page * PAGE, zero, PAGE) != 0;
        memset(a, 0xdd, 64 * KIB);
        if (hsaKmtUnmapMemoryToGPU(a) != HSAKMT_STATUS_SUCCESS)
            give_up("unmap");
        quiet_free(a, 64 * KIB);
    }
    line("%s: pages of fresh buffers with old data: %u", flag_names(flags), dirty);
}

void section_data(void) {
    static const uint32_t system[] = {FINE,
                                      HOST_ACCESS | COARSE,
                                      HOST_ACCESS | UNCACHED,
                                      HOST_ACCESS | EXECUTE,
                                      HOST_ACCESS | AQL,
                                      HOST_ACCESS | EXECUTE | AQL};
    static const uint32_t local[] = {PINNED, PINNED | UNCACHED, DEVICE, VISIBLE, VISIBLE | EXECUTE};
    heading("system memory");
    for (unsigned number = 0; number < sizeof system / sizeof *system; number++)
        kind(machine.cpu, system[number]);
    heading("memory of the GPU's node");
    for (unsigned number = 0; number < sizeof local / sizeof *local; number++)
        kind(machine.gpu[0], local[number]);
    heading("fresh memory");
    fresh(machine.cpu, FINE);
    fresh(machine.gpu[0], PINNED);
    fresh(machine.gpu[0], VISIBLE);
    heading("read only for the GPU");
    for (unsigned local_memory = 0; local_memory < 2; local_memory++) {
        uint32_t flags = (local_memory ? VISIBLE : FINE) | READ_ONLY;
        char *r = alloc("r", local_memory ? machine.gpu[0] : machine.cpu, 4 * PAGE, flags);
        map(r, 4 * PAGE);
        line("the CPU can %s at %s", reach(r), at(r));
        if (!strcmp(reach(r), "read write"))
            cpu_writes(r + PAGE, 8, 79);
        gpu_writes(0, r + PAGE, 8, 78);
        gpu_sees(0, r + PAGE, 8, 79);
        unmap(r);
        drop("r", r, 4 * PAGE);
    }
    // Case C16: VRAM without host access is there for the GPU alone; its data survive.
    heading("VRAM without host access");
    char *a = alloc("a", machine.gpu[0], MIB, DEVICE);
    map(a, MIB);
    gpu_writes(0, a, MIB, 81);
    line("the CPU can %s at %s", reach(a), at(a));
    unmap(a);
    map(a, MIB);
    gpu_sees(0, a, MIB, 81);
    unmap(a);
    drop("a", a, MIB);
}

// Sparse, up to the size that the environment names in MiB (8 GiB by default).
void section_data_large(void) {
    const char *most = getenv("MEMORY_SYSTEM_MIB");
    uint64_t system = (most ? strtoull(most, NULL, 10) : 8192) * MIB;
    static const uint64_t sizes[] = {64 * MIB, 256 * MIB + PAGE, GIB, 4 * GIB - PAGE, 4 * GIB + 2 * MIB, 8 * GIB};
    static const uint32_t kinds[] = {FINE, PINNED, DEVICE, VISIBLE};
    for (unsigned number = 0; number < sizeof kinds / sizeof *kinds; number++) {
        uint32_t flags = kinds[number];
        heading(flag_names(flags));
        bool local = flags & COARSE;
        for (unsigned size = 0; size < sizeof sizes / sizeof *sizes; size++) {
            if (!local && sizes[size] > system)
                continue;
            char *a = alloc("a", flags & NON_PAGED ? machine.gpu[0] : machine.cpu, sizes[size], flags);
            if (!a)
                continue;
            map(a, sizes[size]);
            both_ways("a", a, sizes[size], flags & HOST_ACCESS, size);
            info(a + sizes[size] - 1);
            unmap(a);
            drop("a", a, sizes[size]);
        }
    }
}
