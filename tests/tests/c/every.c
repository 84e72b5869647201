// Calls every function of the thunk's API, through a library that is loaded by name: every LIBRARY PREFIX NODE LINK CACHE
// QUEUE. PREFIX stands in front of all names ("-" for none); the others are the bytes of HsaNodeProperties, HsaIoLinkProperties,
// HsaCacheProperties and HsaQueueInfo in the layout that the library believes its caller to have. All that it writes to lies right before a
// page without access. Prints a status for each function.
//
// Types and numbers are those of hsakmttypes.h and amdgpu.h, which is not included: its structs have one size only.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

typedef uint32_t u32;
typedef uint64_t u64;

static void *library;
static const char *prefix = "";
static int called;

static void *find(const char *name) {
    char full[128];
    snprintf(full, sizeof full, "%s%s", prefix, name);
    return dlsym(library, full);
}

static const char *name_of(int status) {
    static char other[32];
    switch (status) {
    case 0: return "SUCCESS";
    case 10: return "NOT_IMPLEMENTED";
    case 11: return "NOT_SUPPORTED";
    default: snprintf(other, sizeof other, "status %d", status); return other;
    }
}

static int report(const char *name, int status) {
    printf("%s: %s\n", name, name_of(status));
    fflush(stdout);
    called++;
    return status;
}

// Calls a function with arguments of the given types.
#define CALL(name, types, ...)                                                                                                  \
    (find(#name) ? report(#name, ((int(*) types)find(#name))(__VA_ARGS__)) : (printf("%s: missing\n", #name), 1))

#define NEED(call)                                                                                                              \
    do {                                                                                                                        \
        if ((call) != 0) {                                                                                                      \
            printf("cannot go on\n");                                                                                           \
            return 1;                                                                                                           \
        }                                                                                                                       \
    } while (0)

// Memory that ends where access ends, filled with a byte that is no answer.
static void *guarded(size_t size) {
    size_t page = 4096, whole = (size + page - 1) / page * page;
    char *start = mmap(NULL, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED || mprotect(start + whole, page, PROT_NONE) != 0) {
        printf("no guarded memory\n");
        exit(1);
    }
    memset(start, 0x5a, whole);
    return start + whole - size;
}

// Whether something was written to the very end.
static void full(const char *what, const void *start, size_t size) {
    const unsigned char *bytes = start;
    size_t untouched = 0;
    while (untouched < size && bytes[size - 1 - untouched] == 0x5a)
        untouched++;
    printf("%s written to its end: %d\n", what, untouched == 0);
}

static u32 word(const void *bytes, size_t place) {
    u32 value;
    memcpy(&value, (const char *)bytes + place, sizeof value);
    return value;
}

static u64 get(const void *bytes, size_t place) {
    u64 value;
    memcpy(&value, (const char *)bytes + place, sizeof value);
    return value;
}

static void put(void *bytes, size_t place, u64 value) { memcpy((char *)bytes + place, &value, sizeof value); }

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

enum { HOST_ACCESS = 1 << 6, NON_PAGED = 1, NO_SUBSTITUTE = 1 << 7, COARSE_GRAIN = 1 << 13, EXECUTE = 1 << 12 };
enum { SDMA = 2, COMPUTE_AQL = 21 };

static u32 gpu;

// Another process that shares memory, 0 without one, and what it writes a handle to.
static pid_t sharer;
static int from_sharer = -1;

// Starts it. It ends when this process does.
static void start_sharer(void) {
    int ends[2];
    if (pipe(ends) != 0)
        return;
    from_sharer = ends[0];
    sharer = fork();
    if (sharer != 0) {
        close(ends[1]);
        return;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    u32 system[4], handle[8];
    void *vram = NULL;
    int (*open)(void) = find("hsaKmtOpenKFD"), (*acquire)(void *) = find("hsaKmtAcquireSystemProperties");
    int (*alloc)(u32, u64, u32, void **) = find("hsaKmtAllocMemory");
    int (*share)(void *, u64, u32 *) = find("hsaKmtShareMemory");
    // The last node is a GPU's.
    if (open() == 0 && acquire(system) == 0 &&
        alloc(system[0] - 1, 65536, NON_PAGED | NO_SUBSTITUTE | COARSE_GRAIN, &vram) == 0 &&
        share(vram, 65536, handle) == 0 && write(ends[1], handle, sizeof handle) == sizeof handle)
        for (;;)
            pause();
    _exit(1);
}

static int topology(size_t node_size, size_t link_size, size_t cache_size) {
    void *system = guarded(16);
    NEED(CALL(hsaKmtAcquireSystemProperties, (void *), system));
    full("system", system, 16);
    u32 nodes = word(system, 0);
    void *node = NULL;
    for (u32 number = 0; number < nodes; number++) {
        void *properties = guarded(node_size);
        int (*ask)(u32, void *) = find("hsaKmtGetNodeProperties");
        if (!ask || ask(number, properties) != 0)
            return 1;
        full("node", properties, node_size);
        if (word(properties, 4) != 0 && !node) { // NumFComputeCores
            gpu = number;
            node = properties;
        }
    }
    if (!node)
        return 1;
    CALL(hsaKmtGetNodeProperties, (u32, void *), gpu, node);
    size_t first = node_size >= 368 ? 12 : 8; // NumMemoryBanks
    u32 banks = word(node, first), caches = word(node, first + 4), links = word(node, first + 8);
    void *memory = guarded(32 * (size_t)banks), *cache = guarded(cache_size * caches), *link = guarded(link_size * links);
    CALL(hsaKmtGetNodeMemoryProperties, (u32, u32, void *), gpu, banks, memory);
    full("banks", memory, 32 * (size_t)banks);
    CALL(hsaKmtGetNodeCacheProperties, (u32, u32, u32, void *), gpu, 0, caches, cache);
    full("caches", cache, cache_size * caches);
    CALL(hsaKmtGetNodeIoLinkProperties, (u32, u32, void *), gpu, links, link);
    full("links", link, link_size * links);
    printf("second cache at its place: %d\n", caches < 2 || word((char *)cache + cache_size, 4) - 1 < 4);
    printf("link from the GPU to the CPU: %d\n", links > 0 && word(link, 12) == gpu && word(link, 16) == 0);
    u64 *frequency = guarded(8);
    CALL(hsaKmtGetNodeWallclockFrequency, (u32, u64 *), gpu, frequency);
    CALL(hsaKmtSetPersistingCacheSize, (u32, u64), gpu, 0);
    return 0;
}

static int events(void) {
    u32 description[6] = {0}; // a signal
    void *event = NULL;
    u64 age = 0;
    NEED(CALL(hsaKmtCreateEvent, (void *, bool, bool, void **), description, false, false, &event));
    CALL(hsaKmtSetEvent, (void *), event);
    CALL(hsaKmtWaitOnEvent, (void *, u32), event, 10000);
    int (*set)(void *) = find("hsaKmtSetEvent");
    set(event);
    CALL(hsaKmtResetEvent, (void *), event);
    CALL(hsaKmtQueryEventState, (void *), event);
    set(event);
    CALL(hsaKmtWaitOnMultipleEvents, (void **, u32, bool, u32), &event, 1, true, 10000);
    set(event);
    CALL(hsaKmtWaitOnEvent_Ext, (void *, u32, u64 *), event, 10000, &age);
    set(event);
    CALL(hsaKmtWaitOnMultipleEvents_Ext, (void **, u32, bool, u32, u64 *), &event, 1, false, 10000, &age);
    double before = now();
    int (*wait)(void *, u32) = find("hsaKmtWaitOnEvent");
    int nothing = wait(event, 50);
    printf("nothing came: %d, after the time: %d\n", nothing, now() - before >= 0.05);
    CALL(hsaKmtDestroyEvent, (void *), event);
    return 0;
}

static int memory(void) {
    void *page = NULL, *vram = NULL, *again = NULL;
    u64 alternate = 0, available = 0, size = 0, offset = 0;
    int fd = -1;
    NEED(CALL(hsaKmtAllocMemory, (u32, u64, u32, void **), 0, 4096, HOST_ACCESS, &page));
    CALL(hsaKmtMapMemoryToGPU, (void *, u64, u64 *), page, 4096, &alternate);
    CALL(hsaKmtMapMemoryToGPUNodes, (void *, u64, u64 *, u32, u64, u32 *), page, 4096, &alternate, 0, 1, &gpu);
    CALL(hsaKmtSetMemoryUserData, (void *, void *), page, &page);
    void *info = guarded(68);
    CALL(hsaKmtQueryPointerInfo, (void *, void *), page, info);
    full("pointer", info, 68);
    CALL(hsaKmtUnmapMemoryToGPU, (void *), page);
    CALL(hsaKmtAvailableMemory, (u32, u64 *), gpu, &available);
    u32 flags = NON_PAGED | NO_SUBSTITUTE | COARSE_GRAIN;
    NEED(CALL(hsaKmtAllocMemoryAlign, (u32, u64, u64, u32, void **), gpu, 65536, 65536, flags, &vram));
    u32 handle[8];
    CALL(hsaKmtShareMemory, (void *, u64, u32 *), vram, 65536, handle);
    // Of another process, where there can be one.
    if (sharer > 0 && read(from_sharer, handle, sizeof handle) != sizeof handle)
        printf("nothing from the other process\n");
    CALL(hsaKmtRegisterSharedHandle, (u32 *, void **, u64 *), handle, &again, &size);
    CALL(hsaKmtRegisterSharedHandleToNodes, (u32 *, void **, u64 *, u64, u32 *), handle, &again, &size, 1, &gpu);
    CALL(hsaKmtExportDMABufHandle, (void *, u64, int *, u64 *), vram, 65536, &fd, &offset);
    void *graphics = guarded(32);
    CALL(hsaKmtRegisterGraphicsHandleToNodes, (u64, void *, u64, u32 *), fd, graphics, 1, &gpu);
    full("graphics", graphics, 32);
    void *other = guarded(32);
    CALL(hsaKmtRegisterGraphicsHandleToNodesExt, (u64, void *, u64, u32 *, u32), fd, other, 1, &gpu, 0);
    u64 address;
    memcpy(&address, other, sizeof address);
    CALL(hsaKmtDeregisterMemory, (void *), (void *)(uintptr_t)address);
    memcpy(&address, graphics, sizeof address);
    CALL(hsaKmtUnmapGraphicHandle, (u32, u64, u64), gpu, address, 65536);
    if (fd >= 0)
        close(fd);
    static char own[8192] __attribute__((aligned(4096)));
    CALL(hsaKmtRegisterMemory, (void *, u64), own, 4096);
    CALL(hsaKmtRegisterMemoryToNodes, (void *, u64, u64, u32 *), own, 4096, 1, &gpu);
    CALL(hsaKmtRegisterMemoryWithFlags, (void *, u64, u32), own, 4096, 0);
    char from[16] = "across", to[16] = "";
    struct {
        void *address;
        u64 size;
    } local = {to, 8}, remote = {from, 8};
    CALL(hsaKmtProcessVMRead, (u32, void *, u64, void *, u64, u64 *), getpid(), &local, 1, &remote, 1, &size);
    CALL(hsaKmtProcessVMWrite, (u32, void *, u64, void *, u64, u64 *), getpid(), &local, 1, &remote, 1, &size);
    printf("read: %s\n", to);
    CALL(hsaKmtSetMemoryPolicy, (u32, u32, u32, void *, u64), gpu, 0, 0, own, 4096);
    CALL(hsaKmtReplaceAsanHeaderPage, (void *), page);
    CALL(hsaKmtReturnAsanHeaderPage, (void *), page);
    CALL(hsaKmtAisReadWriteFile, (void *, u64, int, int64_t, u32, u64 *, int *), vram, 4096, 0, 0, 0, &size, &fd);
    CALL(hsaKmtGetMemoryHandle, (void *, void *, u64, u64 *), own, own, 4096, &size);
    CALL(hsaKmtSVMSetAttr, (void *, u64, u32, void *), own, 4096, 0, NULL);
    CALL(hsaKmtSVMGetAttr, (void *, u64, u32, void *), own, 4096, 0, NULL);
    CALL(hsaKmtFreeMemory, (void *, u64), page, 4096);
    return 0;
}

// Memory that the CPU and the GPU use.
static void *shared(size_t size) {
    void *address = NULL;
    u64 alternate;
    int (*alloc)(u32, u64, u32, void **) = find("hsaKmtAllocMemory");
    int (*map)(void *, u64, u64 *) = find("hsaKmtMapMemoryToGPU");
    if (alloc(0, size, HOST_ACCESS | EXECUTE, &address) != 0 || map(address, size, &alternate) != 0) {
        printf("no memory for a queue\n");
        exit(1);
    }
    memset(address, 0, size);
    return address;
}

static int queues(size_t queue_size) {
    enum { RING = 4096, PACKET = 64, INVALID = 1, BARRIER_AND = 3 };
    char *ring = shared(RING);
    _Atomic u64 *index = shared(4096); // the write index, and the read index in the next cache line
    for (int packet = 0; packet < RING / PACKET; packet++)
        ring[packet * PACKET] = INVALID;
    void *resource = guarded(40), *other = guarded(40);
    memset(resource, 0, 40);
    memset(other, 0, 40);
    put(resource, 16, (uintptr_t)&index[0]);
    put(resource, 24, (uintptr_t)&index[8]);
    NEED(CALL(hsaKmtCreateQueue, (u32, u32, u32, int64_t, void *, u64, void *, void *), gpu, COMPUTE_AQL, 100, 0, ring, RING, NULL,
              resource));
    u64 id;
    memcpy(&id, resource, sizeof id);
    // A barrier that waits for nothing; the header last.
    atomic_store((_Atomic uint16_t *)ring, BARRIER_AND | 1 << 8);
    atomic_store(&index[0], 1);
    CALL(hsaKmtQueueRingDoorbell, (u64), id);
    double deadline = now() + 60;
    while (atomic_load(&index[8]) != 1 && now() < deadline)
        usleep(1000);
    printf("packets processed: %llu\n", (unsigned long long)atomic_load(&index[8]));
    u32 mask[2] = {~0u, ~0u}, first = 0;
    CALL(hsaKmtSetQueueCUMask, (u64, u32, u32 *), id, 64, mask);
    CALL(hsaKmtAllocQueueGWS, (u64, u32, u32 *), id, 1, &first);
    CALL(hsaKmtUpdateQueue, (u64, u32, int64_t, void *, u64, void *), id, 0, 0, ring, RING, NULL);
    void *info = guarded(queue_size);
    CALL(hsaKmtGetQueueInfo, (u64, void *), id, info);
    full("queue", info, queue_size);
    if (queue_size > 68) { // SaveAreaAllocSize: more than is used of it, whole pages
        u64 all = get(info, 68), used = get(info, 28) + get(info, 44);
        printf("save area is larger than what is used: %d\n", all > used && all % 4096 == 0);
    }
    CALL(hsaKmtGetKernelQueueId, (u64, u32 *), id, &first);
    CALL(hsaKmtCreateQueueExt, (u32, u32, u32, int64_t, u32, void *, u64, void *, void *), gpu, SDMA, 100, 0, 0, shared(4096), 4096,
         NULL, other);
    memset(other, 0, 40);
    CALL(hsaKmtCreateQueueV2, (u32, u32, u32, int64_t, u32, void *, u64, u64, void *, void *), gpu, SDMA, 100, 0, 0, shared(4096),
         4096, 0, NULL, other);
    CALL(hsaKmtDestroyQueue, (u64), id);
    return 0;
}

static int process(void) {
    int mode = 0;
    void *counters = guarded(32), *tiles = guarded(64);
    CALL(hsaKmtGetClockCounters, (u32, void *), gpu, counters);
    full("clocks", counters, 32);
    CALL(hsaKmtGetXNACKMode, (int *), &mode);
    CALL(hsaKmtSetXNACKMode, (int), 0);
    u32 modes[32], macros[16];
    memset(tiles, 0, 64);
    put(tiles, 0, (uintptr_t)modes);
    put(tiles, 8, (uintptr_t)macros);
    put(tiles, 16, 32 | (u64)16 << 32);
    CALL(hsaKmtGetTileConfig, (u32, void *), gpu, tiles);
    char *handler = shared(8192);
    CALL(hsaKmtSetTrapHandler, (u32, void *, u64, void *, u64), gpu, handler, 4096, handler + 4096, 4096);
    return 0;
}

static int rest(void) {
    u64 handle = 0, value = 0;
    u32 count = 0, size = 0;
    void *pointer = NULL;
    int fd = -1;
    bool flag = true;
    CALL(hsaKmtGetAMDGPUDeviceHandle, (u32, u64 *), gpu, &handle);
    CALL(hsaKmtGetAmdGPUDeviceFd, (u64, int *), handle, &fd);
    CALL(hsaKmtModelEnabled, (bool *), &flag);
    printf("AMD's model: %d\n", flag);
    CALL(hsaKmtHandleImport, (void *, void *, void *), &value, &value, &value);
    CALL(hsaKmtHandleExport, (void *, void *, void *), &value, &value, &value);
    CALL(hsaKmtMemoryVaMap, (u64, u64, u64, u64, u64), 0, 0, 4096, 0, 0);
    CALL(hsaKmtMemoryVaUnmap, (u64, u64, u64, u64), 0, 0, 4096, 0);
    CALL(hsaKmtMemoryCpuMap, (u64, void **), 0, &pointer);
    CALL(hsaKmtMemoryGetCpuAddr, (u64, u64, int *, u64 *), handle, 0, &fd, &value);
    CALL(hsaKmtMemHandleFree, (u64), 0);
    CALL(hsaKmtMemHandleFreePreserveMetadata, (u64), 0);
    CALL(hsaKmtMapGraphicHandle, (u32, u64, u64, u64, u64, u64 *), gpu, 0, 0, 0, 4096, &value);
    CALL(hsaKmtImportExternalSemaphore, (u32, void *, u32, u64 *), gpu, &value, 0, &value);
    CALL(hsaKmtDestroyExternalSemaphore, (u64), 0);
    CALL(hsaKmtQueueSignalExternalSemaphore, (u64, u64, u64), 0, 0, 0);
    CALL(hsaKmtQueueWaitExternalSemaphore, (u64, u64, u64), 0, 0, 0);
    CALL(hsaKmtCheckRuntimeDebugSupport, (void), );
    CALL(hsaKmtRuntimeEnable, (void *, bool), &value, false);
    CALL(hsaKmtGetRuntimeCapabilities, (u32 *), &count);
    CALL(hsaKmtRuntimeDisable, (void), );
    CALL(hsaKmtDbgEnable, (void **, u32 *), &pointer, &size);
    CALL(hsaKmtDbgGetDeviceData, (void **, u32 *, u32 *), &pointer, &count, &size);
    CALL(hsaKmtDbgGetQueueData, (void **, u32 *, u32 *, bool), &pointer, &count, &size, false);
    CALL(hsaKmtDbgDisable, (void), );
    CALL(hsaKmtDebugTrapIoctl, (void *, u64 *, u64 *), &value, NULL, &value);
    CALL(hsaKmtGetCoreRuntimeInfo, (void *), &value);
    CALL(hsaKmtGetCoreDeviceInfo, (u32, void *), 0, &value);
    CALL(hsaKmtSetSigbusDelay, (u32, u32), gpu, 0);
    CALL(hsaKmtDbgRegister, (u32), gpu);
    CALL(hsaKmtDbgUnregister, (u32), gpu);
    CALL(hsaKmtDbgWavefrontControl, (u32, u32, u32, u32, void *), gpu, 1, 0, 0, &value);
    CALL(hsaKmtDbgAddressWatch, (u32, u32, void *, void *, void *, void *), gpu, 1, &count, &pointer, &value, &pointer);
    CALL(hsaKmtPmcGetCounterProperties, (u32, void **), gpu, &pointer);
    CALL(hsaKmtPmcRegisterTrace, (u32, u32, void *, void *), gpu, 0, &value, &value);
    CALL(hsaKmtPmcUnregisterTrace, (u32, u64), gpu, 0);
    CALL(hsaKmtPmcAcquireTraceAccess, (u32, u64), gpu, 0);
    CALL(hsaKmtPmcReleaseTraceAccess, (u32, u64), gpu, 0);
    CALL(hsaKmtPmcStartTrace, (u64, void *, u64), 0, &value, 8);
    CALL(hsaKmtPmcQueryTrace, (u64), 0);
    CALL(hsaKmtPmcStopTrace, (u64), 0);
    CALL(hsaKmtSPMAcquire, (u32), gpu);
    CALL(hsaKmtSPMRelease, (u32), gpu);
    CALL(hsaKmtSPMSetDestBuffer, (u32, u32, u32 *, u32 *, void *, bool *), gpu, 0, &count, &size, &value, &flag);
    CALL(hsaKmtPcSamplingSupport, (void), );
    CALL(hsaKmtPcSamplingQueryCapabilities, (u32, void *, u32, u32 *), gpu, NULL, 0, &size);
    CALL(hsaKmtPcSamplingCreate, (u32, void *, u32 *), gpu, &value, &count);
    CALL(hsaKmtPcSamplingStart, (u32, u32), gpu, 0);
    CALL(hsaKmtPcSamplingStop, (u32, u32), gpu, 0);
    CALL(hsaKmtPcSamplingDestroy, (u32, u32), gpu, 0);
    CALL(hsaKmtOpenSMI, (u32, int *), gpu, &fd);
    // libdrm's functions for the handle: sizes of structs by amdgpu.h.
    void *information = guarded(416);
    int (*query)(u64, void *) = find("amdgpu_query_gpu_info"), (*end)(u64) = find("amdgpu_device_deinitialize");
    printf("amdgpu_query_gpu_info: %d\n", query ? query(handle, information) : 1);
    full("information", information, 416);
    printf("amdgpu_device_deinitialize: %d\n", end ? end(handle) : 1);
    return 0;
}

int main(int count, char **arguments) {
    if (count != 7)
        return 2;
    library = dlopen(arguments[1], RTLD_NOW);
    if (!library) {
        printf("%s\n", dlerror());
        return 1;
    }
    if (strcmp(arguments[2], "-") != 0)
        prefix = arguments[2];
    void *(*create)(const char *) = dlsym(library, "DtifCreate");
    if (create) {
        bool made = create("HSA") != NULL;
        printf("DtifCreate: %d\n", made);
        if (!made)
            return 0;
    }
    // In loop-back there is one process.
    if (!getenv("VIRTIO_KFD_LOOPBACK"))
        start_sharer();
    NEED(CALL(hsaKmtOpenKFD, (void), ));
    void *version = guarded(8);
    CALL(hsaKmtGetVersion, (void *), version);
    full("version", version, 8);
    if (topology(atoi(arguments[3]), atoi(arguments[4]), atoi(arguments[5])) || events() || memory() ||
        queues(atoi(arguments[6])) || process() || rest()) {
        printf("ended early\n");
        return 1;
    }
    CALL(hsaKmtReleaseSystemProperties, (void), );
    CALL(hsaKmtCloseKFD, (void), );
    void (*destroy)(void) = dlsym(library, "DtifDestroy");
    if (destroy)
        destroy();
    printf("%d functions\n", called);
    return 0;
}
