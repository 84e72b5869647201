/* What rocr.c uses of ROCr's public API (HSA runtime specification 1.2, chapter 2, and ROCr's vendor extensions): the
 * package sets have the runtime without its headers. */
#ifndef HSA_API_H
#define HSA_API_H

#include <stddef.h>
#include <stdint.h>

typedef int hsa_status_t;

/* Statuses that are looked at. */
#define HSA_STATUS_SUCCESS 0
#define HSA_STATUS_INFO_BREAK 1

/* Opaque handles are 64 bits. */
typedef struct {
	uint64_t handle;
} hsa_agent_t, hsa_signal_t, hsa_amd_memory_pool_t;

/* hsa_agent_info_t, hsa_device_type_t */
#define HSA_AGENT_INFO_NAME 0
#define HSA_AGENT_INFO_DEVICE 17
#define HSA_DEVICE_TYPE_CPU 0
#define HSA_DEVICE_TYPE_GPU 1

/* hsa_amd_memory_pool_info_t, hsa_amd_segment_t, hsa_amd_agent_memory_pool_info_t */
#define HSA_AMD_MEMORY_POOL_INFO_SEGMENT 0
#define HSA_AMD_MEMORY_POOL_INFO_GLOBAL_FLAGS 1
#define HSA_AMD_MEMORY_POOL_INFO_RUNTIME_ALLOC_ALLOWED 5
#define HSA_AMD_SEGMENT_GLOBAL 0
#define HSA_AMD_AGENT_MEMORY_POOL_INFO_ACCESS 0

/* hsa_signal_condition_t, hsa_wait_state_t */
#define HSA_SIGNAL_CONDITION_LT 2
#define HSA_SIGNAL_CONDITION_GTE 3
#define HSA_WAIT_STATE_BLOCKED 0

/* A queue, as programs see it (64-bit machines). */
typedef struct {
	uint32_t type, features;
	void *base_address;
	hsa_signal_t doorbell_signal;
	uint32_t size, reserved;
	uint64_t id;
} hsa_queue_t;
#define HSA_QUEUE_TYPE_MULTI 0

/* Headers of packets: the type in bits 0 to 7, the barrier bit 8, acquire and release scopes from bits 9 and 11. */
#define HSA_PACKET_TYPE_VENDOR_SPECIFIC 0
#define HSA_PACKET_TYPE_KERNEL_DISPATCH 2
#define HSA_PACKET_TYPE_BARRIER_AND 3
#define HSA_PACKET_TYPE_AGENT_DISPATCH 4
#define HSA_PACKET_TYPE_BARRIER_OR 5
#define HSA_PACKET_HEADER_BARRIER 8
#define HSA_PACKET_HEADER_ACQUIRE 9
#define HSA_PACKET_HEADER_RELEASE 11
#define HSA_FENCE_SCOPE_SYSTEM 2

/* A barrier packet, AND and OR: 64 bytes. */
typedef struct {
	uint16_t header, reserved0;
	uint32_t reserved1;
	hsa_signal_t dep_signal[5];
	uint64_t reserved2;
	hsa_signal_t completion_signal;
} hsa_barrier_packet_t;

/* AMD's barrier on a signal's value: 64 bytes. */
typedef struct {
	uint16_t header;
	uint8_t format, reserved0;
	uint32_t reserved1;
	hsa_signal_t signal;
	int64_t value, mask;
	uint32_t cond, reserved2;
	uint64_t reserved3, reserved4;
	hsa_signal_t completion_signal;
} hsa_amd_barrier_value_packet_t;
#define HSA_AMD_PACKET_TYPE_BARRIER_VALUE 2

/* A kernel dispatch packet: 64 bytes. */
typedef struct {
	uint16_t header, setup, workgroup_size[3], reserved0;
	uint32_t grid_size[3], private_segment_size, group_segment_size;
	uint64_t kernel_object;
	void *kernarg_address;
	uint64_t reserved2;
	hsa_signal_t completion_signal;
} hsa_kernel_dispatch_packet_t;

_Static_assert(sizeof(hsa_barrier_packet_t) == 64, "packets have 64 bytes");
_Static_assert(sizeof(hsa_kernel_dispatch_packet_t) == 64, "packets have 64 bytes");
_Static_assert(sizeof(hsa_amd_barrier_value_packet_t) == 64, "packets have 64 bytes");

/* Pitches and positions of copies of boxes, in bytes, rows and slices. */
typedef struct {
	void *base;
	size_t pitch, slice;
} hsa_pitched_ptr_t;
typedef struct {
	uint32_t x, y, z;
} hsa_dim3_t;
#define HSA_HOST_TO_DEVICE 1
#define HSA_DEVICE_TO_HOST 2

typedef struct {
	uint64_t start, end;
} hsa_amd_profiling_async_copy_time_t, hsa_amd_profiling_dispatch_time_t;

hsa_status_t hsa_init(void);
hsa_status_t hsa_shut_down(void);
hsa_status_t hsa_status_string(hsa_status_t status, const char **string);
hsa_status_t hsa_iterate_agents(hsa_status_t (*callback)(hsa_agent_t, void *), void *data);
hsa_status_t hsa_agent_get_info(hsa_agent_t agent, int attribute, void *value);
hsa_status_t hsa_amd_agent_iterate_memory_pools(hsa_agent_t agent,
	hsa_status_t (*callback)(hsa_amd_memory_pool_t, void *), void *data);
hsa_status_t hsa_amd_memory_pool_get_info(hsa_amd_memory_pool_t pool, int attribute, void *value);
hsa_status_t hsa_amd_agent_memory_pool_get_info(hsa_agent_t agent, hsa_amd_memory_pool_t pool, int attribute,
	void *value);
hsa_status_t hsa_amd_memory_pool_allocate(hsa_amd_memory_pool_t pool, size_t size, uint32_t flags, void **pointer);
hsa_status_t hsa_amd_memory_pool_free(void *pointer);
hsa_status_t hsa_amd_agents_allow_access(uint32_t count, const hsa_agent_t *agents, const uint32_t *flags,
	const void *pointer);
hsa_status_t hsa_amd_memory_fill(void *to, uint32_t value, size_t count);
hsa_status_t hsa_memory_copy(void *to, const void *from, size_t size);
hsa_status_t hsa_amd_memory_lock(void *pointer, size_t size, hsa_agent_t *agents, int count, void **agent_pointer);
hsa_status_t hsa_amd_memory_unlock(void *pointer);
hsa_status_t hsa_amd_memory_async_copy(void *to, hsa_agent_t to_agent, const void *from, hsa_agent_t from_agent,
	size_t size, uint32_t dependencies, const hsa_signal_t *dependency, hsa_signal_t done);
hsa_status_t hsa_amd_memory_async_copy_rect(const hsa_pitched_ptr_t *to, const hsa_dim3_t *to_offset,
	const hsa_pitched_ptr_t *from, const hsa_dim3_t *from_offset, const hsa_dim3_t *range, hsa_agent_t agent,
	int direction, uint32_t dependencies, const hsa_signal_t *dependency, hsa_signal_t done);
hsa_status_t hsa_signal_create(int64_t value, uint32_t consumers, const hsa_agent_t *consumer, hsa_signal_t *signal);
hsa_status_t hsa_signal_destroy(hsa_signal_t signal);
int64_t hsa_signal_load_scacquire(hsa_signal_t signal);
void hsa_signal_store_screlease(hsa_signal_t signal, int64_t value);
int64_t hsa_signal_wait_scacquire(hsa_signal_t signal, int condition, int64_t value, uint64_t time, int state);
hsa_status_t hsa_amd_signal_async_handler(hsa_signal_t signal, int condition, int64_t value,
	_Bool (*handler)(int64_t, void *), void *data);
hsa_status_t hsa_queue_create(hsa_agent_t agent, uint32_t size, uint32_t type,
	void (*error)(hsa_status_t, hsa_queue_t *, void *), void *data, uint32_t private_segment, uint32_t group_segment,
	hsa_queue_t **queue);
hsa_status_t hsa_queue_destroy(hsa_queue_t *queue);
uint64_t hsa_queue_load_read_index_scacquire(const hsa_queue_t *queue);
uint64_t hsa_queue_add_write_index_relaxed(const hsa_queue_t *queue, uint64_t value);
hsa_status_t hsa_amd_profiling_async_copy_enable(_Bool enable);
hsa_status_t hsa_amd_profiling_get_async_copy_time(hsa_signal_t signal, hsa_amd_profiling_async_copy_time_t *time);

#endif
