// An AQL queue of the thunk's API, for programs that have one packet at a time on its way.
#ifndef AQL_H
#define AQL_H

#include "kmt.h"

#include <stdint.h>

#define AQL_RING ((HSAuint64)4096)

// amd_signal_t of amd_hsa_signal.h.
struct signal {
    int64_t kind;
    int64_t value;
    uint64_t mailbox;
    uint32_t event_id;
    uint32_t reserved1;
    uint64_t start;
    uint64_t end;
    uint64_t reserved2[2];
} __attribute__((aligned(64)));

struct aql {
    HsaQueueResource queue;
    char *ring;
    char *pointers;
    struct signal *signal;
    uint64_t index;
};

// Memory of the guest that all GPUs have mapped, cleared.
static inline void *mapped(HSAuint64 size) {
    HsaMemFlags flags = {0};
    void *address = NULL;
    HSAuint64 alternate = 0;
    flags.ui32.HostAccess = 1;
    flags.ui32.ExecuteAccess = 1;
    need("allocate", hsaKmtAllocMemory(0, size, flags, &address));
    need("map", hsaKmtMapMemoryToGPU(address, size, &alternate));
    memset(address, 0, size);
    return address;
}

static inline void aql_begin(struct aql *aql, HSAuint32 gpu) {
    memset(aql, 0, sizeof *aql);
    aql->ring = mapped(AQL_RING);
    aql->pointers = mapped(4096);
    aql->signal = mapped(4096);
    for (unsigned at = 0; at < AQL_RING; at += 64)
        *(uint16_t *)(aql->ring + at) = 1; // HSA_PACKET_TYPE_INVALID
    aql->queue.Queue_write_ptr_aql = (HSAuint64 *)aql->pointers;
    aql->queue.Queue_read_ptr_aql = (HSAuint64 *)(aql->pointers + 128);
    need("create an AQL queue", hsaKmtCreateQueue(gpu, HSA_QUEUE_COMPUTE_AQL, 100, HSA_QUEUE_PRIORITY_NORMAL, aql->ring,
                                                  AQL_RING, NULL, &aql->queue));
}

// A BARRIER_AND packet that ends with the signal.
static inline void aql_submit(struct aql *aql) {
    char *packet = aql->ring + aql->index * 64 % AQL_RING;
    __atomic_store_n(&aql->signal->value, 1, __ATOMIC_RELEASE);
    memset(packet + 4, 0, 60);
    *(uint64_t *)(packet + 56) = (uint64_t)(uintptr_t)aql->signal;
    __atomic_store_n((uint32_t *)packet, 3 | 1 << 8, __ATOMIC_RELEASE);
    __atomic_store_n((uint64_t *)aql->pointers, aql->index + 1, __ATOMIC_RELEASE);
    __atomic_store_n((uint64_t *)aql->queue.Queue_DoorBell_aql, aql->index, __ATOMIC_RELEASE);
    aql->index++;
}

static inline void aql_wait(struct aql *aql) {
    double begin = now();
    while (__atomic_load_n(&aql->signal->value, __ATOMIC_ACQUIRE))
        if (now() - begin > 60)
            need("a packet's end", HSAKMT_STATUS_WAIT_TIMEOUT);
}

#endif
