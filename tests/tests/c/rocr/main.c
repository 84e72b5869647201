/* ROCr on its public API, through whatever thunk is under it: copies by the GPU's copy engines, barriers across two
 * queues, blocked waits, boxes, pageable memory. It prints what must be the same wherever it runs; checksums are of what
 * came back, and the test computes them anew from the rules of pattern() and next(). */
#include "rocr.h"

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
	find_agents();
	puts("= agents");
	printf("GPUs: %u\n", gpu_count);
	for (unsigned i = 0; i < gpu_count; i++) {
		char text[64] = "";
		uint32_t flags;
		MUST(hsa_agent_get_info(gpus[i], HSA_AGENT_INFO_NAME, text));
		find_pool(gpus[i], &vram[i]);
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
