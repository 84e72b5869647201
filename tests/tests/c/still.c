// Doorbells that are rung after they have been still, when a store to them may trap. Modes:
//
//   pauses [ROUNDS]  packets on two queues of a page, by two threads, after pauses of 0 to 500 ms: each one is processed
//   again            by a second mapping of the page, made while the first one is still
//   moved            by a mapping that the program has moved while it was still
//   gone             the program unmaps the page while it is still, and has memory of its own there
//   fork             a child has no doorbells
#define _GNU_SOURCE
#include "aql.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#define SLICE 8192
#define SECOND 1000000

static HSAuint32 gpu;

// The queue's doorbell is another one of these from now on.
static void ring_at(struct aql *aql, uintptr_t from, void *to) {
    uintptr_t bell = (uintptr_t)aql->queue.Queue_DoorBell_aql;
    aql->queue.Queue_DoorBell_aql = (HSAuint64 *)((char *)to + (bell - from));
}

// Where the slice of doorbells is mapped that has an address.
static uintptr_t slice_of(void *bell) {
    FILE *maps = fopen("/proc/self/maps", "r");
    uintptr_t start, end, found = 0;
    char line[512];
    while (maps && fgets(line, sizeof line, maps))
        if (sscanf(line, "%lx-%lx", &start, &end) == 2 && start <= (uintptr_t)bell && (uintptr_t)bell < end)
            found = end - start == SLICE ? start : 0;
    if (maps)
        fclose(maps);
    return found;
}

static void packet(struct aql *aql) {
    aql_submit(aql);
    aql_wait(aql);
}

struct work {
    struct aql aql;
    int rounds;
    unsigned seed;
};

static void *pauses(void *data) {
    struct work *work = data;
    for (int i = 0; i < work->rounds; i++) {
        // Some of them long enough for the doorbells to be still, and some right at the time when they begin to be.
        unsigned random = rand_r(&work->seed);
        usleep(random % 4 ? random % 1000 : random % (SECOND / 2));
        packet(&work->aql);
    }
    return NULL;
}

static void *all_pauses(int rounds) {
    struct work work[2] = {0};
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) {
        aql_begin(&work[i].aql, gpu);
        work[i].rounds = rounds;
        work[i].seed = i + 1;
    }
    printf("a page: %d\n", slice_of(work[0].aql.queue.Queue_DoorBell_aql) == slice_of(work[1].aql.queue.Queue_DoorBell_aql));
    for (int i = 0; i < 2; i++)
        pthread_create(&threads[i], NULL, pauses, &work[i]);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    printf("packets: %d\n", (int)(work[0].aql.index + work[1].aql.index) == 2 * rounds);
    return NULL;
}

static void again(struct aql *aql, uintptr_t slice) {
    HsaNodeProperties properties;
    need("node properties", hsaKmtGetNodeProperties(gpu, &properties));
    int kfd = open("/dev/kfd", O_RDWR | O_CLOEXEC);
    // KFD_MMAP_TYPE_DOORBELL, KFD_MMAP_GPU_ID of the kernel's kfd_priv.h
    off_t offset = (off_t)(3ULL << 62 | (uint64_t)(properties.KFDGpuID & 0xffff) << 46);
    for (int i = 0; i < 4; i++) {
        usleep(i % 2 ? SECOND / 2 : 0);
        char *second = mmap(NULL, SLICE, PROT_READ | PROT_WRITE, MAP_SHARED, kfd, offset);
        ring_at(aql, slice, second);
        packet(aql);
        usleep(SECOND / 2);
        packet(aql);
        ring_at(aql, (uintptr_t)second, (void *)slice);
        packet(aql);
        munmap(second, SLICE);
    }
    close(kfd);
}

static void moved(struct aql *aql, uintptr_t slice) {
    for (int i = 0; i < 4; i++) {
        char *place = mmap(NULL, SLICE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        usleep(i % 2 ? SECOND / 2 : 0);
        if (mremap((void *)slice, SLICE, SLICE, MREMAP_MAYMOVE | MREMAP_FIXED, place) != place)
            printf("mremap\n");
        usleep(i / 2 ? SECOND / 2 : 0);
        ring_at(aql, slice, place);
        slice = (uintptr_t)place;
        packet(aql);
    }
}

static void gone(struct aql *aql, uintptr_t slice) {
    (void)aql;
    munmap((void *)slice, SLICE);
    unsigned char *own = mmap((void *)slice, SLICE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    memset(own, 0x5a, SLICE);
    usleep(SECOND);
    // A queue more: what waits for doorbells begins anew.
    struct aql other;
    aql_begin(&other, gpu);
    usleep(SECOND);
    int same = 0;
    for (int i = 0; i < SLICE; i++)
        same += own[i] == 0x5a;
    printf("own memory stays: %d\n", same == SLICE);
}

static void forked(struct aql *aql) {
    for (int i = 0; i < 2; i++) {
        usleep(i ? SECOND / 2 : 0);
        pid_t child = fork();
        if (child == 0) {
            signal(SIGSEGV, SIG_DFL);
            *(volatile HSAuint64 *)aql->queue.Queue_DoorBell_aql = 0;
            _exit(0);
        }
        int status = 0;
        waitpid(child, &status, 0);
        printf("the child: %s\n", WIFSIGNALED(status) ? sigabbrev_np(WTERMSIG(status)) : "rang");
        packet(aql);
    }
}

int main(int count, char **arguments) {
    int node = start();
    if (node < 0 || count < 2)
        return 1;
    gpu = node;
    const char *mode = arguments[1];
    if (!strcmp(mode, "pauses")) {
        all_pauses(count > 2 ? atoi(arguments[2]) : 100);
    } else {
        struct aql aql;
        aql_begin(&aql, gpu);
        packet(&aql);
        uintptr_t slice = slice_of(aql.queue.Queue_DoorBell_aql);
        printf("doorbells: %d\n", slice != 0);
        // Now and then they are still.
        for (int i = 0; i < 2; i++) {
            usleep(i * SECOND / 2);
            packet(&aql);
        }
        if (!strcmp(mode, "again"))
            again(&aql, slice);
        else if (!strcmp(mode, "moved"))
            moved(&aql, slice);
        else if (!strcmp(mode, "fork"))
            forked(&aql);
        else {
            usleep(SECOND / 2);
            gone(&aql, slice);
        }
        if (strcmp(mode, "gone")) {
            usleep(SECOND / 2);
            packet(&aql);
            printf("packets: %d\n", (int)aql.index);
        }
    }
    puts("= end");
    return 0;
}
