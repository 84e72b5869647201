/* One CPU, one GPU, a pool of each, and copies between them: the beginning of small programs on ROCr. */
#ifndef HSA_GPU_H
#define HSA_GPU_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hsa_api.h"

static hsa_agent_t cpu, gpu;
static hsa_amd_memory_pool_t system_pool, vram;

static inline const char *name(hsa_status_t status)
{
	const char *text = "?";
	if (status == HSA_STATUS_SUCCESS)
		return "SUCCESS";
	hsa_status_string(status, &text);
	return text;
}

#define MUST(call) do { \
		hsa_status_t must = (call); \
		if (must != HSA_STATUS_SUCCESS && must != HSA_STATUS_INFO_BREAK) { \
			printf("line %d: %s: %s\n", __LINE__, #call, name(must)); \
			exit(1); \
		} \
	} while (0)

static inline hsa_status_t agent(hsa_agent_t found, void *data)
{
	int device;
	(void)data;
	MUST(hsa_agent_get_info(found, HSA_AGENT_INFO_DEVICE, &device));
	if (device == HSA_DEVICE_TYPE_CPU)
		cpu = found;
	else if (device == HSA_DEVICE_TYPE_GPU && !gpu.handle)
		gpu = found;
	return HSA_STATUS_SUCCESS;
}

static inline hsa_status_t pool(hsa_amd_memory_pool_t found, void *data)
{
	int segment;
	_Bool allowed;
	MUST(hsa_amd_memory_pool_get_info(found, HSA_AMD_MEMORY_POOL_INFO_SEGMENT, &segment));
	MUST(hsa_amd_memory_pool_get_info(found, HSA_AMD_MEMORY_POOL_INFO_RUNTIME_ALLOC_ALLOWED, &allowed));
	if (segment != HSA_AMD_SEGMENT_GLOBAL || !allowed)
		return HSA_STATUS_SUCCESS;
	*(hsa_amd_memory_pool_t *)data = found;
	return HSA_STATUS_INFO_BREAK;
}

static inline void copy(void *to, hsa_agent_t to_agent, const void *from, hsa_agent_t from_agent, size_t size)
{
	hsa_signal_t done;
	MUST(hsa_signal_create(1, 0, NULL, &done));
	MUST(hsa_amd_memory_async_copy(to, to_agent, from, from_agent, size, 0, NULL, done));
	hsa_signal_wait_scacquire(done, HSA_SIGNAL_CONDITION_LT, 1, UINT64_MAX, HSA_WAIT_STATE_BLOCKED);
	MUST(hsa_signal_destroy(done));
}

/* Memory of the host that the GPU reaches as well. */
static inline void *host_memory(size_t size)
{
	void *memory;
	MUST(hsa_amd_memory_pool_allocate(system_pool, size, 0, &memory));
	MUST(hsa_amd_agents_allow_access(1, &gpu, NULL, memory));
	return memory;
}

/* Starts the runtime and finds them. */
static inline void start(void)
{
	MUST(hsa_init());
	MUST(hsa_iterate_agents(agent, NULL));
	MUST(hsa_amd_agent_iterate_memory_pools(cpu, pool, &system_pool));
	MUST(hsa_amd_agent_iterate_memory_pools(gpu, pool, &vram));
}

#endif
