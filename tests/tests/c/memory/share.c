// Memory that two processes share: dma-bufs through a socket, handles as bytes, and what each sees of the other's.
#include "harness.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>

// What the parent asks of the child.
struct order {
    enum { IMPORT, OPEN, AVAILABLE, LOWER, LEAVE } what;
    uint32_t seed;
    uint64_t size;
    HsaSharedMemoryHandle handle;
};

static void send_order(int channel, const struct order *order, int fd) {
    char control[CMSG_SPACE(sizeof fd)];
    struct iovec part = {(void *)order, sizeof *order};
    struct msghdr message;
    memset(&message, 0, sizeof message);
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (fd >= 0) {
        message.msg_control = control;
        message.msg_controllen = sizeof control;
        struct cmsghdr *head = CMSG_FIRSTHDR(&message);
        head->cmsg_level = SOL_SOCKET;
        head->cmsg_type = SCM_RIGHTS;
        head->cmsg_len = CMSG_LEN(sizeof fd);
        memcpy(CMSG_DATA(head), &fd, sizeof fd);
    }
    if (sendmsg(channel, &message, 0) != sizeof *order)
        give_up("sendmsg: %s", strerror(errno));
}

static int take_order(int channel, struct order *order) {
    char control[CMSG_SPACE(sizeof(int))];
    struct iovec part = {order, sizeof *order};
    struct msghdr message;
    memset(&message, 0, sizeof message);
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    if (recvmsg(channel, &message, MSG_CMSG_CLOEXEC) != sizeof *order)
        return -2;
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    int fd = -1;
    if (head && head->cmsg_type == SCM_RIGHTS)
        memcpy(&fd, CMSG_DATA(head), sizeof fd);
    return fd;
}

// The child: other pages, another VM of the GPU, the same memory.
static void child_import(int fd, const struct order *order) {
    HsaGraphicsResourceInfo found;
    memset(&found, 0, sizeof found);
    HSAKMT_STATUS status = hsaKmtRegisterGraphicsHandleToNodes((HSAuint64)fd, &found, 1, &machine.gpu[0]);
    line("import = %s, size %#lx, node %u", status_name(status), (unsigned long)found.SizeInBytes, found.NodeId);
    close(fd);
    if (status != HSAKMT_STATUS_SUCCESS)
        return;
    char *b = found.MemoryAddress;
    name("b", b, found.SizeInBytes);
    info(b);
    map(b, order->size);
    gpu_sees(0, b, order->size, order->seed);
    gpu_writes(0, b, order->size, order->seed + 1);
    line("behind the end: %d", gpu_faults(0, b + order->size));
    unmap(b);
    deregister(b);
    info(b);
    forget("b");
}

static void child_open(const struct order *order) {
    void *memory = NULL, *second = NULL;
    HSAuint64 size = 0, again = 0;
    HSAKMT_STATUS status = hsaKmtRegisterSharedHandle(&order->handle, &memory, &size);
    line("register a shared handle = %s, size %#lx", status_name(status), (unsigned long)size);
    // One bit of it is another handle.
    for (unsigned word = 0; word < 8; word++) {
        HsaSharedMemoryHandle forged;
        void *none = NULL;
        memcpy(forged, order->handle, sizeof forged);
        forged[word] ^= 0x10000;
        line("a forged handle, word %u = %s", word, status_name(hsaKmtRegisterSharedHandle(&forged, &none, &again)));
    }
    if (status != HSAKMT_STATUS_SUCCESS)
        return;
    name("b", memory, size);
    info(memory);
    map(memory, size);
    gpu_sees(0, memory, order->size, order->seed);
    gpu_writes(0, memory, order->size, order->seed + 1);
    // Case C22: opened twice, closed as often.
    status = hsaKmtRegisterSharedHandleToNodes(&order->handle, &second, &again, 1, &machine.gpu[0]);
    line("register it again = %s, %s", status_name(status), second == memory ? "the same address" : "another address");
    if (status == HSAKMT_STATUS_SUCCESS) {
        name("c", second, again);
        info(second);
        map(second, again);
        gpu_sees(0, second, order->size, order->seed + 1);
        unmap(second);
        deregister(second);
        forget("c");
    }
    gpu_sees(0, memory, order->size, order->seed + 1);
    unmap(memory);
    deregister(memory);
    deregister(memory);
    forget("b");
}

int two_child(int count, char **arguments) {
    if (count != 3)
        return 2;
    int channel = atoi(arguments[2]);
    HSAuint64 before = 0, now = 0;
    struct order order;
    line("the other process begins");
    begin();
    meet();
    if (write(channel, "r", 1) != 1)
        return 2;
    for (;;) {
        int fd = take_order(channel, &order);
        if (fd == -2)
            return 3;
        switch (order.what) {
        case IMPORT: child_import(fd, &order); break;
        case OPEN: child_open(&order); break;
        case AVAILABLE:
            if (hsaKmtAvailableMemory(machine.gpu[0], &before) != HSAKMT_STATUS_SUCCESS)
                return 4;
            break;
        case LOWER:
            if (hsaKmtAvailableMemory(machine.gpu[0], &now) != HSAKMT_STATUS_SUCCESS)
                return 4;
            line("the other process has %ld MiB less", (long)(before - now) / (long)MIB);
            break;
        case LEAVE: end(); return 0;
        }
        if (write(channel, "r", 1) != 1)
            return 2;
    }
}

static pid_t start_child(int *channel) {
    int ends[2];
    char number[16];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends))
        give_up("socketpair");
    snprintf(number, sizeof number, "%d", ends[1]);
    pid_t child = fork();
    if (child < 0)
        give_up("fork");
    if (!child) {
        close(ends[0]);
        execl("/proc/self/exe", "memory", "two-child", number, NULL);
        _exit(99);
    }
    close(ends[1]);
    fcntl(ends[0], F_SETFD, FD_CLOEXEC);
    *channel = ends[0];
    char ready;
    if (read(ends[0], &ready, 1) != 1)
        give_up("the other process does not begin");
    return child;
}

static void ask_child(int channel, const struct order *order, int fd) {
    char ready;
    send_order(channel, order, fd);
    if (read(channel, &ready, 1) != 1)
        give_up("the other process has ended");
}

static void end_child(pid_t child, int channel) {
    struct order order = {.what = LEAVE};
    int status = 0;
    send_order(channel, &order, -1);
    waitpid(child, &status, 0);
    line("the other process: %s %d", WIFEXITED(status) ? "exit" : "signal",
         WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
    close(channel);
}

// Dma-bufs: import in the other process, each side's writes seen by the other.
static void dma_bufs(int channel) {
    static const struct {
        uint32_t flags;
        uint64_t size;
    } kinds[] = {{DEVICE, PAGE}, {DEVICE, 4 * MIB}, {VISIBLE, 64 * KIB}, {VISIBLE, 4 * MIB}, {PINNED, 64 * KIB}};
    for (unsigned number = 0; number < sizeof kinds / sizeof *kinds; number++) {
        uint64_t size = kinds[number].size;
        heading(flag_names(kinds[number].flags));
        char *a = alloc("a", machine.gpu[0], size, kinds[number].flags);
        map(a, size);
        gpu_writes(0, a, size, 10 * number);
        int fd = -1;
        HSAuint64 offset = 0;
        HSAKMT_STATUS status = hsaKmtExportDMABufHandle(a, size, &fd, &offset);
        line("export = %s, offset %#lx", status_name(status), (unsigned long)offset);
        if (status == HSAKMT_STATUS_SUCCESS) {
            struct order order = {.what = IMPORT, .seed = 10 * number, .size = size};
            ask_child(channel, &order, fd);
            gpu_sees(0, a, size, 10 * number + 1);
            if (kinds[number].flags & HOST_ACCESS)
                cpu_sees(a, size, 10 * number + 1);
            // Once more, when it is no longer the exporter's.
            unmap(a);
            drop("a", a, size);
            order.seed++;
            ask_child(channel, &order, fd);
            close(fd);
        }
    }
}

// Asks until so much is there: what a guest has freed comes back a little later, and the model looks when the owner asks.
static void until_available(HSAuint64 expected) {
    for (unsigned wait = 0; wait < 250; wait++) {
        HSAuint64 now = 0;
        if (hsaKmtAvailableMemory(machine.gpu[0], &now) != HSAKMT_STATUS_SUCCESS || now >= expected)
            return;
        usleep(20000);
    }
}

// Case C13: what another process takes is missing here, and comes back when it is freed or killed.
static void accounts(void) {
    heading("one account");
    int channel;
    pid_t child = start_child(&channel);
    struct order order = {.what = AVAILABLE};
    HSAuint64 whole = 0;
    // What this process holds back for its next allocations goes when it asks.
    hsaKmtAvailableMemory(machine.gpu[0], &whole);
    ask_child(channel, &order, -1);
    char *a = quiet_alloc(machine.gpu[0], 64 * MIB, DEVICE);
    order.what = LOWER;
    ask_child(channel, &order, -1);
    char *b = quiet_alloc(machine.gpu[0], 32 * MIB, VISIBLE);
    ask_child(channel, &order, -1);
    quiet_free(a, 64 * MIB);
    until_available(whole - 32 * MIB);
    ask_child(channel, &order, -1);
    quiet_free(b, 32 * MIB);
    until_available(whole);
    ask_child(channel, &order, -1);
    end_child(child, channel);
    HSAuint64 before = 0, after = 0;
    hsaKmtAvailableMemory(machine.gpu[0], &before);
    for (unsigned round = 0; round < 3; round++) {
        child = start_child(&channel);
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        close(channel);
    }
    // The end of a process may take a moment.
    for (unsigned wait = 0; wait < 200; wait++) {
        hsaKmtAvailableMemory(machine.gpu[0], &after);
        if (after == before)
            break;
        usleep(20000);
    }
    line("after three killed processes: %s", after == before ? "the same" : "less");
}

void section_two(void) {
    int channel;
    pid_t child = start_child(&channel);
    dma_bufs(channel);
    end_child(child, channel);
    accounts();
}

// Handles as bytes.
void section_share(void) {
    static const uint32_t kinds[] = {DEVICE, VISIBLE, PINNED, FINE};
    int channel;
    pid_t child = start_child(&channel);
    for (unsigned number = 0; number < sizeof kinds / sizeof *kinds; number++) {
        uint64_t size = 4 * MIB;
        uint32_t flags = kinds[number];
        heading(flag_names(flags));
        char *a = alloc("a", flags & NON_PAGED ? machine.gpu[0] : machine.cpu, size, flags);
        map(a, size);
        gpu_writes(0, a, size, 60 + 10 * number);
        struct order order = {.what = OPEN, .seed = 60 + 10 * number, .size = size};
        HsaSharedMemoryHandle handle;
        memset(handle, 0x11, sizeof handle);
        // Case C17: only the beginning, as a whole.
        line("share(a+0x100000) = %s", status_name(hsaKmtShareMemory(a + MIB, size - MIB, &handle)));
        line("share without a handle = %s", status_name(hsaKmtShareMemory(a, size, NULL)));
        HSAKMT_STATUS status = hsaKmtShareMemory(a, size, &order.handle);
        line("share(a) = %s", status_name(status));
        ask_child(channel, &order, -1);
        if (status == HSAKMT_STATUS_SUCCESS)
            gpu_sees(0, a, size, 61 + 10 * number);
        // Case C22: its own handle.
        void *own_memory = NULL;
        HSAuint64 own_size = 0;
        status = hsaKmtRegisterSharedHandle(&order.handle, &own_memory, &own_size);
        line("register its own handle = %s", status_name(status));
        if (status == HSAKMT_STATUS_SUCCESS)
            line("and deregister = %s", status_name(hsaKmtDeregisterMemory(own_memory)));
        info(a);
        unmap(a);
        drop("a", a, size);
        // It is gone.
        order.seed++;
        line("after free:");
        ask_child(channel, &order, -1);
    }
    line("share(NULL) = %s", status_name(hsaKmtShareMemory(NULL, PAGE, &(HsaSharedMemoryHandle){0})));
    HsaSharedMemoryHandle zero;
    void *none = NULL;
    HSAuint64 size = 0;
    memset(zero, 0, sizeof zero);
    line("register a handle of zeros = %s", status_name(hsaKmtRegisterSharedHandle(&zero, &none, &size)));
    line("register no handle = %s", status_name(hsaKmtRegisterSharedHandle(NULL, &none, &size)));
    end_child(child, channel);
}
