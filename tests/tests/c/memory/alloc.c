// Allocation and release: kinds, sizes, alignments, places, and what must be refused.
#include "conform.h"

// Every kind on every node, freed again.
static void kinds(void) {
    static const uint32_t kinds[] = {
        0,
        FINE,
        HOST_ACCESS | COARSE,
        HOST_ACCESS | UNCACHED,
        HOST_ACCESS | EXT_COHERENT,
        HOST_ACCESS | EXECUTE,
        HOST_ACCESS | READ_ONLY,
        HOST_ACCESS | NO_NUMA,
        HOST_ACCESS | NO_SUBSTITUTE,
        HOST_ACCESS | AQL,
        HOST_ACCESS | EXECUTE | AQL,
        NON_PAGED,
        PINNED,
        PINNED | COARSE,
        PINNED | UNCACHED,
        PINNED | EXECUTE,
        PINNED | AQL,
        PINNED | EXT_COHERENT,
        DEVICE,
        DEVICE | READ_ONLY,
        DEVICE | EXECUTE,
        DEVICE | NO_SUBSTITUTE,
        VISIBLE,
        VISIBLE | EXECUTE,
        DEVICE | CONTIGUOUS,
        PINNED | GTT,
        FINE | GTT,
        COARSE | UNCACHED | HOST_ACCESS,
        COARSE | EXT_COHERENT | HOST_ACCESS,
        EXT_COHERENT | UNCACHED | HOST_ACCESS,
        GDS | NON_PAGED,
    };
    heading("kinds of memory");
    for (HSAuint32 node = 0; node < machine.nodes; node++)
        for (unsigned kind = 0; kind < sizeof kinds / sizeof *kinds; kind++) {
            void *memory = alloc("a", node, 4 * PAGE, kinds[kind]);
            if (!memory)
                continue;
            info(memory);
            line("the CPU can %s at %s", reach(memory), at(memory));
            line("the CPU can %s at %s", reach((char *)memory + 4 * PAGE - 1), at((char *)memory + 4 * PAGE - 1));
            drop("a", memory, 4 * PAGE);
        }
}

static void sizes(void) {
    static const uint64_t sizes[] = {0, 1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 64 * KIB, MIB, 2 * MIB - PAGE,
                                     2 * MIB, 2 * MIB + PAGE, 64 * MIB};
    // More than there is of anything, and sums that wrap around.
    static const uint64_t too_large[] = {1ull << 46, 1ull << 47, 1ull << 63, ~0ull & ~(PAGE - 1)};
    static const uint32_t kinds[] = {FINE, PINNED, DEVICE, VISIBLE};
    heading("sizes");
    for (unsigned kind = 0; kind < sizeof kinds / sizeof *kinds; kind++) {
        HSAuint32 node = kinds[kind] & NON_PAGED ? machine.gpu[0] : machine.cpu;
        for (unsigned number = 0; number < sizeof sizes / sizeof *sizes; number++) {
            void *memory = alloc("a", node, sizes[number], kinds[kind]);
            if (memory)
                drop("a", memory, sizes[number]);
        }
        for (unsigned number = 0; number < sizeof too_large / sizeof *too_large; number++) {
            void *memory = alloc("a", node, too_large[number], kinds[kind]);
            if (memory)
                drop("a", memory, too_large[number]);
        }
    }
    // The page size of the flags is the granule.
    heading("page sizes");
    for (unsigned kind = 0; kind < sizeof kinds / sizeof *kinds; kind++) {
        HSAuint32 node = kinds[kind] & NON_PAGED ? machine.gpu[0] : machine.cpu;
        static const uint64_t each[] = {PAGE, 64 * KIB, 2 * MIB, 2 * MIB + PAGE};
        for (unsigned number = 0; number < 4; number++) {
            void *memory = alloc("a", node, each[number], kinds[kind] | PAGE_64K);
            if (memory)
                drop("a", memory, each[number]);
            memory = alloc("a", node, each[number], kinds[kind] | PAGE_2M);
            if (memory)
                drop("a", memory, each[number]);
        }
    }
}

static void alignments(void) {
    static const uint64_t aligns[] = {1, 8, PAGE - 1, PAGE, 2 * PAGE, 3 * PAGE, 64 * KIB, 2 * MIB, 64 * MIB, GIB,
                                      1ull << 40, 1ull << 63};
    static const uint32_t kinds[] = {FINE, HOST_ACCESS | AQL, PINNED, DEVICE, VISIBLE, SCRATCH, DEVICE | ONLY_ADDRESS,
                                     DEVICE | NO_ADDRESS};
    heading("alignments");
    for (unsigned kind = 0; kind < sizeof kinds / sizeof *kinds; kind++) {
        HSAuint32 node = kinds[kind] & (NON_PAGED | SCRATCH) ? machine.gpu[0] : machine.cpu;
        for (unsigned number = 0; number < sizeof aligns / sizeof *aligns; number++) {
            // The native library's sum for a handle wraps around, and it loses the buffer.
            if (kinds[kind] & NO_ADDRESS && aligns[number] > 1ull << 62)
                continue;
            void *memory = alloc_align("a", node, 3 * PAGE, aligns[number], kinds[kind]);
            if (memory)
                drop("a", memory, 3 * PAGE);
        }
    }
    // The alignment must not be less than the page size of the flags.
    void *memory = alloc_align("a", machine.gpu[0], 2 * MIB, 64 * KIB, DEVICE | PAGE_2M);
    if (memory)
        drop("a", memory, 2 * MIB);
}

static void wrong(void) {
    HsaMemFlags flags;
    heading("what is refused");
    flags.Value = FINE;
    line("alloc into NULL = %s", status_name(hsaKmtAllocMemory(machine.cpu, PAGE, flags, NULL)));
    flags.Value = DEVICE;
    line("alloc of VRAM into NULL = %s", status_name(hsaKmtAllocMemory(machine.gpu[0], PAGE, flags, NULL)));
    alloc("a", machine.nodes, PAGE, FINE);
    alloc("a", machine.nodes, PAGE, DEVICE);
    alloc("a", ~0u, PAGE, FINE);
    // VRAM of a node without a GPU is host memory.
    void *memory = alloc("a", machine.cpu, PAGE, DEVICE);
    if (memory)
        drop("a", memory, PAGE);
    memory = alloc("a", machine.cpu, PAGE, SCRATCH);
    if (memory)
        drop("a", memory, PAGE);

    heading("free");
    line("free(NULL) = %s", status_name(hsaKmtFreeMemory(NULL, PAGE)));
    memory = alloc("a", machine.cpu, 2 * PAGE, FINE);
    release((char *)memory + 1, 2 * PAGE);
    release((char *)memory + PAGE, PAGE);
    // The size is not looked at.
    release(memory, 1);
    release(memory, 2 * PAGE);
    forget("a");
    memory = alloc("a", machine.gpu[0], 2 * PAGE, DEVICE);
    release((char *)memory + PAGE, PAGE);
    release(memory, 0);
    release(memory, 2 * PAGE);
    forget("a");
    int local;
    name("local", &local, sizeof local);
    release(&local, sizeof local);
    forget("local");
    release((void *)0x1234000, PAGE);
    release((void *)~0xfffull, PAGE);
    memory = own(PAGE);
    name("own", memory, PAGE);
    release(memory, PAGE);
    line("the CPU can %s at %s", reach(memory), at(memory));
    forget("own");
    disown(memory, PAGE);

    heading("free of what is mapped");
    memory = alloc("a", machine.cpu, 2 * PAGE, FINE);
    map(memory, 2 * PAGE);
    release(memory, 2 * PAGE);
    unmap(memory);
    drop("a", memory, 2 * PAGE);
    memory = alloc("a", machine.gpu[0], 2 * PAGE, VISIBLE);
    map(memory, 2 * PAGE);
    release(memory, 2 * PAGE);
    memset(memory, 1, 2 * PAGE);
    unmap(memory);
    drop("a", memory, 2 * PAGE);
}

// Buffers beside each other neither overlap nor touch: a page at least stays free behind each (case C12).
static void neighbours(void) {
    static const uint64_t sizes[] = {1200128, 1048576 + PAGE, 2097152 - PAGE, PAGE};
    static const uint32_t kinds[] = {FINE, DEVICE, VISIBLE, PINNED};
    heading("neighbours");
    for (unsigned kind = 0; kind < 4; kind++) {
        uintptr_t base[16];
        uint64_t size[16];
        HSAuint32 node = kinds[kind] & NON_PAGED ? machine.gpu[0] : machine.cpu;
        for (unsigned number = 0; number < 16; number++) {
            size[number] = sizes[number % 4] & ~(PAGE - 1);
            base[number] = (uintptr_t)quiet_alloc(node, size[number], kinds[kind]);
        }
        unsigned touching = 0;
        for (unsigned one = 0; one < 16; one++)
            for (unsigned other = 0; other < 16; other++)
                if (one != other && base[one] <= base[other] && base[other] < base[one] + size[one] + PAGE)
                    touching++;
        line("%s: of 16 buffers %u overlap or touch another", flag_names(kinds[kind]), touching);
        for (unsigned number = 0; number < 16; number++)
            quiet_free((void *)base[number], size[number]);
    }
}

static HSAuint64 available(HSAuint32 node) {
    HSAuint64 bytes = 0;
#ifndef OLD_THUNK
    if (hsaKmtAvailableMemory(node, &bytes) != HSAKMT_STATUS_SUCCESS)
        give_up("available memory of node %u", node);
#else
    (void)node;
#endif
    return bytes;
}

// How much less is available than before. In a guest the kernel gives memory back in the background, so what is expected may
// take a moment.
static unsigned long less(HSAuint64 before, HSAuint64 expected) {
    HSAuint64 taken = 0;
    for (unsigned wait = 0; wait < 100; wait++) {
        taken = before - available(machine.gpu[0]);
        if (taken == expected)
            break;
        usleep(50000);
    }
    return (unsigned long)taken;
}

// Case C13, within one process.
static void amount(void) {
    heading("available memory");
#ifndef OLD_THUNK
    HSAuint64 bytes = 0;
    for (HSAuint32 node = 0; node < machine.nodes + 1; node++) {
        HSAKMT_STATUS status = hsaKmtAvailableMemory(node, &bytes);
        line("available(node %u) = %s", node, status_name(status));
    }
#endif
    HSAuint64 before = available(machine.gpu[0]);
    void *memory = quiet_alloc(machine.gpu[0], 64 * MIB, DEVICE);
    line("64 MiB of VRAM take %#lx", less(before, 64 * MIB));
    void *more = quiet_alloc(machine.gpu[0], 64 * MIB, VISIBLE);
    line("64 MiB more that the CPU sees: %#lx", less(before, 128 * MIB));
    quiet_free(memory, 64 * MIB);
    line("one freed: %#lx", less(before, 64 * MIB));
    quiet_free(more, 64 * MIB);
    line("both freed: %#lx", less(before, 0));
    memory = quiet_alloc(machine.cpu, 8 * MIB, FINE);
    line("8 MiB of system memory: %#lx", less(before, 0));
    quiet_free(memory, 8 * MIB);
    for (unsigned round = 0; round < 50; round++)
        quiet_free(quiet_alloc(machine.gpu[0], 16 * MIB, DEVICE), 16 * MIB);
    line("after 50 rounds: %#lx", less(before, 0));

    // All of it, in pieces; then none is left and what is held stays usable.
    heading("exhaustion");
    static void *pieces[4096];
    unsigned count = 0;
    HSAKMT_STATUS status;
    for (;;) {
        HsaMemFlags flags;
        flags.Value = DEVICE;
        status = hsaKmtAllocMemory(machine.gpu[0], 64 * MIB, flags, &pieces[count]);
        if (status != HSAKMT_STATUS_SUCCESS || ++count == 4096)
            break;
    }
    line("64 MiB pieces until %s: %s than 64 MiB is left", status_name(status),
         available(machine.gpu[0]) < 64 * MIB ? "less" : "more");
    alloc("a", machine.gpu[0], 64 * MIB, VISIBLE);
    if (count) {
        map(pieces[0], 64 * MIB);
        unmap(pieces[0]);
        quiet_free(pieces[--count], 64 * MIB);
    }
    memory = alloc("a", machine.gpu[0], 64 * MIB, VISIBLE);
    if (memory) {
        memset(memory, 3, 64 * MIB);
        drop("a", memory, 64 * MIB);
    }
    while (count)
        quiet_free(pieces[--count], 64 * MIB);
    line("all freed: %#lx", less(before, 0));
}

void section_alloc(void) {
    kinds();
    sizes();
    alignments();
    wrong();
    neighbours();
    amount();
}

// Memory at a place that the caller chooses (case C14: what the caller has there is never replaced).
void section_fixed(void) {
    static const uint32_t kinds[] = {FINE, HOST_ACCESS | COARSE, PINNED, DEVICE, VISIBLE, DEVICE | ONLY_ADDRESS};
    heading("fixed addresses");
    for (unsigned kind = 0; kind < sizeof kinds / sizeof *kinds; kind++) {
        uint32_t flags = kinds[kind] | FIXED;
        HSAuint32 node = flags & NON_PAGED ? machine.gpu[0] : machine.cpu;
        char *range = own(64 * PAGE);
        name("range", range, 64 * PAGE);
        memset(range, 0xc5, 64 * PAGE);

        alloc_at("a", node, 4 * PAGE, 0, flags, NULL);
        // Taken by the caller.
        alloc_at("a", node, 4 * PAGE, 0, flags, range);
        disown(range + 16 * PAGE, 16 * PAGE);
        // Partly taken, on either side.
        alloc_at("a", node, 4 * PAGE, 0, flags, range + 14 * PAGE);
        alloc_at("a", node, 4 * PAGE, 0, flags, range + 30 * PAGE);
        alloc_at("a", node, 4 * PAGE, 0, flags, range + 16 * PAGE + 1);
        void *a = alloc_at("a", node, 4 * PAGE, 0, flags, range + 16 * PAGE);
        // Right behind, without a guard page.
        void *b = alloc_at("b", node, 4 * PAGE, 0, flags, range + 20 * PAGE);
        // Taken by the library.
        alloc_at("c", node, 4 * PAGE, 0, flags, range + 17 * PAGE);
        alloc_at("c", node, PAGE, 0, flags, range + 23 * PAGE);
        void *c = alloc_at("c", node, 2 * MIB, 2 * MIB, flags, range + 24 * PAGE);
        if (c)
            drop("c", c, 2 * MIB);
        if (a) {
            info(a);
            map(a, 4 * PAGE);
            info((char *)a + 4 * PAGE - 1);
            unmap(a);
            drop("a", a, 4 * PAGE);
        }
        if (b) {
            info(b);
            drop("b", b, 4 * PAGE);
        }
        // The place is free again.
        a = alloc_at("a", node, 4 * PAGE, 0, flags, range + 16 * PAGE);
        if (a)
            drop("a", a, 4 * PAGE);
        unsigned changed = 0;
        for (unsigned page = 0; page < 64; page++)
            for (unsigned byte = 0; byte < PAGE && (page < 16 || page >= 32); byte += 64)
                changed += (uint8_t)range[page * PAGE + byte] != 0xc5;
        line("bytes of the caller's that changed: %u", changed);
        disown(range, 16 * PAGE);
        disown(range + 32 * PAGE, 32 * PAGE);
        forget("range");
    }
    // Where no memory of the GPU can be.
    heading("addresses that cannot be");
    for (unsigned kind = 0; kind < sizeof kinds / sizeof *kinds; kind++) {
        static const uint64_t addresses[] = {0x800000000000ull, 0xffff800000000000ull, ~0xfffull};
        HSAuint32 node = kinds[kind] & NON_PAGED ? machine.gpu[0] : machine.cpu;
        for (unsigned number = 0; number < 3; number++) {
            void *got = alloc_at("a", node, PAGE, 0, kinds[kind] | FIXED, (void *)addresses[number]);
            if (got)
                drop("a", got, PAGE);
        }
    }
}
