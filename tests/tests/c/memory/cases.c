// Situations from the field that need no copy by the GPU.
#include "harness.h"

#include <pthread.h>
#include <stdatomic.h>

// Case C60: sizes that do not fit a larger granule; nothing of another buffer shows behind the end.
static void odd_sizes(void) {
    static const uint64_t sizes[] = {PAGE, 2 * PAGE, 135168, 2 * MIB - PAGE, 2 * MIB + PAGE};
    heading("sizes beside a larger granule");
    for (unsigned number = 0; number < sizeof sizes / sizeof *sizes; number++) {
        char *a = alloc("a", machine.gpu[0], sizes[number], VISIBLE);
        char *b = alloc("b", machine.gpu[0], sizes[number], VISIBLE);
        memset(b, 0xb0, sizes[number]);
        map(a, sizes[number]);
        cpu_writes(a + sizes[number] - 64, 64, number);
        gpu_sees(0, a + sizes[number] - 64, 64, number);
        line("behind the end: %s", gpu_faults(0, a + sizes[number]) ? "faults" : "there");
        unsigned changed = 0;
        for (uint64_t byte = 0; byte < sizes[number]; byte++)
            changed += (uint8_t)b[byte] != 0xb0;
        line("bytes of the neighbour that changed: %u", changed);
        unmap(a);
        drop("a", a, sizes[number]);
        drop("b", b, sizes[number]);
    }
}

static atomic_uint wrong;

struct side {
    char *memory;
    unsigned first;
};

static void *writer(void *argument) {
    struct side *side = argument;
    for (unsigned round = 0; round < 200; round++)
        for (unsigned slot = side->first; slot < 512; slot += 2) {
            volatile uint64_t *word = (volatile uint64_t *)(side->memory + slot * PAGE);
            *word = round * 1000 + slot;
            if (*word != round * 1000 + slot)
                wrong++;
        }
    return NULL;
}

// Case C61: the first access may be a write, may be to the last page; again after a new map; from two threads at once.
static void first_access(void) {
    heading("first accesses");
    char *a = alloc("a", machine.gpu[0], 2 * MIB, VISIBLE);
    a[2 * MIB - 1] = 0x77;
    map(a, 2 * MIB);
    gpu_writes(0, a, PAGE, 61);
    cpu_sees(a, PAGE, 61);
    line("the last byte: %#x", (uint8_t)a[2 * MIB - 1]);
    unsigned failed = 0;
    for (unsigned round = 0; round < 100; round++) {
        failed += hsaKmtUnmapMemoryToGPU(a) != HSAKMT_STATUS_SUCCESS;
        failed += hsaKmtMapMemoryToGPU(a, 2 * MIB, NULL) != HSAKMT_STATUS_SUCCESS;
        cpu_writes(a + PAGE, 32, round);
        failed += !gpu_has(0, a + PAGE, 32, round);
    }
    line("100 new maps: %u failed", failed);
    pthread_t threads[2];
    struct side sides[2] = {{a, 0}, {a, 1}};
    for (unsigned number = 0; number < 2; number++)
        if (pthread_create(&threads[number], NULL, writer, &sides[number]))
            give_up("pthread_create");
    for (unsigned number = 0; number < 2; number++)
        pthread_join(threads[number], NULL);
    line("two threads: %u words wrong", wrong);
    unmap(a);
    drop("a", a, 2 * MIB);
}

// Hundreds of small buffers that the CPU sees at once (case C62 with a window that is large enough).
static void many(void) {
    enum { COUNT = 2000 };
    static char *memory[COUNT];
    heading("many small buffers");
    unsigned failed = 0, bad = 0;
    for (unsigned number = 0; number < COUNT; number++) {
        HsaMemFlags flags;
        flags.Value = VISIBLE;
        void *got = NULL;
        if (hsaKmtAllocMemory(machine.gpu[0], PAGE * (1 + number % 7), flags, &got) != HSAKMT_STATUS_SUCCESS) {
            failed++;
            continue;
        }
        memory[number] = got;
        failed += hsaKmtMapMemoryToGPU(got, PAGE * (1 + number % 7), NULL) != HSAKMT_STATUS_SUCCESS;
        memset(got, (int)number, PAGE * (1 + number % 7));
    }
    for (unsigned number = 0; number < COUNT; number++) {
        if (!memory[number])
            continue;
        uint64_t size = PAGE * (1 + number % 7);
        for (uint64_t byte = 0; byte < size; byte += 509)
            bad += (uint8_t)memory[number][byte] != (uint8_t)number;
        if (number % 50 == 0) {
            cpu_writes(memory[number] + size - 16, 16, number);
            bad += !gpu_has(0, memory[number] + size - 16, 16, number);
        }
    }
    line("%u buffers: %u calls failed, %u bytes wrong", COUNT, failed, bad);
    // Every second one is freed and made anew, larger.
    for (unsigned number = 0; number < COUNT; number += 2)
        if (memory[number]) {
            failed += hsaKmtUnmapMemoryToGPU(memory[number]) != HSAKMT_STATUS_SUCCESS;
            failed += hsaKmtFreeMemory(memory[number], 0) != HSAKMT_STATUS_SUCCESS;
            memory[number] = quiet_alloc(machine.gpu[0], 16 * PAGE, VISIBLE);
            for (unsigned page = 0; page < 16; page++) {
                bad += memory[number][page * PAGE] != 0;
                memory[number][page * PAGE] = 1;
            }
        }
    for (unsigned number = 1; number < COUNT; number += 2)
        if (memory[number] && number % 50 != 0)
            bad += (uint8_t)memory[number][0] != (uint8_t)number;
    line("every second one made anew: %u calls failed, %u bytes wrong", failed, bad);
    for (unsigned number = 0; number < COUNT; number++)
        if (memory[number]) {
            hsaKmtUnmapMemoryToGPU(memory[number]);
            failed += hsaKmtFreeMemory(memory[number], 0) != HSAKMT_STATUS_SUCCESS;
        }
    line("all freed: %u calls failed", failed);
}

void section_cases(void) {
    odd_sizes();
    first_access();
    many();
}

// Case C62: a window into VRAM that is much smaller than VRAM. Exhausted, it refuses clearly, and what is freed can be had
// again, whatever its pieces were.
void section_window(void) {
    static char *memory[4096];
    unsigned most = 0;
    HSAKMT_STATUS status = HSAKMT_STATUS_SUCCESS;
    HsaMemFlags flags;
    heading("a small window");
    flags.Value = VISIBLE;
    for (unsigned round = 0; round < 20; round++) {
        unsigned count = 0;
        for (; count < 4096; count++) {
            void *got = NULL;
            status = hsaKmtAllocMemory(machine.gpu[0], MIB, flags, &got);
            if (status != HSAKMT_STATUS_SUCCESS)
                break;
            memory[count] = got;
            memset(memory[count], (int)count, PAGE);
        }
        if (round == 0) {
            most = count;
            line("1 MiB each until %s; at least 32: %s", status_name(status), count >= 32 ? "yes" : "no");
        }
        if (count != most)
            line("round %u: %u buffers, %u in the first", round, count, most);
        // Memory that the CPU does not see needs no window.
        void *unseen = NULL;
        HsaMemFlags device;
        device.Value = DEVICE;
        status = hsaKmtAllocMemory(machine.gpu[0], 16 * MIB, device, &unseen);
        if (round == 0)
            line("memory that needs no window = %s", status_name(status));
        if (status == HSAKMT_STATUS_SUCCESS)
            quiet_free(unseen, 16 * MIB);
        unsigned wrong_bytes = 0, again = 0;
        for (unsigned number = 0; number < count; number += 2)
            quiet_free(memory[number], MIB);
        for (unsigned number = 0; number < count; number += 2) {
            void *got = NULL;
            if (hsaKmtAllocMemory(machine.gpu[0], MIB, flags, &got) == HSAKMT_STATUS_SUCCESS)
                again++;
            memory[number] = got;
        }
        for (unsigned number = 1; number < count; number += 2)
            wrong_bytes += (uint8_t)memory[number][0] != (uint8_t)number;
        if (again != (count + 1) / 2 || wrong_bytes)
            line("round %u: %u of %u again, %u wrong", round, again, (count + 1) / 2, wrong_bytes);
        for (unsigned number = 0; number < count; number++)
            if (memory[number])
                quiet_free(memory[number], MIB);
        void *large = NULL;
        status = hsaKmtAllocMemory(machine.gpu[0], 32 * MIB, flags, &large);
        if (round == 0 || status != HSAKMT_STATUS_SUCCESS)
            line("one of 32 MiB = %s", status_name(status));
        if (status == HSAKMT_STATUS_SUCCESS)
            quiet_free(large, 32 * MIB);
    }
    line("20 rounds");
}

// Case C62: a window that nothing fits in. It is told in time, and what needs no window goes on.
void section_tiny_window(void) {
    static const uint32_t kinds[] = {VISIBLE, DEVICE, FINE};
    heading("a window of one page");
    for (unsigned kind = 0; kind < sizeof kinds / sizeof *kinds; kind++)
        for (uint64_t size = PAGE; size <= 2 * MIB; size *= 512) {
            HSAuint32 node = kinds[kind] & NON_PAGED ? machine.gpu[0] : machine.cpu;
            char *a = alloc("a", node, size, kinds[kind]);
            if (!a)
                continue;
            map(a, size);
            gpu_writes(0, a, size, 62);
            gpu_sees(0, a, size, 62);
            unmap(a);
            drop("a", a, size);
        }
}

static void canaries(const char *range, const char *when) {
    unsigned changed = 0;
    for (uint64_t byte = 0; byte < 16 * MIB; byte += 64)
        if (byte < 4 * MIB || byte >= 8 * MIB)
            changed += (uint8_t)range[byte] != 0xc5;
    line("%s, bytes of the caller's that changed: %u", when, changed);
}

// Case C14: a close leaves what the library has not made, and what comes after the next open does not replace it.
void section_reopen(void) {
    heading("a close and an open");
    char *range = own(16 * MIB), *hole = range + 4 * MIB;
    memset(range, 0xc5, 16 * MIB);
    disown(hole, 4 * MIB);
    for (unsigned round = 0; round < 3; round++) {
        name("range", range, 16 * MIB);
        char *a = alloc_at("a", machine.gpu[0], 2 * MIB, 0, VISIBLE | FIXED, hole);
        char *b = alloc_at("b", machine.cpu, MIB, 0, FINE | FIXED, hole + 2 * MIB);
        canaries(range, "allocated");
        if (a) {
            map(a, 2 * MIB);
            cpu_writes(a, 2 * MIB, 14 + round);
            gpu_sees(0, a, 2 * MIB, 14 + round);
            unmap(a);
            drop("a", a, 2 * MIB);
        }
        if (b)
            drop("b", b, MIB);
        end();
        canaries(range, "closed");
        begin();
        meet();
        canaries(range, "opened again");
        forget("range");
    }
    // Something is still there at the close. What becomes of its place is the library's to say; it is not the caller's.
    void *left = NULL;
    HsaMemFlags flags;
    flags.Value = VISIBLE | FIXED;
    left = hole;
    line("one that is left = %s", status_name(hsaKmtAllocMemory(machine.gpu[0], 2 * MIB, flags, &left)));
    end();
    canaries(range, "closed with memory");
    begin();
    meet();
    left = hole;
    HSAKMT_STATUS status = hsaKmtAllocMemory(machine.gpu[0], 2 * MIB, flags, &left);
    line("the same place again: %s", status == HSAKMT_STATUS_SUCCESS || status == HSAKMT_STATUS_NO_MEMORY
                                         ? "had or refused"
                                         : status_name(status));
    canaries(range, "and again");
    disown(range, 4 * MIB);
    disown(range + 8 * MIB, 8 * MIB);
}
