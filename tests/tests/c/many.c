/* Hundreds of VRAM buffers that the CPU sees, more than a VMM has maps: written and read by CPU and GPU in turns, by
 * several threads at once, freed and made again; also with all future memory locked, and with other memory in the
 * place of some. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <sys/mman.h>

#include "hsa_gpu.h"

#define BUFFERS 400
#define SIZE (4u << 20) /* too large for ROCr to share one buffer among several */
#define THREADS 4
#define ROUNDS 3

static uint32_t *buffers[BUFFERS];

/* Words that are looked at: the first, one in the middle, the last. */
static const size_t places[] = {0, SIZE / 8 + 3, SIZE / 4 - 1};

static uint32_t word(unsigned buffer, unsigned place, unsigned round)
{
	return (buffer << 12 | place << 8 | round) * 0x9e3779b1u;
}

static void put(unsigned buffer, unsigned round)
{
	for (unsigned place = 0; place < 3; place++)
		((volatile uint32_t *)buffers[buffer])[places[place]] = word(buffer, place, round);
}

static unsigned wrong(const uint32_t *memory, unsigned buffer, unsigned round)
{
	unsigned count = 0;
	for (unsigned place = 0; place < 3; place++)
		count += ((const volatile uint32_t *)memory)[places[place]] != word(buffer, place, round);
	return count;
}

static void *threads_run(void *data)
{
	uintptr_t thread = (uintptr_t)data, count = 0;
	/* Each writes buffers of its own and reads those again out of order, so that they go and come while others work. */
	for (unsigned round = 0; round < ROUNDS; round++) {
		for (unsigned buffer = thread; buffer < BUFFERS; buffer += THREADS)
			put(buffer, 10 + round);
		for (unsigned step = 0; step < BUFFERS / THREADS; step++) {
			unsigned buffer = step * 37 % (BUFFERS / THREADS) * THREADS + thread;
			count += wrong(buffers[buffer], buffer, 10 + round);
		}
	}
	return (void *)count;
}

/* What each buffer has once half of them were made again. */
static unsigned now[BUFFERS];

static unsigned wrong_for_gpu(uint32_t *host, unsigned buffer)
{
	copy(host, cpu, buffers[buffer], gpu, SIZE);
	return wrong(host, buffer, now[buffer]);
}

/* Whether this process may lock as much as is made below. */
static int may_lock(void)
{
	size_t size = 512u << 20;
	void *memory = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_LOCKED, -1, 0);
	if (memory == MAP_FAILED)
		return 0;
	munmap(memory, size);
	return 1;
}

/* New mappings have all their pages at once. */
static void locked(uint32_t *host)
{
	unsigned count = 0, seen = 0;
	if (!may_lock() || mlockall(MCL_FUTURE))
		fprintf(stderr, "SKIP: this process may not lock memory: %s\n", strerror(errno));
	for (unsigned buffer = 0; buffer < BUFFERS; buffer += 20) {
		MUST(hsa_amd_memory_pool_free(buffers[buffer]));
		MUST(hsa_amd_memory_pool_allocate(vram, SIZE, 0, (void **)&buffers[buffer]));
		now[buffer] = 4;
		put(buffer, 4);
	}
	for (unsigned buffer = 0; buffer < BUFFERS; buffer += 20) {
		count += wrong(buffers[buffer], buffer, 4);
		seen += wrong_for_gpu(host, buffer);
	}
	munlockall();
	for (unsigned buffer = 0; buffer < BUFFERS; buffer++)
		count += wrong(buffers[buffer], buffer, now[buffer]);
	printf("made with all memory locked: %u wrong, %u for the GPU\n", count, seen);
}

/* Buffers whose CPU mappings the program has unmapped: 10 that were used last, and 10 others. */
static int is_unmapped(unsigned buffer)
{
	return buffer % 20 == 5;
}

/* Those in whose place there is other memory. */
static int is_replaced(unsigned buffer)
{
	return is_unmapped(buffer) && buffer % 80 != 5;
}

static void replaced(uint32_t *host)
{
	unsigned count = 0, seen = 0, others = 0, back = 0;
	unsigned char pages[SIZE / 4096];
	for (unsigned buffer = 0; buffer < BUFFERS; buffer++) {
		if (!is_unmapped(buffer))
			continue;
		if (buffer % 40 == 5)
			others += wrong(buffers[buffer], buffer, now[buffer]);
		munmap(buffers[buffer], SIZE);
		if (!is_replaced(buffer))
			continue;
		int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
		if (mmap(buffers[buffer], SIZE, PROT_READ | PROT_WRITE, flags, -1, 0) != buffers[buffer])
			perror("mmap");
		put(buffer, 5);
	}
	/* All others are used, so that each has been the first one of those that are mapped. */
	for (unsigned buffer = 0; buffer < BUFFERS; buffer++)
		if (!is_unmapped(buffer))
			others += wrong(buffers[buffer], buffer, now[buffer]);
	for (unsigned buffer = 0; buffer < BUFFERS; buffer++) {
		if (is_replaced(buffer))
			count += wrong(buffers[buffer], buffer, 5);
		else if (is_unmapped(buffer))
			back += mincore(buffers[buffer], SIZE, pages) == 0 || errno != ENOMEM;
		if (is_unmapped(buffer))
			seen += wrong_for_gpu(host, buffer);
	}
	printf("own memory in the place of buffers: %u wrong, %u for the GPU, %u of the others, %u came back\n", count,
	       seen, others, back);
}

/* Other memory in the place of the first half of some buffers, of which the CPU goes on to use the rest. */
static void halved(uint32_t *host)
{
	unsigned count = 0, seen = 0;
	for (unsigned buffer = 15; buffer < BUFFERS; buffer += 20) {
		/* The others are not mapped in a guest, perhaps. */
		if (buffer % 40 == 15)
			count += wrong(buffers[buffer], buffer, now[buffer]);
		int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
		if (mmap(buffers[buffer], SIZE / 2, PROT_READ | PROT_WRITE, flags, -1, 0) != buffers[buffer])
			perror("mmap");
		((volatile uint32_t *)buffers[buffer])[places[0]] = word(buffer, 0, 7);
		for (unsigned place = 1; place < 3; place++)
			((volatile uint32_t *)buffers[buffer])[places[place]] = word(buffer, place, 8);
	}
	for (unsigned buffer = 0; buffer < BUFFERS; buffer += 2)
		count += wrong(buffers[buffer], buffer, now[buffer]);
	for (unsigned buffer = 15; buffer < BUFFERS; buffer += 20) {
		copy(host, cpu, buffers[buffer], gpu, SIZE);
		for (unsigned place = 0; place < 3; place++) {
			const volatile uint32_t *memory = buffers[buffer];
			count += memory[places[place]] != word(buffer, place, place ? 8 : 7);
			seen += host[places[place]] != word(buffer, place, place ? 8 : now[buffer]);
		}
	}
	printf("own memory in the place of halves: %u wrong, %u for the GPU\n", count, seen);
}

int main(void)
{
	setvbuf(stdout, NULL, _IOLBF, 0);
	start();
	uint32_t *host = host_memory(SIZE);
	unsigned count;
	for (unsigned buffer = 0; buffer < BUFFERS; buffer++) {
		MUST(hsa_amd_memory_pool_allocate(vram, SIZE, 0, (void **)&buffers[buffer]));
		MUST(hsa_amd_agents_allow_access(1, &cpu, NULL, buffers[buffer]));
	}
	printf("%u buffers\n", BUFFERS);

	count = 0;
	for (unsigned buffer = 0; buffer < BUFFERS; buffer++)
		put(buffer, 1);
	for (unsigned buffer = 0; buffer < BUFFERS; buffer++)
		count += wrong(buffers[buffer], buffer, 1);
	printf("by the CPU: %u wrong\n", count);

	count = 0;
	for (unsigned buffer = 0; buffer < BUFFERS; buffer += 20) {
		copy(host, cpu, buffers[buffer], gpu, SIZE);
		count += wrong(host, buffer, 1);
	}
	printf("what the GPU sees: %u wrong\n", count);

	count = 0;
	for (unsigned buffer = 0; buffer < BUFFERS; buffer += 20) {
		for (unsigned place = 0; place < 3; place++)
			host[places[place]] = word(buffer, place, 2);
		copy(buffers[buffer], gpu, host, cpu, SIZE);
	}
	for (unsigned buffer = 0; buffer < BUFFERS; buffer++)
		count += wrong(buffers[buffer], buffer, buffer % 20 ? 1 : 2);
	printf("what the GPU wrote: %u wrong\n", count);

	pthread_t all[THREADS];
	count = 0;
	for (uintptr_t thread = 0; thread < THREADS; thread++)
		pthread_create(&all[thread], NULL, threads_run, (void *)thread);
	for (unsigned thread = 0; thread < THREADS; thread++) {
		void *result;
		pthread_join(all[thread], &result);
		count += (uintptr_t)result;
	}
	printf("by %u threads: %u wrong\n", THREADS, count);

	for (unsigned buffer = 0; buffer < BUFFERS; buffer += 2)
		MUST(hsa_amd_memory_pool_free(buffers[buffer]));
	for (unsigned buffer = 0; buffer < BUFFERS; buffer += 2)
		MUST(hsa_amd_memory_pool_allocate(vram, SIZE, 0, (void **)&buffers[buffer]));
	count = 0;
	for (unsigned buffer = 0; buffer < BUFFERS; buffer += 2)
		put(buffer, 3);
	for (unsigned buffer = 0; buffer < BUFFERS; buffer++)
		count += wrong(buffers[buffer], buffer, buffer % 2 ? 10 + ROUNDS - 1 : 3);
	printf("half of them made again: %u wrong\n", count);

	for (unsigned buffer = 0; buffer < BUFFERS; buffer++)
		now[buffer] = buffer % 2 ? 10 + ROUNDS - 1 : 3;
	locked(host);
	replaced(host);
	halved(host);

	for (unsigned buffer = 0; buffer < BUFFERS; buffer++)
		MUST(hsa_amd_memory_pool_free(buffers[buffer]));
	MUST(hsa_amd_memory_pool_free(host));
	MUST(hsa_shut_down());
	printf("= end\n");
	return 0;
}
