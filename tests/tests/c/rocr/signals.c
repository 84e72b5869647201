/* Threads that sleep until a signal. */
#include "rocr.h"

#include <pthread.h>
#include <time.h>

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

void signals(void)
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
