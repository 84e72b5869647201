/* The parts of the program, and what they share. */
#ifndef ROCR_H
#define ROCR_H

#include "../hsa_api.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Sizes of the sections "copies" and "kernels". */
#define AREA (4u << 20)
#define MIB (1u << 20)
/* Queues of the section "many", without an argument. */
#define QUEUES 64

/* What find_agents() found. */
extern hsa_agent_t cpu, gpus[8];
extern unsigned gpu_count;
extern hsa_amd_memory_pool_t system_pool, vram[8];
/* What check() found wrong. */
extern int failures;
/* Of the first GPU, for the sections. */
extern hsa_queue_t *queues[2];

/* A status without the sentence behind its name. */
const char *name(hsa_status_t status);

#define MUST(call) \
	do { \
		hsa_status_t status_ = (call); \
		if (status_ != HSA_STATUS_SUCCESS) { \
			printf("line %d: %s: %s\n", __LINE__, #call, name(status_)); \
			exit(1); \
		} \
	} while (0)

void check(const char *what, int holds);

/* The agents, and the first pool of the CPU. */
void find_agents(void);
/* The first global pool of an agent that programs may allocate from. */
void find_pool(hsa_agent_t agent, hsa_amd_memory_pool_t *pool);

uint64_t mix(uint64_t x);
/* The 8 bytes at 8 * i are mix(seed << 32 | i). */
void pattern(unsigned char *to, size_t size, uint64_t seed);
uint64_t sum(const unsigned char *from, size_t size);
/* Numbers below `below`, in the same order after each seed(). */
void seed(uint64_t value);
uint64_t next(uint64_t below);

/* Memory of the host and of a GPU, to be freed by hsa_amd_memory_pool_free. */
unsigned char *host(size_t size);
unsigned char *device(unsigned gpu, size_t size);

hsa_signal_t signal_of(int64_t value);
/* Sleeps until the signal is below 1. */
void blocked(hsa_signal_t signal);
/* An asynchronous copy, waited for. */
void copy(void *to, hsa_agent_t to_agent, const void *from, hsa_agent_t from_agent, size_t size);

/* All of a packet but its first word, without which it is not there yet; publish() writes that. */
uint32_t *body(hsa_queue_t *queue, uint64_t index, const void *packet);
void publish(uint32_t *to, const void *packet);
/* A packet, and its ring. */
uint64_t put(hsa_queue_t *queue, const void *packet);
hsa_barrier_packet_t barrier_packet(int type, unsigned count, const hsa_signal_t *dependencies, hsa_signal_t done);
void barrier(hsa_queue_t *queue, int type, unsigned count, const hsa_signal_t *dependencies, hsa_signal_t done);

/* What on_error(), which queues get for their errors, had last. */
struct error {
	unsigned count;
	hsa_status_t status;
	hsa_queue_t *queue;
};
void on_error(hsa_status_t status, hsa_queue_t *queue, void *data);
struct error errors(void);

/* The sections. */
void copies(void);
void kernels(void);
void access_of_agents(void);
void barriers(void);
void slots(void);
void many(unsigned count);
void signals(void);
void pageable(void);
void refused(void);
void broken(void);
void dispatches(void);
void vast(void);
/* Gives the program's status: children of fork, and what each of them does. */
int family(char *program);
int use(void);

#endif
