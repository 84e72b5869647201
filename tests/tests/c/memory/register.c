// Memory of the application's that the GPU is given.
#include "harness.h"

#include <errno.h>

static void shapes(void) {
    // Offset and size of what is registered within 64 KiB: aligned, and not at all (case C08).
    static const struct {
        uint64_t offset, size;
    } shapes[] = {{0, 4 * PAGE}, {3, 9001}, {8, 1}, {PAGE - 1, 2}, {PAGE - 24, PAGE}, {0, 1}, {64, 64}};
    heading("shapes");
    for (unsigned number = 0; number < sizeof shapes / sizeof *shapes; number++) {
        uint64_t offset = shapes[number].offset, size = shapes[number].size;
        char *own_memory = own(16 * PAGE);
        char *m = own_memory + 4 * PAGE + offset;
        HSAuint64 gpu = 0;
        name("m", m, size);
        memset(own_memory, 0xaa, 16 * PAGE);
        cpu_writes(m, size, 11);
        map(m, size);
        if (register_memory(m, size) == HSAKMT_STATUS_SUCCESS) {
            HSAKMT_STATUS status = hsaKmtMapMemoryToGPU(m, size, &gpu);
            line("map(m, %#lx) = %s, the offset in the page is kept: %s", (unsigned long)size, status_name(status),
                 gpu % PAGE == (uintptr_t)m % PAGE ? "yes" : "no");
            name("g", (void *)gpu, size);
            // The last byte before any other query (case C05).
            info(m + size - 1);
            info(m);
            info(m + size / 2);
            gpu_sees(0, (void *)gpu, size, 11);
            gpu_writes(0, (void *)gpu, size, 12);
            cpu_sees(m, size, 12);
            unsigned others = 0;
            for (uint64_t byte = 0; byte < 16 * PAGE; byte++)
                if ((byte < 4 * PAGE + offset || byte >= 4 * PAGE + offset + size) && (uint8_t)own_memory[byte] != 0xaa)
                    others++;
            line("bytes beside it that changed: %u", others);
            info((char *)gpu + size - 1);
            unmap(m);
            unmap(m);
            deregister(m);
            forget("g");
        }
        deregister(m);
        info(m);
        cpu_sees(m, size, 12);
        forget("m");
        disown(own_memory, 16 * PAGE);
    }
}

static void counts(void) {
    heading("registered several times");
    char *m = own(16 * PAGE);
    HSAuint64 gpu = 0, again = 0;
    name("m", m, 16 * PAGE);
    register_memory(m, 4 * PAGE);
    register_memory(m, 4 * PAGE);
    line("map = %s", status_name(hsaKmtMapMemoryToGPU(m, 4 * PAGE, &gpu)));
    line("map again = %s", status_name(hsaKmtMapMemoryToGPU(m, 4 * PAGE, &again)));
    line("the same address: %s", gpu == again ? "yes" : "no");
    info(m);
    // Counted: one of two.
    deregister(m);
    cpu_writes(m, 4 * PAGE, 3);
    gpu_sees(0, (void *)gpu, 4 * PAGE, 3);
    // Maps are counted too.
    unmap(m);
    gpu_sees(0, (void *)gpu, 4 * PAGE, 3);
    info(m);
    unmap(m);
    info(m);
    deregister(m);
    deregister(m);
    info(m);

    // Case C07: one address, two sizes.
    heading("one address in two sizes");
    HSAuint64 small = 0, large = 0;
    register_memory(m, PAGE);
    register_memory(m, 16 * PAGE);
    line("map small = %s", status_name(hsaKmtMapMemoryToGPU(m, PAGE, &small)));
    line("map large = %s", status_name(hsaKmtMapMemoryToGPU(m, 16 * PAGE, &large)));
    line("two addresses: %s", small != large ? "yes" : "no");
    name("small", (void *)small, PAGE);
    name("large", (void *)large, 16 * PAGE);
    cpu_writes(m, 16 * PAGE, 21);
    gpu_sees(0, (void *)small, PAGE, 21);
    gpu_sees(0, (void *)large, 16 * PAGE, 21);
    info((void *)small);
    info((void *)large);
    deregister(m);
    gpu_sees(0, (void *)large, 16 * PAGE, 21);
    unmap((void *)small);
    deregister((void *)small);
    // Only one is left.
    gpu_sees(0, (void *)large, 16 * PAGE, 21);
    info(m);
    unmap((void *)large);
    deregister((void *)large);
    deregister((void *)large);
    deregister(m);
    forget("small");
    forget("large");

    heading("overlapping");
    HSAuint64 first = 0, second = 0;
    register_memory(m, 8 * PAGE);
    register_memory(m + 4 * PAGE, 8 * PAGE);
    register_memory(m + 2 * PAGE, PAGE);
    line("map first = %s", status_name(hsaKmtMapMemoryToGPU(m, 8 * PAGE, &first)));
    line("map second = %s", status_name(hsaKmtMapMemoryToGPU(m + 4 * PAGE, 8 * PAGE, &second)));
    cpu_writes(m + 4 * PAGE, 4 * PAGE, 5);
    line("first shows it: %d, second shows it: %d", gpu_has(0, (char *)first + 4 * PAGE, 4 * PAGE, 5),
         gpu_has(0, (void *)second, 4 * PAGE, 5));
    line("the GPU writes through the first: %d", gpu_put(0, (char *)first + 4 * PAGE, 4 * PAGE, 6));
    cpu_sees(m + 4 * PAGE, 4 * PAGE, 6);
    line("second shows it: %d", gpu_has(0, (void *)second, 4 * PAGE, 6));
    deregister(m + 2 * PAGE);
    unmap(m);
    deregister(m);
    line("second still shows it: %d", gpu_has(0, (void *)second, 4 * PAGE, 6));
    unmap(m + 4 * PAGE);
    deregister(m + 4 * PAGE);
    cpu_sees(m + 4 * PAGE, 4 * PAGE, 6);
    forget("m");
    disown(m, 16 * PAGE);
}

static void nodes(void) {
    HSAuint32 last = machine.gpu[machine.gpus - 1], two[2] = {machine.gpu[0], last}, cpu = machine.cpu,
              far = machine.nodes;
    heading("registered for nodes");
    char *m = own(16 * PAGE);
    name("m", m, 16 * PAGE);
    register_nodes(m, 4 * PAGE, 0, NULL);
    deregister(m);
    register_nodes(m, 4 * PAGE, 1, NULL);
    register_nodes(m, 4 * PAGE, 1, &far);
    register_nodes(m, 4 * PAGE, 1, &cpu);
    deregister(m);
    register_nodes(m, 4 * PAGE, 1, &last);
    info(m);
    // Not for other nodes.
    register_nodes(m, 4 * PAGE, 2, two);
    register_memory(m, 4 * PAGE);
    register_nodes(m, 4 * PAGE, 1, &last);
    HSAuint64 gpu = 0;
    cpu_writes(m, 4 * PAGE, 9);
    line("map = %s", status_name(hsaKmtMapMemoryToGPU(m, 4 * PAGE, &gpu)));
    info(m);
    for (unsigned number = 0; number < machine.gpus; number++)
        line("gpu %u reads it: %d", number, gpu_has(number, (void *)gpu, 4 * PAGE, 9));
    unmap(m);
    // The native library counts those that it refused, too.
    name("counted", m, 16 * PAGE);
    for (unsigned round = 0; round < 5; round++)
        deregister(m);
    forget("counted");
    // The nodes of a map are those of the registration.
    register_nodes(m, 4 * PAGE, 2, two);
    HsaMemMapFlags flags;
    flags.Value = 0;
    line("map for one = %s",
         status_name(hsaKmtMapMemoryToGPUNodes(m, 4 * PAGE, &gpu, flags, 1, &machine.gpu[0])));
    info(m);
    for (unsigned number = 0; number < machine.gpus; number++)
        line("gpu %u reads it: %d", number, gpu_has(number, (void *)gpu, 4 * PAGE, 9));
    unmap(m);
    info(m);
    deregister(m);
    deregister(m);

    heading("registered with flags");
    static const uint32_t flags_of[] = {0,
                                        HOST_ACCESS,
                                        HOST_ACCESS | COARSE,
                                        HOST_ACCESS | NON_PAGED,
                                        HOST_ACCESS | EXT_COHERENT,
                                        HOST_ACCESS | EXT_COHERENT | COARSE,
                                        HOST_ACCESS | READ_ONLY,
                                        HOST_ACCESS | UNCACHED};
    for (unsigned number = 0; number < sizeof flags_of / sizeof *flags_of; number++)
        if (register_flags(m, 4 * PAGE, flags_of[number]) == HSAKMT_STATUS_SUCCESS) {
            info(m);
            deregister(m);
        }
    forget("m");
    disown(m, 16 * PAGE);
}

static void wrong(void) {
    heading("what is refused");
    register_memory(NULL, PAGE);
    deregister(NULL);
    deregister((void *)0x1234000);
    int local = 0;
    name("local", &local, sizeof local);
    deregister(&local);
    forget("local");
    char *m = own(4 * PAGE);
    name("m", m, 4 * PAGE);
    register_memory(m, 0);
    deregister(m);
    register_memory(m, ~0ull);
    name("huge", m, 4 * PAGE);
    register_memory(m, 1ull << 46);
    forget("huge");
    forget("m");
    disown(m, 4 * PAGE);
    // Nothing is there.
    name("m", m, 4 * PAGE);
    register_memory(m, 4 * PAGE);
    deregister(m);
    forget("m");
    // Case C11: what is the library's own.
    static const uint32_t kinds[] = {FINE, PINNED, DEVICE, VISIBLE, DEVICE | ONLY_ADDRESS, DEVICE | NO_ADDRESS};
    for (unsigned kind = 0; kind < sizeof kinds / sizeof *kinds; kind++) {
        HSAuint32 node = kinds[kind] & NON_PAGED ? machine.gpu[0] : machine.cpu;
        char *a = alloc("a", node, 4 * PAGE, kinds[kind]);
        register_memory(a, 4 * PAGE);
        register_nodes(a, 4 * PAGE, 1, &machine.gpu[0]);
        register_flags(a, 4 * PAGE, HOST_ACCESS);
        deregister(a);
        info(a);
        drop("a", a, 4 * PAGE);
    }
    // Freed as if it had been allocated.
    m = own(4 * PAGE);
    name("m", m, 4 * PAGE);
    register_memory(m, 4 * PAGE);
    release(m, 4 * PAGE);
    info(m);
    deregister(m);
    user_data(m, m);
    register_memory(m, 4 * PAGE);
    user_data(m, m + 1);
    info(m + 5);
    deregister(m);
    forget("m");
    disown(m, 4 * PAGE);
}

void section_register(void) {
    shapes();
    counts();
    nodes();
    wrong();
}

// Case C10: more than there is VRAM. Only the ends of each 2 MiB are touched.
static void beyond_vram(void) {
    heading("more than VRAM");
    const uint64_t size = 512 * MIB;
    char *m = own(size);
    name("m", m, size);
    HSAuint64 gpu = 0;
    register_memory(m, size);
    line("map = %s", status_name(hsaKmtMapMemoryToGPU(m, size, &gpu)));
    unsigned wrong_bytes = 0;
    for (uint64_t at = 0; at < size; at += 2 * MIB) {
        uint32_t seed = (uint32_t)(at / MIB);
        cpu_writes(m + at, 8, seed);
        wrong_bytes += !gpu_has(0, (char *)gpu + at, 8, seed);
    }
    line("pieces that the GPU does not see: %u", wrong_bytes);
    unmap(m);
    deregister(m);
    forget("m");
    disown(m, size);
}

// Case C03: pages are replaced under a registration.
static void replaced(void) {
    heading("pages replaced under a registration");
    char *m = own(16 * PAGE);
    HSAuint64 gpu = 0;
    name("m", m, 16 * PAGE);
    register_memory(m, 16 * PAGE);
    line("map = %s", status_name(hsaKmtMapMemoryToGPU(m, 16 * PAGE, &gpu)));
    cpu_writes(m, 16 * PAGE, 31);
    line("the GPU sees it: %d", gpu_has(0, (void *)gpu, 16 * PAGE, 31));
    int answer = madvise(m + 4 * PAGE, 4 * PAGE, MADV_DONTNEED);
    line("madvise(DONTNEED) = %s", answer ? strerror(errno) : "done");
    cpu_writes(m + 4 * PAGE, 4 * PAGE, 32);
    line("the GPU sees the new pages: %d", gpu_has(0, (char *)gpu + 4 * PAGE, 4 * PAGE, 32));
    line("and the old ones: %d", gpu_has(0, (void *)gpu, 4 * PAGE, 31));
    unmap(m);
    deregister(m);
    cpu_sees(m + 4 * PAGE, 4 * PAGE, 32);
    forget("m");
    disown(m, 16 * PAGE);
}

void section_replaced(void) {
    replaced();
}

void section_beyond_vram(void) {
    beyond_vram();
}

// By default, without the opt-in.
void section_register_default(void) {
    heading("registration by default");
    char *m = own(4 * PAGE);
    name("m", m, 4 * PAGE);
    cpu_writes(m, 4 * PAGE, 1);
    register_memory(m, 4 * PAGE);
    register_nodes(m, 4 * PAGE, 1, &machine.gpu[0]);
    register_flags(m, 4 * PAGE, HOST_ACCESS);
    map(m, 4 * PAGE);
    info(m);
    deregister(m);
    cpu_sees(m, 4 * PAGE, 1);
    forget("m");
    disown(m, 4 * PAGE);
}
