// The harness on the other end of standard input and output: it reads and writes memory as the GPU does, through the
// GPU's page table. A request is one line that begins with @, its answer is one line.
#ifndef HARNESS_H
#define HARNESS_H

#include "conform.h"

// Makes the harness find this process's GPU. Must be called after `begin` and before all others.
void meet(void);

// What the GPU reads at an address; a line says whether it is the expected pattern (see `pattern`), or a fault.
void gpu_sees(unsigned gpu, const void *address, uint64_t length, uint32_t seed);
// Lets the GPU write a pattern; a line says whether it could.
void gpu_writes(unsigned gpu, void *address, uint64_t length, uint32_t seed);
// Whether the GPU reads the pattern; no line.
bool gpu_has(unsigned gpu, const void *address, uint64_t length, uint32_t seed);
bool gpu_put(unsigned gpu, void *address, uint64_t length, uint32_t seed);
bool gpu_faults(unsigned gpu, const void *address);

// The pattern: byte number i of seed s.
uint8_t pattern(uint32_t seed, uint64_t number);
// The same by the CPU.
void cpu_writes(void *address, uint64_t length, uint32_t seed);
void cpu_sees(const void *address, uint64_t length, uint32_t seed);
bool cpu_has(const void *address, uint64_t length, uint32_t seed);

// Waits until the harness has done something; the number that it answers.
uint64_t wait_for(const char *what);

#endif
