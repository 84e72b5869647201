/* Agents, memory, patterns in it, signals, copies. */
#include "rocr.h"

hsa_agent_t cpu, gpus[8];
unsigned gpu_count;
hsa_amd_memory_pool_t system_pool, vram[8];
int failures;
hsa_queue_t *queues[2];

const char *name(hsa_status_t status)
{
	const char *text = NULL;
	static char copy[64];
	if (status == HSA_STATUS_SUCCESS)
		return "SUCCESS";
	if (hsa_status_string(status, &text) != HSA_STATUS_SUCCESS || !text)
		return "(no name)";
	/* NAME: a sentence that changes between versions */
	snprintf(copy, sizeof copy, "%.*s", (int)strcspn(text, ":"), text);
	return copy;
}

void check(const char *what, int holds)
{
	printf("%s: %s\n", what, holds ? "yes" : "NO");
	failures += !holds;
}

/* splitmix64 */
uint64_t mix(uint64_t x)
{
	x += 0x9e3779b97f4a7c15u;
	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
	x = (x ^ x >> 27) * 0x94d049bb133111ebu;
	return x ^ x >> 31;
}

/* The 8 bytes at 8 * i are mix(seed << 32 | i). */
void pattern(unsigned char *to, size_t size, uint64_t seed)
{
	for (size_t i = 0; i < size; i += 8) {
		uint64_t word = mix(seed << 32 | i / 8);
		memcpy(to + i, &word, size - i < 8 ? size - i : 8);
	}
}

/* FNV-1a over 64-bit words, the last one filled with zeros. */
uint64_t sum(const unsigned char *from, size_t size)
{
	uint64_t sum = 0xcbf29ce484222325u;
	for (size_t i = 0; i < size; i += 8) {
		uint64_t word = 0;
		memcpy(&word, from + i, size - i < 8 ? size - i : 8);
		sum = (sum ^ word) * 0x100000001b3u;
	}
	return sum;
}

static uint64_t state;

void seed(uint64_t value)
{
	state = value;
}

uint64_t next(uint64_t below)
{
	return mix(state++) % below;
}

static hsa_status_t agent(hsa_agent_t agent, void *data)
{
	int type;
	(void)data;
	MUST(hsa_agent_get_info(agent, HSA_AGENT_INFO_DEVICE, &type));
	if (type == HSA_DEVICE_TYPE_CPU && !cpu.handle)
		cpu = agent;
	if (type == HSA_DEVICE_TYPE_GPU && gpu_count < 8)
		gpus[gpu_count++] = agent;
	return HSA_STATUS_SUCCESS;
}

/* The first global pool that programs may allocate from. */
static hsa_status_t pool(hsa_amd_memory_pool_t pool, void *data)
{
	uint32_t segment;
	_Bool allowed = 0;
	MUST(hsa_amd_memory_pool_get_info(pool, HSA_AMD_MEMORY_POOL_INFO_SEGMENT, &segment));
	if (segment != HSA_AMD_SEGMENT_GLOBAL)
		return HSA_STATUS_SUCCESS;
	MUST(hsa_amd_memory_pool_get_info(pool, HSA_AMD_MEMORY_POOL_INFO_RUNTIME_ALLOC_ALLOWED, &allowed));
	if (allowed && !((hsa_amd_memory_pool_t *)data)->handle)
		*(hsa_amd_memory_pool_t *)data = pool;
	return HSA_STATUS_SUCCESS;
}

void find_agents(void)
{
	MUST(hsa_iterate_agents(agent, NULL));
	find_pool(cpu, &system_pool);
}

void find_pool(hsa_agent_t agent, hsa_amd_memory_pool_t *found)
{
	MUST(hsa_amd_agent_iterate_memory_pools(agent, pool, found));
}

unsigned char *host(size_t size)
{
	void *pointer;
	MUST(hsa_amd_memory_pool_allocate(system_pool, size, 0, &pointer));
	MUST(hsa_amd_agents_allow_access(gpu_count, gpus, NULL, pointer));
	return pointer;
}

unsigned char *device(unsigned gpu, size_t size)
{
	void *pointer;
	MUST(hsa_amd_memory_pool_allocate(vram[gpu], size, 0, &pointer));
	return pointer;
}

hsa_signal_t signal_of(int64_t value)
{
	hsa_signal_t signal;
	MUST(hsa_signal_create(value, 0, NULL, &signal));
	return signal;
}

/* Sleeps until the signal is below 1. */
void blocked(hsa_signal_t signal)
{
	while (hsa_signal_wait_scacquire(signal, HSA_SIGNAL_CONDITION_LT, 1, UINT64_MAX, HSA_WAIT_STATE_BLOCKED) >= 1)
		;
}

/* An asynchronous copy, waited for. */
void copy(void *to, hsa_agent_t to_agent, const void *from, hsa_agent_t from_agent, size_t size)
{
	hsa_signal_t done = signal_of(1);
	MUST(hsa_amd_memory_async_copy(to, to_agent, from, from_agent, size, 0, NULL, done));
	blocked(done);
	if (hsa_signal_load_scacquire(done) != 0) {
		printf("a copy of %zu bytes ended with %ld\n", size, (long)hsa_signal_load_scacquire(done));
		failures++;
	}
	MUST(hsa_signal_destroy(done));
}
