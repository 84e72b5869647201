// Access that the application takes away from memory while it is registered, as for guard pages, collectors of garbage
// and stacks that are used again: it stays as the application has set it, and nothing is lost behind it.
#include "parts.h"

#define PAGES 12

// What /proc/self/maps says of each page.
static void permissions(char *memory, char found[PAGES][5]) {
    FILE *maps = fopen("/proc/self/maps", "r");
    unsigned long start, end;
    char line[512], what[5];
    memset(found, 0, PAGES * 5);
    while (fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%lx-%lx %4s", &start, &end, what) != 3)
            continue;
        for (unsigned page = 0; page < PAGES; page++) {
            unsigned long at = (uintptr_t)memory + page * PAGE;
            if (start <= at && at < end)
                memcpy(found[page], what, 5);
        }
    }
    fclose(maps);
}

static const char *letters(int access) {
    return access == PROT_NONE ? "---" : access == PROT_READ ? "r--" : "rw-";
}

// A number of the page that is not as it should be, from 1 on. After it all can be written.
static int differs(char *memory, const int access[PAGES], int salt, bool private) {
    char found[PAGES][5];
    permissions(memory, found);
    for (int page = 0; page < PAGES; page++)
        if (strncmp(found[page], letters(access[page]), 3) || (private && found[page][3] != 'p'))
            return page + 1;
    if (mprotect(memory, PAGES * PAGE, PROT_READ | PROT_WRITE))
        return 100;
    for (int page = 0; page < PAGES; page++)
        for (size_t at = 0; at < PAGE; at += 8)
            if (*(uint64_t *)(memory + page * PAGE + at) != salt * 1000003ul + page * PAGE + at)
                return 200 + page;
    return 0;
}

static void one(char *memory, int round) {
    int access[PAGES];
    for (int page = 0; page < PAGES; page++)
        for (size_t at = 0; at < PAGE; at += 8)
            *(uint64_t *)(memory + page * PAGE + at) = round * 1000003ul + page * PAGE + at;
    // Pages in front of it and behind it are not registered.
    given(memory + PAGE + 100, (PAGES - 2) * PAGE - 200);
    for (int page = 0; page < PAGES; page++) {
        static const int choices[] = {PROT_READ | PROT_WRITE, PROT_READ, PROT_NONE};
        // The first rounds have all of it alike.
        access[page] = choices[round < 3 ? round : (int)(random_number() % 3)];
        if (mprotect(memory + page * PAGE, PAGE, access[page]))
            fail("mprotect", errno, 0);
    }
    pid_t child = fork();
    if (child == 0) {
        alarm(60);
        int difference = differs(memory, access, round, true);
        if (!difference)
            memset(memory, 0xee, PAGES * PAGE);
        _exit(difference);
    }
    int status = child_status(child);
    if (status)
        fail("status of the child", status, 0);
    taken(memory + PAGE + 100);
    int difference = differs(memory, access, round, true);
    if (difference)
        fail("a page", difference, 0);
}

static atomic_bool over;

static void *toggles(void *page) {
    while (!atomic_load(&over)) {
        mprotect(page, PAGE, PROT_NONE);
        mprotect(page, PAGE, PROT_READ | PROT_WRITE);
    }
    return NULL;
}

// Access that changes all the time, while others fork and while it is given back.
static void toggled(char *memory) {
    pthread_t other;
    memset(memory, 4, PAGES * PAGE);
    given(memory, PAGES * PAGE);
    atomic_store(&over, false);
    pthread_create(&other, NULL, toggles, memory + 5 * PAGE);
    for (int number = 0; number < 10; number++) {
        pid_t child = fork();
        if (child == 0) {
            for (size_t at = 0; at < PAGES * PAGE; at++)
                if (at / PAGE != 5 && memory[at] != 4)
                    _exit(1);
            _exit(0);
        }
        int status = child_status(child);
        if (status)
            fail("status of the child", status, 0);
    }
    taken(memory);
    atomic_store(&over, true);
    pthread_join(other, NULL);
    for (size_t at = 0; at < PAGES * PAGE; at++)
        if (memory[at] != 4)
            fail("a byte", memory[at], 4);
    // Where it could not be given back in the middle of a change, the next call does it.
    char *next = own(PAGE);
    given_and_taken(next, PAGE);
    munmap(next, PAGE);
    if (!is_private(memory) || !is_private(memory + 5 * PAGE))
        fail("private memory in the end", 0, 1);
}

void access_taken(int rounds) {
    static char data[(PAGES + 1) * PAGE] = {1};
    char *memory = own(PAGES * PAGE), *within = (char *)(((uintptr_t)data + PAGE - 1) & -PAGE);
    for (int round = 0; round < rounds; round++) {
        one(memory, round);
        if (variables_are_adopted())
            one(within, round);
        toggled(memory);
    }
    munmap(memory, PAGES * PAGE);
    printf("access: it stays as the application set it\n");
}
