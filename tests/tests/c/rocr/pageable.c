/* Memory of the program's own: locked, or copied in stages. */
#include "rocr.h"

/* The largest pageable copy, and what is staged at a time. */
#define LARGEST (64u << 20)
#define STAGE (4u << 20)

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

void pageable(void)
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
void refused(void)
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
