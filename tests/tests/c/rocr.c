/* ROCr on its public API, through whatever thunk is under it: copies by the GPU's copy engines, barriers across two
 * queues, blocked waits, boxes, pageable memory. It prints what must be the same wherever it runs; checksums are of what
 * came back, and the test computes them anew from the rules of pattern() and next(). */
#include "hsa_api.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Sizes of the section "copies". */
#define AREA (4u << 20)
#define COPIES 120
/* The largest pageable copy, and what is staged at a time. */
#define LARGEST (64u << 20)
#define STAGE (4u << 20)
#define MIB (1u << 20)

static hsa_agent_t cpu, gpus[8];
static unsigned gpu_count;
static hsa_amd_memory_pool_t system_pool, vram[8];
static int failures;

static const char *name(hsa_status_t status)
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

#define MUST(call) \
	do { \
		hsa_status_t status_ = (call); \
		if (status_ != HSA_STATUS_SUCCESS) { \
			printf("line %d: %s: %s\n", __LINE__, #call, name(status_)); \
			exit(1); \
		} \
	} while (0)

static void check(const char *what, int holds)
{
	printf("%s: %s\n", what, holds ? "yes" : "NO");
	failures += !holds;
}

/* splitmix64 */
static uint64_t mix(uint64_t x)
{
	x += 0x9e3779b97f4a7c15u;
	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
	x = (x ^ x >> 27) * 0x94d049bb133111ebu;
	return x ^ x >> 31;
}

/* The 8 bytes at 8 * i are mix(seed << 32 | i). */
static void pattern(unsigned char *to, size_t size, uint64_t seed)
{
	for (size_t i = 0; i < size; i += 8) {
		uint64_t word = mix(seed << 32 | i / 8);
		memcpy(to + i, &word, size - i < 8 ? size - i : 8);
	}
}

/* FNV-1a over 64-bit words, the last one filled with zeros. */
static uint64_t sum(const unsigned char *from, size_t size)
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

static uint64_t next(uint64_t below)
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

static unsigned char *host(size_t size)
{
	void *pointer;
	MUST(hsa_amd_memory_pool_allocate(system_pool, size, 0, &pointer));
	MUST(hsa_amd_agents_allow_access(gpu_count, gpus, NULL, pointer));
	return pointer;
}

static unsigned char *device(unsigned gpu, size_t size)
{
	void *pointer;
	MUST(hsa_amd_memory_pool_allocate(vram[gpu], size, 0, &pointer));
	return pointer;
}

static hsa_signal_t signal_of(int64_t value)
{
	hsa_signal_t signal;
	MUST(hsa_signal_create(value, 0, NULL, &signal));
	return signal;
}

/* Sleeps until the signal is below 1. */
static void blocked(hsa_signal_t signal)
{
	while (hsa_signal_wait_scacquire(signal, HSA_SIGNAL_CONDITION_LT, 1, UINT64_MAX, HSA_WAIT_STATE_BLOCKED) >= 1)
		;
}

/* An asynchronous copy, waited for. */
static void copy(void *to, hsa_agent_t to_agent, const void *from, hsa_agent_t from_agent, size_t size)
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

static void copies(void)
{
	puts("= copies");
	hsa_agent_t gpu = gpus[0];
	unsigned char *from = host(AREA), *back = host(AREA), *on = device(0, AREA);
	unsigned char *on_expected = malloc(AREA), *back_expected = calloc(1, AREA);
	pattern(from, AREA, 1);
	memcpy(on_expected, from, AREA);
	memset(back, 0, AREA);
	copy(on, gpu, from, cpu, AREA);
	state = 1000;
	for (unsigned i = 0; i < COPIES; i++) {
		size_t size = 1 + next(i % 4 == 0 ? AREA / 2 : i % 4 == 1 ? 64 : 5000);
		size_t source = next(AREA - size + 1), target = next(AREA - size + 1);
		if (i % 3 != 2) {
			copy(on + target, gpu, from + source, cpu, size);
			memcpy(on_expected + target, from + source, size);
		} else {
			copy(back + target, cpu, on + source, gpu, size);
			memcpy(back_expected + target, on_expected + source, size);
			if (memcmp(back, back_expected, AREA)) {
				printf("copy %u: %zu bytes from %zu to %zu: differs\n", i, size, source, target);
				failures++;
			}
		}
	}
	printf("host: %016lx\n", sum(back, AREA));
	copy(back, cpu, on, gpu, AREA);
	printf("VRAM: %016lx\n", sum(back, AREA));
	check("byte by byte", !memcmp(back, on_expected, AREA));

	/* A copy that waits for a signal. */
	hsa_signal_t before = signal_of(1), done = signal_of(1);
	memset(back, 1, 4096);
	MUST(hsa_amd_memory_async_copy(back, cpu, on, gpu, 4096, 1, &before, done));
	usleep(20000);
	check("a copy waits", hsa_signal_load_scacquire(done) == 1 && back[0] == 1 && back[4095] == 1);
	hsa_signal_store_screlease(before, 0);
	blocked(done);
	check("and then is done", !memcmp(back, on_expected, 4096));
	hsa_amd_profiling_async_copy_time_t time = { 0, 0 };
	MUST(hsa_amd_profiling_get_async_copy_time(done, &time));
	check("it has times", time.start > 0 && time.end >= time.start);

	/* A box of 100 bytes, 20 rows and 3 slices. */
	hsa_pitched_ptr_t to_box = { on, 256, 256 * 64 }, from_box = { from, 512, 512 * 64 };
	hsa_dim3_t to_at = { 8, 3, 1 }, from_at = { 12, 5, 0 }, range = { 100, 20, 3 };
	hsa_signal_store_screlease(done, 1);
	hsa_status_t status = hsa_amd_memory_async_copy_rect(&to_box, &to_at, &from_box, &from_at, &range, gpu,
		HSA_HOST_TO_DEVICE, 0, NULL, done);
	printf("a box: %s\n", name(status));
	if (status == HSA_STATUS_SUCCESS) {
		blocked(done);
		for (unsigned z = 0; z < 3; z++)
			for (unsigned y = 0; y < 20; y++)
				memcpy(on_expected + (z + 1) * 256 * 64 + (y + 3) * 256 + 8,
					from + z * 512 * 64 + (y + 5) * 512 + 12, 100);
		copy(back, cpu, on, gpu, AREA);
		check("the box alone", !memcmp(back, on_expected, AREA));
	}
	MUST(hsa_signal_destroy(before));
	MUST(hsa_signal_destroy(done));
	MUST(hsa_amd_memory_pool_free(from));
	MUST(hsa_amd_memory_pool_free(back));
	MUST(hsa_amd_memory_pool_free(on));
	free(on_expected);
	free(back_expected);
}

/* All of a packet but its first word, without which it is not there yet. */
static uint32_t *body(hsa_queue_t *queue, uint64_t index, const void *packet)
{
	char *to = (char *)queue->base_address + index % queue->size * 64;
	memcpy(to + 4, (const char *)packet + 4, 60);
	return (uint32_t *)to;
}

static void publish(uint32_t *to, const void *packet)
{
	uint32_t first;
	memcpy(&first, packet, 4);
	__atomic_store_n(to, first, __ATOMIC_RELEASE);
}

static uint64_t put(hsa_queue_t *queue, const void *packet)
{
	uint64_t index = hsa_queue_add_write_index_relaxed(queue, 1);
	while (index - hsa_queue_load_read_index_scacquire(queue) >= queue->size)
		usleep(50);
	publish(body(queue, index, packet), packet);
	hsa_signal_store_screlease(queue->doorbell_signal, (int64_t)index);
	return index;
}

static hsa_barrier_packet_t barrier_packet(int type, unsigned count, const hsa_signal_t *dependencies, hsa_signal_t done)
{
	hsa_barrier_packet_t packet = { 0 };
	packet.header = type | 1 << HSA_PACKET_HEADER_BARRIER | HSA_FENCE_SCOPE_SYSTEM << HSA_PACKET_HEADER_ACQUIRE
		| HSA_FENCE_SCOPE_SYSTEM << HSA_PACKET_HEADER_RELEASE;
	for (unsigned i = 0; i < count; i++)
		packet.dep_signal[i] = dependencies[i];
	packet.completion_signal = done;
	return packet;
}

static void barrier(hsa_queue_t *queue, int type, unsigned count, const hsa_signal_t *dependencies, hsa_signal_t done)
{
	hsa_barrier_packet_t packet = barrier_packet(type, count, dependencies, done);
	put(queue, &packet);
}

static struct {
	pthread_mutex_t lock;
	unsigned count;
	hsa_status_t status;
	hsa_queue_t *queue;
} error = { .lock = PTHREAD_MUTEX_INITIALIZER };

static void on_error(hsa_status_t status, hsa_queue_t *queue, void *data)
{
	(void)data;
	pthread_mutex_lock(&error.lock);
	error.count++;
	error.status = status;
	error.queue = queue;
	pthread_mutex_unlock(&error.lock);
}

static unsigned errors(void)
{
	pthread_mutex_lock(&error.lock);
	unsigned count = error.count;
	pthread_mutex_unlock(&error.lock);
	return count;
}

static hsa_queue_t *queues[2];

static void barriers(void)
{
	puts("= barriers");
	hsa_signal_t a = signal_of(1), b = signal_of(1), done = signal_of(1);
	unsigned rounds = 0;
	/* More than the rings hold: they wrap. */
	for (unsigned i = 0; i < 300; i++) {
		hsa_signal_store_screlease(a, 1);
		hsa_signal_store_screlease(b, 1);
		barrier(queues[i % 2], HSA_PACKET_TYPE_BARRIER_AND, 1, &a, b);
		barrier(queues[1 - i % 2], HSA_PACKET_TYPE_BARRIER_AND, 0, NULL, a);
		blocked(b);
		rounds += hsa_signal_load_scacquire(a) == 0 && hsa_signal_load_scacquire(b) == 0;
	}
	printf("one queue after the other: %u\n", rounds);

	/* Packet i waits for packet i - 1, which is in the other queue. */
	hsa_signal_t chain[64];
	unsigned ended = 0;
	for (unsigned i = 0; i < 64; i++)
		chain[i] = signal_of(1);
	for (unsigned i = 1; i < 64; i += 2)
		barrier(queues[1], HSA_PACKET_TYPE_BARRIER_AND, 1, &chain[i - 1], chain[i]);
	usleep(5000);
	for (unsigned i = 1; i < 64; i += 2)
		ended += hsa_signal_load_scacquire(chain[i]) != 1;
	check("the second queue waits", ended == 0);
	for (unsigned i = 0; i < 64; i += 2)
		barrier(queues[0], HSA_PACKET_TYPE_BARRIER_AND, i > 0, &chain[i ? i - 1 : 0], chain[i]);
	blocked(chain[63]);
	for (unsigned i = 0; i < 64; i++) {
		ended += hsa_signal_load_scacquire(chain[i]) == 0;
		MUST(hsa_signal_destroy(chain[i]));
	}
	printf("a chain of: %u\n", ended);

	/* All five dependencies, the last one from the other queue; what is behind has to wait. */
	hsa_signal_t five[5];
	for (unsigned i = 0; i < 5; i++)
		five[i] = signal_of(1);
	hsa_signal_store_screlease(a, 1);
	hsa_signal_store_screlease(done, 1);
	barrier(queues[0], HSA_PACKET_TYPE_BARRIER_AND, 5, five, a);
	barrier(queues[0], HSA_PACKET_TYPE_BARRIER_AND, 0, NULL, done);
	for (unsigned i = 0; i < 4; i++)
		hsa_signal_store_screlease(five[(i * 2 + 1) % 5], 0);
	usleep(5000);
	check("four of five do not do", hsa_signal_load_scacquire(a) == 1 && hsa_signal_load_scacquire(done) == 1);
	barrier(queues[1], HSA_PACKET_TYPE_BARRIER_AND, 0, NULL, five[4]);
	usleep(1000);
	hsa_signal_store_screlease(five[2], 0);
	blocked(done);
	check("five do", hsa_signal_load_scacquire(a) == 0);

	/* The third of four, and no fifth: all of four wait for it, one of them does not. */
	for (unsigned i = 0; i < 4; i++)
		hsa_signal_store_screlease(five[i], i == 2);
	hsa_signal_store_screlease(a, 1);
	hsa_signal_store_screlease(done, 1);
	barrier(queues[0], HSA_PACKET_TYPE_BARRIER_AND, 4, five, a);
	barrier(queues[1], HSA_PACKET_TYPE_BARRIER_OR, 4, five, done);
	blocked(done);
	usleep(5000);
	check("all of four wait, one of them does not", hsa_signal_load_scacquire(a) == 1);
	hsa_signal_store_screlease(five[2], 0);
	blocked(a);

	for (unsigned i = 0; i < 5; i++) {
		for (unsigned k = 0; k < 5; k++)
			hsa_signal_store_screlease(five[k], 1);
		hsa_signal_store_screlease(done, 1);
		barrier(queues[i % 2], HSA_PACKET_TYPE_BARRIER_OR, 5, five, done);
		usleep(2000);
		ended = hsa_signal_load_scacquire(done) != 1;
		barrier(queues[1 - i % 2], HSA_PACKET_TYPE_BARRIER_AND, 0, NULL, five[i]);
		blocked(done);
		printf("one of five, number %u: %s\n", i, ended ? "too early" : "done");
		failures += ended;
	}

	hsa_amd_barrier_value_packet_t packet = { 0 };
	packet.header = HSA_PACKET_TYPE_VENDOR_SPECIFIC | 1 << HSA_PACKET_HEADER_BARRIER;
	packet.format = HSA_AMD_PACKET_TYPE_BARRIER_VALUE;
	packet.signal = a;
	packet.value = 0x20;
	packet.mask = 0xf0;
	packet.cond = HSA_SIGNAL_CONDITION_GTE;
	packet.completion_signal = done;
	hsa_signal_store_screlease(a, 0x15);
	hsa_signal_store_screlease(done, 1);
	put(queues[0], &packet);
	usleep(5000);
	check("a masked value that is too small", hsa_signal_load_scacquire(done) == 1);
	hsa_signal_store_screlease(a, 0x25);
	blocked(done);
	check("and one that is not", hsa_signal_load_scacquire(done) == 0);

	for (unsigned i = 0; i < 5; i++)
		MUST(hsa_signal_destroy(five[i]));
	MUST(hsa_signal_destroy(a));
	MUST(hsa_signal_destroy(b));
	MUST(hsa_signal_destroy(done));
}

static void slots(void)
{
	puts("= slots");
	hsa_signal_t done[3], last = signal_of(1);
	hsa_barrier_packet_t packets[3];
	uint32_t *places[3];
	for (unsigned i = 0; i < 3; i++)
		done[i] = signal_of(1);
	/* Three places are taken and rung for before any packet is there; they come as the third, the first, the second. */
	uint64_t index = hsa_queue_add_write_index_relaxed(queues[0], 3);
	for (unsigned i = 0; i < 3; i++) {
		packets[i] = barrier_packet(HSA_PACKET_TYPE_BARRIER_AND, 0, NULL, done[i]);
		places[i] = body(queues[0], index + i, &packets[i]);
	}
	hsa_signal_store_screlease(queues[0]->doorbell_signal, (int64_t)index + 2);
	usleep(10000);
	publish(places[2], &packets[2]);
	usleep(10000);
	check("the third waits for the first", hsa_signal_load_scacquire(done[2]) == 1);
	publish(places[0], &packets[0]);
	blocked(done[0]);
	usleep(10000);
	check("and for the second", hsa_signal_load_scacquire(done[1]) == 1 && hsa_signal_load_scacquire(done[2]) == 1);
	publish(places[1], &packets[1]);
	blocked(done[2]);
	check("the second came before it", hsa_signal_load_scacquire(done[1]) == 0);

	/* Ten times around the ring; each doorbell is rung twice, every third time with an older packet once more. */
	hsa_signal_t all = signal_of(10 * 64 + 7);
	hsa_barrier_packet_t packet = barrier_packet(HSA_PACKET_TYPE_BARRIER_AND, 0, NULL, all);
	for (unsigned i = 0; i < 10 * 64 + 7; i++) {
		index = put(queues[0], &packet);
		hsa_signal_store_screlease(queues[0]->doorbell_signal, (int64_t)(i % 3 ? index : index - 1));
	}
	hsa_signal_store_screlease(queues[0]->doorbell_signal, (int64_t)index);
	blocked(all);
	barrier(queues[0], HSA_PACKET_TYPE_BARRIER_AND, 0, NULL, last);
	blocked(last);
	printf("after ten times around: %ld are left\n", (long)hsa_signal_load_scacquire(all));
	for (unsigned i = 0; i < 3; i++)
		MUST(hsa_signal_destroy(done[i]));
	MUST(hsa_signal_destroy(all));
	MUST(hsa_signal_destroy(last));
}

#define QUEUES 64
#define PACKETS 50

static void many(unsigned count)
{
	puts("= many");
	hsa_queue_t *all[QUEUES];
	hsa_signal_t left[QUEUES], gate = signal_of(1), behind = signal_of(1);
	unsigned done = 0;
	for (unsigned i = 0; i < count; i++) {
		MUST(hsa_queue_create(gpus[0], 64, HSA_QUEUE_TYPE_MULTI, on_error, NULL, UINT32_MAX, UINT32_MAX, &all[i]));
		left[i] = signal_of(PACKETS);
	}
	/* The first one stands all the time. */
	barrier(all[0], HSA_PACKET_TYPE_BARRIER_AND, 1, &gate, behind);
	for (unsigned k = 0; k < PACKETS; k++)
		for (unsigned i = 0; i < count; i++)
			barrier(all[i], HSA_PACKET_TYPE_BARRIER_AND, 0, NULL, left[i]);
	for (unsigned i = 1; i < count; i++)
		blocked(left[i]);
	for (unsigned i = 1; i < count; i++)
		done += hsa_signal_load_scacquire(left[i]) == 0;
	check("all others are done", done == count - 1);
	check("the first one stands", hsa_signal_load_scacquire(left[0]) == PACKETS);
	hsa_signal_store_screlease(gate, 0);
	blocked(left[0]);
	check("and goes on", hsa_signal_load_scacquire(behind) == 0);
	for (unsigned i = 0; i < count; i++) {
		MUST(hsa_queue_destroy(all[i]));
		MUST(hsa_signal_destroy(left[i]));
	}
	MUST(hsa_signal_destroy(gate));
	MUST(hsa_signal_destroy(behind));
}

static void *sleeper(void *signal)
{
	struct timespec used;
	blocked(*(hsa_signal_t *)signal);
	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
	return (void *)(intptr_t)(used.tv_sec * 1000 + used.tv_nsec / 1000000);
}

static _Bool handler(int64_t value, void *data)
{
	__atomic_store_n((int64_t *)data, value, __ATOMIC_RELEASE);
	return 0;
}

static void signals(void)
{
	puts("= signals");
	/* A signal for each: ROCr lets only the first waiter of a signal sleep. The last one is the handler's. */
	hsa_signal_t before = signal_of(1), done[5];
	pthread_t threads[4];
	int64_t handled = -1;
	long early = 0, used = 0;
	for (unsigned i = 0; i < 5; i++)
		done[i] = signal_of(1);
	int64_t value = hsa_signal_wait_scacquire(before, HSA_SIGNAL_CONDITION_LT, 1, 1000000, HSA_WAIT_STATE_BLOCKED);
	printf("a wait that ends by time: %ld\n", (long)value);
	barrier(queues[0], HSA_PACKET_TYPE_BARRIER_AND, 1, &before, done[0]);
	for (unsigned i = 1; i < 5; i++)
		barrier(queues[0], HSA_PACKET_TYPE_BARRIER_AND, 0, NULL, done[i]);
	for (unsigned i = 0; i < 4; i++)
		pthread_create(&threads[i], NULL, sleeper, &done[i]);
	MUST(hsa_amd_signal_async_handler(done[4], HSA_SIGNAL_CONDITION_LT, 1, handler, &handled));
	usleep(500000);
	for (unsigned i = 0; i < 5; i++)
		early += hsa_signal_load_scacquire(done[i]) != 1;
	check("nobody was woken before", !early);
	barrier(queues[1], HSA_PACKET_TYPE_BARRIER_AND, 0, NULL, before);
	for (unsigned i = 0; i < 4; i++) {
		void *result;
		pthread_join(threads[i], &result);
		used += (intptr_t)result;
	}
	puts("four sleepers are awake");
	/* Of 2 s that they waited together. */
	if (getenv("ROCR_WAITS_POLL"))
		puts("they slept: not asked");
	else
		check("they slept", used < 500);
	fprintf(stderr, "four sleepers used %ld ms of CPU\n", used);
	while (__atomic_load_n(&handled, __ATOMIC_ACQUIRE) == -1)
		usleep(1000);
	printf("a handler had: %ld\n", (long)handled);
	MUST(hsa_signal_destroy(before));
	for (unsigned i = 0; i < 5; i++)
		MUST(hsa_signal_destroy(done[i]));
}

static void access_of_agents(void)
{
	puts("= access");
	uint32_t access;
	for (unsigned i = 0; i < gpu_count; i++) {
		MUST(hsa_amd_agent_memory_pool_get_info(gpus[i], system_pool, HSA_AMD_AGENT_MEMORY_POOL_INFO_ACCESS, &access));
		printf("GPU %u to the host's pool: %u\n", i, access);
		MUST(hsa_amd_agent_memory_pool_get_info(cpu, vram[i], HSA_AMD_AGENT_MEMORY_POOL_INFO_ACCESS, &access));
		printf("the CPU to VRAM %u: %u\n", i, access);
		for (unsigned k = 0; k < gpu_count; k++) {
			MUST(hsa_amd_agent_memory_pool_get_info(gpus[k], vram[i], HSA_AMD_AGENT_MEMORY_POOL_INFO_ACCESS, &access));
			printf("GPU %u to VRAM %u: %u\n", k, i, access);
		}
	}
	/* Given, taken back and given again. */
	unsigned char *from = host(65536), *back = host(65536), *on = device(0, 65536);
	hsa_agent_t nobody[1] = { cpu };
	pattern(from, 65536, 2);
	printf("access for the CPU alone: %s\n", name(hsa_amd_agents_allow_access(1, nobody, NULL, from)));
	printf("access for all: %s\n", name(hsa_amd_agents_allow_access(gpu_count, gpus, NULL, from)));
	copy(on, gpus[0], from, cpu, 65536);
	if (gpu_count > 1) {
		unsigned char *other = device(1, 65536);
		printf("access to VRAM for all: %s\n", name(hsa_amd_agents_allow_access(gpu_count, gpus, NULL, on)));
		MUST(hsa_amd_agents_allow_access(gpu_count, gpus, NULL, other));
		copy(other, gpus[1], on, gpus[0], 65536);
		copy(back, cpu, other, gpus[1], 65536);
		check("from GPU to GPU", !memcmp(from, back, 65536));
		memset(back, 0, 65536);
		MUST(hsa_amd_memory_pool_free(other));
	}
	copy(back, cpu, on, gpus[0], 65536);
	printf("came back: %016lx\n", sum(back, 65536));
	MUST(hsa_amd_memory_pool_free(from));
	MUST(hsa_amd_memory_pool_free(back));
	MUST(hsa_amd_memory_pool_free(on));
}

static unsigned char *stage;

/* As HIP copies pageable memory that cannot be locked. */
static void staged(unsigned char *on, unsigned char *plain, size_t size, int to_device)
{
	for (size_t at = 0; at < size; at += STAGE) {
		size_t piece = size - at < STAGE ? size - at : STAGE;
		if (to_device)
			memcpy(stage, plain + at, piece);
		copy(to_device ? on + at : stage, to_device ? gpus[0] : cpu, to_device ? stage : on + at,
			to_device ? cpu : gpus[0], piece);
		if (!to_device)
			memcpy(plain + at, stage, piece);
	}
}

/* Locked, copied by the address that the GPU has, unlocked; else in stages. */
static void pageable_copy(unsigned char *on, unsigned char *plain, size_t size, int to_device)
{
	void *locked = NULL;
	hsa_status_t status = hsa_amd_memory_lock(plain, size, gpus, 1, &locked);
	printf("hsa_amd_memory_lock: %s\n", name(status));
	if (status != HSA_STATUS_SUCCESS) {
		staged(on, plain, size, to_device);
		return;
	}
	if (to_device)
		copy(on, gpus[0], locked, cpu, size);
	else
		copy(locked, cpu, on, gpus[0], size);
	MUST(hsa_amd_memory_unlock(plain));
}

/* Plain memory with 64 bytes around that nobody may write. */
struct plain {
	unsigned char *block, *at;
};

static struct plain plain(size_t size, unsigned offset)
{
	struct plain it;
	it.block = malloc(size + 192);
	memset(it.block, 0xa5, size + 192);
	it.at = it.block + 64 + offset;
	return it;
}

static int untouched(const struct plain *it, size_t size, unsigned offset)
{
	for (size_t i = 0; i < 64 + offset; i++)
		if (it->block[i] != 0xa5)
			return 0;
	for (size_t i = 64 + offset + size; i < size + 192; i++)
		if (it->block[i] != 0xa5)
			return 0;
	return 1;
}

/* 1, 2, 4 bytes ... 64 MiB; one less every second time from 8 bytes on. */
#define CLASSES 27

static size_t class_size(unsigned class)
{
	return ((size_t)1 << class) - (class % 2 && class > 2);
}

static void pageable(void)
{
	puts("= pageable");
	stage = host(STAGE);
	unsigned char *on = device(0, LARGEST);
	for (unsigned class = 0; class < CLASSES; class++) {
		size_t size = class_size(class);
		unsigned offset = class * 7 % 61;
		struct plain from = plain(size, offset), back = plain(size, offset);
		pattern(from.at, size, 100 + class);
		pageable_copy(on, from.at, size, 1);
		pageable_copy(on, back.at, size, 0);
		int same = !memcmp(from.at, back.at, size);
		int around = untouched(&from, size, offset) && untouched(&back, size, offset);
		printf("%zu bytes: %016lx, %s, %s\n", size, sum(back.at, size), same ? "the same" : "DIFFERENT",
			around ? "nothing else" : "MORE");
		failures += !same || !around;
		free(from.block);
		free(back.block);
	}
	MUST(hsa_amd_memory_pool_free(on));
	MUST(hsa_amd_memory_pool_free(stage));
}

/* hsa_memory_copy locks pageable memory, and has no other way: its status where that is refused, and that neither side
 * has changed. Where it is not, the copy is a kernel of the runtime's. */
static void refused(void)
{
	puts("= refused");
	unsigned char *back = host(LARGEST), *on = device(0, LARGEST), *expected = malloc(LARGEST);
	pattern(expected, LARGEST, 7);
	memcpy(back, expected, LARGEST);
	copy(on, gpus[0], back, cpu, LARGEST);
	for (unsigned class = 0; class < CLASSES; class++) {
		size_t size = class_size(class);
		struct plain it = plain(size, 0);
		memset(it.at, 0x5a, size);
		printf("%zu bytes to VRAM: %s", size, name(hsa_memory_copy(on, it.at, size)));
		printf(", from VRAM: %s", name(hsa_memory_copy(it.at, on, size)));
		size_t written = 0;
		for (size_t i = 0; i < size; i++)
			written += it.at[i] != 0x5a;
		printf(", %zu bytes changed\n", written);
		failures += written != 0 || !untouched(&it, size, 0);
		free(it.block);
	}
	memset(back, 0, LARGEST);
	copy(back, cpu, on, gpus[0], LARGEST);
	check("VRAM is as it was", !memcmp(back, expected, LARGEST));
	free(expected);
	MUST(hsa_amd_memory_pool_free(back));
	MUST(hsa_amd_memory_pool_free(on));
}

/* What the runtime's own kernels do: fills, copies within a GPU, synchronous copies. */
static void kernels(void)
{
	puts("= kernels");
	unsigned char *on = device(0, AREA), *other = device(0, AREA), *back = host(AREA);
	unsigned char *expected = malloc(AREA), *copied = calloc(1, AREA);
	pattern(expected, AREA, 9);
	memcpy(back, expected, AREA);
	printf("synchronous copy to VRAM: %s\n", name(hsa_memory_copy(on, back, AREA)));
	memset(back, 0, AREA);
	MUST(hsa_amd_memory_fill(other, 0, AREA / 4));
	state = 5000;
	for (unsigned i = 0; i < 60; i++) {
		/* Whole words, at whole words. */
		size_t count = 1 + next(i % 3 ? 3000 : AREA / 8), at = next(AREA / 4 - count + 1);
		uint32_t value = (uint32_t)mix(i);
		MUST(hsa_amd_memory_fill(on + 4 * at, value, count));
		for (size_t k = 0; k < count; k++)
			memcpy(expected + 4 * (at + k), &value, 4);
	}
	for (unsigned i = 0; i < 40; i++) {
		size_t size = 1 + next(i % 3 ? 5000 : AREA / 2);
		size_t source = next(AREA - size + 1), target = next(AREA - size + 1);
		copy(other + target, gpus[0], on + source, gpus[0], size);
		memcpy(copied + target, expected + source, size);
	}
	printf("synchronous copy from VRAM: %s\n", name(hsa_memory_copy(back, on, AREA)));
	check("fills, byte by byte", !memcmp(back, expected, AREA));
	printf("filled: %016lx\n", sum(back, AREA));
	copy(back, cpu, other, gpus[0], AREA);
	check("copies within the GPU, byte by byte", !memcmp(back, copied, AREA));
	printf("within the GPU: %016lx\n", sum(back, AREA));
	/* Memory of the host. */
	MUST(hsa_amd_memory_fill(back + 4096, 0xdeadbeef, 1000));
	for (size_t k = 0; k < 1000; k++)
		memcpy(copied + 4096 + 4 * k, "\xef\xbe\xad\xde", 4);
	check("a fill of the host's memory", !memcmp(back, copied, AREA));
	free(expected);
	free(copied);
	MUST(hsa_amd_memory_pool_free(on));
	MUST(hsa_amd_memory_pool_free(other));
	MUST(hsa_amd_memory_pool_free(back));
}

/* A queue of its own gets a packet, which it must not take for done. */
static void wrong(const char *what, const void *packet)
{
	hsa_signal_t done = signal_of(1), other = signal_of(1);
	hsa_queue_t *queue;
	unsigned before = errors();
	/* All packets have the signal at their end. */
	unsigned char copy[64];
	memcpy(copy, packet, 56);
	memcpy(copy + 56, &done, 8);
	printf("%s\n", what);
	MUST(hsa_queue_create(gpus[0], 64, HSA_QUEUE_TYPE_MULTI, on_error, NULL, UINT32_MAX, UINT32_MAX, &queue));
	put(queue, copy);
	while (errors() == before)
		usleep(1000);
	printf("the callback: %s\n", name(error.status));
	check("for this queue", error.queue == queue);
	check("it is not done", hsa_signal_load_scacquire(done) == 1);
	barrier(queues[0], HSA_PACKET_TYPE_BARRIER_AND, 0, NULL, other);
	blocked(other);
	check("the other queue runs, one error", errors() == before + 1);
	MUST(hsa_queue_destroy(queue));
	MUST(hsa_signal_destroy(done));
	MUST(hsa_signal_destroy(other));
}

static void wrong_packet(const char *what, uint16_t header, uint8_t format)
{
	hsa_amd_barrier_value_packet_t packet = { 0 };
	packet.header = header | 1 << HSA_PACKET_HEADER_BARRIER;
	packet.format = format;
	wrong(what, &packet);
}

static void broken(void)
{
	puts("= packets that are none");
	wrong_packet("one for another kind of agent", HSA_PACKET_TYPE_AGENT_DISPATCH, 0);
	wrong_packet("one of a reserved type", 7, 0);
	wrong_packet("one of an unknown format", HSA_PACKET_TYPE_VENDOR_SPECIFIC, 77);
}

/* A kernel that ends at once: its descriptor, of which all that is 0 asks for nothing, and its code. */
static unsigned char *nothing(void)
{
	unsigned char *kernel = host(4096);
	memset(kernel, 0, 4096);
	/* kernel_code_entry_byte_offset */
	*(int64_t *)(kernel + 16) = 256;
	/* s_endpgm of gfx9 */
	*(uint32_t *)(kernel + 256) = 0xbf810000;
	return kernel;
}

static hsa_kernel_dispatch_packet_t dispatch(const void *kernel, hsa_signal_t done)
{
	hsa_kernel_dispatch_packet_t packet = { .setup = 3, .workgroup_size = { 64, 1, 1 }, .grid_size = { 64, 1, 1 } };
	packet.header = HSA_PACKET_TYPE_KERNEL_DISPATCH | 1 << HSA_PACKET_HEADER_BARRIER
		| HSA_FENCE_SCOPE_SYSTEM << HSA_PACKET_HEADER_ACQUIRE | HSA_FENCE_SCOPE_SYSTEM << HSA_PACKET_HEADER_RELEASE;
	packet.kernel_object = (uint64_t)(uintptr_t)kernel;
	packet.completion_signal = done;
	return packet;
}

/* As many workgroups as packets can ask for: it does not end in a lifetime. */
static hsa_kernel_dispatch_packet_t endless(const void *kernel, hsa_signal_t done)
{
	hsa_kernel_dispatch_packet_t packet = dispatch(kernel, done);
	packet.workgroup_size[0] = 1;
	for (unsigned i = 0; i < 3; i++)
		packet.grid_size[i] = UINT32_MAX;
	return packet;
}

/* Dispatches that no GPU can run, which runtimes above this one do not let through. */
static void dispatches(void)
{
	puts("= dispatches");
	unsigned char *kernel = nothing();
	hsa_signal_t none = { 0 }, done = signal_of(1);
	hsa_kernel_dispatch_packet_t good = dispatch(kernel, done), packet = good;
	put(queues[0], &good);
	blocked(done);
	puts("a good one is done");
	good.completion_signal = none;

	for (unsigned i = 0; i < 3; i++) {
		packet.workgroup_size[i] = UINT16_MAX;
		packet.grid_size[i] = UINT32_MAX;
	}
	wrong("65535 x 65535 x 65535 work-items in a workgroup", &packet);
	packet = good;
	packet.workgroup_size[0] = 1025;
	packet.grid_size[0] = 1025;
	wrong("1025 work-items in a workgroup", &packet);
	packet = good;
	packet.setup = 0;
	wrong("no dimensions", &packet);
	for (unsigned i = 0; i < 3; i++) {
		packet = good;
		packet.grid_size[i] = 0;
		wrong("a grid of nothing", &packet);
		packet = good;
		packet.workgroup_size[i] = 0;
		wrong("workgroups of nothing", &packet);
	}
	packet = good;
	packet.group_segment_size = UINT32_MAX;
	wrong("4 GiB of group memory", &packet);
	packet = good;
	packet.kernel_object = 0;
	wrong("no kernel", &packet);

	/* Its queue can be destroyed. */
	hsa_queue_t *queue;
	unsigned before = errors();
	hsa_signal_store_screlease(done, 1);
	packet = endless(kernel, done);
	MUST(hsa_queue_create(gpus[0], 64, HSA_QUEUE_TYPE_MULTI, on_error, NULL, UINT32_MAX, UINT32_MAX, &queue));
	put(queue, &packet);
	usleep(200000);
	hsa_signal_t other = signal_of(1);
	packet = dispatch(kernel, other);
	put(queues[0], &packet);
	blocked(other);
	puts("beside an endless grid one is done");
	check("the endless one is not", hsa_signal_load_scacquire(done) == 1 && errors() == before);
	MUST(hsa_queue_destroy(queue));
	puts("its queue is destroyed");
	hsa_signal_store_screlease(other, 1);
	put(queues[0], &packet);
	blocked(other);
	puts("and another one is done");
	MUST(hsa_signal_destroy(done));
	MUST(hsa_signal_destroy(other));
	MUST(hsa_amd_memory_pool_free(kernel));
}

/* Waits for an endless grid. */
static void vast(void)
{
	hsa_signal_t done = signal_of(1);
	hsa_kernel_dispatch_packet_t packet = endless(nothing(), done);
	put(queues[0], &packet);
	puts("= vast");
	blocked(done);
}

/* What a process does that comes fresh to the runtime: 1 MiB to the GPU and back. */
static int use(void)
{
	alarm(120);
	MUST(hsa_init());
	MUST(hsa_iterate_agents(agent, NULL));
	MUST(hsa_amd_agent_iterate_memory_pools(cpu, pool, &system_pool));
	MUST(hsa_amd_agent_iterate_memory_pools(gpus[0], pool, &vram[0]));
	unsigned char *from = host(MIB), *back = host(MIB), *on = device(0, MIB);
	pattern(from, MIB, (uint64_t)getpid());
	copy(on, gpus[0], from, cpu, MIB);
	copy(back, cpu, on, gpus[0], MIB);
	int differs = memcmp(from, back, MIB) != 0;
	MUST(hsa_amd_memory_pool_free(from));
	MUST(hsa_amd_memory_pool_free(back));
	MUST(hsa_amd_memory_pool_free(on));
	MUST(hsa_shut_down());
	return differs;
}

static unsigned good(const pid_t *children, unsigned count)
{
	unsigned good = 0;
	for (unsigned i = 0; i < count; i++) {
		int status = -1;
		waitpid(children[i], &status, 0);
		good += WIFEXITED(status) && WEXITSTATUS(status) == 0;
		if (status)
			fprintf(stderr, "child %u: %#x\n", i, status);
	}
	return good;
}

/* Children before the runtime is used, after that with exec, and after that without. */
static int family(char *program)
{
	pid_t children[8];
	puts("= children");
	for (unsigned i = 0; i < 8; i++)
		if (!(children[i] = fork()))
			_exit(use());
	printf("forked before: %u of 8\n", good(children, 8));
	MUST(hsa_init());
	MUST(hsa_iterate_agents(agent, NULL));
	MUST(hsa_amd_agent_iterate_memory_pools(cpu, pool, &system_pool));
	MUST(hsa_amd_agent_iterate_memory_pools(gpus[0], pool, &vram[0]));
	unsigned char *from = host(MIB), *back = host(MIB), *on = device(0, MIB);
	pattern(from, MIB, 3);
	for (unsigned i = 0; i < 8; i++)
		if (!(children[i] = fork())) {
			execl(program, program, "use", NULL);
			_exit(99);
		}
	unsigned same = 0;
	for (unsigned i = 0; i < 16; i++) {
		memset(back, 0, MIB);
		copy(on, gpus[0], from, cpu, MIB);
		copy(back, cpu, on, gpus[0], MIB);
		same += !memcmp(from, back, MIB);
	}
	printf("forked and executed: %u of 8\n", good(children, 8));
	printf("the parent meanwhile: %u of 16\n", same);
	/* Without exec the runtime is of no use to it, and says so. */
	if (!(children[0] = fork())) {
		void *memory;
		alarm(60);
		/* More than the runtime keeps in store. */
		_exit(hsa_amd_memory_pool_allocate(vram[0], 64 * MIB, 0, &memory) == HSA_STATUS_SUCCESS);
	}
	printf("only forked, refused: %u of 1\n", good(children, 1));
	memset(back, 0, MIB);
	copy(back, cpu, on, gpus[0], MIB);
	check("the parent goes on", !memcmp(from, back, MIB));
	MUST(hsa_amd_memory_pool_free(from));
	MUST(hsa_amd_memory_pool_free(back));
	MUST(hsa_amd_memory_pool_free(on));
	MUST(hsa_shut_down());
	puts("= end");
	return failures != 0;
}

/* Without arguments all sections but "refused", "kernels", "dispatches", "vast" and "children", else that one; a number is that of the section "many"'s
 * queues. */
int main(int argc, char **argv)
{
	const char *only = argc > 1 ? argv[1] : "";
	setvbuf(stdout, NULL, _IOLBF, 0);
	if (!strcmp(only, "use"))
		return use();
	if (!strcmp(only, "children"))
		return family(argv[0]);
	MUST(hsa_init());
	MUST(hsa_iterate_agents(agent, NULL));
	MUST(hsa_amd_agent_iterate_memory_pools(cpu, pool, &system_pool));
	puts("= agents");
	printf("GPUs: %u\n", gpu_count);
	for (unsigned i = 0; i < gpu_count; i++) {
		char text[64] = "";
		uint32_t flags;
		MUST(hsa_agent_get_info(gpus[i], HSA_AGENT_INFO_NAME, text));
		MUST(hsa_amd_agent_iterate_memory_pools(gpus[i], pool, &vram[i]));
		MUST(hsa_amd_memory_pool_get_info(vram[i], HSA_AMD_MEMORY_POOL_INFO_GLOBAL_FLAGS, &flags));
		printf("%s, pool with flags %u\n", text, flags);
	}
	MUST(hsa_amd_profiling_async_copy_enable(1));
	for (unsigned i = 0; i < 2; i++)
		MUST(hsa_queue_create(gpus[0], 64, HSA_QUEUE_TYPE_MULTI, on_error, NULL, UINT32_MAX, UINT32_MAX, &queues[i]));
	if (!strcmp(only, "refused")) {
		refused();
	} else if (!strcmp(only, "kernels")) {
		kernels();
	} else if (!strcmp(only, "dispatches")) {
		dispatches();
	} else if (!strcmp(only, "vast")) {
		vast();
	} else {
		copies();
		barriers();
		slots();
		many(*only ? (unsigned)atoi(only) : QUEUES);
		signals();
		access_of_agents();
		pageable();
		broken();
	}
	puts("= end");
	for (unsigned i = 0; i < 2; i++)
		MUST(hsa_queue_destroy(queues[i]));
	MUST(hsa_shut_down());
	printf("failures: %d\n", failures);
	return failures != 0;
}
