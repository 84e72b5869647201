/* Starts and ends ROCr again and again, with a queue and 1 MiB in between: what each does, and whether the process
 * grows from the tenth to the last. */
#include <malloc.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "held.h"
#include "hsa_api.h"

#define ROUNDS 30
#define SETTLED 10

static hsa_agent_t gpu;
static hsa_amd_memory_pool_t pool;
static int found;

static hsa_status_t on_pool(hsa_amd_memory_pool_t candidate, void *data)
{
	(void)data;
	_Bool allowed = 0;
	int segment = -1;
	hsa_amd_memory_pool_get_info(candidate, HSA_AMD_MEMORY_POOL_INFO_SEGMENT, &segment);
	hsa_amd_memory_pool_get_info(candidate, HSA_AMD_MEMORY_POOL_INFO_RUNTIME_ALLOC_ALLOWED, &allowed);
	if (segment != HSA_AMD_SEGMENT_GLOBAL || !allowed)
		return HSA_STATUS_SUCCESS;
	pool = candidate;
	return HSA_STATUS_INFO_BREAK;
}

static hsa_status_t on_agent(hsa_agent_t agent, void *data)
{
	(void)data;
	int kind = -1;
	hsa_agent_get_info(agent, HSA_AGENT_INFO_DEVICE, &kind);
	if (kind != HSA_DEVICE_TYPE_GPU)
		return HSA_STATUS_SUCCESS;
	gpu = agent;
	found = 1;
	return HSA_STATUS_INFO_BREAK;
}

int main(void)
{
	/* Which threads get a heap of their own, of 64 MiB of addresses, is chance. */
	mallopt(M_ARENA_MAX, 1);
	unsigned descriptors = 0, threads = 0;
	unsigned long size = 0;
	for (unsigned round = 0; round < ROUNDS; round++) {
		hsa_status_t status = hsa_init();
		printf("start %u: %#x\n", round, (unsigned)status);
		if (status != HSA_STATUS_SUCCESS)
			continue;
		found = 0;
		hsa_iterate_agents(on_agent, NULL);
		printf("a GPU: %d\n", found);
		if (found) {
			void *memory = NULL;
			hsa_queue_t *queue = NULL;
			hsa_amd_agent_iterate_memory_pools(gpu, on_pool, NULL);
			printf("memory: %#x\n", (unsigned)hsa_amd_memory_pool_allocate(pool, 1 << 20, 0, &memory));
			printf("queue: %#x\n", (unsigned)hsa_queue_create(gpu, 64, HSA_QUEUE_TYPE_MULTI, NULL, NULL, UINT32_MAX,
				UINT32_MAX, &queue));
			printf("queue ends: %#x\n", (unsigned)(queue ? hsa_queue_destroy(queue) : 0));
			printf("memory ends: %#x\n", (unsigned)(memory ? hsa_amd_memory_pool_free(memory) : 0));
		}
		printf("end %u: %#x\n", round, (unsigned)hsa_shut_down());
		if (round == SETTLED) {
			descriptors = entries("/proc/self/fd");
			threads = entries("/proc/self/task");
			size = address_space_kib();
		}
	}
	/* Threads that were told to end may be about to. */
	for (unsigned waited = 0; entries("/proc/self/task") > threads && waited < 10000; waited++)
		usleep(1000);
	long grown = (long)(address_space_kib() - size);
	int more = (int)(entries("/proc/self/fd") - descriptors), more_threads = (int)(entries("/proc/self/task") - threads);
	fprintf(stderr, "from start %d to %d: %d descriptors, %d threads, %ld KiB of addresses more\n", SETTLED, ROUNDS - 1, more,
		more_threads, grown);
	printf("no more descriptors: %d, threads: %d, 16 MiB of addresses more: %d\n", more <= 0, more_threads <= 0,
		grown >= 16384);
	return 0;
}
