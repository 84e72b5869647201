// Forks, and memory that is given back, where the process has no descriptor left, and where it has closed those that it does
// not know or has others under their numbers; and where what the library keeps cannot be emptied, since all is locked.
#include "parts.h"

#include <sys/ioctl.h>
#include <sys/resource.h>

#define PAGES 8

#define LIMIT 128

// All that the process may have are taken, or these are given back.
static void permit_descriptors(bool any) {
    static int taken_ones[LIMIT], count;
    static struct rlimit before;
    struct rlimit limit;
    if (!before.rlim_cur && getrlimit(RLIMIT_NOFILE, &before))
        fail("getrlimit", errno, 0);
    limit = before;
    if (!any)
        limit.rlim_cur = LIMIT;
    if (setrlimit(RLIMIT_NOFILE, &limit))
        fail("setrlimit", errno, 0);
    while (any && count > 0)
        close(taken_ones[--count]);
    while (!any && count < LIMIT && (taken_ones[count] = open("/dev/null", O_RDONLY)) >= 0)
        count++;
    if (!any && errno != EMFILE)
        fail("open", errno, EMFILE);
}

static void fill(char *memory, int salt) {
    for (size_t at = 0; at < PAGES * PAGE; at += 8)
        *(uint64_t *)(memory + at) = salt * 1000003ul + at;
}

static bool is_filled(char *memory, int salt) {
    for (size_t at = 0; at < PAGES * PAGE; at += 8)
        if (*(uint64_t *)(memory + at) != salt * 1000003ul + at)
            return false;
    return true;
}

// A child that has a copy, and changes nothing of its parent's; its status.
static int forked(char *memory, int salt) {
    pid_t child = fork();
    if (child == 0) {
        alarm(60);
        // Fails where it has no memory, which the next access finds.
        mprotect(memory, PAGES * PAGE, PROT_READ | PROT_WRITE);
        if (!is_filled(memory, salt))
            _exit(2);
        memset(memory, 0xee, PAGES * PAGE);
        _exit(0);
    }
    if (child < 0)
        fail("fork", errno, 0);
    return child_status(child);
}

static void given_back(char *memory, int salt) {
    taken(memory + PAGE);
    permit_descriptors(true);
    if (!is_private(memory + PAGE))
        fail("private memory in the end", 0, 1);
    if (!is_filled(memory, salt))
        fail("content", 0, 1);
}

// The limit is reached. One page may not be read meanwhile.
static void none_left(char *memory, int salt) {
    fill(memory, salt);
    given(memory + PAGE, (PAGES - 2) * PAGE);
    if (mprotect(memory + 3 * PAGE, PAGE, PROT_NONE))
        fail("mprotect", errno, 0);
    permit_descriptors(false);
    int status = forked(memory, salt);
    if (status)
        fail("status of a child", status, 0);
    if (mprotect(memory + 3 * PAGE, PAGE, PROT_READ | PROT_WRITE))
        fail("mprotect", errno, 0);
    if (!is_filled(memory, salt))
        fail("the parent's content", 0, 1);
    given_back(memory, salt);
}

static __attribute__((noinline)) void none_left_for_variables(int salt) {
    volatile uint64_t local[2 * PAGE / 8];
    for (unsigned at = 0; at < 2 * PAGE / 8; at++)
        local[at] = salt + at;
    given((char *)local, sizeof local);
    permit_descriptors(false);
    pid_t child = fork();
    if (child == 0) {
        for (unsigned at = 0; at < 2 * PAGE / 8; at++)
            if (local[at] != salt + at)
                _exit(2);
        local[5] = 0;
        _exit(0);
    }
    int status = child_status(child);
    if (status)
        fail("status of a child", status, 0);
    taken((char *)local);
    permit_descriptors(true);
    for (unsigned at = 0; at < 2 * PAGE / 8; at++)
        if (local[at] != salt + at)
            fail("a word", local[at], salt + at);
}

// What else has files of this process's in /proc open: none natively. They are closed, or another file is put there.
static int close_unknown(int other, int numbers[], int most) {
    int count = 0;
    char expected[2][64], link[64], found[64];
    snprintf(expected[0], sizeof expected[0], "/proc/%d/maps", getpid());
    snprintf(expected[1], sizeof expected[1], "/proc/%d/task", getpid());
    for (int number = 3; number < 1024; number++) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", number);
        ssize_t length = readlink(link, found, sizeof found - 1);
        found[length < 0 ? 0 : length] = 0;
        if (strcmp(found, expected[0]) && strcmp(found, expected[1]))
            continue;
        if (count < most)
            numbers[count++] = number;
        if (other < 0 ? close(number) : dup2(other, number) != number)
            fail("close", errno, 0);
    }
    return count;
}

static void closed(char *memory, int salt) {
    int numbers[8], ends[2], waiting = 0;
    fill(memory, salt);
    given(memory + PAGE, (PAGES - 2) * PAGE);
    if (pipe(ends) || write(ends[1], "content", 7) != 7)
        fail("pipe", errno, 0);
    int count = close_unknown(ends[0], numbers, 8);
    int status = forked(memory, salt);
    if (status)
        fail("status of a child", status, 0);
    given_back(memory, salt);
    if (ioctl(ends[0], FIONREAD, &waiting) || waiting != 7)
        fail("bytes in a pipe", waiting, 7);
    for (int index = 0; index < count; index++)
        if (close(numbers[index]))
            fail("a descriptor of the program's", errno, 0);
    close(ends[0]);
    close(ends[1]);
    // And there is no other.
    given(memory + PAGE, (PAGES - 2) * PAGE);
    bool adopted = !is_private(memory + PAGE);
    count = close_unknown(-1, numbers, 8);
    if (adopted != (count > 0))
        fail("descriptors of /proc", count, adopted);
    permit_descriptors(false);
    status = forked(memory, salt);
    // A child cannot have a copy then, and ends before it does something else.
    int expected = !adopted ? 0 : variables_are_adopted() ? 1000 + SIGKILL : 1000 + SIGSEGV;
    if (status != expected)
        fail("status of a child", status, expected);
    if (!is_filled(memory, salt))
        fail("the parent's content", 0, 1);
    permit_descriptors(true);
    status = forked(memory, salt);
    if (status)
        fail("status of a child", status, 0);
    given_back(memory, salt);
}

// A fork under a debugger has its copies made before, where what was there is kept. If that is locked, it has them for good.
static void locked(char *memory, int salt) {
    struct debugger it = debugger();
    fill(memory, salt);
    given(memory + PAGE, (PAGES - 2) * PAGE);
    // The pages that are there: all of them would be more than the machine has.
    if (mlockall(MCL_CURRENT | MCL_ONFAULT)) {
        fprintf(stderr, "SKIP: mlockall: %s\n", strerror(errno));
    } else {
        debug(&it);
        int status = forked(memory, salt);
        if (status)
            fail("status of a child under a debugger", status, 0);
    }
    end_debugger(&it);
    memset(memory, 0, PAGES * PAGE);
    taken(memory + PAGE);
    munlockall();
    for (size_t at = 0; at < PAGES * PAGE; at++)
        if (memory[at])
            fail("a byte", memory[at], 0);
}

void without_descriptors(int rounds) {
    char *memory = own(PAGES * PAGE);
    for (int round = 0; round < rounds; round++) {
        none_left(memory, round);
        if (variables_are_adopted())
            none_left_for_variables(round);
        closed(memory, round);
        locked(memory, round);
    }
    munmap(memory, PAGES * PAGE);
    printf("descriptors: none is needed\n");
}
