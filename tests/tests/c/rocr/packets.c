/* Packets in queues, and what queues tell of errors. */
#include "rocr.h"

#include <pthread.h>

/* All of a packet but its first word, without which it is not there yet. */
uint32_t *body(hsa_queue_t *queue, uint64_t index, const void *packet)
{
	char *to = (char *)queue->base_address + index % queue->size * 64;
	memcpy(to + 4, (const char *)packet + 4, 60);
	return (uint32_t *)to;
}

void publish(uint32_t *to, const void *packet)
{
	uint32_t first;
	memcpy(&first, packet, 4);
	__atomic_store_n(to, first, __ATOMIC_RELEASE);
}

uint64_t put(hsa_queue_t *queue, const void *packet)
{
	uint64_t index = hsa_queue_add_write_index_relaxed(queue, 1);
	while (index - hsa_queue_load_read_index_scacquire(queue) >= queue->size)
		usleep(50);
	publish(body(queue, index, packet), packet);
	hsa_signal_store_screlease(queue->doorbell_signal, (int64_t)index);
	return index;
}

hsa_barrier_packet_t barrier_packet(int type, unsigned count, const hsa_signal_t *dependencies, hsa_signal_t done)
{
	hsa_barrier_packet_t packet = { 0 };
	packet.header = type | 1 << HSA_PACKET_HEADER_BARRIER | HSA_FENCE_SCOPE_SYSTEM << HSA_PACKET_HEADER_ACQUIRE
		| HSA_FENCE_SCOPE_SYSTEM << HSA_PACKET_HEADER_RELEASE;
	for (unsigned i = 0; i < count; i++)
		packet.dep_signal[i] = dependencies[i];
	packet.completion_signal = done;
	return packet;
}

void barrier(hsa_queue_t *queue, int type, unsigned count, const hsa_signal_t *dependencies, hsa_signal_t done)
{
	hsa_barrier_packet_t packet = barrier_packet(type, count, dependencies, done);
	put(queue, &packet);
}

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct error error;

void on_error(hsa_status_t status, hsa_queue_t *queue, void *data)
{
	(void)data;
	pthread_mutex_lock(&lock);
	error.count++;
	error.status = status;
	error.queue = queue;
	pthread_mutex_unlock(&lock);
}

struct error errors(void)
{
	pthread_mutex_lock(&lock);
	struct error now = error;
	pthread_mutex_unlock(&lock);
	return now;
}
