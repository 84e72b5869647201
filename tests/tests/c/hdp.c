// The page of HDP flush registers. What the registers hold a GPU says, which copies it to host memory (SDMA, packet COPY
// linear of vega10_sdma_pkt_open.h), since a CPU that loads from a flush register learns nothing.
//
//   hdp            stores of all sizes, by several threads, and faults that are none of the library's
//   hdp default    ends by the program's own SIGSEGV, which nothing handles
//   hdp ignored    ends by it although the program ignores SIGSEGV
//   hdp cost N     prints the time of N flushes
#include "kmt.h"

#include <emmintrin.h>
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/time.h>

#define PAGE 4096u
#define THREADS 4
#define STORES 100
#define PATIENCE_S 60
#define TICKS 50

static volatile uint32_t *page;
static int gpu;

// A ring of SDMA packets, and words that the GPU writes.
static uint32_t *ring, *words;
static HsaQueueResource queue;
static uint64_t written;

static void put(uint32_t word) {
    ring[written / 4 % (PAGE / 4)] = word;
    written += 4;
}

static void put_address(const volatile void *address) {
    put((uint32_t)(uintptr_t)address);
    put((uint32_t)((uintptr_t)address >> 32));
}

static void copy(const volatile void *from, volatile void *to, uint32_t bytes) {
    put(1);
    put(bytes - 1);
    put(0);
    put_address(from);
    put_address(to);
}

// Rings for what was put, and waits for a FENCE behind it.
static void run(void) {
    static uint32_t number;
    put(5);
    put_address(words + 16);
    put(++number);
    __atomic_store_n(queue.Queue_write_ptr_aql, written, __ATOMIC_RELEASE);
    __atomic_store_n(queue.Queue_DoorBell_aql, written, __ATOMIC_RELEASE);
    double begin = now();
    while (__atomic_load_n(words + 16, __ATOMIC_ACQUIRE) != number) {
        if (now() - begin > PATIENCE_S) {
            puts("the GPU does not answer");
            exit(1);
        }
        sched_yield();
    }
}

// What the GPU reads from the two registers; they are zero afterwards.
static void registers(const char *what) {
    words[0] = words[1] = 0xdead;
    words[2] = words[3] = 0;
    copy(page, words, 8);
    copy(words + 2, page, 8);
    run();
    printf("%s: memory %d, registers %d\n", what, words[0] != 0, words[1] != 0);
    fflush(stdout);
}

static void *stores(void *unused) {
    for (int i = 0; i < STORES; i++)
        page[0] = 1;
    return unused;
}

static volatile sig_atomic_t faults;
static sigjmp_buf again;
static void *fault;

// A page that can only be read, and what a load that faults does not reach.
static volatile char *own;
static volatile int done;

// A handler of a timer's: the store may interrupt another one.
static volatile sig_atomic_t ticks;

static void tick(int signal) {
    (void)signal;
    int before = errno;
    page[1] = 1;
    errno = before;
    ticks++;
}

// Stores until the handler has run so often; the timer starts anew only then, so that this goes on however slow stores are.
static void stores_amid_signals(void) {
    struct itimerval once = {{0, 0}, {0, 300}};
    signal(SIGALRM, tick);
    for (int started = 0; ticks < TICKS; page[0] = 1)
        if (ticks == started) {
            started++;
            setitimer(ITIMER_REAL, &once, NULL);
        }
}

static void with_info(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)context;
    faults++;
    fault = info->si_addr;
    siglongjmp(again, 1);
}

static void without_info(int signal) {
    (void)signal;
    faults++;
    siglongjmp(again, 1);
}

static void handle(void (*with)(int, siginfo_t *, void *), void (*without)(int), int flags) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_flags = flags;
    if (with)
        action.sa_sigaction = with;
    else
        action.sa_handler = without;
    sigaction(SIGSEGV, &action, NULL);
}

static void find_page(void) {
    HsaNodeProperties node;
    HsaMemoryProperties banks[16];
    gpu = start();
    need("node properties", hsaKmtGetNodeProperties(gpu, &node));
    need("memory properties", hsaKmtGetNodeMemoryProperties(gpu, node.NumMemoryBanks, banks));
    for (HSAuint32 i = 0; i < node.NumMemoryBanks && i < 16; i++)
        if (banks[i].HeapType == HSA_HEAPTYPE_MMIO_REMAP) {
            printf("a page of %llu bytes\n", (unsigned long long)banks[i].SizeInBytes);
            page = (volatile uint32_t *)(uintptr_t)banks[i].VirtualBaseAddress;
        }
    if (!page) {
        puts("no page of registers");
        exit(1);
    }
    fflush(stdout);
}

static void cost(int count) {
    double begin = now();
    for (int i = 0; i < count; i++)
        page[0] = 1;
    printf("%.1f us for each of %d flushes\n", (now() - begin) / count * 1e6, count);
}

int main(int count, char **arguments) {
    const char *what = count > 1 ? arguments[1] : "";
    pthread_t threads[THREADS];
    own = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (!strcmp(what, "ignored"))
        signal(SIGSEGV, SIG_IGN);
    else if (!*what)
        handle(with_info, NULL, SA_SIGINFO);
    find_page();
    if (!strcmp(what, "cost")) {
        cost(count > 2 ? atoi(arguments[2]) : 1000);
        return 0;
    }
    if (*what) {
        page[0] = 1;
        if (!strcmp(what, "ignored"))
            kill(getpid(), SIGSEGV);
        puts("and now a fault");
        fflush(stdout);
        own[0] = 1;
        return 0;
    }
    ring = host_memory(PAGE);
    words = host_memory(PAGE);
    need("create a queue", hsaKmtCreateQueue(gpu, HSA_QUEUE_SDMA, 100, HSA_QUEUE_PRIORITY_NORMAL, ring, PAGE, NULL, &queue));

    registers("at first");
    page[0] = 1;
    registers("a word");
    page[1] = 1;
    registers("the other word");
    ((volatile uint8_t *)page)[0] = 1;
    registers("a byte");
    ((volatile uint16_t *)page)[2] = 1;
    registers("a half word");
    *(volatile uint64_t *)page = 0x100000001;
    registers("a double word");
    _mm_stream_si32((int *)page, 1);
    registers("a word past the caches");
    _mm_storeu_si128((__m128i *)page, _mm_set1_epi32(1));
    registers("a vector");
    __atomic_store_n(page + 1, 1, __ATOMIC_SEQ_CST);
    registers("an atomic store");
    printf("an exchange gives %u\n", __atomic_exchange_n(page, 1, __ATOMIC_SEQ_CST));
    registers("an exchange");
    page[2] = page[1023] = 1;
    registers("behind them");
    errno = 5;
    page[0] = 1;
    printf("errno is kept: %d\n", errno == 5);
    for (int i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, stores, NULL);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    registers("many threads");
    stores_amid_signals();
    registers("signals");

    // The program's handlers, in place before the page was there, and after.
    if (!sigsetjmp(again, 1))
        own[3] = 1;
    printf("a fault of the program's own: %d, at its place: %d\n", (int)faults, fault == (void *)(own + 3));
    if (!sigsetjmp(again, 1))
        done = *(volatile int *)8 + 1;
    printf("another: %d, at its place: %d\n", (int)faults, fault == (void *)8);
    page[0] = 1;
    registers("between them");
    struct sigaction ours;
    sigaction(SIGSEGV, NULL, &ours);
    handle(NULL, without_info, 0);
    if (!sigsetjmp(again, 1))
        own[5] = 1;
    printf("with a later handler: %d\n", (int)faults);
    sigaction(SIGSEGV, &ours, NULL);
    page[1] = 1;
    registers("afterwards");
    if (!sigsetjmp(again, 1))
        own[7] = 1;
    printf("one more: %d %d\n", (int)faults, done);

    need("destroy the queue", hsaKmtDestroyQueue(queue.QueueId));
    say("close", hsaKmtCloseKFD());
    return 0;
}
