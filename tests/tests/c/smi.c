// Streams of system management events. Modes:
//
//   (none)  what streams with different masks have of a memory fault, by read, poll, epoll, a copy and a child
//   device  the same call by ioctl, with wrong arguments
//   close   what a stream has when the library has been closed
#define _GNU_SOURCE
#include "aql.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/kfd_ioctl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#define ROUNDS 300

static int gpu;

static int stream(void) {
    int fd = -1;
    need("open a stream", hsaKmtOpenSMI(gpu, &fd));
    return fd;
}

static void enable(int fd, uint64_t events) {
    if (write(fd, &events, sizeof events) != sizeof events)
        printf("a mask: %s\n", strerrorname_np(errno));
}

// What there is: whole text, or why not.
static const char *text(int fd, size_t most) {
    static char found[256];
    ssize_t size = read(fd, found, most < sizeof found ? most : sizeof found - 1);
    if (size < 0)
        return strerrorname_np(errno);
    found[size] = 0;
    return size ? found : "the end";
}

// The line of a fault of this process, which took the GPU by its first thread.
static const char *own_fault(void) {
    static char line[64];
    char name[17] = "";
    prctl(PR_GET_NAME, name);
    snprintf(line, sizeof line, "1 %x:%s\n", getpid(), name);
    return line;
}

static void told(const char *what, int fd) {
    const char *found = text(fd, 256);
    printf("%s: %s\n", what, strcmp(found, own_fault()) ? found : "the fault, by this process");
    fflush(stdout);
}

// An SDMA queue that writes a word where nothing is mapped: FENCE of vega10_sdma_pkt_open.h.
static void fault(void) {
    HsaQueueResource queue = {0};
    uint32_t *ring = mapped(4096);
    void *nowhere = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    uint64_t to = (uint64_t)(uintptr_t)nowhere;
    need("create an SDMA queue",
         hsaKmtCreateQueue(gpu, HSA_QUEUE_SDMA, 100, HSA_QUEUE_PRIORITY_NORMAL, ring, 4096, NULL, &queue));
    uint32_t packet[] = {5, to, to >> 32, 1};
    memcpy(ring, packet, sizeof packet);
    __atomic_store_n(queue.Queue_write_ptr_aql, sizeof packet, __ATOMIC_RELEASE);
    __atomic_store_n(queue.Queue_DoorBell_aql, sizeof packet, __ATOMIC_RELEASE);
}

static int ready(int fd, int milliseconds) {
    struct pollfd polled = {.fd = fd, .events = POLLIN};
    return poll(&polled, 1, milliseconds) == 1 && polled.revents == POLLIN;
}

static void faults(void) {
    const uint64_t vm = HSA_SMI_EVENT_MASK_FROM_INDEX(HSA_SMI_EVENT_VMFAULT);
    const uint64_t others = ~vm;
    int all = stream(), some = stream(), none = stream(), cleared = stream(), late = stream(), small = stream();
    int polled = stream(), copied = stream(), inherited = stream();
    printf("close on exec: %d, may be read and written: %d\n", fcntl(all, F_GETFD) & FD_CLOEXEC ? 1 : 0,
           (fcntl(all, F_GETFL) & O_ACCMODE) == O_RDWR);
    printf("nothing yet: %s\n", text(all, 256));
    enable(all, ~(uint64_t)0);
    enable(some, others);
    enable(cleared, vm);
    enable(cleared, 0);
    enable(small, vm);
    enable(polled, others);
    enable(polled, vm);
    enable(inherited, vm);
    int copy = dup(copied);
    close(copied);
    enable(copy, vm);
    printf("readable: %d\n", ready(polled, 0));
    int many = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event asked = {.events = EPOLLIN, .data.fd = copy}, got = {0};
    epoll_ctl(many, EPOLL_CTL_ADD, copy, &asked);
    HsaEvent *event = NULL;
    need("create", create(HSA_EVENTTYPE_MEMORY, false, false, &event));
    // Right before it.
    enable(late, vm);
    fault();
    say("the memory event", hsaKmtWaitOnEvent(event, 30000));
    printf("readable: %d\n", ready(polled, 30000));
    told("poll", polled);
    int events = epoll_wait(many, &got, 1, 30000);
    printf("epoll: %d, by the copy: %d\n", events, got.data.fd == copy);
    told("a copy", copy);
    printf("readable: %d %d %d\n", ready(all, 30000), ready(late, 30000), ready(small, 30000));
    told("everything", all);
    told("once only", all);
    told("a mask right before", late);
    told("no mask", none);
    told("other events", some);
    told("a mask that was taken back", cleared);
    char begin[8] = "";
    memcpy(begin, own_fault(), 3);
    printf("three bytes: %d\n", !strcmp(text(small, 3), begin));
    printf("the rest: %d\n", !strcmp(text(small, 256), own_fault() + 3));
    printf("then: %s\n", text(small, 3));
    printf("readable: %d\n", ready(inherited, 30000));
    pid_t parent = getpid(), child = fork();
    if (child == 0) {
        char expected[64];
        snprintf(expected, sizeof expected, "1 %x:", parent);
        _exit(strncmp(text(inherited, 256), expected, strlen(expected)) ? 1 : 0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    printf("a child reads it: %d\n", status == 0);
    told("the parent then", inherited);
}

static void many(void) {
    int good = 0;
    for (int i = 0; i < ROUNDS; i++) {
        int fd = -1;
        good += hsaKmtOpenSMI(gpu, &fd) == HSAKMT_STATUS_SUCCESS;
        enable(fd, i);
        close(fd);
    }
    int fd = stream();
    for (int i = 0; i < ROUNDS / 2; i++)
        enable(fd, 1);
    close(fd);
    printf("%d of %d were opened and closed\n", good, ROUNDS);
}

static void device(void) {
    int kfd = open("/dev/kfd", O_RDWR | O_CLOEXEC);
    HsaNodeProperties properties;
    need("node properties", hsaKmtGetNodeProperties(gpu, &properties));
    struct kfd_ioctl_smi_events_args args = {.gpuid = properties.KFDGpuID, .anon_fd = 77};
    printf("a GPU: %d, a descriptor: %d\n", ioctl(kfd, AMDKFD_IOC_SMI_EVENTS, &args), (int)args.anon_fd > kfd);
    close(args.anon_fd);
    args.gpuid ^= 1;
    args.anon_fd = 77;
    int failed = ioctl(kfd, AMDKFD_IOC_SMI_EVENTS, &args);
    printf("no such GPU: %s, untouched: %d\n", failed ? strerrorname_np(errno) : "ok", args.anon_fd == 77);
    printf("null: %s\n", ioctl(kfd, AMDKFD_IOC_SMI_EVENTS, NULL) ? strerrorname_np(errno) : "ok");
    close(kfd);
}

int main(int count, char **arguments) {
    int fd = -1;
    say("before the open", hsaKmtOpenSMI(1, &fd));
    gpu = start();
    if (gpu < 0)
        return 1;
    const char *mode = count > 1 ? arguments[1] : "";
    say("no such node", hsaKmtOpenSMI(99, &fd));
    say("a CPU", hsaKmtOpenSMI(0, &fd));
    if (!strcmp(mode, "device")) {
        device();
    } else if (!strcmp(mode, "close")) {
        int open = stream();
        enable(open, ~(uint64_t)0);
        say("close", hsaKmtCloseKFD());
        printf("its stream: %s\n", text(open, 256));
        // Must not end the program.
        enable(open, 1);
        return 0;
    } else {
        many();
        faults();
    }
    say("close", hsaKmtCloseKFD());
    return 0;
}
