/* ROCr's interface of virtual memory, dma-bufs and handles between processes (hsa_ext_amd.h), as far as programs here use it. */
#ifndef HSA_VMEM_H
#define HSA_VMEM_H

#include "hsa_api.h"

typedef struct {
	uint64_t handle;
} hsa_amd_vmem_alloc_handle_t;
typedef struct {
	int permissions;
	hsa_agent_t agent;
} hsa_amd_memory_access_desc_t;
typedef struct {
	uint32_t handle[8];
} hsa_amd_ipc_memory_t;
#define HSA_ACCESS_PERMISSION_RW 3
#define MEMORY_TYPE_NONE 0

hsa_status_t hsa_amd_vmem_address_reserve(void **va, size_t size, uint64_t address, uint64_t flags);
hsa_status_t hsa_amd_vmem_address_free(void *va, size_t size);
hsa_status_t hsa_amd_vmem_handle_create(hsa_amd_memory_pool_t pool, size_t size, int type, uint64_t flags,
	hsa_amd_vmem_alloc_handle_t *handle);
hsa_status_t hsa_amd_vmem_handle_release(hsa_amd_vmem_alloc_handle_t handle);
hsa_status_t hsa_amd_vmem_map(void *va, size_t size, size_t offset, hsa_amd_vmem_alloc_handle_t handle, uint64_t flags);
hsa_status_t hsa_amd_vmem_unmap(void *va, size_t size);
hsa_status_t hsa_amd_vmem_set_access(void *va, size_t size, const hsa_amd_memory_access_desc_t *desc, size_t count);
hsa_status_t hsa_amd_vmem_export_shareable_handle(int *fd, hsa_amd_vmem_alloc_handle_t handle, uint64_t flags);
hsa_status_t hsa_amd_vmem_import_shareable_handle(int fd, hsa_amd_vmem_alloc_handle_t *handle);
hsa_status_t hsa_amd_portable_export_dmabuf(const void *pointer, size_t size, int *fd, uint64_t *offset);
hsa_status_t hsa_amd_portable_close_dmabuf(int fd);
hsa_status_t hsa_amd_interop_map_buffer(uint32_t count, hsa_agent_t *agents, int fd, uint32_t flags, size_t *size, void **pointer,
	size_t *metadata_size, const void **metadata);
hsa_status_t hsa_amd_interop_unmap_buffer(void *pointer);
hsa_status_t hsa_amd_ipc_memory_create(void *pointer, size_t size, hsa_amd_ipc_memory_t *handle);
hsa_status_t hsa_amd_ipc_memory_attach(const hsa_amd_ipc_memory_t *handle, size_t size, uint32_t count, const hsa_agent_t *agents,
	void **pointer);
hsa_status_t hsa_amd_ipc_memory_detach(void *pointer);

#endif
