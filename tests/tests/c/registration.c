// Memory of the application that is registered and given back while it is in use: nothing that threads write and nothing
// that system calls bring may be lost. Run with VIRTIO_KFD_REGISTER=adopt; natively nothing has to be set.
//
// registration storm ROUNDS | flat ROUNDS [ask] | fork ROUNDS [open] | heap ROUNDS | replaced | sizes [MIB] | unfit HOW | refused | bench
#define _GNU_SOURCE
#include "kmt.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>

#define PAGE 4096ul
#define WRITERS 4
#define PAGES 64

static void fail(const char *what, long found, long expected) {
    printf("FAILED: %s: %ld, expected %ld\n", what, found, expected);
    fflush(stdout);
    _exit(1);
}

static char *own(size_t size) {
    char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        fail("mmap", errno, 0);
    return memory;
}

static void ok(const char *what, HSAKMT_STATUS status) {
    if (status != HSAKMT_STATUS_SUCCESS) {
        printf("FAILED: %s: %s\n", what, status_name(status));
        fflush(stdout);
        _exit(1);
    }
}

static void given(char *start, size_t size) {
    HSAuint64 gpu = 0;
    ok("register", hsaKmtRegisterMemory(start, size));
    ok("map", hsaKmtMapMemoryToGPU(start, size, &gpu));
    if (gpu % PAGE != (uintptr_t)start % PAGE)
        fail("offset of the address on GPUs", gpu % PAGE, (uintptr_t)start % PAGE);
}

static void taken(char *start) {
    ok("unmap", hsaKmtUnmapMemoryToGPU(start));
    ok("deregister", hsaKmtDeregisterMemory(start));
}

static void given_and_taken(char *start, size_t size) {
    given(start, size);
    taken(start);
}

// Lines of /proc/self/maps.
static long mappings(void) {
    FILE *maps = fopen("/proc/self/maps", "r");
    long lines = 0;
    for (int byte; (byte = getc(maps)) != EOF;)
        lines += byte == '\n';
    fclose(maps);
    return lines;
}

static long descriptors(void) {
    long count = 0;
    for (int fd = 0; fd < 1024; fd++)
        count += fcntl(fd, F_GETFD) >= 0;
    return count;
}

static long resident(void) {
    long size, pages;
    FILE *statm = fopen("/proc/self/statm", "r");
    if (fscanf(statm, "%ld %ld", &size, &pages) != 2)
        fail("statm", 0, 2);
    fclose(statm);
    return pages * (long)PAGE / 1024;
}

static unsigned random_number(void) {
    static unsigned state = 12345;
    state = state * 1664525u + 1013904223u;
    return state >> 8;
}

// --- storm

static atomic_bool stop;
static char *area;

// Each writer has one word in every page.
static void *writer(void *argument) {
    unsigned number = (unsigned)(uintptr_t)argument;
    uint64_t *counts = calloc(PAGES, sizeof *counts);
    while (!stop)
        for (unsigned page = 0; page < PAGES; page++) {
            volatile uint64_t *word = (volatile uint64_t *)(area + page * PAGE + 64 * number);
            *word = *word + 1;
            counts[page]++;
        }
    return counts;
}

#define SLOTS 32
#define SLOT_PAGE 40
static int datagrams[2];
static atomic_ulong received, sent, interrupted;

static void *sender(void *unused) {
    for (uint64_t number = 1; !stop; number++) {
        uint64_t message[4] = {number, ~number, number * 3, number ^ 0x5555};
        while (send(datagrams[0], message, sizeof message, 0) != sizeof message)
            if (errno != EINTR)
                fail("send", errno, 0);
            else
                interrupted++;
        sent++;
    }
    return unused;
}

// Datagrams go to memory that is being exchanged: one that a failing copy drops is gone for good.
static void *receiver(void *unused) {
    for (uint64_t number = 1;; number++) {
        volatile uint64_t *slot = (volatile uint64_t *)(area + SLOT_PAGE * PAGE + 1024 + number % SLOTS * 8 * PAGE / 16);
        ssize_t length;
        while ((length = recv(datagrams[1], (void *)slot, 32, 0)) < 0)
            if (errno != EINTR)
                fail("recv: errno", errno, 0);
            else
                interrupted++;
        if (length == 0)
            return unused;
        if (slot[0] != number || slot[1] != ~number || slot[2] != number * 3 || slot[3] != (number ^ 0x5555))
            fail("number of a datagram", slot[0], number);
        received++;
    }
}

static int pipes[2];
static atomic_ulong bytes;

static void *pipe_writer(void *unused) {
    unsigned char block[1000], next = 0;
    while (!stop) {
        for (unsigned at = 0; at < sizeof block; at++)
            block[at] = next++;
        for (size_t done = 0; done < sizeof block;) {
            ssize_t length = write(pipes[1], block + done, sizeof block - done);
            if (length > 0)
                done += length;
            else if (errno != EINTR)
                fail("write", errno, 0);
        }
    }
    close(pipes[1]);
    return unused;
}

static void *pipe_reader(void *unused) {
    unsigned char *place = (unsigned char *)area + 20 * PAGE + 2000, next = 0;
    for (;;) {
        ssize_t length = read(pipes[0], place, 2000);
        if (length < 0 && errno == EINTR)
            continue;
        if (length < 0)
            fail("read: errno", errno, 0);
        if (length == 0)
            return unused;
        for (ssize_t at = 0; at < length; at++)
            if (place[at] != next++)
                fail("a byte of the pipe", place[at], next - 1);
        bytes += length;
    }
}

// Threads that come and go while all threads are to be held.
static void *short_lived(void *unused) {
    volatile uint64_t *word = (volatile uint64_t *)(area + 5 * PAGE + 3072);
    *word = *word + 1;
    return unused;
}

static void *breeder(void *argument) {
    uint64_t *made = argument;
    while (!stop) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, short_lived, NULL))
            fail("pthread_create", errno, 0);
        pthread_join(thread, NULL);
        ++*made;
    }
    return NULL;
}

static void storm(int rounds) {
    area = own(PAGES * PAGE);
    pthread_t writers[WRITERS], others[5];
    uint64_t made = 0;
    if (socketpair(AF_UNIX, SOCK_DGRAM, 0, datagrams) || pipe(pipes))
        fail("socketpair", errno, 0);
    for (uintptr_t number = 0; number < WRITERS; number++)
        pthread_create(&writers[number], NULL, writer, (void *)number);
    pthread_create(&others[0], NULL, sender, NULL);
    pthread_create(&others[1], NULL, receiver, NULL);
    pthread_create(&others[2], NULL, pipe_writer, NULL);
    pthread_create(&others[3], NULL, pipe_reader, NULL);
    pthread_create(&others[4], NULL, breeder, &made);
    double start = now();
    for (int round = 0; round < rounds; round++) {
        unsigned first = random_number() % PAGES, count = 1 + random_number() % (PAGES - first);
        unsigned offset = random_number() % PAGE;
        char *memory = area + first * PAGE + offset;
        size_t size = count * PAGE - offset;
        switch (random_number() % 4) {
        case 0: // all of it
            given_and_taken(area, PAGES * PAGE);
            break;
        case 1: { // two that overlap, the first one ends first
            size_t half = size / 2 + 1;
            given(memory, size);
            given(memory + size - half, half);
            taken(memory);
            taken(memory + size - half);
            break;
        }
        default:
            given_and_taken(memory, size);
        }
    }
    double end = now();
    stop = true;
    uint64_t lost = 0, increments = 0;
    for (unsigned number = 0; number < WRITERS; number++) {
        void *counts;
        pthread_join(writers[number], &counts);
        for (unsigned page = 0; page < PAGES; page++) {
            uint64_t counted = ((uint64_t *)counts)[page];
            lost += counted - *(uint64_t *)(area + page * PAGE + 64 * number);
            increments += counted;
        }
    }
    pthread_join(others[0], NULL);
    pthread_join(others[2], NULL);
    pthread_join(others[4], NULL);
    // The end of the datagrams: an empty one is received after all others.
    send(datagrams[0], NULL, 0, 0);
    pthread_join(others[1], NULL);
    pthread_join(others[3], NULL);
    fprintf(stderr, "%d rounds in %.2f s: %.0f us each; %lu increments, %lu datagrams, %lu bytes, %lu threads; %lu EINTR\n",
            rounds, end - start, (end - start) * 1e6 / rounds, increments, received, bytes, made, interrupted);
    if (lost)
        fail("lost increments", lost, 0);
    if (received != sent)
        fail("datagrams received", received, sent);
    uint64_t threads = *(uint64_t *)(area + 5 * PAGE + 3072);
    if (threads != made)
        fail("increments by short-lived threads", threads, made);
    munmap(area, PAGES * PAGE);
    printf("storm: nothing is lost\n");
}

// --- flat

// Somebody may want to look at the process and its host: says where it is, and waits for a line.
static void pause_at(const char *where, bool ask) {
    if (!ask)
        return;
    printf("%s\n", where);
    fflush(stdout);
    while (getchar() != '\n' && !feof(stdin))
        ;
}

static void flat(int rounds, bool ask) {
    size_t pages = 4096;
    char *memory = own(pages * PAGE);
    memset(memory, 1, pages * PAGE);
    long maps = 0, fds = 0, size = 0;
    double start = now();
    for (int round = -rounds / 2 - 10; round < rounds; round++) {
        if (round == 0) {
            pause_at("warm", ask);
            maps = mappings(), fds = descriptors(), size = resident(), start = now();
        }
        // Different ranges, some within one page.
        unsigned first = random_number() % (pages - 8), offset = random_number() % PAGE;
        given_and_taken(memory + first * PAGE + offset, 1 + random_number() % (4 * PAGE));
    }
    double end = now();
    long grown = mappings() - maps;
    pause_at("done", ask);
    fprintf(stderr, "%d rounds: %.0f us each; maps %ld%+ld, fds %ld%+ld, resident %ld%+ld KiB\n", rounds,
            (end - start) * 1e6 / rounds, maps, grown, fds, descriptors() - fds, size, resident() - size);
    if (grown > 8)
        fail("mappings more", grown, 0);
    if (descriptors() != fds)
        fail("descriptors", descriptors(), fds);
    if (resident() - size > 4096)
        fail("KiB more", resident() - size, 0);
    for (size_t page = 0; page < pages; page++)
        for (size_t at = 0; at < PAGE; at += 511)
            if (memory[page * PAGE + at] != 1)
                fail("a byte", memory[page * PAGE + at], 1);
    // Many registrations at once, several in each page.
    int many = rounds < 2000 ? rounds : 2000;
    for (int number = 0; number < many; number++)
        given(memory + number * 900, 1 + number % 700);
    for (int number = 0; number < many; number++)
        taken(memory + number * 900);
    printf("flat: nothing is left\n");
}

// --- fork

static int child_status(pid_t child) {
    int status;
    if (waitpid(child, &status, 0) != child)
        return -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

static void forks(int rounds, bool reopen) {
    char *memory = own(8 * PAGE);
    for (int round = 0; round < rounds; round++) {
        for (size_t at = 0; at < 8 * PAGE; at += 8)
            *(uint64_t *)(memory + at) = round * 1000003ul + at;
        given(memory + 100, 5 * PAGE);
        int ready[2];
        if (pipe(ready))
            fail("pipe", errno, 0);
        pid_t child = fork();
        if (child == 0) {
            alarm(60);
            char byte;
            // The parent has changed its memory by now.
            if (read(ready[0], &byte, 1) != 1)
                _exit(2);
            for (size_t at = 0; at < 8 * PAGE; at += 8)
                if (*(uint64_t *)(memory + at) != round * 1000003ul + at)
                    _exit(3);
            memset(memory, 0xee, 8 * PAGE);
            // It may register its own copy, on a connection of its own.
            if (reopen) {
                if (start() < 0)
                    _exit(6);
                given(memory + 50, 6 * PAGE);
                memset(memory + 2 * PAGE, 0xef, PAGE);
                taken(memory + 50);
                for (size_t at = 0; at < 8 * PAGE; at++)
                    if ((unsigned char)memory[at] != (at / PAGE == 2 ? 0xef : 0xee))
                        _exit(7);
                ok("close", hsaKmtCloseKFD());
            }
            // Ordinary memory: system calls may use it, and it may be unmapped.
            int null = open("/dev/null", O_WRONLY);
            if (write(null, memory, 8 * PAGE) != 8 * PAGE || munmap(memory, 8 * PAGE))
                _exit(4);
            // What was the parent's is not registered here.
            if (hsaKmtDeregisterMemory(memory + 100) == HSAKMT_STATUS_SUCCESS)
                _exit(5);
            _exit(0);
        }
        memset(memory, 0x11, 8 * PAGE);
        if (write(ready[1], "x", 1) != 1)
            fail("write", errno, 0);
        int status = child_status(child);
        if (status)
            fail("status of the child", status, 0);
        for (size_t at = 0; at < 8 * PAGE; at++)
            if (memory[at] != 0x11)
                fail("a byte of the parent", memory[at], 0x11);
        taken(memory + 100);
        close(ready[0]);
        close(ready[1]);
    }
    munmap(memory, 8 * PAGE);
    printf("fork: children have copies of their own\n");
}

// --- heap

// Blocks of malloc's, with its own data between them, used and freed while they are registered.
static void heap(int rounds) {
    enum { BLOCKS = 64 };
    char *blocks[BLOCKS] = {0};
    size_t sizes[BLOCKS] = {0};
    bool registered[BLOCKS] = {0};
    for (int round = 0; round < rounds; round++) {
        unsigned number = random_number() % BLOCKS;
        if (blocks[number]) {
            for (size_t at = 0; at < sizes[number]; at++)
                if (blocks[number][at] != (char)(number + at))
                    fail("a byte of a block", blocks[number][at], (char)(number + at));
            if (registered[number])
                taken(blocks[number]);
            free(blocks[number]);
            blocks[number] = NULL;
            registered[number] = false;
        } else {
            sizes[number] = 1 + random_number() % 30000;
            blocks[number] = malloc(sizes[number]);
            if (random_number() % 2) {
                given(blocks[number], sizes[number]);
                registered[number] = true;
            }
            for (size_t at = 0; at < sizes[number]; at++)
                blocks[number][at] = (char)(number + at);
        }
    }
    for (unsigned number = 0; number < BLOCKS; number++) {
        if (registered[number])
            taken(blocks[number]);
        free(blocks[number]);
    }
    printf("heap: malloc goes on\n");
}

// --- replaced

static bool is_private(char *address) {
    FILE *maps = fopen("/proc/self/maps", "r");
    unsigned long start, end;
    char permissions[8];
    bool found = false;
    for (char line[512]; fgets(line, sizeof line, maps);)
        if (sscanf(line, "%lx-%lx %7s", &start, &end, permissions) == 3 && start <= (uintptr_t)address &&
            (uintptr_t)address < end)
            found = !strcmp(permissions, "rw-p");
    fclose(maps);
    return found;
}

// Whether memory of the application is adopted at all: natively it is not.
static bool adopting(void) {
    const char *how = getenv("VIRTIO_KFD_REGISTER");
    return how && !strcmp(how, "adopt");
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
static void replaced(void) {
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

// --- sizes

static void sizes(size_t mebibytes) {
    for (size_t size = PAGE; size <= mebibytes << 20; size *= 16) {
        char *memory = own(size);
        for (size_t at = 0; at < size; at += 2ul << 20)
            *(uint64_t *)(memory + at) = at + 1;
        memory[size - 1] = 9;
        given(memory, size);
        memory[size / 2 + 9] = 4;
        taken(memory);
        for (size_t at = 0; at < size; at += 2ul << 20)
            if (*(uint64_t *)(memory + at) != at + 1)
                fail("a word", *(uint64_t *)(memory + at), at + 1);
        if (memory[size - 1] != 9 || memory[size / 2 + 9] != 4)
            fail("the last byte", memory[size - 1], 9);
        munmap(memory, size);
    }
    printf("sizes: up to %zu MiB\n", mebibytes);
}

// Without the option, as a runtime asks before it copies in stages.
static void refused(void) {
    char *memory = own(4 * PAGE);
    HSAKMT_STATUS first = hsaKmtRegisterMemory(memory, 4 * PAGE);
    HsaMemFlags flags;
    memset(&flags, 0, sizeof flags);
    flags.ui32.HostAccess = 1;
    HSAKMT_STATUS second = hsaKmtRegisterMemoryWithFlags(memory, 4 * PAGE, flags);
    printf("refused: %s, ", status_name(first));
    printf("%s\n", status_name(second));
}

// --- unfit

static void refuses(const char *what, char *start, size_t size, HSAKMT_STATUS expected) {
    HSAKMT_STATUS status = hsaKmtRegisterMemory(start, size);
    if (status != expected) {
        printf("FAILED: %s: %s, expected ", what, status_name(status));
        printf("%s\n", status_name(expected));
        fflush(stdout);
        _exit(1);
    }
}

static pid_t vforked;

static void *vforks(void *unused) {
    // Its thread cannot be stopped until the child has ended.
    pid_t child = vfork();
    if (child == 0) {
        struct timespec long_time = {8, 0};
        nanosleep(&long_time, NULL);
        _exit(0);
    }
    vforked = child;
    return unused;
}

struct asked {
    char *start;
    HSAKMT_STATUS status;
};

static void *ask(void *argument) {
    struct asked *asked = argument;
    asked->status = hsaKmtRegisterMemory(asked->start, PAGE);
    if (asked->status == HSAKMT_STATUS_SUCCESS)
        ok("deregister", hsaKmtDeregisterMemory(asked->start));
    return NULL;
}

// Where threads cannot be stopped: writers held in another way let memory be adopted still, and it is given back later.
static void asks(const char *what, char *memory, HSAKMT_STATUS expected) {
    pthread_t other;
    struct asked asked = {memory, HSAKMT_STATUS_SUCCESS};
    // The thread that asks is not stopped, so that another one has to ask.
    pthread_create(&other, NULL, ask, &asked);
    pthread_join(other, NULL);
    fprintf(stderr, "%s: %s\n", what, status_name(asked.status));
    if (asked.status != expected)
        fail(what, asked.status, expected);
}

// What cannot be adopted is refused, and stays what it is.
static void unfit(const char *hold) {
    // Writers held by faults let memory be adopted where threads cannot be stopped; it is given back later.
    HSAKMT_STATUS unstoppable = HSAKMT_STATUS_SUCCESS;
    if (strcmp(hold, "userfaultfd"))
        unstoppable = HSAKMT_STATUS_NOT_SUPPORTED;
    char *memory = own(16 * PAGE), local[64] = {0};
    memset(memory, 1, 16 * PAGE);
    refuses("a stack", local, sizeof local, HSAKMT_STATUS_NOT_SUPPORTED);
    mlock(memory, PAGE);
    refuses("locked", memory, 2 * PAGE, HSAKMT_STATUS_NOT_SUPPORTED);
    munlock(memory, PAGE);
    mprotect(memory + 2 * PAGE, PAGE, PROT_READ);
    refuses("read-only in part", memory, 4 * PAGE, HSAKMT_STATUS_NOT_SUPPORTED);
    mprotect(memory + 2 * PAGE, PAGE, PROT_READ | PROT_WRITE);
    madvise(memory, PAGE, MADV_DONTFORK);
    refuses("not for children", memory, PAGE, HSAKMT_STATUS_NOT_SUPPORTED);
    madvise(memory, PAGE, MADV_DOFORK);
    munmap(memory + 8 * PAGE, PAGE);
    refuses("a hole", memory, 16 * PAGE, HSAKMT_STATUS_ERROR);
    refuses("nothing", memory + 8 * PAGE, PAGE, HSAKMT_STATUS_ERROR);
    refuses("no size", memory, 0, HSAKMT_STATUS_ERROR);
    refuses("beyond all addresses", memory, ~0ul, HSAKMT_STATUS_ERROR);
    refuses("beyond all memory", memory, 1ul << 47, HSAKMT_STATUS_ERROR);
    char *shared = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    refuses("shared", shared, PAGE, HSAKMT_STATUS_NOT_SUPPORTED);
    int file = open("/proc/self/exe", O_RDONLY);
    char *mapped = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
    refuses("a file", mapped, PAGE, HSAKMT_STATUS_NOT_SUPPORTED);

    // A debugger has the main thread.
    int begin[2], end[2];
    char byte = 0;
    if (pipe(begin) || pipe(end))
        fail("pipe", errno, 0);
    pid_t parent = getpid(), tracer = fork();
    if (tracer == 0) {
        alarm(60);
        if (read(begin[0], &byte, 1) != 1 || ptrace(PTRACE_SEIZE, parent, NULL, NULL) || write(end[1], "x", 1) != 1)
            _exit(1);
        if (read(begin[0], &byte, 1) != 1)
            _exit(2);
        // Its own end lets the thread go.
        _exit(0);
    }
    prctl(PR_SET_PTRACER, tracer, 0, 0, 0);
    if (write(begin[1], "x", 1) != 1 || read(end[0], &byte, 1) != 1)
        fail("a tracer", errno, 0);
    asks("a debugger has a thread", memory, unstoppable);
    if (write(begin[1], "x", 1) != 1)
        fail("write", errno, 0);
    if (child_status(tracer))
        fail("the tracer", 1, 0);

    // A thread that does not stop.
    pthread_t other;
    pthread_create(&other, NULL, vforks, NULL);
    struct timespec moment = {0, 200 * 1000 * 1000};
    nanosleep(&moment, NULL);
    asks("a thread does not stop", memory, unstoppable);
    pthread_join(other, NULL);
    if (child_status(vforked))
        fail("the child of vfork", 1, 0);
    for (size_t at = 0; at < 8 * PAGE; at++)
        if (memory[at] != 1)
            fail("a byte", memory[at], 1);
    // It may take a while until the library tries again.
    for (int tries = 0;; tries++) {
        HSAKMT_STATUS status = hsaKmtRegisterMemory(memory, 8 * PAGE);
        if (status == HSAKMT_STATUS_SUCCESS) {
            ok("deregister", hsaKmtDeregisterMemory(memory));
            if (is_private(memory))
                break;
        }
        if (tries == 300)
            fail("private memory in the end", status, HSAKMT_STATUS_SUCCESS);
        struct timespec pause = {0, 100 * 1000 * 1000};
        nanosleep(&pause, NULL);
    }
    printf("unfit: refused\n");
}

static void bench(void) {
    for (size_t size = PAGE; size <= 256ul << 20; size *= 16) {
        char *memory = own(size);
        memset(memory, 1, size);
        int rounds = size <= 1ul << 20 ? 300 : 5;
        double in = 0, out = 0;
        for (int round = 0; round < rounds; round++) {
            double start = now();
            given(memory, size);
            double middle = now();
            taken(memory);
            in += middle - start, out += now() - middle;
        }
        printf("%9zu KiB: register+map %8.0f us, unmap+deregister %8.0f us\n", size / 1024, in * 1e6 / rounds,
               out * 1e6 / rounds);
        munmap(memory, size);
    }
}

int main(int count, char **arguments) {
    const char *what = count > 1 ? arguments[1] : "";
    int rounds = count > 2 ? atoi(arguments[2]) : 100;
    if (start() < 0)
        fail("GPUs", 0, 1);
    if (!strcmp(what, "storm"))
        storm(rounds);
    else if (!strcmp(what, "flat"))
        flat(rounds, count > 3);
    else if (!strcmp(what, "fork"))
        forks(rounds, count > 3);
    else if (!strcmp(what, "heap"))
        heap(rounds);
    else if (!strcmp(what, "replaced"))
        replaced();
    else if (!strcmp(what, "sizes"))
        sizes(count > 2 ? atoi(arguments[2]) : 256);
    else if (!strcmp(what, "unfit"))
        unfit(count > 2 ? arguments[2] : "");
    else if (!strcmp(what, "refused"))
        refused();
    else if (!strcmp(what, "bench"))
        bench();
    else
        return 2;
    ok("close", hsaKmtCloseKFD());
    return 0;
}
