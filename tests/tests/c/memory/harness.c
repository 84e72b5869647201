// Requests to the harness.
#include "harness.h"

// What the process is called in its requests: chosen at random, found by the harness in the memory that it names.
static char token[40];

static void ask(char *line_of_it, size_t length, const char *format, ...) {
    char request[512];
    va_list list;
    va_start(list, format);
    vsnprintf(request, sizeof request, format, list);
    va_end(list);
    line("%s", request);
    // Byte by byte: a child of this process may read the next line.
    for (size_t done = 0; done < length; done++) {
        if (read(STDIN_FILENO, line_of_it + done, 1) != 1)
            give_up("no answer to %s", request);
        if (line_of_it[done] == '\n') {
            line_of_it[done] = 0;
            return;
        }
    }
    give_up("an answer that is too long to %s", request);
}

void meet(void) {
    char answer[512];
    uint64_t random[2];
    FILE *source = fopen("/dev/urandom", "r");
    if (!source || fread(random, sizeof random, 1, source) != 1)
        give_up("/dev/urandom");
    fclose(source);
    uint64_t *page = quiet_alloc(machine.cpu, PAGE, FINE);
    quiet_map(page, PAGE);
    memcpy(page, random, sizeof random);
    snprintf(token, sizeof token, "%016lx%016lx", (unsigned long)random[0], (unsigned long)random[1]);
    ask(answer, sizeof answer, "@meet %s %u %#lx", token, machine.gpu_id[0], (unsigned long)page);
    if (strcmp(answer, "met"))
        give_up("the harness: %s", answer);
    if (hsaKmtUnmapMemoryToGPU(page) != HSAKMT_STATUS_SUCCESS)
        give_up("unmap");
    quiet_free(page, PAGE);
}

// "same", "fault ...", "differs at ...", "done".
static void gpu(char *answer, size_t length, const char *what, unsigned number, const void *address, uint64_t size,
                uint32_t seed) {
    ask(answer, length, "@%s %s %u %#lx %#lx %u", what, token, machine.gpu_id[number], (unsigned long)address,
        (unsigned long)size, seed);
}

void gpu_sees(unsigned number, const void *address, uint64_t length, uint32_t seed) {
    char answer[512];
    gpu(answer, sizeof answer, "check", number, address, length, seed);
    line("gpu %u reads %#lx bytes of %s: %s", number, (unsigned long)length, at(address), answer);
}

void gpu_writes(unsigned number, void *address, uint64_t length, uint32_t seed) {
    char answer[512];
    gpu(answer, sizeof answer, "fill", number, address, length, seed);
    line("gpu %u writes %#lx bytes of %s: %s", number, (unsigned long)length, at(address), answer);
}

bool gpu_has(unsigned number, const void *address, uint64_t length, uint32_t seed) {
    char answer[512];
    gpu(answer, sizeof answer, "check", number, address, length, seed);
    return !strcmp(answer, "same");
}

bool gpu_put(unsigned number, void *address, uint64_t length, uint32_t seed) {
    char answer[512];
    gpu(answer, sizeof answer, "fill", number, address, length, seed);
    return !strcmp(answer, "done");
}

bool gpu_faults(unsigned number, const void *address) {
    char answer[512];
    gpu(answer, sizeof answer, "check", number, address, 1, 0);
    return !strncmp(answer, "fault", 5);
}

uint8_t pattern(uint32_t seed, uint64_t number) {
    return (uint8_t)(seed * 37 + number * 11 + (number >> 8) * 5 + (number >> 12) * 3 + (number >> 20) * 7 + 1);
}

void cpu_writes(void *address, uint64_t length, uint32_t seed) {
    volatile uint8_t *bytes = address;
    for (uint64_t number = 0; number < length; number++)
        bytes[number] = pattern(seed, number);
}

bool cpu_has(const void *address, uint64_t length, uint32_t seed) {
    const volatile uint8_t *bytes = address;
    for (uint64_t number = 0; number < length; number++)
        if (bytes[number] != pattern(seed, number))
            return false;
    return true;
}

void cpu_sees(const void *address, uint64_t length, uint32_t seed) {
    line("cpu reads %#lx bytes of %s: %s", (unsigned long)length, at(address),
         cpu_has(address, length, seed) ? "same" : "differs");
}

uint64_t wait_for(const char *what) {
    char answer[512];
    ask(answer, sizeof answer, "@wait %s", what);
    return strtoull(answer, NULL, 10);
}
