/* Copies and fills: by copy engines, by kernels of the runtime, and who has access to what. */
#include "rocr.h"

#define COPIES 120

void copies(void)
{
	puts("= copies");
	hsa_agent_t gpu = gpus[0];
	unsigned char *from = host(AREA), *back = host(AREA), *on = device(0, AREA);
	unsigned char *on_expected = malloc(AREA), *back_expected = calloc(1, AREA);
	pattern(from, AREA, 1);
	memcpy(on_expected, from, AREA);
	memset(back, 0, AREA);
	copy(on, gpu, from, cpu, AREA);
	seed(1000);
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

/* What the runtime's own kernels do: fills, copies within a GPU, synchronous copies. */
void kernels(void)
{
	puts("= kernels");
	unsigned char *on = device(0, AREA), *other = device(0, AREA), *back = host(AREA);
	unsigned char *expected = malloc(AREA), *copied = calloc(1, AREA);
	pattern(expected, AREA, 9);
	memcpy(back, expected, AREA);
	printf("synchronous copy to VRAM: %s\n", name(hsa_memory_copy(on, back, AREA)));
	memset(back, 0, AREA);
	MUST(hsa_amd_memory_fill(other, 0, AREA / 4));
	seed(5000);
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

void access_of_agents(void)
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
