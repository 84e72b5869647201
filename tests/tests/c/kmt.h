// What the programs here share: statuses by name, a line of output for each question.
#ifndef KMT_H
#define KMT_H

#include <hsakmt/hsakmt.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static inline const char *status_name(HSAKMT_STATUS status) {
    static _Thread_local char other[32];
    switch (status) {
    case HSAKMT_STATUS_SUCCESS: return "SUCCESS";
    case HSAKMT_STATUS_ERROR: return "ERROR";
    case HSAKMT_STATUS_INVALID_PARAMETER: return "INVALID_PARAMETER";
    case HSAKMT_STATUS_INVALID_HANDLE: return "INVALID_HANDLE";
    case HSAKMT_STATUS_INVALID_NODE_UNIT: return "INVALID_NODE_UNIT";
    case HSAKMT_STATUS_NO_MEMORY: return "NO_MEMORY";
    case HSAKMT_STATUS_NOT_IMPLEMENTED: return "NOT_IMPLEMENTED";
    case HSAKMT_STATUS_NOT_SUPPORTED: return "NOT_SUPPORTED";
    case HSAKMT_STATUS_OUT_OF_RESOURCES: return "OUT_OF_RESOURCES";
    case HSAKMT_STATUS_KERNEL_IO_CHANNEL_NOT_OPENED: return "KERNEL_IO_CHANNEL_NOT_OPENED";
    case HSAKMT_STATUS_KERNEL_ALREADY_OPENED: return "KERNEL_ALREADY_OPENED";
    case HSAKMT_STATUS_WAIT_FAILURE: return "WAIT_FAILURE";
    case HSAKMT_STATUS_WAIT_TIMEOUT: return "WAIT_TIMEOUT";
    case HSAKMT_STATUS_MEMORY_NOT_REGISTERED: return "MEMORY_NOT_REGISTERED";
    default: snprintf(other, sizeof other, "status %d", status); return other;
    }
}

static inline void say(const char *what, HSAKMT_STATUS status) {
    printf("%s: %s\n", what, status_name(status));
    fflush(stdout);
}

// For what the rest of a program stands on.
static inline void need(const char *what, HSAKMT_STATUS status) {
    if (status != HSAKMT_STATUS_SUCCESS) {
        printf("%s: %s, cannot go on\n", what, status_name(status));
        fflush(stdout);
        _exit(1);
    }
}

static inline HSAKMT_STATUS create(HSA_EVENTTYPE type, bool manual, bool signaled, HsaEvent **event) {
    HsaEventDescriptor description;
    memset(&description, 0, sizeof description);
    description.EventType = type;
    description.NodeId = 0;
    return hsaKmtCreateEvent(&description, manual, signaled, event);
}

static inline HsaEvent *signal_event(bool manual) {
    HsaEvent *event = NULL;
    need("create a signal event", create(HSA_EVENTTYPE_SIGNAL, manual, false, &event));
    return event;
}

// Memory of the host that the CPU and all GPUs have mapped.
static inline void *host_memory(HSAuint64 size) {
    HsaMemFlags flags;
    void *address = NULL;
    memset(&flags, 0, sizeof flags);
    flags.ui32.HostAccess = 1;
    need("allocate", hsaKmtAllocMemory(0, size, flags, &address));
    need("map", hsaKmtMapMemoryToGPU(address, size, NULL));
    return address;
}

static inline double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

// The number of the calling thread, for until_asleep.
static inline pid_t own_number(void) {
    return (pid_t)syscall(SYS_gettid);
}

// Waits until the thread that has its number there sleeps in the kernel, looked at twenty times in a row, or has ended.
static inline void until_asleep(const volatile pid_t *thread) {
    for (int looks = 0; looks < 20;) {
        usleep(5000);
        pid_t number = *thread;
        if (!number)
            continue;
        char path[64], line[512];
        snprintf(path, sizeof path, "/proc/self/task/%d/stat", number);
        FILE *file = fopen(path, "r");
        if (!file)
            return;
        // "number (name) state ...": names here have no parenthesis.
        const char *name_end = fgets(line, sizeof line, file) ? strchr(line, ')') : NULL;
        looks = name_end && name_end[1] && name_end[2] == 'S' ? looks + 1 : 0;
        fclose(file);
    }
}

// Opens and reads the topology, as every runtime does first. Gives the number of the first GPU node, or -1.
static inline int start(void) {
    HsaSystemProperties system;
    need("open", hsaKmtOpenKFD());
    need("system properties", hsaKmtAcquireSystemProperties(&system));
    for (HSAuint32 node = 0; node < system.NumNodes; node++) {
        HsaNodeProperties properties;
        need("node properties", hsaKmtGetNodeProperties(node, &properties));
        if (properties.NumFComputeCores)
            return (int)node;
    }
    return -1;
}

#endif
