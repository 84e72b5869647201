// What the library tells of pointers, and data of the user's that hangs on them.
#include "conform.h"

void section_pointer(void) {
    static const uint32_t kinds[] = {FINE, HOST_ACCESS | AQL, PINNED, DEVICE, VISIBLE, DEVICE | ONLY_ADDRESS};
    static int first, second;
    name("first", &first, sizeof first);
    name("second", &second, sizeof second);
    heading("pointers");
    for (unsigned kind = 0; kind < sizeof kinds / sizeof *kinds; kind++) {
        HSAuint32 node = kinds[kind] & NON_PAGED ? machine.gpu[machine.gpus - 1] : machine.cpu;
        // Interior addresses before the beginning, too (case C05).
        char *a = alloc("a", node, 16 * PAGE, kinds[kind]);
        info(a + 8);
        info(a + 16 * PAGE - 1);
        info(a);
        info(a + 40001);
        info(a + 16 * PAGE);
        info(a - 1);
        user_data(a, &first);
        info(a + 5 * PAGE);
        user_data(a + 1, &second);
        user_data(a + PAGE, &second);
        info(a);
        user_data(a, NULL);
        info(a);
        if (!(kinds[kind] & ONLY_ADDRESS)) {
            map(a, 16 * PAGE);
            info(a + 1);
            unmap(a);
        }
        user_data(a, &second);
        release(a, 16 * PAGE);
        info(a);
        user_data(a, &first);
        forget("a");
    }
    heading("pointers to nothing");
    line("info into NULL = %s", status_name(hsaKmtQueryPointerInfo(&first, NULL)));
    info(NULL);
    info(&first);
    info((void *)0x1234567);
    info((void *)~0ull);
    user_data(NULL, &first);
    user_data(&first, &first);
    forget("first");
    forget("second");
}
