// Memory of the application that is registered and given back while it is in use: nothing that threads write and nothing
// that system calls bring may be lost. Run with VIRTIO_KFD_REGISTER=adopt; natively nothing has to be set.
//
// registration storm ROUNDS | flat ROUNDS [ask] | fork ROUNDS [open] | heap ROUNDS | replaced | access ROUNDS | descriptors ROUNDS | handlers ROUNDS | sizes [MIB] | unfit HOW | refused | bench
// And with VIRTIO_KFD_REGISTER=adopt-variables: locals ROUNDS | growth | data ROUNDS | children ROUNDS | ends ROUNDS | threads ROUNDS
#ifndef PARTS_H
#define PARTS_H

#define _GNU_SOURCE
#include "../kmt.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/wait.h>

#define PAGE 4096ul

// Ends the program with a line that says what was found.
void fail(const char *what, long found, long expected) __attribute__((noreturn));
void ok(const char *what, HSAKMT_STATUS status);

// Memory of the program's own.
char *own(size_t size);
// Registered, and mapped for GPUs; and the other way round.
void given(char *start, size_t size);
void taken(char *start);
void given_and_taken(char *start, size_t size);

// What the process holds: lines of /proc/self/maps, descriptors, KiB of memory.
long mappings(void);
long descriptors(void);
long resident(void);
unsigned random_number(void);
// The exit status of a child, or 1000 and the signal that ended it.
int child_status(pid_t child);
// Whether the mapping at an address is the process's own.
bool is_private(char *address);

// A process that is to debug this one: made before memory is registered, of which it would have to have a copy.
struct debugger {
    pid_t process;
    int begin[2], end[2];
};
struct debugger debugger(void);
// From now on, until that ends.
void debug(struct debugger *it);
void end_debugger(struct debugger *it);

// The parts with files of their own.
void storm(int rounds);
void replaced(void);
void unfit(const char *hold);
void access_taken(int rounds);
void without_descriptors(int rounds);
void handlers(int rounds);
void locals(int rounds);
void growth(void);
void program_data(int rounds);
void children(int rounds);
void ends(int rounds);
void thread_locals(int rounds);
// Whether stacks and the program's data are adopted: natively nothing is.
bool variables_are_adopted(void);

#endif
