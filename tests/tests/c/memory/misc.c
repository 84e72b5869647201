// The rest of the family: scratch, policies, tiling, copies between processes, SVM, graphics handles, a closed library.
#include "harness.h"

static void scratch(void) {
    heading("scratch");
    char *s = alloc("s", machine.gpu[0], 256 * KIB, SCRATCH);
    alloc("t", machine.gpu[0], 256 * KIB, SCRATCH);
    alloc("t", machine.gpu[0], 256 * KIB, SCRATCH | HOST_ACCESS);
    info(s);
    line("at a multiple of 64 KiB: %s", (uintptr_t)s % (64 * KIB) ? "no" : "yes");
    gpu_sees(0, s, 16, 0);
    map(s, 64 * KIB);
    gpu_writes(0, s, 64 * KIB, 4);
    gpu_sees(0, s, 64 * KIB, 4);
    line("the second piece faults: %d", gpu_faults(0, s + 64 * KIB));
    map(s + 64 * KIB, 64 * KIB);
    gpu_writes(0, s + 64 * KIB, 64 * KIB, 5);
    gpu_sees(0, s, 64 * KIB, 4);
    // Mapped already, out of the area, across its end.
    map(s, 64 * KIB);
    map(s + 256 * KIB - PAGE, 2 * PAGE);
    map(s + 256 * KIB, PAGE);
    info(s);
    unmap(s + PAGE);
    unmap(s);
    line("the first piece faults: %d", gpu_faults(0, s));
    gpu_sees(0, s + 64 * KIB, 64 * KIB, 5);
    unmap(s);
    map(s, 128 * KIB);
    // All pieces go with the area.
    release(s + PAGE, PAGE);
    line("after free it faults: %d", gpu_faults(0, s));
    release(s, 256 * KIB);
    forget("s");
    // Sizes are rounded up to 64 KiB; the next area is a new one.
    s = alloc("s", machine.gpu[0], PAGE, SCRATCH);
    map(s, PAGE);
    map(s + PAGE, PAGE);
    unmap(s + PAGE);
    unmap(s);
    drop("s", s, PAGE);
    s = alloc("s", machine.gpu[machine.gpus - 1], 16 * MIB, SCRATCH);
    map(s, 16 * MIB);
    unmap(s);
    drop("s", s, 16 * MIB);
    alloc("s", machine.gpu[0], 0, SCRATCH);
    alloc("s", machine.gpu[0], 1ull << 47, SCRATCH);
    alloc("s", machine.nodes, PAGE, SCRATCH);
}

static void policies(void) {
    heading("memory policy");
    for (HSAuint32 node = 0; node <= machine.nodes; node++)
        line("policy(node %u) = %s", node,
             status_name(hsaKmtSetMemoryPolicy(node, HSA_CACHING_CACHED, HSA_CACHING_NONCACHED, NULL, 0)));
    line("policy of an unknown kind = %s",
         status_name(hsaKmtSetMemoryPolicy(machine.gpu[0], 17, 18, (void *)1, 1)));
}

static void tiles(void) {
    heading("tile configuration");
    for (HSAuint32 node = 0; node <= machine.nodes; node++) {
        HSAuint32 tile[40], macro[20];
        HsaGpuTileConfig config;
        memset(&config, 0, sizeof config);
        memset(tile, 0x11, sizeof tile);
        memset(macro, 0x11, sizeof macro);
        config.TileConfig = tile;
        config.MacroTileConfig = macro;
        config.NumTileConfigs = 32;
        config.NumMacroTileConfigs = 16;
        HSAKMT_STATUS status = hsaKmtGetTileConfig(node, &config);
        uint32_t sum = 0;
        for (unsigned number = 0; number < 32; number++)
            sum = sum * 31 + tile[number];
        for (unsigned number = 0; number < 16; number++)
            sum = sum * 31 + macro[number];
        line("tiles(node %u) = %s, %u tiles, %u macro tiles, address config %#x, banks %u, ranks %u, sum %#x, %s beyond",
             node, status_name(status), config.NumTileConfigs, config.NumMacroTileConfigs, config.GbAddrConfig,
             config.NumBanks, config.NumRanks, sum, tile[32] == 0x11111111 && macro[16] == 0x11111111 ? "nothing" : "much");
    }
    HsaGpuTileConfig config;
    memset(&config, 0, sizeof config);
    HSAKMT_STATUS status = hsaKmtGetTileConfig(machine.gpu[0], &config);
    line("tiles without room = %s, %u and %u, address config %#x", status_name(status), config.NumTileConfigs,
         config.NumMacroTileConfigs, config.GbAddrConfig);
}

static void copies(void) {
    heading("copies between processes");
    char a[64], b[128];
    memset(a, 'a', sizeof a);
    memset(b, 'b', sizeof b);
    HsaMemoryRange local = {a, sizeof a}, remote[2] = {{b, 32}, {b + 96, 32}};
    HSAuint64 copied = 77;
    HSAKMT_STATUS status = hsaKmtProcessVMRead(getpid(), &local, 1, remote, 2, &copied);
    line("read from itself = %s, %lu copied, %.1s", status_name(status), (unsigned long)copied, a);
    memset(a, 'a', sizeof a);
    copied = 77;
    status = hsaKmtProcessVMWrite(getpid(), &local, 1, remote, 2, &copied);
    line("write to itself = %s, %lu copied, %.1s%.1s%.1s", status_name(status), (unsigned long)copied, b, b + 64, b + 96);
    copied = 77;
    status = hsaKmtProcessVMRead(0x7fffffff, &local, 1, remote, 1, &copied);
    line("read from nobody = %s", status_name(status));
}

static void graphics(void) {
    heading("graphics handles");
    HSAuint64 address = 5;
    HSAKMT_STATUS status = hsaKmtMapGraphicHandle(machine.gpu[0], 1, 2, 0, PAGE, &address);
    line("map a graphics handle = %s", status_name(status));
    line("unmap no graphics handle = %s", status_name(hsaKmtUnmapGraphicHandle(machine.gpu[0], 0, PAGE)));
    line("unmap an unknown one = %s", status_name(hsaKmtUnmapGraphicHandle(machine.gpu[0], 0x1234000, PAGE)));
    // It is an unmap by another name.
    char *a = alloc("a", machine.gpu[0], PAGE, DEVICE);
    map(a, PAGE);
    line("unmap what is mapped = %s",
         status_name(hsaKmtUnmapGraphicHandle(machine.gpu[0], (uintptr_t)a, PAGE)));
    info(a);
    drop("a", a, PAGE);
#ifndef OLD_THUNK
    for (HSAuint32 node = 0; node <= machine.nodes; node++) {
        HsaAMDGPUDeviceHandle device = NULL, again = NULL;
        status = hsaKmtGetAMDGPUDeviceHandle(node, &device);
        hsaKmtGetAMDGPUDeviceHandle(node, &again);
        line("device(node %u) = %s, %s, %s", node, status_name(status), device ? "a handle" : "none",
             device == again ? "the same again" : "another");
    }
#endif
}

static void svm(void) {
    heading("SVM");
    char *m = own(4 * PAGE);
    HSA_SVM_ATTRIBUTE attribute = {HSA_SVM_ATTR_PREFERRED_LOC, 0};
    line("set = %s", status_name(hsaKmtSVMSetAttr(m, 4 * PAGE, 1, &attribute)));
    line("get = %s", status_name(hsaKmtSVMGetAttr(m, 4 * PAGE, 1, &attribute)));
    line("set unaligned = %s", status_name(hsaKmtSVMSetAttr(m + 1, PAGE, 1, &attribute)));
    line("set of nothing = %s", status_name(hsaKmtSVMSetAttr(m, 0, 1, &attribute)));
    for (unsigned gpu = 0; gpu < machine.gpus; gpu++) {
        HsaNodeProperties properties;
        if (hsaKmtGetNodeProperties(machine.gpu[gpu], &properties) != HSAKMT_STATUS_SUCCESS)
            give_up("properties");
        line("gpu %u says that it has SVM: %u", gpu, properties.Capability.ui32.SVMAPISupported);
    }
    disown(m, 4 * PAGE);
#ifndef OLD_THUNK
    char *a = alloc("a", machine.gpu[0], 4 * PAGE, VISIBLE);
    line("replace a page for the address sanitizer = %s", status_name(hsaKmtReplaceAsanHeaderPage(a)));
    line("give it back = %s", status_name(hsaKmtReturnAsanHeaderPage(a)));
    drop("a", a, 4 * PAGE);
#endif
}

// Must be the last section: the library is closed afterwards, and opened again for `end`.
static void closed(void) {
    heading("a closed library");
    char *a = alloc("a", machine.cpu, PAGE, FINE);
    HsaMemFlags flags;
    HsaPointerInfo pointer;
    HSAuint64 bytes;
    HsaGpuTileConfig config;
    HsaMemMapFlags map_flags;
    memset(&config, 0, sizeof config);
    map_flags.Value = 0;
    flags.Value = FINE;
    line("close = %s", status_name(hsaKmtCloseKFD()));
    void *none = NULL;
    line("alloc = %s", status_name(hsaKmtAllocMemory(machine.cpu, PAGE, flags, &none)));
    line("free = %s", status_name(hsaKmtFreeMemory(a, PAGE)));
    line("map = %s", status_name(hsaKmtMapMemoryToGPU(a, PAGE, &bytes)));
    line("map to nodes = %s",
         status_name(hsaKmtMapMemoryToGPUNodes(a, PAGE, &bytes, map_flags, 1, &machine.gpu[0])));
    line("unmap = %s", status_name(hsaKmtUnmapMemoryToGPU(a)));
    line("register = %s", status_name(hsaKmtRegisterMemory(&flags, 1)));
    line("register to nodes = %s", status_name(hsaKmtRegisterMemoryToNodes(&flags, 1, 1, &machine.gpu[0])));
    line("register with flags = %s", status_name(hsaKmtRegisterMemoryWithFlags(&flags, 1, flags)));
    line("deregister = %s", status_name(hsaKmtDeregisterMemory(&flags)));
    line("info = %s", status_name(hsaKmtQueryPointerInfo(a, &pointer)));
    line("user data = %s", status_name(hsaKmtSetMemoryUserData(a, a)));
    line("tiles = %s", status_name(hsaKmtGetTileConfig(machine.gpu[0], &config)));
    line("policy = %s", status_name(hsaKmtSetMemoryPolicy(machine.gpu[0], 0, 0, NULL, 0)));
#ifndef OLD_THUNK
    int fd;
    HsaSharedMemoryHandle shared;
    memset(&shared, 0, sizeof shared);
    line("available = %s", status_name(hsaKmtAvailableMemory(machine.gpu[0], &bytes)));
    line("alloc aligned = %s", status_name(hsaKmtAllocMemoryAlign(machine.cpu, PAGE, PAGE, flags, &none)));
    line("export = %s", status_name(hsaKmtExportDMABufHandle(a, PAGE, &fd, &bytes)));
    line("share = %s", status_name(hsaKmtShareMemory(a, PAGE, &shared)));
    line("register shared = %s", status_name(hsaKmtRegisterSharedHandle(&shared, &none, &bytes)));
#endif
    forget("a");
    begin();
    a = alloc("a", machine.cpu, PAGE, FINE);
    drop("a", a, PAGE);
}

void section_misc(void) {
    scratch();
    policies();
    tiles();
    copies();
    graphics();
    svm();
    closed();
}
