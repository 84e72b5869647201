// Memory without an address, addresses without memory, and dma-bufs; then the calls of libdrm_amdgpu that ROCr's interface
// for virtual memory makes with them.
#include "harness.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <libdrm/amdgpu.h>
#include <libdrm/amdgpu_drm.h>
#include <sys/resource.h>
#include <xf86drm.h>

// The descriptor, or -1.
static int export_of(void *address, uint64_t size) {
    int fd = -77;
    HSAuint64 offset = 0x7171;
    HSAKMT_STATUS status = hsaKmtExportDMABufHandle(address, size, &fd, &offset);
    if (status == HSAKMT_STATUS_SUCCESS)
        line("export(%s, %#lx) = SUCCESS, %s, %s, offset %#lx", at(address), (unsigned long)size,
             fd >= 0 ? "a descriptor" : "no descriptor", fcntl(fd, F_GETFD) & FD_CLOEXEC ? "closed on exec" : "inherited",
             (unsigned long)offset);
    else
        line("export(%s, %#lx) = %s, %s", at(address), (unsigned long)size, status_name(status),
             fd == -77 && offset == 0x7171 ? "nothing written" : "something written");
    return status == HSAKMT_STATUS_SUCCESS ? fd : -1;
}

// The address, or NULL.
static void *import_of(const char *label, int fd, HSAuint64 count, HSAuint32 *nodes) {
    HsaGraphicsResourceInfo found;
    memset(&found, 0, sizeof found);
    HSAKMT_STATUS status = hsaKmtRegisterGraphicsHandleToNodes((HSAuint64)fd, &found, count, nodes);
    if (status != HSAKMT_STATUS_SUCCESS) {
        line("import %s(%lu nodes %s) = %s", label, (unsigned long)count, node_list(count, nodes), status_name(status));
        return NULL;
    }
    name(label, found.MemoryAddress, found.SizeInBytes);
    line("import %s(%lu nodes %s) = SUCCESS, size %#lx, node %u, %u bytes of metadata", label, (unsigned long)count,
         node_list(count, nodes), (unsigned long)found.SizeInBytes, found.NodeId, found.MetadataSizeInBytes);
    return found.MemoryAddress;
}

static void exports(void) {
    static const uint32_t kinds[] = {DEVICE, VISIBLE, PINNED, FINE, DEVICE | NO_ADDRESS, DEVICE | ONLY_ADDRESS};
    heading("exports");
    for (unsigned kind = 0; kind < sizeof kinds / sizeof *kinds; kind++) {
        HSAuint32 node = kinds[kind] & NON_PAGED ? machine.gpu[0] : machine.cpu;
        char *a = alloc("a", node, 16 * PAGE, kinds[kind]);
        int fd = export_of(a, 16 * PAGE);
        if (fd >= 0)
            close(fd);
        // Pieces, and more than there is.
        fd = export_of(a, PAGE);
        if (fd >= 0)
            close(fd);
        fd = export_of(a + 4 * PAGE, 12 * PAGE);
        if (fd >= 0)
            close(fd);
        fd = export_of(a + 5, 1);
        if (fd >= 0)
            close(fd);
        fd = export_of(a, 0);
        if (fd >= 0)
            close(fd);
        export_of(a, 17 * PAGE);
        export_of(a + PAGE, 16 * PAGE);
        export_of(a + 16 * PAGE, PAGE);
        drop("a", a, 16 * PAGE);
    }
    export_of(NULL, PAGE);
    int local;
    name("local", &local, sizeof local);
    export_of(&local, sizeof local);
    forget("local");
}

static void imports(void) {
    static const uint32_t kinds[] = {DEVICE, VISIBLE, PINNED, DEVICE | NO_ADDRESS};
    HSAuint32 last = machine.gpu[machine.gpus - 1];
    heading("imports");
    for (unsigned kind = 0; kind < sizeof kinds / sizeof *kinds; kind++) {
        uint32_t flags = kinds[kind];
        char *a = alloc("a", machine.gpu[0], 16 * PAGE, flags);
        if (!(flags & NO_ADDRESS)) {
            map(a, 16 * PAGE);
            gpu_writes(0, a, 16 * PAGE, 41);
        }
        int fd = export_of(a, 16 * PAGE);
        // Of memory without an address: see the exceptions.
        bool bare = flags & NO_ADDRESS;
        char *b = import_of(bare ? "bare-b" : "b", fd, 1, &machine.gpu[0]);
        char *c = import_of(bare ? "bare-c" : "c", fd, 0, NULL);
        char *d = import_of("d", fd, 1, &last);
        close(fd);
        if (!b || !c || !d)
            give_up("no import");
        info(b);
        info(c);
        map(b, 16 * PAGE);
        info(b + 5 * PAGE);
        // Without an address it cannot be mapped.
        map(c, 16 * PAGE);
        if (flags & NO_ADDRESS)
            gpu_writes(0, b, 16 * PAGE, 41);
        gpu_sees(0, b, 16 * PAGE, 41);
        gpu_writes(0, b + PAGE, PAGE, 42);
        if (!(flags & NO_ADDRESS)) {
            gpu_sees(0, a + PAGE, PAGE, 42);
            if (flags & HOST_ACCESS)
                cpu_sees(a + PAGE, PAGE, 42);
        }
        line("the CPU can %s at %s", reach(b), at(b));
        line("behind the end: %d", gpu_faults(0, b + 16 * PAGE));
        map(d, 16 * PAGE);
        line("gpu %u sees it: %d", machine.gpus - 1, gpu_has(machine.gpus - 1, d + PAGE, PAGE, 42));
        unmap(d);
        deregister(d);
        info(d);
        release(c, 16 * PAGE);
        // The exporter goes first; the memory stays.
        if (!(flags & NO_ADDRESS))
            unmap(a);
        drop("a", a, 16 * PAGE);
        gpu_sees(0, b + PAGE, PAGE, 42);
        fd = export_of(b, 16 * PAGE);
        if (fd >= 0)
            close(fd);
        unmap(b);
        release(b, 16 * PAGE);
        release(b, 16 * PAGE);
        forget(bare ? "bare-b" : "b");
        forget(bare ? "bare-c" : "c");
        forget("d");
    }
    heading("imports that are refused");
    import_of("x", -1, 1, &machine.gpu[0]);
    import_of("x", 100000, 1, &machine.gpu[0]);
    int fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    import_of("x", fd, 1, &machine.gpu[0]);
    close(fd);
    fd = memfd_create("x", MFD_CLOEXEC);
    if (ftruncate(fd, 16 * PAGE))
        give_up("ftruncate");
    import_of("x", fd, 1, &machine.gpu[0]);
    import_of("x", fd, 0, NULL);
    close(fd);
    char *a = alloc("a", machine.gpu[0], 16 * PAGE, DEVICE);
    fd = export_of(a, 16 * PAGE);
    HSAuint32 far = machine.nodes;
    import_of("x", fd, 1, NULL);
    import_of("x", fd, 1, &far);
    close(fd);
    drop("a", a, 16 * PAGE);

    // Case C19.
    heading("2000 exports and imports");
    struct rlimit before, few;
    getrlimit(RLIMIT_NOFILE, &before);
    few = before;
    few.rlim_cur = 256;
    setrlimit(RLIMIT_NOFILE, &few);
    a = quiet_alloc(machine.gpu[0], 16 * PAGE, DEVICE);
    unsigned failed = 0;
    for (unsigned round = 0; round < 2000; round++) {
        HSAuint64 offset;
        HsaGraphicsResourceInfo found;
        if (hsaKmtExportDMABufHandle(a, 16 * PAGE, &fd, &offset) != HSAKMT_STATUS_SUCCESS) {
            failed++;
            continue;
        }
        if (hsaKmtRegisterGraphicsHandleToNodes(fd, &found, 1, &machine.gpu[0]) != HSAKMT_STATUS_SUCCESS)
            failed++;
        else if (hsaKmtDeregisterMemory(found.MemoryAddress) != HSAKMT_STATUS_SUCCESS)
            failed++;
        close(fd);
    }
    line("with 256 descriptors at most, failed: %u", failed);
    setrlimit(RLIMIT_NOFILE, &before);
    quiet_free(a, 16 * PAGE);
}

void section_vmm(void) {
    exports();
    imports();
}

static const char *answer(int result) {
    static char text[8][64];
    static unsigned next;
    char *out = text[next++ % 8];
    if (!result)
        return "done";
    snprintf(out, 64, "%s", strerrorname_np(result < 0 ? -result : result));
    return out;
}

static void *device(unsigned gpu) {
    HsaAMDGPUDeviceHandle handle = NULL;
    HSAKMT_STATUS status = hsaKmtGetAMDGPUDeviceHandle(machine.gpu[gpu], &handle);
    if (status != HSAKMT_STATUS_SUCCESS)
        give_up("the device of gpu %u: %s", gpu, status_name(status));
    return handle;
}

static int operate(amdgpu_bo_handle bo, const char *label, uint64_t offset, uint64_t size, void *address, uint64_t flags,
                   uint32_t operation) {
    int result = amdgpu_bo_va_op(bo, offset, size, (uintptr_t)address, flags, operation);
    line("va_op(%s, %#lx, %#lx, %s, flags %#lx, %s) = %s", label, (unsigned long)offset, (unsigned long)size, at(address),
         (unsigned long)flags,
         operation == AMDGPU_VA_OP_MAP ? "map" : operation == AMDGPU_VA_OP_UNMAP ? "unmap" : "?", answer(result));
    return result;
}

#define READ_WRITE (AMDGPU_VM_PAGE_READABLE | AMDGPU_VM_PAGE_WRITEABLE)

// What ROCr does for hsa_amd_vmem_*: reserve, create, map, access for GPU and CPU, release.
static void virtual_memory(uint64_t size) {
    struct amdgpu_bo_import_result imported;
    heading("virtual memory as ROCr does it");
    char *va = alloc("va", machine.gpu[0], 4 * size, DEVICE | ONLY_ADDRESS);
    char *handle = alloc("handle", machine.gpu[0], size, DEVICE | NO_ADDRESS);
    int fd = export_of(handle, size);
    int result = amdgpu_bo_import(device(0), amdgpu_bo_handle_type_dma_buf_fd, fd, &imported);
    line("import = %s, size %#lx", answer(result), result ? 0ul : (unsigned long)imported.alloc_size);
    close(fd);
    if (result)
        give_up("no import");
    amdgpu_bo_handle bo = imported.buf_handle;
    operate(bo, "bo", 0, size, va, READ_WRITE, AMDGPU_VA_OP_MAP);
    gpu_writes(0, va, size, 51);
    gpu_sees(0, va, size, 51);
    line("behind the end: %d", gpu_faults(0, va + size));
    // The same again, over it, and elsewhere.
    operate(bo, "bo", 0, size, va, READ_WRITE, AMDGPU_VA_OP_MAP);
    operate(bo, "bo", PAGE, PAGE, va + 2 * size, READ_WRITE, AMDGPU_VA_OP_MAP);
    line("a piece elsewhere: %d", gpu_put(0, va + 2 * size, PAGE, 52));
    gpu_sees(0, va + PAGE, PAGE, 52);
    line("behind the piece: %d", gpu_faults(0, va + 2 * size + PAGE));
    void *cpu = NULL;
    result = amdgpu_bo_cpu_map(bo, &cpu);
    line("cpu_map = %s", answer(result));
    if (!result) {
        name("cpu", cpu, size);
        cpu_sees((char *)cpu + PAGE, PAGE, 52);
        cpu_writes(cpu, size, 54);
        gpu_sees(0, va, size, 54);
        void *again = NULL;
        result = amdgpu_bo_cpu_map(bo, &again);
        line("cpu_map again = %s, %s", answer(result), again == cpu ? "the same" : "another");
        forget("cpu");
    }
    // A second handle on the same memory.
    fd = export_of(handle, size);
    struct amdgpu_bo_import_result second;
    result = amdgpu_bo_import(device(0), amdgpu_bo_handle_type_dma_buf_fd, fd, &second);
    line("import again = %s, %s", answer(result), second.buf_handle == bo ? "the same buffer" : "another");
    close(fd);
    uint32_t shared = 0;
    result = amdgpu_bo_export(bo, amdgpu_bo_handle_type_dma_buf_fd, &shared);
    line("export to a dma-buf = %s", answer(result));
    if (!result) {
        char *b = import_of("b", (int)shared, 1, &machine.gpu[0]);
        close((int)shared);
        if (b) {
            map(b, size);
            gpu_sees(0, b, size, 54);
            unmap(b);
            drop("b", b, size);
        }
    }
    line("free the second = %s", answer(amdgpu_bo_free(second.buf_handle)));
    gpu_sees(0, va, size, 54);
    // libdrm takes no notice of the flags.
    operate(bo, "bo", 0, size, va + size, AMDGPU_VM_PAGE_READABLE, AMDGPU_VA_OP_MAP);
    gpu_sees(0, va + size, size, 54);
    gpu_writes(0, va + size, 16, 54);
    operate(bo, "bo", 0, size, va + size, 0, AMDGPU_VA_OP_UNMAP);
    // The CPU's memory of the thunk's own is released; the buffer is still held.
    drop("handle", handle, size);
    gpu_sees(0, va, size, 54);

    heading("what is refused");
    operate(bo, "bo", 0, size, va + size, 0, AMDGPU_VA_OP_UNMAP);
    operate(bo, "bo", 0, size + PAGE, va + size, READ_WRITE, AMDGPU_VA_OP_MAP);
    operate(bo, "bo", size, PAGE, va + size, READ_WRITE, AMDGPU_VA_OP_MAP);
    operate(bo, "bo", 0, PAGE, va + size + 8, READ_WRITE, AMDGPU_VA_OP_MAP);
    operate(bo, "bo", 8, PAGE, va + size, READ_WRITE, AMDGPU_VA_OP_MAP);
    operate(bo, "bo", 0, 0, va + size, READ_WRITE, AMDGPU_VA_OP_MAP);
    operate(bo, "bo", 0, PAGE, (void *)0xffff900000000000ull, READ_WRITE, AMDGPU_VA_OP_MAP);
    operate(bo, "bo", 0, PAGE, va + size, READ_WRITE, 99);
    line("import of no descriptor = %s",
         answer(amdgpu_bo_import(device(0), amdgpu_bo_handle_type_dma_buf_fd, 100000, &second)));
    fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    line("import of another file = %s",
         answer(amdgpu_bo_import(device(0), amdgpu_bo_handle_type_dma_buf_fd, (uint32_t)fd, &second)));
    close(fd);

    heading("the end");
    operate(bo, "bo", 0, size, va, 0, AMDGPU_VA_OP_UNMAP);
    line("unmapped: %d", gpu_faults(0, va));
    gpu_sees(0, va + 2 * size, 16, 52);
    // Each reference is given back by itself.
    amdgpu_bo_inc_ref(bo);
    line("free with another reference = %s", answer(amdgpu_bo_free(bo)));
    gpu_sees(0, va + 2 * size, 16, 52);
    // What is still mapped goes with the buffer.
    line("free = %s", answer(amdgpu_bo_free(bo)));
    line("the piece after free: %d", gpu_faults(0, va + 2 * size));
    drop("va", va, 4 * size);
}

// The CPU's access as ROCr gives it: a map of the device's file, at the address that the GPU has.
void section_drm_file(void) {
    const uint64_t size = 2 * MIB;
    struct amdgpu_bo_import_result imported;
    int (*device_fd)(void *) = (int (*)(void *))(uintptr_t)dlsym(RTLD_DEFAULT, "amdgpu_device_get_fd");
    heading("through the device's file");
    char *va = alloc("va", machine.gpu[0], size, DEVICE | ONLY_ADDRESS);
    char *handle = alloc("handle", machine.gpu[0], size, DEVICE | NO_ADDRESS);
    int fd = export_of(handle, size);
    int result = amdgpu_bo_import(device(0), amdgpu_bo_handle_type_dma_buf_fd, fd, &imported);
    close(fd);
    if (result)
        give_up("no import");
    amdgpu_bo_handle bo = imported.buf_handle;
    operate(bo, "bo", 0, size, va, READ_WRITE, AMDGPU_VA_OP_MAP);
    gpu_writes(0, va, size, 52);
    uint32_t gem = 0;
    result = amdgpu_bo_export(bo, amdgpu_bo_handle_type_kms, &gem);
    line("export to a handle = %s, %s", answer(result), gem ? "a handle" : "none");
    union drm_amdgpu_gem_mmap args;
    memset(&args, 0, sizeof args);
    args.in.handle = gem;
    int render = device_fd ? device_fd(device(0)) : -1;
    line("the device's file: %s", render >= 0 ? "there" : "none");
    result = drmCommandWriteRead(render, DRM_AMDGPU_GEM_MMAP, &args, sizeof args);
    line("offset for mmap = %s", answer(result));
    if (!result) {
        char *cpu = mmap(va, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, render, (off_t)args.out.addr_ptr);
        line("mmap = %s", cpu == va ? "done" : cpu == MAP_FAILED ? strerrorname_np(errno) : "elsewhere");
        if (cpu == va) {
            cpu_sees(va, size, 52);
            cpu_writes(va, size, 53);
            gpu_sees(0, va, size, 53);
            munmap(va, size);
            if (mmap(va, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != va)
                give_up("mmap");
        }
    }
    operate(bo, "bo", 0, size, va, 0, AMDGPU_VA_OP_UNMAP);
    line("free = %s", answer(amdgpu_bo_free(bo)));
    drop("handle", handle, size);
    drop("va", va, size);
}

// What a program may ask of the device besides.
static void questions(void) {
    heading("questions about the device");
    uint32_t word = 0x77, count = 0x77, version = 0x77, feature = 0x77;
    int result = amdgpu_query_info(device(0), AMDGPU_INFO_ACCEL_WORKING, sizeof word, &word);
    line("acceleration works = %s, %#x", answer(result), word);
    struct drm_amdgpu_info_device known;
    memset(&known, 0, sizeof known);
    result = amdgpu_query_info(device(0), AMDGPU_INFO_DEV_INFO, sizeof known, &known);
    line("device = %s, id %#x, family %u", answer(result), known.device_id, known.family);
    result = amdgpu_query_hw_ip_count(device(0), AMDGPU_HW_IP_COMPUTE, &count);
    line("compute blocks = %s, %#x", answer(result), count);
    result = amdgpu_query_firmware_version(device(0), AMDGPU_INFO_FW_GFX_MEC, 0, 0, &version, &feature);
    line("firmware of the MEC = %s, %#x, %#x", answer(result), version, feature);
    // GB_ADDR_CONFIG, which ROCr reads too.
    result = amdgpu_read_mm_registers(device(0), 0x263e, 1, 0xffffffff, 0, &word);
    line("a register = %s, %#x", answer(result), word);
}

void section_drm(void) {
    HSAuint64 before = 0, after = 0;
    questions();
    hsaKmtAvailableMemory(machine.gpu[0], &before);
    virtual_memory(2 * MIB);
    heading("200 rounds");
    unsigned failed = 0;
    for (unsigned round = 0; round < 200; round++) {
        void *handle = quiet_alloc(machine.gpu[0], 64 * KIB, DEVICE | NO_ADDRESS);
        struct amdgpu_bo_import_result imported;
        int fd;
        HSAuint64 offset;
        if (hsaKmtExportDMABufHandle(handle, 64 * KIB, &fd, &offset) != HSAKMT_STATUS_SUCCESS) {
            failed++;
        } else {
            if (amdgpu_bo_import(device(0), amdgpu_bo_handle_type_dma_buf_fd, (uint32_t)fd, &imported))
                failed++;
            else if (amdgpu_bo_free(imported.buf_handle))
                failed++;
            close(fd);
        }
        quiet_free(handle, 64 * KIB);
    }
    // A guest's kernel gives back in the background what had no address.
    for (unsigned wait = 0; wait < 100; wait++) {
        hsaKmtAvailableMemory(machine.gpu[0], &after);
        if (after >= before)
            break;
        usleep(50000);
    }
    line("failed: %u, VRAM that is missing: %ld KiB", failed, (long)(before - after) / (long)KIB);
}
