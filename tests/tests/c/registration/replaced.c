// What the application does to addresses while they are registered.
#include "parts.h"

// Whether memory of the application is adopted at all: natively it is not.
static bool adopting(void) {
    const char *how = getenv("VIRTIO_KFD_REGISTER");
    return how && !strncmp(how, "adopt", 5);
}

static void is_adopted(const char *what, char *address) {
    if (is_private(address) == adopting())
        fail(what, is_private(address), !adopting());
}

// The same range registered again, when other memory lies there.
static void registered_again(void) {
    char *memory = own(4 * PAGE);
    memset(memory, 1, 4 * PAGE);
    ok("register", hsaKmtRegisterMemory(memory, 4 * PAGE));
    munmap(memory, 4 * PAGE);
    mmap(memory, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    memset(memory, 2, 4 * PAGE);
    given(memory, 4 * PAGE);
    is_adopted("memory that was registered before", memory);
    // Replaced while GPUs have it mapped: natively they get the new pages. Where they cannot, it is no success.
    munmap(memory, 4 * PAGE);
    mmap(memory, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    memset(memory, 3, 4 * PAGE);
    HSAKMT_STATUS status = hsaKmtRegisterMemory(memory, 4 * PAGE), expected = HSAKMT_STATUS_SUCCESS;
    if (adopting())
        expected = HSAKMT_STATUS_ERROR;
    if (status != expected)
        fail("register what is mapped", status, expected);
    ok("unmap", hsaKmtUnmapMemoryToGPU(memory));
    given(memory, 4 * PAGE);
    is_adopted("memory that was mapped before", memory);
    ok("unmap", hsaKmtUnmapMemoryToGPU(memory));
    // Every registration that succeeded is counted.
    for (int count = adopting() ? 3 : 4; count > 0; count--)
        ok("deregister", hsaKmtDeregisterMemory(memory));
    HSAKMT_STATUS last = hsaKmtDeregisterMemory(memory);
    if (last == HSAKMT_STATUS_SUCCESS)
        fail("deregister once more", last, HSAKMT_STATUS_MEMORY_NOT_REGISTERED);
    if (!is_private(memory))
        fail("private memory in the end", 0, 1);
    for (size_t at = 0; at < 4 * PAGE; at++)
        if (memory[at] != 3)
            fail("a byte", memory[at], 3);
    munmap(memory, 4 * PAGE);
}

// A registration of memory that is gone ends while other memory at its address is registered. In a guest that memory's blob
// lies at the same place of the device's file.
static void ended_late(void) {
    char *memory = own(4 * PAGE);
    memset(memory, 1, 4 * PAGE);
    given(memory, 4 * PAGE);
    munmap(memory, 4 * PAGE);
    mmap(memory, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    memset(memory, 2, 4 * PAGE);
    given(memory + 8, 4 * PAGE - 8);
    is_adopted("the new memory", memory);
    taken(memory);
    is_adopted("the new memory, when the old registration has ended", memory);
    memory[9] = 3;
    taken(memory + 8);
    if (!is_private(memory))
        fail("private memory in the end", 0, 1);
    for (size_t at = 0; at < 4 * PAGE; at++)
        if (memory[at] != (at == 9 ? 3 : 2))
            fail("a byte", memory[at], at == 9 ? 3 : 2);
    munmap(memory, 4 * PAGE);
}

// What the application does to its addresses while they are registered (case C03).
void replaced(void) {
    char *memory = own(16 * PAGE);
    memset(memory, 1, 16 * PAGE);
    given(memory, 16 * PAGE);
    // Gone, and other memory there.
    munmap(memory, 16 * PAGE);
    char *again = mmap(memory, 16 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    memset(again, 2, 16 * PAGE);
    taken(memory);
    for (size_t at = 0; at < 16 * PAGE; at++)
        if (again[at] != 2)
            fail("a byte of the new memory", again[at], 2);
    // In part.
    given(memory, 16 * PAGE);
    mmap(memory + 4 * PAGE, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    memset(memory + 4 * PAGE, 3, 4 * PAGE);
    munmap(memory + 12 * PAGE, PAGE);
    taken(memory);
    for (size_t at = 0; at < 12 * PAGE; at++)
        if (memory[at] != (at / (4 * PAGE) == 1 ? 3 : 2))
            fail("a byte", memory[at], at / (4 * PAGE) == 1 ? 3 : 2);
    munmap(memory, 16 * PAGE);
    // Moved: it stays what it is, whatever becomes of the registration.
    memory = own(16 * PAGE);
    memset(memory, 5, 16 * PAGE);
    given(memory, 16 * PAGE);
    char *place = own(16 * PAGE);
    char *moved = mremap(memory, 16 * PAGE, 16 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, place);
    if (moved != place)
        fail("mremap", errno, 0);
    taken(memory);
    char *other = own(16 * PAGE);
    memset(other, 6, 16 * PAGE);
    given_and_taken(other, 16 * PAGE);
    for (size_t at = 0; at < 16 * PAGE; at++)
        if (moved[at] != 5)
            fail("a byte that was moved", moved[at], 5);
    munmap(moved, 16 * PAGE);
    munmap(other, 16 * PAGE);
    // Unmapped, and then the library's own memory lies there.
    memory = own(4 * PAGE);
    memset(memory, 7, 4 * PAGE);
    given(memory, 4 * PAGE);
    munmap(memory, 4 * PAGE);
    HsaMemFlags flags;
    memset(&flags, 0, sizeof flags);
    flags.ui32.HostAccess = 1;
    void *allocated[64];
    for (unsigned number = 0; number < 64; number++) {
        ok("allocate", hsaKmtAllocMemory(0, 4 * PAGE, flags, &allocated[number]));
        memset(allocated[number], number + 1, 4 * PAGE);
    }
    hsaKmtUnmapMemoryToGPU(memory);
    hsaKmtDeregisterMemory(memory);
    for (unsigned number = 0; number < 64; number++) {
        for (size_t at = 0; at < 4 * PAGE; at++)
            if (((char *)allocated[number])[at] != (char)(number + 1))
                fail("a byte of an allocation", ((char *)allocated[number])[at], number + 1);
        ok("free", hsaKmtFreeMemory(allocated[number], 4 * PAGE));
    }
    registered_again();
    ended_late();
    printf("replaced: what is the application's stays so\n");
}
