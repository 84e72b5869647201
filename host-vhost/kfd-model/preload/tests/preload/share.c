/* Processes that pass memory on to each other, by ioctls alone. Run with the model preloaded:
 * `share pass` starts `share take` with a socket as descriptor 3; `share hold MIB` takes VRAM and waits;
 * `share available` prints what is left. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

/* What of linux/kfd_ioctl.h (1.12) is needed; distributions' headers may be older. */
struct kfd_process_device_apertures {
    uint64_t lds_base, lds_limit, scratch_base, scratch_limit, gpuvm_base, gpuvm_limit;
    uint32_t gpu_id, pad;
};
struct kfd_ioctl_get_process_apertures_new_args {
    uint64_t kfd_process_device_apertures_ptr;
    uint32_t num_of_nodes, pad;
};
struct kfd_ioctl_acquire_vm_args {
    uint32_t drm_fd, gpu_id;
};
struct kfd_ioctl_alloc_memory_of_gpu_args {
    uint64_t va_addr, size, handle, mmap_offset;
    uint32_t gpu_id, flags;
};
struct kfd_ioctl_free_memory_of_gpu_args {
    uint64_t handle;
};
struct kfd_ioctl_map_memory_to_gpu_args {
    uint64_t handle, device_ids_array_ptr;
    uint32_t n_devices, n_success;
};
struct kfd_ioctl_import_dmabuf_args {
    uint64_t va_addr, handle;
    uint32_t gpu_id, dmabuf_fd;
};
struct kfd_ioctl_get_available_memory_args {
    uint64_t available;
    uint32_t gpu_id, pad;
};
struct kfd_ioctl_export_dmabuf_args {
    uint64_t handle;
    uint32_t flags, dmabuf_fd;
};

#define AMDKFD_IOC_GET_PROCESS_APERTURES_NEW \
    _IOWR('K', 0x14, struct kfd_ioctl_get_process_apertures_new_args)
#define AMDKFD_IOC_ACQUIRE_VM _IOW('K', 0x15, struct kfd_ioctl_acquire_vm_args)
#define AMDKFD_IOC_ALLOC_MEMORY_OF_GPU _IOWR('K', 0x16, struct kfd_ioctl_alloc_memory_of_gpu_args)
#define AMDKFD_IOC_FREE_MEMORY_OF_GPU _IOW('K', 0x17, struct kfd_ioctl_free_memory_of_gpu_args)
#define AMDKFD_IOC_MAP_MEMORY_TO_GPU _IOWR('K', 0x18, struct kfd_ioctl_map_memory_to_gpu_args)
#define AMDKFD_IOC_UNMAP_MEMORY_FROM_GPU _IOWR('K', 0x19, struct kfd_ioctl_map_memory_to_gpu_args)
#define AMDKFD_IOC_IMPORT_DMABUF _IOWR('K', 0x1d, struct kfd_ioctl_import_dmabuf_args)
#define AMDKFD_IOC_AVAILABLE_MEMORY _IOWR('K', 0x23, struct kfd_ioctl_get_available_memory_args)
#define AMDKFD_IOC_EXPORT_DMABUF _IOWR('K', 0x24, struct kfd_ioctl_export_dmabuf_args)

#define KFD_IOC_ALLOC_MEM_FLAGS_VRAM (1u << 0)
#define KFD_IOC_ALLOC_MEM_FLAGS_WRITABLE (1u << 31)
#define KFD_IOC_ALLOC_MEM_FLAGS_PUBLIC (1u << 29)

#define CHECK(condition)                                                                       \
    do {                                                                                       \
        if (!(condition)) {                                                                    \
            fprintf(stderr, "%s:%d: %s (errno %d: %s)\n", __FILE__, __LINE__, #condition, errno, \
                    strerror(errno));                                                          \
            exit(1);                                                                           \
        }                                                                                      \
    } while (0)

enum { PAGE = 4096, SIZE = 3 * PAGE };
#define VA 0x700000000000ull

static int kfd, render;
static uint32_t gpu;

static void start(void)
{
    kfd = open("/dev/kfd", O_RDWR | O_CLOEXEC);
    render = open("/dev/dri/renderD128", O_RDWR | O_CLOEXEC);
    CHECK(kfd >= 0 && render >= 0);
    struct kfd_process_device_apertures aperture;
    struct kfd_ioctl_get_process_apertures_new_args apertures = {
        .kfd_process_device_apertures_ptr = (uintptr_t)&aperture, .num_of_nodes = 1};
    CHECK(ioctl(kfd, AMDKFD_IOC_GET_PROCESS_APERTURES_NEW, &apertures) == 0);
    gpu = aperture.gpu_id;
    struct kfd_ioctl_acquire_vm_args vm = {.drm_fd = render, .gpu_id = gpu};
    CHECK(ioctl(kfd, AMDKFD_IOC_ACQUIRE_VM, &vm) == 0);
}

static uint64_t allocate(uint64_t size, uint64_t *offset)
{
    struct kfd_ioctl_alloc_memory_of_gpu_args args = {
        .va_addr = VA,
        .size = size,
        .gpu_id = gpu,
        .flags = KFD_IOC_ALLOC_MEM_FLAGS_VRAM | KFD_IOC_ALLOC_MEM_FLAGS_WRITABLE |
                 KFD_IOC_ALLOC_MEM_FLAGS_PUBLIC};
    CHECK(ioctl(kfd, AMDKFD_IOC_ALLOC_MEMORY_OF_GPU, &args) == 0);
    *offset = args.mmap_offset;
    return args.handle;
}

static void map(uint64_t handle)
{
    struct kfd_ioctl_map_memory_to_gpu_args args = {
        .handle = handle, .device_ids_array_ptr = (uintptr_t)&gpu, .n_devices = 1};
    CHECK(ioctl(kfd, AMDKFD_IOC_MAP_MEMORY_TO_GPU, &args) == 0 && args.n_success == 1);
}

static void send_descriptor(int over, int descriptor)
{
    char byte = 0;
    struct iovec data = {&byte, 1};
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = &control,
                             .msg_controllen = sizeof control};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
    CHECK(sendmsg(over, &message, 0) == 1);
}

static int receive_descriptor(int over)
{
    char byte;
    struct iovec data = {&byte, 1};
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = &control,
                             .msg_controllen = sizeof control};
    CHECK(recvmsg(over, &message, 0) == 1);
    int descriptor;
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    CHECK(header != NULL && header->cmsg_type == SCM_RIGHTS);
    memcpy(&descriptor, CMSG_DATA(header), sizeof descriptor);
    return descriptor;
}

static void tell(int over)
{
    CHECK(send(over, "x", 1, 0) == 1);
}

static void hear(int over)
{
    char byte;
    CHECK(recv(over, &byte, 1, 0) == 1);
}

static int pass(const char *program)
{
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
    pid_t child = fork();
    if (child == 0) {
        CHECK(dup2(ends[1], 3) == 3 && fcntl(3, F_SETFD, 0) == 0);
        execl(program, program, "take", (char *)NULL);
        _exit(127);
    }
    start();
    uint64_t offset, handle = allocate(SIZE, &offset);
    map(handle);
    char *memory = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, render, offset);
    CHECK(memory != MAP_FAILED && memory[0] == 0 && memory[SIZE - 1] == 0);
    memset(memory, 'p', SIZE);
    memory[SIZE - 1] = 'e';
    struct kfd_ioctl_export_dmabuf_args args = {.handle = handle, .flags = O_CLOEXEC};
    CHECK(ioctl(kfd, AMDKFD_IOC_EXPORT_DMABUF, &args) == 0);
    struct stat st;
    int dmabuf = args.dmabuf_fd;
    CHECK(fstat(dmabuf, &st) == 0 && st.st_size == SIZE && lseek(dmabuf, 0, SEEK_END) == SIZE);
    send_descriptor(ends[0], dmabuf);
    hear(ends[0]);
    CHECK(memory[1] == 't');
    /* The buffer goes; the other process keeps its memory. */
    struct kfd_ioctl_map_memory_to_gpu_args unmap = {
        .handle = handle, .device_ids_array_ptr = (uintptr_t)&gpu, .n_devices = 1};
    struct kfd_ioctl_free_memory_of_gpu_args gone = {.handle = handle};
    CHECK(ioctl(kfd, AMDKFD_IOC_UNMAP_MEMORY_FROM_GPU, &unmap) == 0);
    CHECK(ioctl(kfd, AMDKFD_IOC_FREE_MEMORY_OF_GPU, &gone) == 0);
    CHECK(close(dmabuf) == 0 && munmap(memory, SIZE) == 0);
    /* As much again, so that the range would be reused if it could. */
    allocate(SIZE, &offset);
    tell(ends[0]);
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

static int take(void)
{
    int dmabuf = receive_descriptor(3);
    struct stat st;
    /* Before this process has opened any device. */
    CHECK(fstat(dmabuf, &st) == 0 && st.st_size == SIZE);
    CHECK(lseek(dmabuf, 0, SEEK_END) == SIZE && lseek(dmabuf, 0, SEEK_SET) == 0);
    char *memory = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, dmabuf, 0);
    CHECK(memory != MAP_FAILED && memory[0] == 'p' && memory[SIZE - 1] == 'e');
    CHECK(mmap(NULL, SIZE + 1, PROT_READ, MAP_SHARED, dmabuf, 0) == MAP_FAILED && errno == EINVAL);
    memory[1] = 't';
    start();
    struct kfd_ioctl_import_dmabuf_args args = {.va_addr = VA, .gpu_id = gpu, .dmabuf_fd = dmabuf};
    CHECK(ioctl(kfd, AMDKFD_IOC_IMPORT_DMABUF, &args) == 0);
    CHECK(close(dmabuf) == 0);
    map(args.handle);
    tell(3);
    hear(3);
    CHECK(memory[0] == 'p' && memory[1] == 't' && memory[SIZE - 1] == 'e');
    /* The test looks at what the GPU sees, and writes as it. */
    printf("%u\n", gpu);
    CHECK(fflush(stdout) == 0);
    CHECK(getchar() == '\n');
    printf("%.8s\n", memory + PAGE);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "pass") == 0)
        return pass(argv[0]);
    if (argc == 2 && strcmp(argv[1], "take") == 0)
        return take();
    start();
    if (argc == 3 && strcmp(argv[1], "hold") == 0) {
        uint64_t offset;
        allocate(strtoull(argv[2], NULL, 10) << 20, &offset);
        /* A child that outlives it, until the test closes its input, holds nothing of it. */
        if (fork() == 0) {
            close(STDOUT_FILENO);
            getchar();
            _exit(0);
        }
        puts("held");
        CHECK(fflush(stdout) == 0);
        pause();
    }
    struct kfd_ioctl_get_available_memory_args args = {.gpu_id = gpu};
    CHECK(ioctl(kfd, AMDKFD_IOC_AVAILABLE_MEMORY, &args) == 0);
    printf("%llu\n", (unsigned long long)args.available);
    return 0;
}
