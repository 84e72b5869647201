/* Starts and ends ROCr twice. */
#include <stdio.h>

#include "hsa_api.h"

int main(void)
{
	for (unsigned round = 0; round < 2; round++) {
		hsa_status_t status = hsa_init();
		printf("start %u: %#x\n", round, (unsigned)status);
		if (status == HSA_STATUS_SUCCESS)
			printf("end %u: %#x\n", round, (unsigned)hsa_shut_down());
	}
	return 0;
}
