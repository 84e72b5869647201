/* What a process on ROCr costs. Modes:
 *
 *   started   after hsa_init, with a queue
 *   wait      a thread is blocked in hsa_signal_wait
 */
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#include "hsa_api.h"
#include "measured.h"

#define MUST(call) do { \
		if ((call) != HSA_STATUS_SUCCESS) { \
			printf("line %d: %s\n", __LINE__, #call); \
			exit(1); \
		} \
	} while (0)

static hsa_agent_t gpu;
static hsa_signal_t held;

static hsa_status_t agent(hsa_agent_t found, void *data)
{
	int device;
	(void)data;
	MUST(hsa_agent_get_info(found, HSA_AGENT_INFO_DEVICE, &device));
	if (device == HSA_DEVICE_TYPE_GPU)
		gpu = found;
	return HSA_STATUS_SUCCESS;
}

static void *blocked(void *data)
{
	(void)data;
	hsa_signal_wait_scacquire(held, HSA_SIGNAL_CONDITION_LT, 1, UINT64_MAX, HSA_WAIT_STATE_BLOCKED);
	return NULL;
}

int main(int count, char **arguments)
{
	hsa_queue_t *queue;
	pthread_t thread;
	_Bool waits = count > 1 && !strcmp(arguments[1], "wait");
	MUST(hsa_init());
	MUST(hsa_iterate_agents(agent, NULL));
	MUST(hsa_queue_create(gpu, 4096, HSA_QUEUE_TYPE_MULTI, NULL, NULL, UINT32_MAX, UINT32_MAX, &queue));
	if (waits) {
		MUST(hsa_signal_create(1, 0, NULL, &held));
		pthread_create(&thread, NULL, blocked, NULL);
		/* ROCr polls for a while before it sleeps. */
		sleep(1);
	}
	measured();
	if (waits) {
		hsa_signal_store_screlease(held, 0);
		pthread_join(thread, NULL);
		MUST(hsa_signal_destroy(held));
	}
	MUST(hsa_queue_destroy(queue));
	MUST(hsa_shut_down());
	puts("= end");
	return 0;
}
