// Output in a stable form, and the calls with their lines.
#include "conform.h"

#include <setjmp.h>
#include <signal.h>

struct machine machine;

static struct place {
    char label[32];
    uintptr_t base;
    uint64_t size;
} places[256];
static unsigned place_count;

static char *text(void) {
    static _Thread_local char ring[32][256];
    static _Thread_local unsigned next;
    return ring[next++ % 32];
}

void line(const char *format, ...) {
    char whole[2048];
    va_list list;
    va_start(list, format);
    int length = vsnprintf(whole, sizeof whole - 1, format, list);
    va_end(list);
    if (length < 0 || (size_t)length >= sizeof whole - 1)
        length = sizeof whole - 2;
    whole[length++] = '\n';
    for (int done = 0; done < length;) {
        ssize_t wrote = write(STDOUT_FILENO, whole + done, length - done);
        if (wrote <= 0)
            _exit(3);
        done += wrote;
    }
}

void heading(const char *text) {
    line("== %s", text);
}

void give_up(const char *format, ...) {
    char why[512];
    va_list list;
    va_start(list, format);
    vsnprintf(why, sizeof why, format, list);
    va_end(list);
    line("CANNOT GO ON: %s", why);
    _exit(1);
}

void name(const char *label, const void *base, uint64_t size) {
    if (place_count == sizeof places / sizeof *places)
        give_up("too many names");
    struct place *place = &places[place_count++];
    snprintf(place->label, sizeof place->label, "%s", label);
    place->base = (uintptr_t)base;
    place->size = size;
}

void forget(const char *label) {
    for (unsigned number = place_count; number-- > 0;)
        if (!strcmp(places[number].label, label)) {
            memmove(&places[number], &places[number + 1], (place_count - number - 1) * sizeof *places);
            place_count--;
            return;
        }
}

const char *at64(uint64_t address) {
    char *out = text();
    if (!address)
        return "NULL";
    // Inside of one, else right behind one.
    for (unsigned behind = 0; behind < 2; behind++)
        for (unsigned number = place_count; number-- > 0;) {
            const struct place *place = &places[number];
            if (address < place->base || address - place->base >= place->size + behind)
                continue;
            if (address == place->base)
                snprintf(out, 256, "%s", place->label);
            else
                snprintf(out, 256, "%s+%#lx", place->label, (unsigned long)(address - place->base));
            return out;
        }
    // A number that the test itself chose, where nothing is mapped, or an address that depends on the run.
    if (address < 0x10000000 || address >= 0xffff000000000000ull)
        snprintf(out, 256, "%#lx", (unsigned long)address);
    else
        snprintf(out, 256, "(elsewhere)");
    return out;
}

const char *at(const void *address) {
    return at64((uintptr_t)address);
}

const char *flag_names(uint32_t flags) {
    static const char *const names[32] = {
        [0] = "NonPaged", [3] = "ReadOnly", [6] = "HostAccess", [7] = "NoSubstitute", [8] = "GDS", [9] = "Scratch",
        [10] = "AtomicFull", [11] = "AtomicPartial", [12] = "Execute", [13] = "Coarse", [14] = "AQL", [15] = "Fixed",
        [16] = "NoNUMA", [17] = "Uncached", [18] = "NoAddress", [19] = "OnlyAddress", [20] = "ExtCoherent", [21] = "GTT",
        [22] = "Contiguous",
    };
    char *out = text();
    int used = 0;
    out[0] = 0;
    for (unsigned bit = 0; bit < 32; bit++)
        if (flags & (1u << bit)) {
            const char *mark = used ? "|" : "";
            if (names[bit])
                used += snprintf(out + used, 256 - used, "%s%s", mark, names[bit]);
            else
                used += snprintf(out + used, 256 - used, "%s%#x", mark, 1u << bit);
        }
    return used ? out : "0";
}

const char *status_name(HSAKMT_STATUS status) {
    char *out = text();
    switch ((int)status) {
    case HSAKMT_STATUS_SUCCESS: return "SUCCESS";
    case HSAKMT_STATUS_ERROR: return "ERROR";
    case HSAKMT_STATUS_DRIVER_MISMATCH: return "DRIVER_MISMATCH";
    case HSAKMT_STATUS_INVALID_PARAMETER: return "INVALID_PARAMETER";
    case HSAKMT_STATUS_INVALID_HANDLE: return "INVALID_HANDLE";
    case HSAKMT_STATUS_INVALID_NODE_UNIT: return "INVALID_NODE_UNIT";
    case HSAKMT_STATUS_NO_MEMORY: return "NO_MEMORY";
    case HSAKMT_STATUS_BUFFER_TOO_SMALL: return "BUFFER_TOO_SMALL";
    case HSAKMT_STATUS_NOT_IMPLEMENTED: return "NOT_IMPLEMENTED";
    case HSAKMT_STATUS_NOT_SUPPORTED: return "NOT_SUPPORTED";
    case HSAKMT_STATUS_UNAVAILABLE: return "UNAVAILABLE";
    case HSAKMT_STATUS_OUT_OF_RESOURCES: return "OUT_OF_RESOURCES";
    case HSAKMT_STATUS_KERNEL_IO_CHANNEL_NOT_OPENED: return "KERNEL_IO_CHANNEL_NOT_OPENED";
    case HSAKMT_STATUS_KERNEL_COMMUNICATION_ERROR: return "KERNEL_COMMUNICATION_ERROR";
    case HSAKMT_STATUS_KERNEL_ALREADY_OPENED: return "KERNEL_ALREADY_OPENED";
    case HSAKMT_STATUS_HSAMMU_UNAVAILABLE: return "HSAMMU_UNAVAILABLE";
    case HSAKMT_STATUS_WAIT_FAILURE: return "WAIT_FAILURE";
    case HSAKMT_STATUS_WAIT_TIMEOUT: return "WAIT_TIMEOUT";
    case HSAKMT_STATUS_MEMORY_ALREADY_REGISTERED: return "MEMORY_ALREADY_REGISTERED";
    case HSAKMT_STATUS_MEMORY_NOT_REGISTERED: return "MEMORY_NOT_REGISTERED";
    case HSAKMT_STATUS_MEMORY_ALIGNMENT: return "MEMORY_ALIGNMENT";
    default: snprintf(out, 256, "status %d", status); return out;
    }
}

const char *node_list(HSAuint64 count, const HSAuint32 *nodes) {
    char *out = text();
    if (!nodes)
        return "NULL";
    int used = snprintf(out, 256, "{");
    for (HSAuint64 number = 0; number < count && number < NODES; number++)
        used += snprintf(out + used, 256 - used, "%s%u", number ? " " : "", nodes[number]);
    snprintf(out + used, 256 - used, "}");
    return out;
}

// What stands in an address before a call that may fill it in.
static void *const UNTOUCHED = (void *)0x5a5aull;

void *alloc_at(const char *label, HSAuint32 node, uint64_t size, uint64_t align, uint32_t flags, void *address) {
    HsaMemFlags mem_flags;
    void *got = address;
    HSAKMT_STATUS status;
    mem_flags.Value = flags;
#ifndef OLD_THUNK
    if (align) {
        status = hsaKmtAllocMemoryAlign(node, size, align, mem_flags, &got);
    } else
#endif
    {
        status = hsaKmtAllocMemory(node, size, mem_flags, &got);
    }
    const char *result;
    if (status == HSAKMT_STATUS_SUCCESS) {
        uint64_t asked = align ? align : PAGE;
        result = (flags & FIXED) && got != address ? "moved" : (uintptr_t)got % asked ? "misaligned" : "aligned";
        name(label, got, size);
    } else {
        result = got == UNTOUCHED ? "left alone" : got ? "not NULL" : "NULL";
    }
    line("alloc %s(node %u, size %#lx, align %#lx, %s) = %s, address %s", label, node, (unsigned long)size,
         (unsigned long)align, flag_names(flags), status_name(status), result);
    return status == HSAKMT_STATUS_SUCCESS ? got : NULL;
}

void *alloc_align(const char *label, HSAuint32 node, uint64_t size, uint64_t align, uint32_t flags) {
    return alloc_at(label, node, size, align, flags, UNTOUCHED);
}

void *alloc(const char *label, HSAuint32 node, uint64_t size, uint32_t flags) {
    return alloc_at(label, node, size, 0, flags, UNTOUCHED);
}

HSAKMT_STATUS release(void *address, uint64_t size) {
    HSAKMT_STATUS status = hsaKmtFreeMemory(address, size);
    line("free(%s, %#lx) = %s", at(address), (unsigned long)size, status_name(status));
    return status;
}

void drop(const char *label, void *address, uint64_t size) {
    release(address, size);
    forget(label);
}

HSAKMT_STATUS map(void *address, uint64_t size) {
    HSAuint64 gpu = 0x7171;
    HSAKMT_STATUS status = hsaKmtMapMemoryToGPU(address, size, &gpu);
    line("map(%s, %#lx) = %s, alternate %s", at(address), (unsigned long)size, status_name(status), at64(gpu));
    return status;
}

HSAKMT_STATUS map_nodes(void *address, uint64_t size, HSAuint64 count, HSAuint32 *nodes) {
    HSAuint64 gpu = 0x7171;
    HsaMemMapFlags flags;
    flags.Value = 0;
    HSAKMT_STATUS status = hsaKmtMapMemoryToGPUNodes(address, size, &gpu, flags, count, nodes);
    line("map(%s, %#lx, %lu nodes %s) = %s, alternate %s", at(address), (unsigned long)size, (unsigned long)count,
         node_list(count, nodes), status_name(status), at64(gpu));
    return status;
}

HSAKMT_STATUS unmap(void *address) {
    HSAKMT_STATUS status = hsaKmtUnmapMemoryToGPU(address);
    line("unmap(%s) = %s", at(address), status_name(status));
    return status;
}

void info(const void *address) {
    static const char *const types[] = {"unknown", "allocated", "user", "graphics", "shared", "reserved"};
    HsaPointerInfo found;
    memset(&found, 0x55, sizeof found);
    HSAKMT_STATUS status = hsaKmtQueryPointerInfo(address, &found);
    const char *type = (unsigned)found.Type < 6 ? types[found.Type] : "?";
    if (status != HSAKMT_STATUS_SUCCESS) {
        line("info(%s) = %s, type %s", at(address), status_name(status), type);
        return;
    }
    // Of an address without memory the native library does not set the node.
    char node[16] = "-";
    if (found.Type != HSA_POINTER_RESERVED_ADDR)
        snprintf(node, sizeof node, "%u", found.Node);
    line("info(%s) = %s, type %s, node %s, flags %s, cpu %s, gpu %s, size %#lx, registered %u %s, mapped %u %s, data %s",
         at(address), status_name(status), type, node, flag_names(found.MemFlags.Value), at(found.CPUAddress),
         at64(found.GPUAddress), (unsigned long)found.SizeInBytes, found.NRegisteredNodes,
         node_list(found.NRegisteredNodes, found.RegisteredNodes), found.NMappedNodes,
         node_list(found.NMappedNodes, found.MappedNodes), at(found.UserData));
}

HSAKMT_STATUS user_data(const void *address, void *data) {
    HSAKMT_STATUS status = hsaKmtSetMemoryUserData(address, data);
    line("user data(%s, %s) = %s", at(address), at(data), status_name(status));
    return status;
}

HSAKMT_STATUS register_memory(void *address, uint64_t size) {
    HSAKMT_STATUS status = hsaKmtRegisterMemory(address, size);
    line("register(%s, %#lx) = %s", at(address), (unsigned long)size, status_name(status));
    return status;
}

HSAKMT_STATUS register_nodes(void *address, uint64_t size, HSAuint64 count, HSAuint32 *nodes) {
    HSAKMT_STATUS status = hsaKmtRegisterMemoryToNodes(address, size, count, nodes);
    line("register(%s, %#lx, %lu nodes %s) = %s", at(address), (unsigned long)size, (unsigned long)count,
         node_list(count, nodes), status_name(status));
    return status;
}

HSAKMT_STATUS register_flags(void *address, uint64_t size, uint32_t flags) {
    HsaMemFlags mem_flags;
    mem_flags.Value = flags;
    HSAKMT_STATUS status = hsaKmtRegisterMemoryWithFlags(address, size, mem_flags);
    line("register(%s, %#lx, %s) = %s", at(address), (unsigned long)size, flag_names(flags), status_name(status));
    return status;
}

HSAKMT_STATUS deregister(void *address) {
    HSAKMT_STATUS status = hsaKmtDeregisterMemory(address);
    line("deregister(%s) = %s", at(address), status_name(status));
    return status;
}

void *quiet_alloc(HSAuint32 node, uint64_t size, uint32_t flags) {
    HsaMemFlags mem_flags;
    void *got = NULL;
    mem_flags.Value = flags;
    HSAKMT_STATUS status = hsaKmtAllocMemory(node, size, mem_flags, &got);
    if (status != HSAKMT_STATUS_SUCCESS)
        give_up("alloc(node %u, size %#lx, %s): %s", node, (unsigned long)size, flag_names(flags), status_name(status));
    return got;
}

void quiet_map(void *address, uint64_t size) {
    HSAuint64 gpu;
    HSAKMT_STATUS status = hsaKmtMapMemoryToGPU(address, size, &gpu);
    if (status != HSAKMT_STATUS_SUCCESS)
        give_up("map %s: %s", at(address), status_name(status));
}

void quiet_free(void *address, uint64_t size) {
    HSAKMT_STATUS status = hsaKmtFreeMemory(address, size);
    if (status != HSAKMT_STATUS_SUCCESS)
        give_up("free %s: %s", at(address), status_name(status));
}

void *own(uint64_t size) {
    void *address = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED)
        give_up("mmap of %#lx: %s", (unsigned long)size, strerror(errno));
    return address;
}

void disown(void *address, uint64_t size) {
    if (munmap(address, size))
        give_up("munmap: %s", strerror(errno));
}

static sigjmp_buf fault;

static void on_fault(int signal) {
    siglongjmp(fault, signal);
}

const char *reach(volatile void *address) {
    struct sigaction action, segv, bus;
    volatile uint8_t *byte = address;
    const char *volatile found = "nothing";
    memset(&action, 0, sizeof action);
    action.sa_handler = on_fault;
    sigaction(SIGSEGV, &action, &segv);
    sigaction(SIGBUS, &action, &bus);
    if (!sigsetjmp(fault, 1)) {
        uint8_t value = *byte;
        found = "read";
        *byte = value;
        found = "read write";
    }
    sigaction(SIGSEGV, &segv, NULL);
    sigaction(SIGBUS, &bus, NULL);
    return found;
}

void begin(void) {
    HsaSystemProperties system;
    HSAKMT_STATUS status = hsaKmtOpenKFD();
    if (status != HSAKMT_STATUS_SUCCESS)
        give_up("open: %s", status_name(status));
    status = hsaKmtAcquireSystemProperties(&system);
    if (status != HSAKMT_STATUS_SUCCESS)
        give_up("system properties: %s", status_name(status));
    machine.nodes = system.NumNodes;
    machine.gpus = 0;
    for (HSAuint32 node = 0; node < system.NumNodes; node++) {
        HsaNodeProperties properties;
        status = hsaKmtGetNodeProperties(node, &properties);
        if (status != HSAKMT_STATUS_SUCCESS)
            give_up("properties of node %u: %s", node, status_name(status));
        if (properties.NumFComputeCores && machine.gpus < NODES) {
            machine.gpu_id[machine.gpus] = properties.KFDGpuID;
            machine.gpu[machine.gpus++] = node;
        }
    }
    if (!machine.gpus)
        give_up("no GPU");
}

void end(void) {
    line("close = %s", status_name(hsaKmtCloseKFD()));
}
