// What is refused of new queues, how many there can be, and where their doorbells are (cases C42 and C46).
#include "kmt.h"

#define RING 4096u
#define MOST 200

static int gpu;

struct asked {
    HSAuint32 node;
    HSA_QUEUE_TYPE type;
    HSAuint32 percentage;
    HSA_QUEUE_PRIORITY priority;
    HSAuint64 size;
};

static void *ring, *pointers;

static HSAKMT_STATUS make(struct asked asked, HsaQueueResource *queue) {
    memset(queue, 0, sizeof *queue);
    // An AQL queue's pointers are its program's.
    queue->Queue_write_ptr_aql = pointers;
    queue->Queue_read_ptr_aql = (HSAuint64 *)pointers + 8;
    return hsaKmtCreateQueue(asked.node, asked.type, asked.percentage, asked.priority, ring, asked.size, NULL, queue);
}

static struct asked good(HSA_QUEUE_TYPE type) {
    return (struct asked){ (HSAuint32)gpu, type, 100, HSA_QUEUE_PRIORITY_NORMAL, RING };
}

static void refused(const char *what, struct asked asked) {
    HsaQueueResource queue;
    HSAKMT_STATUS status = make(asked, &queue);
    say(what, status);
    if (status == HSAKMT_STATUS_SUCCESS) {
        printf("  its doorbell: %s\n", queue.Queue_DoorBell ? "there" : "NULL");
        say("  destroyed", hsaKmtDestroyQueue(queue.QueueId));
    }
}

// As many as there can be, and all of them back. A status other than the last one's is an error.
static void fill(const char *what, HSA_QUEUE_TYPE type, unsigned most) {
    static HsaQueueResource queues[MOST];
    unsigned count = 0, wrong = 0;
    HSAKMT_STATUS status = HSAKMT_STATUS_SUCCESS;
    while (count < most && (status = make(good(type), &queues[count])) == HSAKMT_STATUS_SUCCESS) {
        wrong += !queues[count].Queue_DoorBell;
        count++;
    }
    printf("%s: %u, then %s, %u without a doorbell\n", what, count, status_name(status), wrong);
    for (unsigned i = 0; i < count; i++)
        need("destroy", hsaKmtDestroyQueue(queues[i].QueueId));
}

static void doorbells(void) {
    HsaQueueResource queues[32];
    HSAuint64 first = ~0ul, last = 0, bells[32];
    unsigned unaligned = 0, equal = 0, moved = 0;
    for (unsigned i = 0; i < 32; i++) {
        need("create", make(good(i % 2 ? HSA_QUEUE_SDMA : HSA_QUEUE_COMPUTE_AQL), &queues[i]));
        bells[i] = (HSAuint64)queues[i].Queue_DoorBell_aql;
        first = bells[i] < first ? bells[i] : first;
        last = bells[i] > last ? bells[i] : last;
        unaligned += bells[i] % 8 != 0;
        for (unsigned k = 0; k < i; k++)
            equal += bells[k] == bells[i];
    }
    printf("32 doorbells: %u not aligned, %u twice, within 8 KiB: %s\n", unaligned, equal,
           last - first < 8192 ? "yes" : "no");
    // KFD chooses the place in the page; it is the same wherever the library runs.
    for (unsigned i = 0; i < 32; i++)
        printf("%s%lu", i ? " " : "", bells[i] % 4096);
    puts("");
    for (unsigned i = 0; i < 32; i += 3)
        need("destroy", hsaKmtDestroyQueue(queues[i].QueueId));
    for (unsigned i = 0; i < 32; i += 3) {
        need("create again", make(good(i % 2 ? HSA_QUEUE_SDMA : HSA_QUEUE_COMPUTE_AQL), &queues[i]));
        moved += (HSAuint64)queues[i].Queue_DoorBell_aql - first > 8191;
    }
    printf("made again: %u elsewhere\n", moved);
    for (unsigned i = 0; i < 32; i++)
        need("destroy", hsaKmtDestroyQueue(queues[i].QueueId));
}

int main(void) {
    struct asked asked;
    gpu = start();
    ring = host_memory(RING);
    pointers = host_memory(4096);
    HSA_QUEUE_TYPE types[] = { HSA_QUEUE_COMPUTE, HSA_QUEUE_SDMA, HSA_QUEUE_COMPUTE_AQL };
    for (unsigned i = 0; i < 3; i++) {
        printf("type %d\n", types[i]);
        refused("as it should be", good(types[i]));
        asked = good(types[i]), asked.size = 3000, refused("a ring of 3000 bytes", asked);
        asked = good(types[i]), asked.size = 0, refused("a ring of nothing", asked);
        asked = good(types[i]), asked.size = 2 * RING, refused("a ring twice as large as its memory", asked);
        asked = good(types[i]), asked.percentage = 101, refused("101 per cent", asked);
        asked = good(types[i]), asked.percentage = 0, refused("0 per cent", asked);
        asked = good(types[i]), asked.priority = HSA_QUEUE_PRIORITY_MAXIMUM + 1, refused("priority 4", asked);
        asked = good(types[i]), asked.priority = HSA_QUEUE_PRIORITY_MINIMUM - 1, refused("priority -4", asked);
        asked = good(types[i]), asked.node = 99, refused("node 99", asked);
    }
    refused("type 0", good((HSA_QUEUE_TYPE)0));
    refused("type 3", good((HSA_QUEUE_TYPE)3));
    refused("type 99", good((HSA_QUEUE_TYPE)99));
    say("destroy queue 0", hsaKmtDestroyQueue(0));
    for (unsigned round = 0; round < 2; round++) {
        fill("SDMA queues", HSA_QUEUE_SDMA, MOST);
        // Each has a save area of 20 MiB.
        fill("AQL queues", HSA_QUEUE_COMPUTE_AQL, 40);
    }
    doorbells();
    need("unmap", hsaKmtUnmapMemoryToGPU(ring));
    need("free", hsaKmtFreeMemory(ring, RING));
    say("close", hsaKmtCloseKFD());
    return 0;
}
