// What the kernel lets a program do with a piece of its memory, one line for each system call: the question, then "ok",
// the name of the errno, or what else was seen. The same questions to ordinary memory give what bare metal answers.
#ifndef SYSCALLS_H
#define SYSCALLS_H

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <linux/io_uring.h>
#include <linux/userfaultfd.h>
#include <netinet/in.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096ul
// Each question has pages of its own, so that none sees what another left.
#define PART (16 * PAGE)
#define SUBJECT_SIZE (64 * PART)

static inline void fill(unsigned char *at, size_t size, unsigned seed) {
    for (size_t i = 0; i < size; i++) at[i] = (unsigned char)(seed + i * 7 + i / 251);
}

static inline bool filled(const unsigned char *at, size_t size, unsigned seed) {
    for (size_t i = 0; i < size; i++)
        if (at[i] != (unsigned char)(seed + i * 7 + i / 251)) return false;
    return true;
}

static inline const char *error_name(int error) {
    const char *name = strerrorname_np(error);
    return name ? name : "?";
}

// The answer to a call that returns a length or -1.
static inline const char *answer(ssize_t result, size_t expected, bool right) {
    if (result < 0) return error_name(errno);
    if ((size_t)result != expected) return "short";
    return right ? "ok" : "wrong data";
}

static inline void say_that(const char *question, const char *result) {
    printf("%s: %s\n", question, result);
    fflush(stdout);
}

static inline unsigned char *ordinary(size_t size) {
    unsigned char *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) {
        perror("mmap");
        _exit(1);
    }
    return at;
}

// ---------------------------------------------------------------- copies by the kernel

static inline const char *ask_read(unsigned char *at) {
    char name[] = "/tmp/syscalls-XXXXXX";
    int file = mkstemp(name);
    unlink(name);
    unsigned char *other = ordinary(PART);
    fill(other, PART, 1);
    if (pwrite(file, other, PART, 0) != (ssize_t)PART) return "no file";
    ssize_t result = pread(file, at, PART, 0);
    const char *is = answer(result, PART, result < 0 || filled(at, PART, 1));
    close(file);
    munmap(other, PART);
    return is;
}

static inline const char *ask_write(unsigned char *at) {
    char name[] = "/tmp/syscalls-XXXXXX";
    int file = mkstemp(name);
    unlink(name);
    unsigned char *other = ordinary(PART);
    fill(at, PART, 2);
    ssize_t result = pwrite(file, at, PART, 0);
    if (result > 0 && pread(file, other, PART, 0) != (ssize_t)PART) return "no file";
    const char *is = answer(result, PART, result < 0 || filled(other, PART, 2));
    close(file);
    munmap(other, PART);
    return is;
}

static inline const char *ask_datagram(unsigned char *at) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_DGRAM, 0, pair)) return "no sockets";
    unsigned char *other = ordinary(PAGE);
    fill(other, PAGE, 3);
    if (send(pair[0], other, PAGE, 0) != (ssize_t)PAGE) return "no send";
    struct iovec piece = {at, PAGE};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1};
    ssize_t result = recvmsg(pair[1], &message, MSG_DONTWAIT);
    const char *is = answer(result, PAGE, result < 0 || filled(at, PAGE, 3));
    close(pair[0]);
    close(pair[1]);
    munmap(other, PAGE);
    return is;
}

// ---------------------------------------------------------------- direct I/O: the kernel pins the pages

static inline const char *ask_direct_write(unsigned char *at, const char *device) {
    int file = open(device, O_RDWR | O_DIRECT);
    if (file < 0) return "no block device";
    unsigned char *other = ordinary(PART);
    fill(at, PART, 4);
    ssize_t result = pwrite(file, at, PART, 0);
    if (result > 0 && pread(file, other, PART, 0) != (ssize_t)PART) return "no device";
    const char *is = answer(result, PART, result < 0 || filled(other, PART, 4));
    close(file);
    munmap(other, PART);
    return is;
}

static inline const char *ask_direct_read(unsigned char *at, const char *device) {
    int file = open(device, O_RDWR | O_DIRECT);
    if (file < 0) return "no block device";
    unsigned char *other = ordinary(PART);
    fill(other, PART, 5);
    if (pwrite(file, other, PART, 0) != (ssize_t)PART) return "no device";
    ssize_t result = pread(file, at, PART, 0);
    const char *is = answer(result, PART, result < 0 || filled(at, PART, 5));
    close(file);
    munmap(other, PART);
    return is;
}

// One request through a ring of its own. 0 or a length, or a negative errno.
static inline int ring_request(struct io_uring_sqe request, struct iovec *registered) {
    struct io_uring_params parameters = {0};
    int ring = (int)syscall(SYS_io_uring_setup, 4, &parameters);
    if (ring < 0) return -errno;
    size_t length = parameters.sq_off.array + parameters.sq_entries * sizeof(unsigned);
    size_t answers = parameters.cq_off.cqes + parameters.cq_entries * sizeof(struct io_uring_cqe);
    if (answers > length) length = answers;
    char *queue = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQ_RING);
    struct io_uring_sqe *entries =
        mmap(NULL, parameters.sq_entries * sizeof *entries, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQES);
    int result = -EIO;
    if (queue != MAP_FAILED && entries != MAP_FAILED) {
        result = 0;
        if (registered && syscall(SYS_io_uring_register, ring, IORING_REGISTER_BUFFERS, registered, 1) < 0)
            result = -errno;
        if (!result) {
            entries[0] = request;
            unsigned *tail = (unsigned *)(queue + parameters.sq_off.tail);
            unsigned mask = *(unsigned *)(queue + parameters.sq_off.ring_mask);
            ((unsigned *)(queue + parameters.sq_off.array))[*tail & mask] = 0;
            __atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
            if (syscall(SYS_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) < 0) result = -errno;
            else result = ((struct io_uring_cqe *)(queue + parameters.cq_off.cqes))[0].res;
        }
        munmap(queue, length);
        munmap(entries, parameters.sq_entries * sizeof *entries);
    }
    close(ring);
    return result;
}

static inline const char *ask_ring(unsigned char *at, const char *path, int flags, bool registered) {
    char name[] = "/tmp/syscalls-XXXXXX";
    int file = path ? open(path, O_RDWR | flags) : mkstemp(name);
    if (file < 0) return "no block device";
    if (!path) unlink(name);
    unsigned char *other = ordinary(PART);
    fill(other, PART, 6);
    if (pwrite(file, other, PART, 0) != (ssize_t)PART) return "no device";
    struct iovec piece = {at, PART};
    struct io_uring_sqe request = {
        .opcode = registered ? IORING_OP_READ_FIXED : IORING_OP_READ, .fd = file, .addr = (uintptr_t)at, .len = PART};
    int result = ring_request(request, registered ? &piece : NULL);
    if (result < 0) errno = -result;
    const char *is = answer(result < 0 ? -1 : result, PART, result < 0 || filled(at, PART, 6));
    close(file);
    munmap(other, PART);
    return is;
}

// ---------------------------------------------------------------- other calls that pin or look up pages

static inline const char *ask_vm_read(unsigned char *at) {
    unsigned char *other = ordinary(PART);
    fill(at, PART, 7);
    struct iovec to = {other, PART}, from = {at, PART};
    ssize_t result = process_vm_readv(getpid(), &to, 1, &from, 1, 0);
    const char *is = answer(result, PART, result < 0 || filled(other, PART, 7));
    munmap(other, PART);
    return is;
}

static inline const char *ask_vm_write(unsigned char *at) {
    unsigned char *other = ordinary(PART);
    fill(other, PART, 8);
    struct iovec from = {other, PART}, to = {at, PART};
    ssize_t result = process_vm_writev(getpid(), &from, 1, &to, 1, 0);
    const char *is = answer(result, PART, result < 0 || filled(at, PART, 8));
    munmap(other, PART);
    return is;
}

static inline const char *ask_vm_read_into(unsigned char *at) {
    unsigned char *other = ordinary(PART);
    fill(other, PART, 9);
    struct iovec to = {at, PART}, from = {other, PART};
    ssize_t result = process_vm_readv(getpid(), &to, 1, &from, 1, 0);
    const char *is = answer(result, PART, result < 0 || filled(at, PART, 9));
    munmap(other, PART);
    return is;
}

static inline const char *ask_vmsplice(unsigned char *at) {
    int ends[2];
    if (pipe(ends)) return "no pipe";
    unsigned char *other = ordinary(PAGE);
    fill(at, PAGE, 10);
    struct iovec piece = {at, PAGE};
    ssize_t result = vmsplice(ends[1], &piece, 1, 0);
    const char *is = result < 0 ? error_name(errno) : NULL;
    if (!is) is = answer(read(ends[0], other, PAGE), PAGE, true);
    if (result > 0 && !filled(other, PAGE, 10)) is = "wrong data";
    close(ends[0]);
    close(ends[1]);
    munmap(other, PAGE);
    return is;
}

// Needs the loop-back interface.
static inline const char *ask_zerocopy(unsigned char *at) {
    int listener = socket(AF_INET, SOCK_STREAM, 0), sender = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 1) ||
        getsockname(listener, (struct sockaddr *)&address, &length) ||
        connect(sender, (struct sockaddr *)&address, sizeof address))
        return "no loop-back interface";
    int receiver = accept(listener, NULL, NULL);
    if (setsockopt(sender, SOL_SOCKET, SO_ZEROCOPY, &one, sizeof one)) return "no zero-copy";
    unsigned char *other = ordinary(PART);
    fill(at, PART, 12);
    ssize_t result = send(sender, at, PART, MSG_ZEROCOPY);
    const char *is = result < 0 ? error_name(errno) : answer(recv(receiver, other, PART, MSG_WAITALL), PART, true);
    if (result > 0 && !filled(other, PART, 12)) is = "wrong data";
    close(sender);
    close(receiver);
    close(listener);
    munmap(other, PART);
    return is;
}

// A wait on a word that has another value answers EAGAIN at once if the kernel can name the word at all.
static inline const char *ask_futex(unsigned char *at, int flag) {
    uint32_t *word = (uint32_t *)at;
    *word = 1;
    struct timespec none = {0, 0};
    if (syscall(SYS_futex, word, FUTEX_WAIT | flag, 2, &none, NULL, 0) < 0 && errno == EAGAIN) return "ok";
    return error_name(errno);
}

static inline const char *ask_userfaultfd(unsigned char *at) {
    int fault = (int)syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY);
    struct uffdio_api api = {.api = UFFD_API};
    if (fault < 0 || ioctl(fault, UFFDIO_API, &api)) return "no userfaultfd";
    struct uffdio_register range = {
        .range = {(uintptr_t)at, PART}, .mode = UFFDIO_REGISTER_MODE_MISSING};
    const char *is = ioctl(fault, UFFDIO_REGISTER, &range) ? error_name(errno) : "ok";
    close(fault);
    return is;
}

static inline const char *ask_node_of_page(unsigned char *at) {
    void *page = at;
    int status = -ENOSYS;
    at[0] = 1;
    if (syscall(SYS_move_pages, 0, 1ul, &page, NULL, &status, 0) < 0) return error_name(errno);
    return status >= 0 ? "ok" : error_name(-status);
}

// ---------------------------------------------------------------- the mapping itself

static inline const char *ask_advice(unsigned char *at, int advice) {
    return madvise(at, PART, advice) ? error_name(errno) : "ok";
}

// What is there after pages were given back.
static inline const char *ask_give_back(unsigned char *at, int advice) {
    fill(at, PART, 13);
    if (madvise(at, PART, advice)) return filled(at, PART, 13) ? error_name(errno) : "an error, and the data is gone";
    return filled(at, PART, 13) ? "ok, the data stays" : at[PART - 1] == 0 ? "ok, zeros" : "wrong data";
}

static inline const char *ask_protect(unsigned char *at) {
    fill(at, PART, 14);
    if (mprotect(at, PART, PROT_READ) || mprotect(at, PART, PROT_READ | PROT_WRITE)) return error_name(errno);
    at[0] = (unsigned char)14;
    return filled(at, PART, 14) ? "ok" : "wrong data";
}

static inline const char *ask_lock(unsigned char *at) {
    if (mlock(at, PART)) return error_name(errno);
    munlock(at, PART);
    return "ok";
}

static inline const char *ask_resident(unsigned char *at) {
    unsigned char present[PART / PAGE];
    fill(at, PART, 15);
    if (mincore(at, PART, present)) return error_name(errno);
    for (unsigned i = 0; i < PART / PAGE; i++)
        if (!(present[i] & 1)) return "not resident";
    return "ok";
}

static inline const char *ask_move(unsigned char *at) {
    fill(at, PART, 16);
    unsigned char *place = ordinary(PART);
    unsigned char *moved = mremap(at, PART, PART, MREMAP_MAYMOVE | MREMAP_FIXED, place);
    if (moved == MAP_FAILED) return error_name(errno);
    bool right = filled(moved, PART, 16);
    // Back, so that the owner's munmap finds it.
    if (mremap(moved, PART, PART, MREMAP_MAYMOVE | MREMAP_FIXED, at) == MAP_FAILED) return "cannot be moved back";
    return right ? "ok" : "wrong data";
}

// At the end of the memory there is room to grow only elsewhere.
static inline const char *ask_grow(unsigned char *at) {
    unsigned char *grown = mremap(at, PART, 2 * PART, MREMAP_MAYMOVE);
    if (grown == MAP_FAILED) return error_name(errno);
    if (mremap(grown, 2 * PART, PART, 0) == MAP_FAILED) return "cannot shrink";
    if (grown != at && mremap(grown, PART, PART, MREMAP_MAYMOVE | MREMAP_FIXED, at) == MAP_FAILED)
        return "cannot be moved back";
    return "ok";
}

// ---------------------------------------------------------------- other processes

// The answer of a child that exits with an errno, 0, or 255 for wrong data.
static inline const char *child_says(pid_t child) {
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child) return "no child";
    if (WIFSIGNALED(status)) return "killed";
    int code = WEXITSTATUS(status);
    return code == 0 ? "ok" : code == 255 ? "wrong data" : error_name(code);
}

static inline const char *ask_proc_mem(unsigned char *at) {
    fill(at, PAGE, 17);
    unsigned char *other = ordinary(PAGE);
    int memory = open("/proc/self/mem", O_RDWR);
    ssize_t result = pread(memory, other, PAGE, (off_t)(uintptr_t)at);
    const char *is = answer(result, PAGE, result < 0 || filled(other, PAGE, 17));
    close(memory);
    munmap(other, PAGE);
    return is;
}

static inline const char *ask_other_process(unsigned char *at) {
    fill(at, PAGE, 18);
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
    pid_t parent = getpid(), child = fork();
    if (child == 0) {
        unsigned char *other = ordinary(PAGE);
        struct iovec to = {other, PAGE}, from = {at, PAGE};
        if (process_vm_readv(parent, &to, 1, &from, 1, 0) < 0) _exit(errno);
        _exit(filled(other, PAGE, 18) ? 0 : 255);
    }
    return child_says(child);
}

static inline const char *ask_debugger(unsigned char *at) {
    fill(at, PAGE, 19);
    long word;
    memcpy(&word, at, sizeof word);
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
    pid_t parent = getpid(), child = fork();
    if (child == 0) {
        int status;
        if (ptrace(PTRACE_ATTACH, parent, NULL, NULL)) _exit(errno);
        if (waitpid(parent, &status, __WALL) != parent) _exit(254);
        errno = 0;
        long seen = ptrace(PTRACE_PEEKDATA, parent, at, NULL);
        int error = errno;
        ptrace(PTRACE_DETACH, parent, NULL, NULL);
        _exit(error ? error : seen == word ? 0 : 255);
    }
    return child_says(child);
}

// Whether a child of fork has it, and whether it is the same memory.
static inline const char *ask_fork(unsigned char *at) {
    at[0] = 1;
    pid_t child = fork();
    if (child == 0) {
        struct rlimit none = {0, 0};
        setrlimit(RLIMIT_CORE, &none);
        at[0] = 2;
        _exit(0);
    }
    if (strcmp(child_says(child), "ok")) return "the child has not got it";
    return at[0] == 2 ? "the child shares it" : "the child has a copy";
}

static inline const char *ask_counted(unsigned char *at) {
    fill(at, PART, 20);
    FILE *maps = fopen("/proc/self/smaps", "r");
    char line[512];
    bool inside = false;
    long kilobytes = -1;
    while (maps && kilobytes < 0 && fgets(line, sizeof line, maps)) {
        unsigned long begin, end;
        char dash;
        if (sscanf(line, "%lx%c%lx ", &begin, &dash, &end) == 3 && dash == '-')
            inside = begin <= (uintptr_t)at && (uintptr_t)at < end;
        else if (inside) sscanf(line, "Rss: %ld kB", &kilobytes);
    }
    if (maps) fclose(maps);
    return kilobytes < 0 ? "not found" : kilobytes >= (long)(PART / 1024) ? "ok" : "not counted";
}

// ---------------------------------------------------------------- after a crash

#define MARK 256ul

// Marks memory so that it is known again in a core file. Computed, for constants of the program are in a core file too.
static inline void mark(unsigned char *at) {
    unsigned state = 77;
    for (size_t i = 0; i < MARK; i++) {
        state = state * 1103515245u + 12345u;
        at[i] = (unsigned char)(state >> 16);
    }
}

// Whether the mark stands on a page of `./core`.
static inline const char *ask_core(void) {
    unsigned char page[PAGE];
    int file = open("core", O_RDONLY);
    if (file < 0) return "no core file";
    const char *is = "not in it";
    for (off_t at = 0; pread(file, page, PAGE, at) == (ssize_t)PAGE; at += PAGE) {
        unsigned state = 77;
        size_t i = 0;
        for (; i < MARK; i++) {
            state = state * 1103515245u + 12345u;
            if (page[i] != (unsigned char)(state >> 16)) break;
        }
        if (i == MARK) is = "ok";
    }
    close(file);
    return is;
}

// ---------------------------------------------------------------- all of them

// `at` has SUBJECT_SIZE bytes; `device` is a block device whose content is of no value.
static inline void ask_all(unsigned char *at, const char *device) {
#define NEXT (at += PART, at - PART)
    say_that("read(), buffered", ask_read(NEXT));
    say_that("write(), buffered", ask_write(NEXT));
    say_that("recvmsg()", ask_datagram(NEXT));
    say_that("write() with O_DIRECT", ask_direct_write(NEXT, device));
    say_that("read() with O_DIRECT", ask_direct_read(NEXT, device));
    say_that("io_uring, buffered", ask_ring(NEXT, NULL, 0, false));
    say_that("io_uring, O_DIRECT", ask_ring(NEXT, device, O_DIRECT, false));
    say_that("io_uring, registered buffer", ask_ring(NEXT, NULL, 0, true));
    say_that("process_vm_readv() from it", ask_vm_read(NEXT));
    say_that("process_vm_writev() to it", ask_vm_write(NEXT));
    say_that("process_vm_readv() into it", ask_vm_read_into(NEXT));
    say_that("vmsplice()", ask_vmsplice(NEXT));
    say_that("send() with MSG_ZEROCOPY", ask_zerocopy(NEXT));
    say_that("futex, private", ask_futex(NEXT, FUTEX_PRIVATE_FLAG));
    say_that("futex, shared", ask_futex(NEXT, 0));
    say_that("userfaultfd", ask_userfaultfd(NEXT));
    say_that("move_pages(), query", ask_node_of_page(NEXT));
    say_that("MADV_DONTNEED", ask_give_back(NEXT, MADV_DONTNEED));
    say_that("MADV_FREE", ask_give_back(NEXT, MADV_FREE));
    say_that("MADV_REMOVE", ask_give_back(NEXT, MADV_REMOVE));
    say_that("MADV_POPULATE_WRITE", ask_advice(NEXT, MADV_POPULATE_WRITE));
    say_that("MADV_HUGEPAGE", ask_advice(NEXT, MADV_HUGEPAGE));
    say_that("MADV_MERGEABLE", ask_advice(NEXT, MADV_MERGEABLE));
    say_that("MADV_DODUMP", ask_advice(NEXT, MADV_DODUMP));
    say_that("MADV_DOFORK", ask_advice(NEXT, MADV_DOFORK));
    say_that("MADV_DONTFORK", ask_advice(NEXT, MADV_DONTFORK));
    say_that("mprotect()", ask_protect(NEXT));
    say_that("mlock()", ask_lock(NEXT));
    say_that("mincore()", ask_resident(NEXT));
    say_that("mremap(), moved", ask_move(NEXT));
    say_that("/proc/self/mem", ask_proc_mem(NEXT));
    say_that("process_vm_readv() by another process", ask_other_process(NEXT));
    say_that("a debugger", ask_debugger(NEXT));
    say_that("counted in RSS", ask_counted(NEXT));
    say_that("fork()", ask_fork(NEXT));
    say_that("mremap(), grown", ask_grow(NEXT));
#undef NEXT
}

#endif
