// Variables: on the stacks of threads, and in the data of the program. Run with VIRTIO_KFD_REGISTER=adopt-variables.
#include "parts.h"

#include <alloca.h>
#include <signal.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/syscall.h>

extern char **environ;

bool variables_are_adopted(void) {
    const char *how = getenv("VIRTIO_KFD_REGISTER");
    return how && !strcmp(how, "adopt-variables");
}

static void is_adopted(const char *what, const volatile void *address) {
    if (is_private((char *)address) == variables_are_adopted())
        fail(what, is_private((char *)address), !variables_are_adopted());
}

static void give(volatile void *start, size_t size) {
    given((char *)start, size);
}

static void take(volatile void *start) {
    taken((char *)start);
}

// Frames are written, called through, and looked at again.
static __attribute__((noinline)) void dig(size_t bytes, unsigned seed) {
    volatile unsigned frame[512];
    for (unsigned at = 0; at < 512; at += 3)
        frame[at] = seed + at;
    if (bytes > sizeof frame)
        dig(bytes - sizeof frame, seed * 5 + 1);
    for (unsigned at = 0; at < 512; at += 3)
        if (frame[at] != seed + at)
            fail("a word of a frame", frame[at], seed + at);
}

static atomic_ulong begun, ended;

// On the stack of whatever it interrupts.
static void tick(int signal) {
    (void)signal;
    int before = errno;
    begun++;
    dig(6000, begun);
    ended++;
    errno = before;
}

// A timer for the calling thread.
static timer_t ticking(long nanoseconds) {
    timer_t timer;
    struct sigevent event;
    memset(&event, 0, sizeof event);
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = SIGALRM;
    event._sigev_un._tid = gettid();
    struct itimerspec interval = {{0, nanoseconds}, {0, nanoseconds}};
    if (timer_create(CLOCK_MONOTONIC, &event, &timer) || timer_settime(timer, 0, &interval, NULL))
        fail("a timer", errno, 0);
    return timer;
}

#define WORDS (16 * PAGE / 8)

static atomic_bool stop;

struct worker {
    pthread_t thread;
    // On its stack.
    _Atomic(volatile uint64_t *) words;
    uint64_t lost, increments;
};

static void *work(void *argument) {
    struct worker *worker = argument;
    timer_t timer = ticking(700 * 1000);
    // Away from what the C library keeps at the end of a stack.
    volatile char *room = alloca(2 * PAGE);
    room[0] = 1;
    volatile uint64_t words[WORDS];
    uint64_t *counts = calloc(WORDS, sizeof *counts);
    for (unsigned at = 0; at < WORDS; at++)
        words[at] = 0;
    worker->words = words;
    while (!stop) {
        for (unsigned at = 0; at < WORDS; at += 7) {
            words[at] = words[at] + 1;
            counts[at]++;
        }
        dig(20000, counts[0]);
    }
    timer_delete(timer);
    for (unsigned at = 0; at < WORDS; at++) {
        worker->lost += counts[at] - words[at];
        worker->increments += counts[at];
    }
    free(counts);
    return NULL;
}

#define LEVELS 14
static volatile unsigned char *blocks[LEVELS];
static bool is_given[LEVELS];

static void look(unsigned level, unsigned seed) {
    for (unsigned at = 0; at < 1400; at++)
        if (blocks[level][at] != (unsigned char)(seed + level * 7 + at))
            fail("a byte of a local variable", blocks[level][at], (unsigned char)(seed + level * 7 + at));
}

// Registers variables of frames above, and lets them go on the way back: the stack pointer comes to lie in their pages.
static __attribute__((noinline)) void climb(unsigned level, unsigned seed) {
    volatile unsigned char block[1400];
    blocks[level] = block;
    for (unsigned at = 0; at < sizeof block; at++)
        block[at] = (unsigned char)(seed + level * 7 + at);
    if (level + 1 < LEVELS)
        climb(level + 1, seed);
    else
        for (unsigned count = 1 + random_number() % 3; count > 0; count--) {
            unsigned one = random_number() % LEVELS, offset = random_number() % 700;
            if (!is_given[one]) {
                give(blocks[one] + offset, 1 + random_number() % 700);
                blocks[one] += offset;
                is_given[one] = true;
                is_adopted("a local variable", blocks[one]);
            }
            dig(10000, seed + one);
        }
    if (is_given[level]) {
        dig(4000, seed);
        take(blocks[level]);
        is_given[level] = false;
    }
    blocks[level] = block;
    look(level, seed);
}

// Nothing is lost on stacks that are in use, while signals are handled on them.
void locals(int rounds) {
    struct worker workers[3];
    memset(workers, 0, sizeof workers);
    signal(SIGALRM, tick);
    for (unsigned number = 0; number < 3; number++)
        pthread_create(&workers[number].thread, NULL, work, &workers[number]);
    for (unsigned number = 0; number < 3; number++)
        while (!workers[number].words)
            sched_yield();
    climb(0, 0);
    long maps = mappings();
    timer_t timer = ticking(1000 * 1000);
    double start = now();
    for (int round = 0; round < rounds; round++) {
        climb(0, random_number());
        struct worker *worker = &workers[round % 3];
        unsigned first = random_number() % (WORDS - 1), count = 1 + random_number() % (WORDS - first);
        volatile uint64_t *word = worker->words + first;
        give(word, count * sizeof *word);
        is_adopted("another thread's variable", word);
        dig(3000, round);
        take(word);
    }
    double end = now();
    timer_delete(timer);
    long grown = mappings() - maps;
    stop = true;
    uint64_t lost = 0, increments = 0;
    for (unsigned number = 0; number < 3; number++) {
        pthread_join(workers[number].thread, NULL);
        lost += workers[number].lost, increments += workers[number].increments;
    }
    fprintf(stderr, "%d rounds in %.2f s: %.0f us each; %lu increments, %lu signals; maps %ld%+ld\n", rounds, end - start,
            (end - start) * 1e6 / rounds, increments, (unsigned long)begun, maps, grown);
    if (lost)
        fail("lost increments", lost, 0);
    if (begun != ended || begun == 0)
        fail("handlers that have ended", ended, begun);
    if (grown > 4)
        fail("mappings more", grown, 0);
    signal(SIGALRM, SIG_DFL);
    printf("locals: nothing is lost\n");
}

// Where the mappings begin that lie side by side around an address, and how many they are.
static unsigned long mapped_from(const volatile void *address, int *count) {
    FILE *maps = fopen("/proc/self/maps", "r");
    unsigned long from = 0, start, end, before = 0;
    *count = 0;
    for (char line[512]; fgets(line, sizeof line, maps) && sscanf(line, "%lx-%lx", &start, &end) == 2; before = end) {
        if (start != before) {
            if (before > (uintptr_t)address)
                break;
            from = start, *count = 0;
        }
        ++*count;
    }
    fclose(maps);
    return from;
}

// The stack grows by megabytes while a part of it is adopted, and when that has been given back.
void growth(void) {
    struct rlimit limit;
    getrlimit(RLIMIT_STACK, &limit);
    size_t large = 6ul << 20;
    if (limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur < large + (1ul << 20))
        large = limit.rlim_cur / 2;
    // As much of it as is mapped from the beginning.
    size_t before = 256 << 10;
    int count, after;
    volatile unsigned local[700];
    for (unsigned at = 0; at < 700; at++)
        local[at] = at;
    // What the library makes once.
    give(local, sizeof local);
    take(local);
    long maps = mappings();
    unsigned long begin = mapped_from(local, &count);
    give(local, sizeof local);
    is_adopted("a local variable", local);
    dig(large / 2, 1);
    unsigned long middle = mapped_from(local, &after);
    if (middle + large / 2 > begin + before)
        fail("bytes grown while adopted", begin - middle, large / 2 - before);
    take(local);
    unsigned long given_back = mapped_from(local, &after);
    if (given_back != middle)
        fail("bytes that are mapped less", given_back - middle, 0);
    if (after != count)
        fail("mappings of the stack", after, count);
    dig(large, 2);
    unsigned long end = mapped_from(local, &after);
    if (end + large / 2 > middle + before)
        fail("bytes grown after that", middle - end, large / 2 - before);
    if (after != count)
        fail("mappings of the stack that has grown", after, count);
    if (mappings() != maps)
        fail("mappings", mappings(), maps);
    for (unsigned at = 0; at < 700; at++)
        if (local[at] != at)
            fail("a word", local[at], at);
    printf("growth: stacks grow on\n");
}

// Of the program's file, initialized; with what lies around it.
static volatile uint64_t data[3 * PAGE / 8] = {1, 2, 3};

// Data of the program, with pages that nobody has touched and pages that were written.
void program_data(int rounds) {
    for (int round = 0; round < rounds; round++) {
        unsigned first = round == 0 ? 0 : random_number() % (sizeof data / 8 - 1);
        unsigned count = 1 + random_number() % (sizeof data / 8 - first);
        give(&data[first], count * 8);
        is_adopted("data", &data[first]);
        for (unsigned at = 0; at < sizeof data / 8; at++) {
            uint64_t expected = (at < 3 ? at + 1 : 0) + (uint64_t)round * at;
            if (data[at] != expected)
                fail("a word of the data", data[at], expected);
            data[at] += at;
        }
        pid_t child = fork();
        if (child == 0) {
            for (unsigned at = 0; at < sizeof data / 8; at++) {
                if (data[at] != (at < 3 ? at + 1 : 0) + (uint64_t)(round + 1) * at)
                    _exit(2);
                data[at] = 9;
            }
            _exit(0);
        }
        int status = child_status(child);
        if (status)
            fail("status of the child", status, 0);
        take(&data[first]);
    }
    printf("data: nothing is lost\n");
}

// What a child of fork does in the frames of its parent.
static __attribute__((noinline)) int in_child(volatile uint64_t *local, unsigned count, uint64_t expected) {
    for (unsigned at = 0; at < count; at++)
        if (local[at] != expected + at)
            return 3;
    for (unsigned at = 0; at < count; at++)
        local[at] = 77;
    dig(100000, 4);
    // Its memory is ordinary: system calls may use it.
    int null = open("/dev/null", O_WRONLY);
    if (write(null, (void *)local, count * 8) != (ssize_t)count * 8)
        return 4;
    close(null);
    if (hsaKmtDeregisterMemory((void *)local) == HSAKMT_STATUS_SUCCESS)
        return 5;
    // A child of its own.
    pid_t child = fork();
    if (child == 0)
        return 0;
    return child_status(child) ? 6 : 0;
}

// The frame that holds the variable is one that the child returns to, and returns from.
static __attribute__((noinline)) pid_t forks_in_here(uint64_t value, unsigned skip) {
    volatile char *room = alloca(16 + skip);
    room[0] = 1;
    volatile uint64_t local[40];
    for (unsigned at = 0; at < 40; at++)
        local[at] = value + at;
    give(local, sizeof local);
    is_adopted("a local variable", local);
    pid_t child = fork();
    if (child == 0) {
        alarm(60);
        int status = in_child(local, 40, value);
        if (status)
            _exit(status);
        return 0;
    }
    // At once, while the child looks at its own.
    for (unsigned at = 0; at < 40; at++)
        local[at] = ~value;
    dig(5000, 3);
    int status = child_status(child);
    if (status)
        fail("status of the child", status, 0);
    for (unsigned at = 0; at < 40; at++)
        if (local[at] != ~value)
            fail("a word of the parent", local[at], ~value);
    take(local);
    return child;
}

static void *forks_in_a_thread(void *argument) {
    volatile char *room = alloca(3 * PAGE);
    room[0] = 1;
    if (forks_in_here((uintptr_t)argument, (uintptr_t)argument % 4096) == 0)
        _exit(0);
    return NULL;
}

// A function that is called, and makes a child, on the page of its own variable.
static __attribute__((noinline)) void on_one_page(void (*then)(volatile uint64_t *)) {
    volatile uint64_t local[8] = {5};
    if ((uintptr_t)local % PAGE < 3000) {
        // Further down.
        on_one_page(then);
        local[1] = 1;
        return;
    }
    then(local);
    if (local[0] != 5)
        fail("a local variable", local[0], 5);
}

// A child of the bare system call has no memory there, and ends; the parent is unharmed.
static void clones(volatile uint64_t *local) {
    give(local, 64);
    pid_t child = syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, 0);
    if (child == 0) {
        local[0] = 6;
        _exit(0);
    }
    int status = child_status(child), expected = variables_are_adopted() ? 1000 + SIGSEGV : 0;
    if (status != expected)
        fail("status of a child of clone", status, expected);
    take(local);
}

// A child of fork ends too where a debugger has the thread: by what signal depends on which of its frames are missing.
static void forks_under_a_debugger(volatile uint64_t *local) {
    struct debugger it = debugger();
    give(local, 64);
    debug(&it);
    pid_t child = fork();
    if (child == 0) {
        local[0] = 6;
        _exit(0);
    }
    int status = child_status(child);
    if (variables_are_adopted() ? status <= 1000 : status != 0)
        fail("status of a child under a debugger", status, variables_are_adopted() ? 1000 : 0);
    end_debugger(&it);
    take(local);
}

// Children have stacks of their own.
void children(int rounds) {
    for (int round = 0; round < rounds; round++) {
        if (forks_in_here(round * 1000003ul, random_number() % 4096) == 0)
            _exit(0);
        pthread_t thread;
        pthread_create(&thread, NULL, forks_in_a_thread, (void *)(uintptr_t)random_number());
        pthread_join(thread, NULL);
    }
    volatile uint64_t local[40] = {3};
    give(local, sizeof local);
    // They share the memory until they call exec. The shell has libraries of its own.
    unsetenv("LD_LIBRARY_PATH");
    unsetenv("LD_PRELOAD");
    for (int round = 0; round < 3; round++) {
        pid_t child;
        char *arguments[] = {"sh", "-c", "exit 7", NULL};
        int error = posix_spawn(&child, "/bin/sh", NULL, NULL, arguments, environ);
        if (error)
            fail("posix_spawn", error, 0);
        int status = child_status(child);
        if (status != 7)
            fail("status of what was spawned", status, 7);
        status = system("exit 6");
        if (WEXITSTATUS(status) != 6)
            fail("status of system", WEXITSTATUS(status), 6);
        is_adopted("a local variable", local);
    }
    take(local);
    if (local[0] != 3)
        fail("a local variable", local[0], 3);
    on_one_page(clones);
    on_one_page(forks_under_a_debugger);
    printf("children: they have stacks of their own\n");
}

static volatile uint64_t *left;

// Ends while its variable is registered.
static void *leaves(void *argument) {
    volatile char *room = alloca(2 * PAGE);
    room[0] = 1;
    volatile uint64_t local[600];
    for (unsigned at = 0; at < 600; at++)
        local[at] = at;
    give(local, sizeof local);
    is_adopted("a variable of a thread", local);
    left = local;
    dig(9000, 1);
    return argument;
}

static void *digs(void *argument) {
    dig(60000, 5);
    return argument;
}

// What the C library keeps for a thread at the end of its stack.
static void *is_refused(void *argument) {
    HSAKMT_STATUS status = hsaKmtRegisterMemory((void *)pthread_self(), 64);
    if (variables_are_adopted() && status != HSAKMT_STATUS_NOT_SUPPORTED)
        fail("a thread's own data", status, HSAKMT_STATUS_NOT_SUPPORTED);
    if (status == HSAKMT_STATUS_SUCCESS)
        ok("deregister", hsaKmtDeregisterMemory((void *)pthread_self()));
    return argument;
}

// Threads end and others begin on stacks that are registered.
void ends(int rounds) {
    long maps = 0;
    for (int round = -3; round < rounds; round++) {
        if (round == 0)
            maps = mappings();
        pthread_t thread;
        pthread_create(&thread, NULL, leaves, NULL);
        pthread_join(thread, NULL);
        for (int next = 0; next < 2; next++) {
            pthread_create(&thread, NULL, digs, NULL);
            pthread_join(thread, NULL);
        }
        take(left);
        pthread_create(&thread, NULL, digs, NULL);
        pthread_join(thread, NULL);
        pthread_create(&thread, NULL, is_refused, NULL);
        pthread_join(thread, NULL);
    }
    long grown = mappings() - maps;
    if (grown > 4)
        fail("mappings more", grown, 0);
    printf("ends: stacks are used again\n");
}
