/* Arguments of ioctls in memory that GPUs share: the version, a list of events, and what the waves of a queue that stands still have
 * left (GET_QUEUE_WAVE_STATE), which the kernel writes to where the queue's context save area usually is. */
#include <errno.h>
#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "hsa_gpu.h"

/* As linux/kfd_ioctl.h has them, which needs libdrm's headers. */
struct version {
	uint32_t major, minor;
};
struct create_event {
	uint64_t page_offset;
	uint32_t trigger_data, type, auto_reset, node_id, id, slot;
};
struct set_event {
	uint32_t id, pad;
};
struct event_data {
	uint64_t data[4], ext;
	uint32_t id, pad;
};
struct wait_events {
	uint64_t list;
	uint32_t count, for_all, timeout, result;
};
struct update_queue {
	uint64_t ring;
	uint32_t id, ring_size, percentage, priority;
};
struct wave_state {
	uint64_t area;
	uint32_t stack_used, area_used, id, pad;
};
#define GET_VERSION _IOR('K', 0x01, struct version)
#define UPDATE_QUEUE _IOW('K', 0x07, struct update_queue)
#define CREATE_EVENT _IOWR('K', 0x08, struct create_event)
#define SET_EVENT _IOW('K', 0x0a, struct set_event)
#define WAIT_EVENTS _IOWR('K', 0x0c, struct wait_events)
#define GET_QUEUE_WAVE_STATE _IOWR('K', 0x1b, struct wave_state)

#define QUEUES 6

static const char *answer(int result)
{
	return result < 0 ? strerror(errno) : "ok";
}

int main(void)
{
	start();
	int kfd = open("/dev/kfd", O_RDWR | O_CLOEXEC);
	char *memory = host_memory(1 << 20);
	memset(memory, 0x55, 1 << 20);

	struct version *version = (void *)memory;
	const char *said = answer(ioctl(kfd, GET_VERSION, version));
	printf("version: %s %u\n", said, version->major);

	struct create_event *event = (void *)(memory + 4096);
	memset(event, 0, sizeof *event);
	event->auto_reset = 1;
	printf("event: %s\n", answer(ioctl(kfd, CREATE_EVENT, event)));
	struct event_data *list = (void *)(memory + 8192 - 8);
	memset(list, 0, sizeof *list);
	list->id = event->id;
	struct set_event set = {.id = event->id};
	printf("set: %s\n", answer(ioctl(kfd, SET_EVENT, &set)));
	struct wait_events wait = {.list = (uintptr_t)list, .count = 1, .timeout = 10000};
	said = answer(ioctl(kfd, WAIT_EVENTS, &wait));
	printf("wait: %s %u\n", said, wait.result);

	hsa_queue_t *queue;
	MUST(hsa_queue_create(gpu, 64, HSA_QUEUE_TYPE_MULTI, NULL, NULL, UINT32_MAX, UINT32_MAX, &queue));
	for (unsigned id = 0; id < QUEUES; id++) {
		uint32_t *area = (void *)(memory + 65536);
		memset(area, 0x55, 65536);
		struct wave_state state = {.area = (uintptr_t)area, .id = id};
		printf("queue %u, active: %s\n", id, answer(ioctl(kfd, GET_QUEUE_WAVE_STATE, &state)));
		struct update_queue update = {.id = id};
		printf("stands still: %s\n", answer(ioctl(kfd, UPDATE_QUEUE, &update)));
		said = answer(ioctl(kfd, GET_QUEUE_WAVE_STATE, &state));
		printf("its waves: %s, %u and %u bytes used, header %x %x %x %x, behind it %x\n", said, state.stack_used, state.area_used,
			area[0], area[1], area[2], area[3], area[4]);
		/* Where nothing can be written. */
		state.area = (uintptr_t)main & ~(uintptr_t)4095;
		printf("to read-only memory: %s\n", answer(ioctl(kfd, GET_QUEUE_WAVE_STATE, &state)));
	}
	fflush(stdout);
	/* Without the runtime's end, which would want its queues. */
	_exit(0);
}
