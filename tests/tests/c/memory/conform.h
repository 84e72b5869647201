// The memory conformance suite: one line for each call, in a form that does not depend on where things lie, so that two
// libraries' outputs can be compared line by line.
//
// Addresses are printed as NAME+OFFSET, where a name was given to a range by the test. Lines that begin with @ are
// requests to the harness (harness.h) and no part of the output.
#ifndef CONFORM_H
#define CONFORM_H

#define _GNU_SOURCE
#ifdef OLD_THUNK
#include <hsakmt.h>
#else
#include <hsakmt/hsakmt.h>
#endif
#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE 0x1000ull
#define KIB 1024ull
#define MIB (1024ull * KIB)
#define GIB (1024ull * MIB)
#define NODES 8

// Bits of HsaMemFlags.Value (the bit fields of hsakmttypes.h, in their order).
enum {
    NON_PAGED = 1u << 0,
    READ_ONLY = 1u << 3,
    PAGE_64K = 1u << 4,
    PAGE_2M = 2u << 4,
    HOST_ACCESS = 1u << 6,
    NO_SUBSTITUTE = 1u << 7,
    GDS = 1u << 8,
    SCRATCH = 1u << 9,
    EXECUTE = 1u << 12,
    COARSE = 1u << 13,
    AQL = 1u << 14,
    FIXED = 1u << 15,
    NO_NUMA = 1u << 16,
    UNCACHED = 1u << 17,
    NO_ADDRESS = 1u << 18,
    ONLY_ADDRESS = 1u << 19,
    EXT_COHERENT = 1u << 20,
    GTT = 1u << 21,
    CONTIGUOUS = 1u << 22,
};

// Usual kinds of memory.
enum {
    FINE = HOST_ACCESS,
    DEVICE = NON_PAGED | COARSE,
    VISIBLE = NON_PAGED | HOST_ACCESS | COARSE,
    PINNED = NON_PAGED | HOST_ACCESS,
};

// What the topology has: the CPU's node and the GPUs' nodes with their ids.
struct machine {
    HSAuint32 nodes;
    HSAuint32 cpu;
    HSAuint32 gpus;
    HSAuint32 gpu[NODES];
    HSAuint32 gpu_id[NODES];
};
extern struct machine machine;

// Prints a line of the output.
void line(const char *format, ...) __attribute__((format(printf, 1, 2)));
// A heading; calls after it belong to it.
void heading(const char *text);
// Ends the program: what follows makes no sense any more.
void give_up(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

// Gives a range a name until `forget`; of two that overlap the newer one counts.
void name(const char *label, const void *base, uint64_t size);
void forget(const char *label);
// The name of an address. The text is good for some calls more.
const char *at(const void *address);
const char *at64(uint64_t address);
const char *flag_names(uint32_t flags);
const char *status_name(HSAKMT_STATUS status);
const char *node_list(HSAuint64 count, const HSAuint32 *nodes);

// The calls, each with its line. `alloc` names what it gets.
void *alloc(const char *label, HSAuint32 node, uint64_t size, uint32_t flags);
void *alloc_align(const char *label, HSAuint32 node, uint64_t size, uint64_t align, uint32_t flags);
void *alloc_at(const char *label, HSAuint32 node, uint64_t size, uint64_t align, uint32_t flags, void *address);
HSAKMT_STATUS release(void *address, uint64_t size);
// `release` and `forget`.
void drop(const char *label, void *address, uint64_t size);
HSAKMT_STATUS map(void *address, uint64_t size);
HSAKMT_STATUS map_nodes(void *address, uint64_t size, HSAuint64 count, HSAuint32 *nodes);
HSAKMT_STATUS unmap(void *address);
void info(const void *address);
HSAKMT_STATUS user_data(const void *address, void *data);
HSAKMT_STATUS register_memory(void *address, uint64_t size);
HSAKMT_STATUS register_nodes(void *address, uint64_t size, HSAuint64 count, HSAuint32 *nodes);
HSAKMT_STATUS register_flags(void *address, uint64_t size, uint32_t flags);
HSAKMT_STATUS deregister(void *address);

// Without a line: for what a section stands on.
void *quiet_alloc(HSAuint32 node, uint64_t size, uint32_t flags);
void quiet_map(void *address, uint64_t size);
void quiet_free(void *address, uint64_t size);

// Own memory of the process, page aligned, and its end.
void *own(uint64_t size);
void disown(void *address, uint64_t size);
// Whether a load or a store at an address works: "read write", "read", "nothing".
const char *reach(volatile void *address);

// Opens the library and reads the topology.
void begin(void);
void end(void);

// The sections.
void section_alloc(void);
void section_fixed(void);
void section_map(void);
void section_nodes(void);
void section_pointer(void);
void section_register(void);
void section_replaced(void);
void section_beyond_vram(void);
void section_register_default(void);
void section_vmm(void);
void section_drm(void);
void section_drm_file(void);
void section_share(void);
void section_misc(void);
void section_data(void);
void section_data_large(void);
void section_cases(void);
void section_two(void);
void section_window(void);
void section_hotplug(void);
void section_reopen(void);
void section_tiny_window(void);
void section_pids(void);
int two_child(int count, char **arguments);
int pids_child(char **arguments);

#endif
