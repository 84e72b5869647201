/* What takes the program's heap: a file for programs with a heap of their own. */
#define _GNU_SOURCE
#include <dirent.h>
#include <signal.h>
#include <stddef.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "check.h"

#ifdef OWN_MALLOC
/* The program's heap, for the libraries too: counts its calls. */
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
static volatile unsigned long heap_calls;

/* The last blocks, by the number of the call modulo the length. */
static struct {
    void *block;
    size_t size;
} blocks[1 << 16];

void *malloc(size_t size)
{
    unsigned long call = heap_calls++ % (sizeof blocks / sizeof *blocks);
    blocks[call].size = size;
    return blocks[call].block = __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
    heap_calls++;
    return __libc_calloc(count, size);
}

void *realloc(void *block, size_t size)
{
    heap_calls++;
    return __libc_realloc(block, size);
}

/* What malloc was last asked for when it gave this out. */
static size_t asked_for(void *block)
{
    for (unsigned long back = 1; back <= heap_calls && back <= sizeof blocks / sizeof *blocks; back++) {
        unsigned long call = (heap_calls - back) % (sizeof blocks / sizeof *blocks);
        if (blocks[call].block == block)
            return blocks[call].size;
    }
    return 0;
}

/* A copy of an entry is as long as it says. */
void test_scandir(void)
{
    static const char *const paths[] = {TOPOLOGY, "/sys/class/kfd/kfd", "/usr/share",
                                        "/sys/class/kfd/kfd/../../../../../etc"};
    for (unsigned i = 0; i < sizeof paths / sizeof *paths; i++) {
        struct dirent **entries;
        int count = scandir(paths[i], &entries, NULL, alphasort);
        CHECK(count >= 3 && strcmp(entries[0]->d_name, ".") == 0);
        for (int n = 0; n < count; n++) {
            struct dirent *entry = entries[n];
            size_t used = offsetof(struct dirent, d_name) + strlen(entry->d_name) + 1;
            CHECK(entry->d_reclen >= used && asked_for(entry) >= entry->d_reclen);
            free(entry);
        }
        free(entries);
    }
}

static volatile sig_atomic_t signals;

static void asks(int signal)
{
    (void)signal;
    /* From /usr or another directory of the root's: some that cannot be the service's, and some that only a look at the directory
     * tells from its own. */
    static const char *const paths[] = {"none",           "../none/x",      "../../none",   "x/../../none",
                                        "../dev/none",    "../dev/kfdnone", "dev/none",     "./sys/none",
                                        "x/../dev/kfd",   "../sys/none/kfd", "class/kfd/x", "../sys/class/none/x",
                                        "../x/../dev/no", "kfd"};
    struct stat st;
    char text[8];
    for (unsigned i = 0; i < sizeof paths / sizeof *paths; i++) {
        FAILS(open(paths[i], O_RDONLY), ENOENT);
        FAILS(stat(paths[i], &st), ENOENT);
        FAILS(access(paths[i], R_OK), ENOENT);
        FAILS(readlink(paths[i], text, sizeof text), ENOENT);
    }
    signals++;
}

/* Calls that a handler may make take no heap, and little of a stack that has hardly more than what the kernel needs. */
void test_handlers(void)
{
    size_t frame = getauxval(AT_MINSIGSTKSZ), page = 4096;
    size_t size = ((frame ? frame : 2048) + page + page - 1) / page * page;
    char *area = mmap(NULL, page + size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(area != MAP_FAILED && mprotect(area, page, PROT_NONE) == 0);
    stack_t stack = {.ss_sp = area + page, .ss_size = size};
    CHECK(sigaltstack(&stack, NULL) == 0);
    struct sigaction action = {.sa_handler = asks, .sa_flags = SA_ONSTACK};
    sigaction(SIGUSR1, &action, NULL);
    /* The first time, the dynamic linker may look for functions that are bound late. */
    CHECK(chdir("/usr") == 0);
    asks(0);
    unsigned long before = heap_calls;
    free(malloc(1));
    CHECK(heap_calls == before + 1);
    CHECK(raise(SIGUSR1) == 0 && signals == 2);
    CHECK(heap_calls == before + 1);
    /* The service is still reached that way, and only its own paths take the heap. */
    struct stat st;
    CHECK(stat("../dev/kfd", &st) == 0 && S_ISCHR(st.st_mode) && heap_calls > before + 1);
}
#endif
