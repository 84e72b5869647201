// System calls on memory of hsaKmtAllocMemory and on ordinary memory: what differs is what a guest cannot do
// (docs/limits.md).
//
//   syscalls ordinary|thunk BLOCK-DEVICE   asks all questions of syscalls.h
//   syscalls ordinary|thunk crash          dies with a mark in the memory
//   syscalls ordinary core                 whether the mark is in the core file of the working directory
#define _GNU_SOURCE
#include "kmt.h"
#include "syscalls.h"

static unsigned char *of_the_thunk(void) {
    start();
    HsaMemFlags flags;
    memset(&flags, 0, sizeof flags);
    flags.ui32.HostAccess = 1;
    void *at = NULL;
    need("allocate", hsaKmtAllocMemory(0, SUBJECT_SIZE, flags, &at));
    // What a GPU has mapped must be the same memory for the CPU all along.
    HSAuint64 alternate = 0;
    need("map", hsaKmtMapMemoryToGPU(at, SUBJECT_SIZE, &alternate));
    return at;
}

int main(int count, char **arguments) {
    if (count != 3) return 2;
    if (!strcmp(arguments[2], "core")) {
        say_that("core dump", ask_core());
        return 0;
    }
    unsigned char *at = strcmp(arguments[1], "thunk") ? ordinary(SUBJECT_SIZE) : of_the_thunk();
    if (!strcmp(arguments[2], "crash")) {
        struct rlimit all = {RLIM_INFINITY, RLIM_INFINITY};
        mark(at);
        if (setrlimit(RLIMIT_CORE, &all)) {
            perror("setrlimit");
            return 1;
        }
        abort();
    }
    ask_all(at, arguments[2]);
    return 0;
}
