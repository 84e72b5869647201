/* Loads ROCr by hand: starts it, uses its GPU, and unloads it and loads it anew, of which each time the same is left. amdkfd refuses a
 * process that has acquired a GPU's memory by one open file to do so by another (kfd_ioctl_acquire_vm(): EBUSY), and AMD's thunk never
 * closes its own: a runtime that has its thunk inside starts once. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "held.h"
#include "hsa_api.h"

#define ROUNDS 4
#define SETTLED 1

/* The runtime's functions, by their names: nothing is linked. */
static void *runtime;
#define CALL(function) ((__typeof__(&function))symbol(#function))

static void *symbol(const char *name)
{
	void *found = dlsym(runtime, name);
	if (!found) {
		printf("%s: %s\n", name, dlerror());
		exit(1);
	}
	return found;
}

static hsa_agent_t gpu;
static hsa_amd_memory_pool_t pool;
static int gpus;

static hsa_status_t on_agent(hsa_agent_t agent, void *data)
{
	int device = -1;
	(void)data;
	CALL(hsa_agent_get_info)(agent, HSA_AGENT_INFO_DEVICE, &device);
	if (device == HSA_DEVICE_TYPE_GPU) {
		gpu = agent;
		gpus++;
	}
	return HSA_STATUS_SUCCESS;
}

static hsa_status_t on_pool(hsa_amd_memory_pool_t candidate, void *data)
{
	int segment = -1;
	_Bool allowed = 0;
	(void)data;
	CALL(hsa_amd_memory_pool_get_info)(candidate, HSA_AMD_MEMORY_POOL_INFO_SEGMENT, &segment);
	CALL(hsa_amd_memory_pool_get_info)(candidate, HSA_AMD_MEMORY_POOL_INFO_RUNTIME_ALLOC_ALLOWED, &allowed);
	if (segment != HSA_AMD_SEGMENT_GLOBAL || !allowed)
		return HSA_STATUS_SUCCESS;
	pool = candidate;
	return HSA_STATUS_INFO_BREAK;
}

static int is_mapped(const char *name)
{
	int found = 0;
	char line[512];
	FILE *file = fopen("/proc/self/maps", "r");
	while (file && fgets(line, sizeof line, file))
		found |= strstr(line, name) != NULL;
	if (file)
		fclose(file);
	return found;
}

static void use(void)
{
	hsa_queue_t *queue = NULL;
	void *memory = NULL;
	hsa_status_t allocated, created;
	gpus = 0;
	CALL(hsa_iterate_agents)(on_agent, NULL);
	if (gpus == 0)
		return;
	CALL(hsa_amd_agent_iterate_memory_pools)(gpu, on_pool, NULL);
	allocated = CALL(hsa_amd_memory_pool_allocate)(pool, 1 << 20, 0, &memory);
	created = CALL(hsa_queue_create)(gpu, 64, HSA_QUEUE_TYPE_MULTI, NULL, NULL, UINT32_MAX, UINT32_MAX, &queue);
	printf("memory: %#x, queue: %#x, they end: %#x, %#x\n", (unsigned)allocated, (unsigned)created,
		queue ? (unsigned)CALL(hsa_queue_destroy)(queue) : 0, memory ? (unsigned)CALL(hsa_amd_memory_pool_free)(memory) : 0);
}

/* Threads that were told to end may be about to, and run what is about to be unloaded. */
static void settle(void)
{
	unsigned threads = 0;
	for (unsigned same = 0; same < 20; same++) {
		unsigned now = entries("/proc/self/task");
		if (now != threads)
			same = 0;
		threads = now;
		usleep(10000);
	}
}

static void load(void)
{
	runtime = dlopen("libhsa-runtime64.so.1", RTLD_NOW | RTLD_LOCAL);
	if (!runtime) {
		printf("dlopen: %s\n", dlerror());
		exit(1);
	}
}

int main(void)
{
	/* Which threads get a heap of their own, of 64 MiB of addresses, is chance. */
	mallopt(M_ARENA_MAX, 1);
	unsigned descriptors = 0, threads = 0;
	unsigned long size = 0;
	load();
	for (unsigned round = 0; round < ROUNDS; round++) {
		hsa_status_t status = CALL(hsa_init)();
		printf("start %u: %#x\n", round, (unsigned)status);
		if (status == HSA_STATUS_SUCCESS) {
			use();
			printf("end %u: %#x, GPUs: %d\n", round, (unsigned)CALL(hsa_shut_down)(), gpus);
		}
		settle();
		printf("unloaded: %d", dlclose(runtime));
		printf(", still mapped: %d\n", is_mapped("libhsa-runtime64"));
		fflush(stdout);
		if (round == SETTLED) {
			descriptors = entries("/proc/self/fd");
			threads = entries("/proc/self/task");
			size = address_space_kib();
		}
		load();
	}
	settle();
	long grown = (long)(address_space_kib() - size);
	fprintf(stderr, "%ld KiB of addresses more\n", grown);
	printf("from the round %d on, descriptors more: %d, threads more: %d, 16 MiB of addresses more: %d\n", SETTLED,
		(int)(entries("/proc/self/fd") - descriptors), entries("/proc/self/task") > threads, grown >= 16384);
	return 0;
}
