// Memory that is plugged into the machine and out of it while buffers are live (case C70). The harness does it when it is
// asked to, and answers how much the next buffers take in MiB.
#include "harness.h"

#define PIECE (32 * MIB)

static char *pieces[256];
static unsigned count;

static unsigned seen(void) {
    unsigned right = 0;
    for (unsigned number = 0; number < count; number++) {
        char *piece = pieces[number];
        bool good = true;
        for (uint64_t at = 0; at < PIECE; at += 4 * MIB)
            good = good && gpu_has(0, piece + at, 32, number) && cpu_has(piece + at, 32, number);
        good = good && gpu_has(0, piece + PIECE - 32, 32, number);
        right += good;
    }
    return right;
}

static void take(uint64_t size) {
    while (count < size / PIECE && count < sizeof pieces / sizeof *pieces) {
        HsaMemFlags flags;
        flags.Value = FINE;
        void *memory = NULL;
        HSAKMT_STATUS status = hsaKmtAllocMemory(machine.cpu, PIECE, flags, &memory);
        if (status == HSAKMT_STATUS_SUCCESS)
            status = hsaKmtMapMemoryToGPU(memory, PIECE, NULL);
        if (status != HSAKMT_STATUS_SUCCESS) {
            line("piece %u: %s", count, status_name(status));
            return;
        }
        for (uint64_t at = 0; at < PIECE; at += 4 * MIB)
            cpu_writes((char *)memory + at, 32, count);
        cpu_writes((char *)memory + PIECE - 32, 32, count);
        pieces[count++] = memory;
    }
}

void section_hotplug(void) {
    take(2 * PIECE);
    line("before: %u of %u pieces right", seen(), count);
    uint64_t size = wait_for("plugged") * MIB;
    line("plugged in: %u of %u pieces right", seen(), count);
    take(size);
    line("all asked for: %s", count >= size / PIECE ? "yes" : "no");
    line("with new memory: %s", seen() == count ? "all right" : "some wrong");
    wait_for("unplug");
    line("after the machine was asked for it back: %s", seen() == count ? "all right" : "some wrong");
    // The GPU writes, too.
    unsigned wrong = 0;
    for (unsigned number = 0; number < count; number++)
        wrong += !gpu_put(0, pieces[number] + MIB, 64, 9) || !cpu_has(pieces[number] + MIB, 64, 9);
    line("pieces that the GPU does not reach: %u", wrong);
    while (count > 2) {
        if (hsaKmtUnmapMemoryToGPU(pieces[--count]) != HSAKMT_STATUS_SUCCESS)
            give_up("unmap");
        quiet_free(pieces[count], PIECE);
    }
    wait_for("unplug-again");
    line("at the end: %u of %u pieces right", seen(), count);
    take(4 * PIECE);
    line("anew: %u of %u pieces right", seen(), count);
    while (count) {
        if (hsaKmtUnmapMemoryToGPU(pieces[--count]) != HSAKMT_STATUS_SUCCESS)
            give_up("unmap");
        quiet_free(pieces[count], PIECE);
    }
}
