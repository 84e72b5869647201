/* Exercises the front end from C, as programs call it. Run as `check CASE` with the fixture preloaded. */
#define _GNU_SOURCE
#include "check.h"

static const struct {
    const char *name;
    void (*run)(void);
} cases[] = {
    {"device", test_device},   {"mmap", test_mmap},       {"copies", test_copies},
    {"escapes", test_escapes}, {"files", test_files},     {"directories", test_directories},
    {"errno", test_errno},     {"fork", test_fork},       {"signals", test_signals},
    {"threads", test_threads}, {"blocking", test_blocking}, {"panic", test_panic},
    {"reentry", test_reentry}, {"failed", test_failed},   {"popen", test_popen}, {"early", test_early},
    {"shared", test_shared},   {"ways", test_ways},       {"vfork", test_vfork},
    {"vfork_first", test_vfork_first}, {"cancellation", test_cancellation},
#ifdef OWN_MALLOC
    {"handlers", test_handlers}, {"scandir", test_scandir},
#endif
};

int main(int argc, char **argv)
{
    for (unsigned i = 0; argc == 2 && i < sizeof cases / sizeof *cases; i++) {
        if (strcmp(argv[1], cases[i].name) == 0) {
            cases[i].run();
            return 0;
        }
    }
    fprintf(stderr, "usage: %s CASE\n", *argv);
    return 2;
}
