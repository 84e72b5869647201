// What events carry. Modes:
//
//   memory     a queue writes where nothing is mapped; what two memory events say
//   read-only  the same where it may not write
//   hardware   prints "ready GPU-ID" and waits for a hardware exception; what the event says
//   mailboxes  a packet for each of many events reaches it, and no other, by the address in HWData2
#include "aql.h"

#include <sys/mman.h>

#define EVENTS 600

static HSAuint32 gpu;

static HsaEvent *exception(HSA_EVENTTYPE type) {
    HsaEvent *event = NULL;
    need("create", create(type, false, false, &event));
    return event;
}

// An SDMA queue that writes one word: FENCE of vega10_sdma_pkt_open.h.
static void write_word(uint64_t to) {
    HsaQueueResource queue = {0};
    uint32_t *ring = mapped(4096);
    need("create an SDMA queue",
         hsaKmtCreateQueue(gpu, HSA_QUEUE_SDMA, 100, HSA_QUEUE_PRIORITY_NORMAL, ring, 4096, NULL, &queue));
    uint32_t packet[] = {5, to, to >> 32, 1};
    memcpy(ring, packet, sizeof packet);
    __atomic_store_n(queue.Queue_write_ptr_aql, sizeof packet, __ATOMIC_RELEASE);
    __atomic_store_n(queue.Queue_DoorBell_aql, sizeof packet, __ATOMIC_RELEASE);
}

static void tell_fault(const char *what, HsaEvent *event, uint64_t expected) {
    HsaMemoryAccessFault *fault = &event->EventData.EventData.MemoryAccessFault;
    say(what, hsaKmtWaitOnEvent(event, 30000));
    printf("the GPU's node: %d, the page: %d, flags %d\n", fault->NodeId == gpu,
           fault->VirtualAddress == (expected & ~(uint64_t)4095), (int)fault->Flags);
    printf("not present %u, read only %u, no execute %u, imprecise %u, ecc %u, error type %u\n",
           fault->Failure.NotPresent, fault->Failure.ReadOnly, fault->Failure.NoExecute, fault->Failure.Imprecise,
           fault->Failure.ECC, fault->Failure.ErrorType);
    fflush(stdout);
}

static void memory(bool read_only) {
    HsaEvent *event = exception(HSA_EVENTTYPE_MEMORY), *same = exception(HSA_EVENTTYPE_MEMORY);
    void *reserved = mmap(NULL, 8192, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    uint64_t address = (uint64_t)(uintptr_t)reserved + 4096 + 0x128;
    if (read_only) {
        HsaMemFlags flags = {0};
        void *buffer = NULL;
        HSAuint64 alternate = 0;
        flags.ui32.ReadOnly = 1;
        flags.ui32.HostAccess = 1;
        need("allocate", hsaKmtAllocMemory(0, 4096, flags, &buffer));
        need("map", hsaKmtMapMemoryToGPU(buffer, 4096, &alternate));
        address = (uint64_t)(uintptr_t)buffer + 0x40;
    }
    say("before it", hsaKmtWaitOnEvent(event, 0));
    write_word(address);
    tell_fault("one event", event, address);
    tell_fault("another event", same, address);
}

static void hardware(void) {
    HsaEvent *event = exception(HSA_EVENTTYPE_HW_EXCEPTION), *signal = signal_event(false);
    // The GPU's memory is what the test looks for.
    mapped(4096);
    say("before it", hsaKmtWaitOnEvent(event, 0));
    HsaNodeProperties properties;
    need("node properties", hsaKmtGetNodeProperties(gpu, &properties));
    printf("ready %u\n", properties.KFDGpuID);
    fflush(stdout);
    HsaEvent *both[] = {signal, event};
    say("wait", hsaKmtWaitOnMultipleEvents(both, 2, false, 60000));
    HsaHwException *data = &event->EventData.EventData.HwException;
    printf("the GPU's node: %d, reset type %u, memory lost %u, cause %u\n", data->NodeId == gpu, data->ResetType,
           data->MemoryLost, data->ResetCause);
    say("once only", hsaKmtWaitOnEvent(event, 0));
}

static void mailboxes(void) {
    static HsaEvent *events[EVENTS];
    struct aql aql;
    aql_begin(&aql, gpu);
    for (int i = 0; i < EVENTS; i++)
        events[i] = signal_event(false);
    int reached = 0, others = 0, apart = 1;
    for (int i = 0; i < EVENTS; i++) {
        aql.signal->mailbox = events[i]->EventData.HWData2;
        aql.signal->event_id = events[i]->EventId;
        for (int j = 0; j < i; j++)
            apart &= events[j]->EventData.HWData2 != events[i]->EventData.HWData2;
        aql_submit(&aql);
        reached += hsaKmtWaitOnEvent(events[i], 30000) == HSAKMT_STATUS_SUCCESS;
        aql_wait(&aql);
        others += hsaKmtWaitOnMultipleEvents(events, EVENTS, false, 0) == HSAKMT_STATUS_SUCCESS;
    }
    printf("%d of %d events were reached, %d others, each address is one event's: %d\n", reached, EVENTS, others, apart);
    need("destroy", hsaKmtDestroyQueue(aql.queue.QueueId));
}

int main(int count, char **arguments) {
    int node = start();
    if (node < 0 || count < 2)
        return 1;
    gpu = node;
    if (!strcmp(arguments[1], "memory"))
        memory(false);
    else if (!strcmp(arguments[1], "read-only"))
        memory(true);
    else if (!strcmp(arguments[1], "hardware"))
        hardware();
    else
        mailboxes();
    say("close", hsaKmtCloseKFD());
    return 0;
}
