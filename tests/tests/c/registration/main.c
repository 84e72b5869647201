// The program, and the parts that are short.
#include "parts.h"

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
    else if (!strcmp(what, "access"))
        access_taken(rounds);
    else if (!strcmp(what, "descriptors"))
        without_descriptors(rounds);
    else if (!strcmp(what, "handlers"))
        handlers(rounds);
    else if (!strcmp(what, "sizes"))
        sizes(count > 2 ? atoi(arguments[2]) : 256);
    else if (!strcmp(what, "unfit"))
        unfit(count > 2 ? arguments[2] : "");
    else if (!strcmp(what, "locals"))
        locals(rounds);
    else if (!strcmp(what, "growth"))
        growth();
    else if (!strcmp(what, "data"))
        program_data(rounds);
    else if (!strcmp(what, "children"))
        children(rounds);
    else if (!strcmp(what, "ends"))
        ends(rounds);
    else if (!strcmp(what, "threads"))
        thread_locals(rounds);
    else if (!strcmp(what, "refused"))
        refused();
    else if (!strcmp(what, "bench"))
        bench();
    else
        return 2;
    ok("close", hsaKmtCloseKFD());
    return 0;
}
