/* Packets that are none, and dispatches that no GPU can run. */
#include "rocr.h"

/* A queue of its own gets a packet, which it must not take for done. */
static void wrong(const char *what, const void *packet)
{
	hsa_signal_t done = signal_of(1), other = signal_of(1);
	hsa_queue_t *queue;
	unsigned before = errors().count;
	/* All packets have the signal at their end. */
	unsigned char copy[64];
	memcpy(copy, packet, 56);
	memcpy(copy + 56, &done, 8);
	printf("%s\n", what);
	MUST(hsa_queue_create(gpus[0], 64, HSA_QUEUE_TYPE_MULTI, on_error, NULL, UINT32_MAX, UINT32_MAX, &queue));
	put(queue, copy);
	while (errors().count == before)
		usleep(1000);
	printf("the callback: %s\n", name(errors().status));
	check("for this queue", errors().queue == queue);
	check("it is not done", hsa_signal_load_scacquire(done) == 1);
	barrier(queues[0], HSA_PACKET_TYPE_BARRIER_AND, 0, NULL, other);
	blocked(other);
	check("the other queue runs, one error", errors().count == before + 1);
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

void broken(void)
{
	puts("= packets that are none");
	wrong_packet("one for another kind of agent", HSA_PACKET_TYPE_AGENT_DISPATCH, 0);
	wrong_packet("one of a reserved type", 7, 0);
	wrong_packet("one of an unknown format", HSA_PACKET_TYPE_VENDOR_SPECIFIC, 77);
}

/* A kernel that ends at once: its descriptor, of which all that is 0 asks for nothing, and its code. */
static unsigned char *nothing(void)
{
	void *memory;
	/* HSA_AMD_MEMORY_POOL_EXECUTABLE_FLAG. Runtimes before 6.4 do not know it, and let all of this memory be executed. */
	if (hsa_amd_memory_pool_allocate(system_pool, 4096, 4, &memory) == HSA_STATUS_SUCCESS)
		MUST(hsa_amd_agents_allow_access(gpu_count, gpus, NULL, memory));
	else
		memory = host(4096);
	unsigned char *kernel = memory;
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
void dispatches(void)
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
	unsigned before = errors().count;
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
	check("the endless one is not", hsa_signal_load_scacquire(done) == 1 && errors().count == before);
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
void vast(void)
{
	hsa_signal_t done = signal_of(1);
	hsa_kernel_dispatch_packet_t packet = endless(nothing(), done);
	put(queues[0], &packet);
	puts("= vast");
	blocked(done);
}
