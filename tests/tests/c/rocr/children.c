/* Children of fork: before the runtime is used, after that with exec, and after that without. */
#include "rocr.h"

#include <sys/wait.h>

/* What a process does that comes fresh to the runtime: 1 MiB to the GPU and back. */
int use(void)
{
	alarm(120);
	MUST(hsa_init());
	find_agents();
	find_pool(gpus[0], &vram[0]);
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
int family(char *program)
{
	pid_t children[8];
	puts("= children");
	for (unsigned i = 0; i < 8; i++)
		if (!(children[i] = fork()))
			_exit(use());
	printf("forked before: %u of 8\n", good(children, 8));
	MUST(hsa_init());
	find_agents();
	find_pool(gpus[0], &vram[0]);
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
