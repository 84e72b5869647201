// Maps of the GPU: which calls are refused, what pointers tell of them, and what the GPU then reaches.
#include "harness.h"

void section_map(void) {
    static const uint32_t kinds[] = {FINE, HOST_ACCESS | COARSE, HOST_ACCESS | AQL, PINNED, DEVICE, VISIBLE};
    heading("map and unmap");
    for (unsigned kind = 0; kind < sizeof kinds / sizeof *kinds; kind++) {
        HSAuint32 node = kinds[kind] & NON_PAGED ? machine.gpu[0] : machine.cpu;
        char *a = alloc("a", node, 4 * PAGE, kinds[kind]);
        // Never mapped.
        gpu_sees(0, a, 64, 0);
        unmap(a);
        map(a, 4 * PAGE);
        info(a);
        gpu_writes(0, a, 4 * PAGE, 7);
        gpu_sees(0, a, 4 * PAGE, 7);
        // Again, and in other sizes: the size is not looked at.
        map(a, 4 * PAGE);
        map(a, PAGE);
        map(a, 0);
        map(a, 64 * PAGE);
        info(a);
        // Not the beginning.
        map(a + PAGE, PAGE);
        map(a + 1, PAGE);
        unmap(a + PAGE);
        unmap(a + 4 * PAGE);
        // An address inside the first page is taken for the page.
        unmap(a + 1);
        info(a);
        gpu_sees(0, a, 64, 7);
        unmap(a);
        unmap(a);
        info(a);
        // The content is still there.
        map(a, 4 * PAGE);
        gpu_sees(0, a, 4 * PAGE, 7);
        unmap(a);
        drop("a", a, 4 * PAGE);
        unmap(a);
    }
    heading("maps that are refused");
    line("map(NULL) = %s", status_name(hsaKmtMapMemoryToGPU(NULL, PAGE, NULL)));
    line("unmap(NULL) = %s", status_name(hsaKmtUnmapMemoryToGPU(NULL)));
    char *a = quiet_alloc(machine.cpu, PAGE, FINE);
    name("a", a, PAGE);
    line("map without a place for the alternate address = %s", status_name(hsaKmtMapMemoryToGPU(a, PAGE, NULL)));
    unmap(a);
    drop("a", a, PAGE);
    map((void *)0x1234000, PAGE);
    unmap((void *)0x1234000);
    int local;
    name("local", &local, sizeof local);
    map(&local, sizeof local);
    unmap(&local);
    forget("local");
    // An address alone, and memory without one.
    void *only = alloc("only", machine.gpu[0], 4 * PAGE, DEVICE | ONLY_ADDRESS);
    map(only, 4 * PAGE);
    map_nodes(only, 4 * PAGE, 1, &machine.gpu[0]);
    unmap(only);
    info(only);
    drop("only", only, 4 * PAGE);
    void *without = alloc("without", machine.gpu[0], 4 * PAGE, DEVICE | NO_ADDRESS);
    map(without, 4 * PAGE);
    map_nodes(without, 4 * PAGE, 1, &machine.gpu[0]);
    unmap(without);
    info(without);
    drop("without", without, 4 * PAGE);

    // Case C15: map and unmap leave nothing behind.
    heading("1000 times mapped");
    a = quiet_alloc(machine.gpu[0], MIB, VISIBLE);
    name("a", a, MIB);
    memset(a, 0x3c, MIB);
    unsigned failed = 0;
    for (unsigned round = 0; round < 1000; round++) {
        failed += hsaKmtMapMemoryToGPU(a, MIB, NULL) != HSAKMT_STATUS_SUCCESS;
        failed += hsaKmtUnmapMemoryToGPU(a) != HSAKMT_STATUS_SUCCESS;
    }
    unsigned changed = 0;
    for (unsigned byte = 0; byte < MIB; byte++)
        changed += a[byte] != 0x3c;
    line("failed: %u, bytes that changed: %u", failed, changed);
    drop("a", a, MIB);
}

// Which node reaches what.
static void reached(const void *address, uint32_t seed) {
    for (unsigned gpu = 0; gpu < machine.gpus; gpu++)
        gpu_sees(gpu, address, 64, seed);
}

static void lists(HSAuint32 node, uint32_t kind) {
    HSAuint32 last = machine.gpu[machine.gpus - 1];
    HSAuint32 cpu = machine.cpu, far = machine.nodes, two[2] = {machine.gpu[0], last}, swapped[2] = {last, machine.gpu[0]};
    HSAuint32 with_cpu[2] = {machine.gpu[0], cpu}, twice[2] = {last, last};
    char *a = alloc("a", node, 4 * PAGE, kind);
    map_nodes(a, 4 * PAGE, 0, two);
    map_nodes(a, 4 * PAGE, 1, NULL);
    map_nodes(a, 4 * PAGE, 0, NULL);
    map_nodes(a, 4 * PAGE, 1, &cpu);
    map_nodes(a, 4 * PAGE, 2, with_cpu);
    map_nodes(a, 4 * PAGE, 1, &far);
    info(a);
    map_nodes(a, 4 * PAGE, 1, &machine.gpu[0]);
    info(a);
    gpu_writes(0, a, 4 * PAGE, 5);
    reached(a, 5);
    // A list takes the place of the list before (case C57).
    map_nodes(a, 4 * PAGE, 1, &last);
    info(a);
    reached(a, 5);
    map_nodes(a, 4 * PAGE, 2, two);
    info(a);
    reached(a, 5);
    map_nodes(a, 4 * PAGE, 2, swapped);
    info(a);
    map_nodes(a, 4 * PAGE, 1, &machine.gpu[0]);
    info(a);
    reached(a, 5);
    map_nodes(a, 4 * PAGE, 2, twice);
    info(a);
    map_nodes(a + PAGE, PAGE, 1, &last);
    map_nodes(a + 1, PAGE, 1, &last);
    unmap(a);
    info(a);
    reached(a, 5);
    map(a, 4 * PAGE);
    info(a);
    reached(a, 5);
    // From all to one.
    map_nodes(a, 4 * PAGE, 1, &last);
    info(a);
    reached(a, 5);
    unmap(a);
    drop("a", a, 4 * PAGE);
    map_nodes(a, 4 * PAGE, 1, &last);
}

void section_nodes(void) {
    static const uint32_t kinds[] = {FINE, PINNED, DEVICE, VISIBLE};
    for (unsigned kind = 0; kind < sizeof kinds / sizeof *kinds; kind++) {
        heading(flag_names(kinds[kind]));
        if (kinds[kind] & NON_PAGED) {
            for (unsigned gpu = 0; gpu < machine.gpus; gpu++)
                lists(machine.gpu[gpu], kinds[kind]);
        } else {
            lists(machine.cpu, kinds[kind]);
        }
    }
    HsaMemMapFlags flags;
    flags.Value = 0;
    line("map to nodes of NULL = %s",
         status_name(hsaKmtMapMemoryToGPUNodes(NULL, PAGE, NULL, flags, 1, &machine.gpu[0])));
    int local;
    name("local", &local, sizeof local);
    map_nodes(&local, sizeof local, 1, &machine.gpu[0]);
    forget("local");
}
