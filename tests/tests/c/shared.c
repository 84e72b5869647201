/* Memory that one process makes and another one uses, by ROCr's API: dma-bufs that go over a socket (hsa_amd_portable_export_dmabuf,
 * hsa_amd_vmem_export_shareable_handle) and handles of bytes (hsa_amd_ipc_memory_*, under hipIpcGetMemHandle). Each side reads what the other
 * one wrote, by copies of the GPU. The processes take turns, so that the lines come in order. */
#define _GNU_SOURCE
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "hsa_gpu.h"
#include "hsa_vmem.h"

#define SIZE (2u << 20)

static unsigned char *host;
static int peer;
static const char *side;

static void begin(const char *who)
{
	side = who;
	start();
	host = host_memory(SIZE);
}

static unsigned char pattern(unsigned seed, unsigned i)
{
	return (unsigned char)(i * (2 * seed + 1) + (i >> 11) + seed);
}

static void write_to(void *device, unsigned seed)
{
	for (unsigned i = 0; i < SIZE; i++)
		host[i] = pattern(seed, i);
	copy(device, gpu, host, cpu, SIZE);
}

// The number of bytes that are others.
static unsigned wrong_in(const void *device, unsigned seed)
{
	unsigned wrong = 0;
	memset(host, 0, SIZE);
	copy(host, cpu, device, gpu, SIZE);
	for (unsigned i = 0; i < SIZE; i++)
		wrong += host[i] != pattern(seed, i);
	return wrong;
}

// Bytes and perhaps a descriptor; the other side's turn.
static void give(const void *bytes, size_t size, int fd)
{
	char control[CMSG_SPACE(sizeof fd)] = {0};
	struct iovec data = {(void *)bytes, size};
	struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1};
	if (fd >= 0) {
		message.msg_control = control;
		message.msg_controllen = sizeof control;
		struct cmsghdr *header = CMSG_FIRSTHDR(&message);
		*header = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof fd)};
		memcpy(CMSG_DATA(header), &fd, sizeof fd);
	}
	if (sendmsg(peer, &message, 0) != (ssize_t)size) {
		printf("%s: the other side has gone\n", side);
		exit(1);
	}
}

static int take(void *bytes, size_t size)
{
	int fd = -1;
	char control[CMSG_SPACE(sizeof fd)] = {0};
	struct iovec data = {bytes, size};
	struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
	if (recvmsg(peer, &message, MSG_CMSG_CLOEXEC) != (ssize_t)size) {
		printf("%s: the other side has gone\n", side);
		exit(1);
	}
	if (CMSG_FIRSTHDR(&message))
		memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
	return fd;
}

static void turn(void)
{
	char byte = 0;
	give(&byte, 1, -1);
	take(&byte, 1);
}

// What the first process makes and the second one sees, for memory of one pool.
static void first_dma_buf(const char *what, hsa_amd_memory_pool_t from, unsigned seed)
{
	void *memory;
	int fd = -1;
	uint64_t offset = 77;
	MUST(hsa_amd_memory_pool_allocate(from, SIZE, 0, &memory));
	MUST(hsa_amd_agents_allow_access(1, &gpu, NULL, memory));
	write_to(memory, seed);
	hsa_status_t status = hsa_amd_portable_export_dmabuf(memory, SIZE, &fd, &offset);
	printf("first, %s: export %s, offset %lu\n", what, name(status), (unsigned long)offset);
	give(&status, sizeof status, fd);
	if (status == HSA_STATUS_SUCCESS) {
		MUST(hsa_amd_portable_close_dmabuf(fd));
		char byte;
		take(&byte, 1);
		printf("first, %s: what the other one wrote is wrong in %u bytes\n", what, wrong_in(memory, seed + 1));
		give(&byte, 1, -1);
		take(&byte, 1);
	}
	MUST(hsa_amd_memory_pool_free(memory));
}

static void second_dma_buf(const char *what, unsigned seed)
{
	hsa_status_t status;
	int fd = take(&status, sizeof status);
	if (status != HSA_STATUS_SUCCESS)
		return;
	size_t size = 0, metadata_size = 0;
	void *memory = NULL;
	status = hsa_amd_interop_map_buffer(1, &gpu, fd, 0, &size, &memory, &metadata_size, NULL);
	printf("second, %s: import %s, %zu bytes\n", what, name(status), size);
	close(fd);
	if (status == HSA_STATUS_SUCCESS) {
		printf("second, %s: wrong in %u bytes\n", what, wrong_in(memory, seed));
		write_to(memory, seed + 1);
		turn();
		printf("second, %s: unmap %s\n", what, name(hsa_amd_interop_unmap_buffer(memory)));
	} else {
		turn();
	}
	char byte = 0;
	give(&byte, 1, -1);
}

static void first_vmem(unsigned seed)
{
	char *va;
	hsa_amd_vmem_alloc_handle_t handle;
	hsa_amd_memory_access_desc_t access = {HSA_ACCESS_PERMISSION_RW, gpu};
	MUST(hsa_amd_vmem_address_reserve((void **)&va, SIZE, 0, 0));
	MUST(hsa_amd_vmem_handle_create(vram, SIZE, MEMORY_TYPE_NONE, 0, &handle));
	MUST(hsa_amd_vmem_map(va, SIZE, 0, handle, 0));
	MUST(hsa_amd_vmem_set_access(va, SIZE, &access, 1));
	write_to(va, seed);
	int fd = -1;
	hsa_status_t status = hsa_amd_vmem_export_shareable_handle(&fd, handle, 0);
	printf("first, virtual memory: export %s\n", name(status));
	give(&status, sizeof status, fd);
	if (status == HSA_STATUS_SUCCESS) {
		close(fd);
		char byte;
		take(&byte, 1);
		printf("first, virtual memory: what the other one wrote is wrong in %u bytes\n", wrong_in(va, seed + 1));
		// The second process has it for as long as it wants.
		write_to(va, seed + 2);
	}
	MUST(hsa_amd_vmem_unmap(va, SIZE));
	MUST(hsa_amd_vmem_handle_release(handle));
	MUST(hsa_amd_vmem_address_free(va, SIZE));
	if (status == HSA_STATUS_SUCCESS) {
		char byte = 0;
		give(&byte, 1, -1);
		take(&byte, 1);
	}
}

static void second_vmem(unsigned seed)
{
	hsa_status_t status;
	int fd = take(&status, sizeof status);
	if (status != HSA_STATUS_SUCCESS)
		return;
	char *va;
	hsa_amd_vmem_alloc_handle_t handle;
	hsa_amd_memory_access_desc_t access = {HSA_ACCESS_PERMISSION_RW, gpu};
	MUST(hsa_amd_vmem_address_reserve((void **)&va, SIZE, 0, 0));
	status = hsa_amd_vmem_import_shareable_handle(fd, &handle);
	printf("second, virtual memory: import %s\n", name(status));
	close(fd);
	char byte = 0;
	if (status == HSA_STATUS_SUCCESS) {
		MUST(hsa_amd_vmem_map(va, SIZE, 0, handle, 0));
		MUST(hsa_amd_vmem_set_access(va, SIZE, &access, 1));
		printf("second, virtual memory: wrong in %u bytes\n", wrong_in(va, seed));
		write_to(va, seed + 1);
		turn();
		printf("second, virtual memory: the first one has freed it, wrong in %u bytes\n", wrong_in(va, seed + 2));
		MUST(hsa_amd_vmem_unmap(va, SIZE));
		MUST(hsa_amd_vmem_handle_release(handle));
	} else {
		turn();
	}
	MUST(hsa_amd_vmem_address_free(va, SIZE));
	give(&byte, 1, -1);
}

struct message {
	hsa_status_t status;
	hsa_amd_ipc_memory_t handle;
};

static void first_ipc(const char *what, hsa_amd_memory_pool_t from, unsigned seed)
{
	void *memory;
	struct message message = {0};
	MUST(hsa_amd_memory_pool_allocate(from, SIZE, 0, &memory));
	MUST(hsa_amd_agents_allow_access(1, &gpu, NULL, memory));
	write_to(memory, seed);
	message.status = hsa_amd_ipc_memory_create(memory, SIZE, &message.handle);
	printf("first, %s by a handle: create %s\n", what, name(message.status));
	give(&message, sizeof message, -1);
	if (message.status == HSA_STATUS_SUCCESS) {
		char byte;
		take(&byte, 1);
		printf("first, %s by a handle: what the other one wrote is wrong in %u bytes\n", what, wrong_in(memory, seed + 1));
		give(&byte, 1, -1);
		take(&byte, 1);
	}
	MUST(hsa_amd_memory_pool_free(memory));
}

static void second_ipc(const char *what, unsigned seed)
{
	struct message message;
	take(&message, sizeof message);
	if (message.status != HSA_STATUS_SUCCESS)
		return;
	void *memory = NULL;
	hsa_status_t status = hsa_amd_ipc_memory_attach(&message.handle, SIZE, 1, &gpu, &memory);
	printf("second, %s by a handle: attach %s\n", what, name(status));
	if (status == HSA_STATUS_SUCCESS) {
		printf("second, %s by a handle: wrong in %u bytes\n", what, wrong_in(memory, seed));
		write_to(memory, seed + 1);
		turn();
		printf("second, %s by a handle: detach %s\n", what, name(hsa_amd_ipc_memory_detach(memory)));
	} else {
		turn();
	}
	char byte = 0;
	give(&byte, 1, -1);
}

int main(void)
{
	int sockets[2];
	setvbuf(stdout, NULL, _IOLBF, 0);
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) != 0)
		return 1;
	pid_t child = fork();
	peer = sockets[child == 0];
	close(sockets[child != 0]);
	if (child == 0) {
		alarm(300);
		begin("second");
		second_dma_buf("VRAM", 1);
		second_dma_buf("host memory", 3);
		second_vmem(5);
		second_ipc("VRAM", 8);
		MUST(hsa_shut_down());
		return 0;
	}
	begin("first");
	first_dma_buf("VRAM", vram, 1);
	first_dma_buf("host memory", system_pool, 3);
	first_vmem(5);
	first_ipc("VRAM", vram, 8);
	int status = -1;
	waitpid(child, &status, 0);
	printf("the second one ended with %d\n", status);
	MUST(hsa_shut_down());
	puts("= end");
	return status ? 1 : 0;
}
