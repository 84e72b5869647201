/* ROCr's virtual memory interface (hsa_amd_vmem_*): memory without an address, mapped at addresses of the program's choice by
 * dma-bufs and libdrm, and moved. What GPUs see is read by copies. */
#include <unistd.h>

#include "hsa_gpu.h"
#include "hsa_vmem.h"

#define SIZE (2u << 20)

int main(void)
{
	setvbuf(stdout, NULL, _IOLBF, 0);
	start();
	unsigned char *host = host_memory(SIZE), *back = host_memory(SIZE);
	for (unsigned i = 0; i < SIZE; i++)
		host[i] = (unsigned char)(i * 31 + (i >> 11));

	puts("= virtual memory");
	char *va;
	hsa_amd_vmem_alloc_handle_t handle, other;
	hsa_amd_memory_access_desc_t access = {HSA_ACCESS_PERMISSION_RW, gpu};
	printf("reserve: %s\n", name(hsa_amd_vmem_address_reserve((void **)&va, 4 * SIZE, 0, 0)));
	printf("create: %s\n", name(hsa_amd_vmem_handle_create(vram, SIZE, MEMORY_TYPE_NONE, 0, &handle)));
	printf("another: %s\n", name(hsa_amd_vmem_handle_create(vram, SIZE, MEMORY_TYPE_NONE, 0, &other)));
	printf("map: %s\n", name(hsa_amd_vmem_map(va, SIZE, 0, handle, 0)));
	printf("access: %s\n", name(hsa_amd_vmem_set_access(va, SIZE, &access, 1)));
	copy(va, gpu, host, cpu, SIZE);
	copy(back, cpu, va, gpu, SIZE);
	printf("came back: %d\n", memcmp(host, back, SIZE) == 0);
	printf("unmap: %s\n", name(hsa_amd_vmem_unmap(va, SIZE)));
	printf("the other one there: %s\n", name(hsa_amd_vmem_map(va, SIZE, 0, other, 0)));
	printf("access: %s\n", name(hsa_amd_vmem_set_access(va, SIZE, &access, 1)));
	printf("the first one elsewhere: %s\n", name(hsa_amd_vmem_map(va + 2 * SIZE, SIZE, 0, handle, 0)));
	printf("access: %s\n", name(hsa_amd_vmem_set_access(va + 2 * SIZE, SIZE, &access, 1)));
	memset(back, 0, SIZE);
	copy(back, cpu, va + 2 * SIZE, gpu, SIZE);
	printf("it has moved: %d\n", memcmp(host, back, SIZE) == 0);
	memset(back, 0x5a, SIZE);
	copy(va, gpu, back, cpu, SIZE);
	copy(back, cpu, va + 2 * SIZE, gpu, SIZE);
	printf("and is another one: %d\n", memcmp(host, back, SIZE) == 0);
	printf("unmap: %s %s\n", name(hsa_amd_vmem_unmap(va, SIZE)), name(hsa_amd_vmem_unmap(va + 2 * SIZE, SIZE)));
	printf("release: %s %s\n", name(hsa_amd_vmem_handle_release(handle)), name(hsa_amd_vmem_handle_release(other)));
	printf("free: %s\n", name(hsa_amd_vmem_address_free(va, 4 * SIZE)));

	puts("= dma-bufs");
	void *device;
	int fd = -1;
	uint64_t offset = 77;
	MUST(hsa_amd_memory_pool_allocate(vram, SIZE, 0, &device));
	printf("export: %s", name(hsa_amd_portable_export_dmabuf(device, SIZE, &fd, &offset)));
	printf(", offset %lu, size %d\n", (unsigned long)offset, lseek(fd, 0, SEEK_END) == SIZE);
	printf("close: %s\n", name(hsa_amd_portable_close_dmabuf(fd)));
	MUST(hsa_amd_memory_pool_free(device));
	puts("= end");
	MUST(hsa_amd_memory_pool_free(host));
	MUST(hsa_amd_memory_pool_free(back));
	MUST(hsa_shut_down());
	return 0;
}
