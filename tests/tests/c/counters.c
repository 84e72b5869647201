/* The performance counters that the library knows of each node: every field of every counter goes into a sum. */
#include <hsakmt/hsakmt.h>

#include <stdio.h>
#include <stdlib.h>

static unsigned long sum(unsigned long sum, unsigned long word)
{
	return (sum ^ word) * 0x100000001b3;
}

int main(void)
{
	HsaSystemProperties system;
	HsaCounterProperties *all = NULL, *again = NULL;
	if (hsaKmtOpenKFD() || hsaKmtAcquireSystemProperties(&system))
		return 1;
	for (unsigned node = 0; node < system.NumNodes; node++) {
		int status = hsaKmtPmcGetCounterProperties(node, &all);
		printf("node %u: status %d\n", node, status);
		if (status)
			continue;
		printf("blocks: %u, at once: %u\n", all->NumBlocks, all->NumConcurrent);
		HsaCounterBlockProperties *block = all->Blocks;
		for (unsigned i = 0; i < all->NumBlocks; i++) {
			unsigned long fields = 0xcbf29ce484222325;
			for (unsigned k = 0; k < block->NumCounters; k++) {
				HsaCounter *counter = &block->Counters[k];
				fields = sum(fields, counter->Type);
				fields = sum(fields, counter->CounterId);
				fields = sum(fields, counter->CounterSizeInBits);
				fields = sum(fields, counter->CounterMask);
				/* AMD's library leaves the other flags as the heap had them. */
				fields = sum(fields, counter->Flags.ui32.Global);
				fields = sum(fields, counter->BlockIndex);
			}
			printf("%08x-%04x-%04x-", block->BlockId.Data1, block->BlockId.Data2, block->BlockId.Data3);
			for (unsigned k = 0; k < 8; k++)
				printf("%02x", block->BlockId.Data4[k]);
			printf(": %u counters, %u at once, %016lx\n", block->NumCounters, block->NumConcurrent, fields);
			block = (HsaCounterBlockProperties *)&block->Counters[block->NumCounters];
		}
		status = hsaKmtPmcGetCounterProperties(node, &again);
		printf("again: status %d, %s\n", status, again == all ? "the same" : "another");
	}
	printf("a node too many: status %d\n", hsaKmtPmcGetCounterProperties(system.NumNodes, &all));
	printf("nowhere: status %d\n", hsaKmtPmcGetCounterProperties(1, NULL));
	hsaKmtCloseKFD();
	return 0;
}
