/* Barriers across queues, packets that come late or in no order, and more queues than a GPU runs at a time. */
#include "rocr.h"

void barriers(void)
{
	puts("= barriers");
	hsa_signal_t a = signal_of(1), b = signal_of(1), done = signal_of(1);
	unsigned rounds = 0;
	/* More than the rings hold: they wrap. */
	for (unsigned i = 0; i < 300; i++) {
		hsa_signal_store_screlease(a, 1);
		hsa_signal_store_screlease(b, 1);
		barrier(queues[i % 2], HSA_PACKET_TYPE_BARRIER_AND, 1, &a, b);
		barrier(queues[1 - i % 2], HSA_PACKET_TYPE_BARRIER_AND, 0, NULL, a);
		blocked(b);
		rounds += hsa_signal_load_scacquire(a) == 0 && hsa_signal_load_scacquire(b) == 0;
	}
	printf("one queue after the other: %u\n", rounds);

	/* Packet i waits for packet i - 1, which is in the other queue. */
	hsa_signal_t chain[64];
	unsigned ended = 0;
	for (unsigned i = 0; i < 64; i++)
		chain[i] = signal_of(1);
	for (unsigned i = 1; i < 64; i += 2)
		barrier(queues[1], HSA_PACKET_TYPE_BARRIER_AND, 1, &chain[i - 1], chain[i]);
	usleep(5000);
	for (unsigned i = 1; i < 64; i += 2)
		ended += hsa_signal_load_scacquire(chain[i]) != 1;
	check("the second queue waits", ended == 0);
	for (unsigned i = 0; i < 64; i += 2)
		barrier(queues[0], HSA_PACKET_TYPE_BARRIER_AND, i > 0, &chain[i ? i - 1 : 0], chain[i]);
	blocked(chain[63]);
	for (unsigned i = 0; i < 64; i++) {
		ended += hsa_signal_load_scacquire(chain[i]) == 0;
		MUST(hsa_signal_destroy(chain[i]));
	}
	printf("a chain of: %u\n", ended);

	/* All five dependencies, the last one from the other queue; what is behind has to wait. */
	hsa_signal_t five[5];
	for (unsigned i = 0; i < 5; i++)
		five[i] = signal_of(1);
	hsa_signal_store_screlease(a, 1);
	hsa_signal_store_screlease(done, 1);
	barrier(queues[0], HSA_PACKET_TYPE_BARRIER_AND, 5, five, a);
	barrier(queues[0], HSA_PACKET_TYPE_BARRIER_AND, 0, NULL, done);
	for (unsigned i = 0; i < 4; i++)
		hsa_signal_store_screlease(five[(i * 2 + 1) % 5], 0);
	usleep(5000);
	check("four of five do not do", hsa_signal_load_scacquire(a) == 1 && hsa_signal_load_scacquire(done) == 1);
	barrier(queues[1], HSA_PACKET_TYPE_BARRIER_AND, 0, NULL, five[4]);
	usleep(1000);
	hsa_signal_store_screlease(five[2], 0);
	blocked(done);
	check("five do", hsa_signal_load_scacquire(a) == 0);

	/* The third of four, and no fifth: all of four wait for it, one of them does not. */
	for (unsigned i = 0; i < 4; i++)
		hsa_signal_store_screlease(five[i], i == 2);
	hsa_signal_store_screlease(a, 1);
	hsa_signal_store_screlease(done, 1);
	barrier(queues[0], HSA_PACKET_TYPE_BARRIER_AND, 4, five, a);
	barrier(queues[1], HSA_PACKET_TYPE_BARRIER_OR, 4, five, done);
	blocked(done);
	usleep(5000);
	check("all of four wait, one of them does not", hsa_signal_load_scacquire(a) == 1);
	hsa_signal_store_screlease(five[2], 0);
	blocked(a);

	for (unsigned i = 0; i < 5; i++) {
		for (unsigned k = 0; k < 5; k++)
			hsa_signal_store_screlease(five[k], 1);
		hsa_signal_store_screlease(done, 1);
		barrier(queues[i % 2], HSA_PACKET_TYPE_BARRIER_OR, 5, five, done);
		usleep(2000);
		ended = hsa_signal_load_scacquire(done) != 1;
		barrier(queues[1 - i % 2], HSA_PACKET_TYPE_BARRIER_AND, 0, NULL, five[i]);
		blocked(done);
		printf("one of five, number %u: %s\n", i, ended ? "too early" : "done");
		failures += ended;
	}

	hsa_amd_barrier_value_packet_t packet = { 0 };
	packet.header = HSA_PACKET_TYPE_VENDOR_SPECIFIC | 1 << HSA_PACKET_HEADER_BARRIER;
	packet.format = HSA_AMD_PACKET_TYPE_BARRIER_VALUE;
	packet.signal = a;
	packet.value = 0x20;
	packet.mask = 0xf0;
	packet.cond = HSA_SIGNAL_CONDITION_GTE;
	packet.completion_signal = done;
	hsa_signal_store_screlease(a, 0x15);
	hsa_signal_store_screlease(done, 1);
	put(queues[0], &packet);
	usleep(5000);
	check("a masked value that is too small", hsa_signal_load_scacquire(done) == 1);
	hsa_signal_store_screlease(a, 0x25);
	blocked(done);
	check("and one that is not", hsa_signal_load_scacquire(done) == 0);

	for (unsigned i = 0; i < 5; i++)
		MUST(hsa_signal_destroy(five[i]));
	MUST(hsa_signal_destroy(a));
	MUST(hsa_signal_destroy(b));
	MUST(hsa_signal_destroy(done));
}

void slots(void)
{
	puts("= slots");
	hsa_signal_t done[3], last = signal_of(1);
	hsa_barrier_packet_t packets[3];
	uint32_t *places[3];
	for (unsigned i = 0; i < 3; i++)
		done[i] = signal_of(1);
	/* Three places are taken and rung for before any packet is there; they come as the third, the first, the second. */
	uint64_t index = hsa_queue_add_write_index_relaxed(queues[0], 3);
	for (unsigned i = 0; i < 3; i++) {
		packets[i] = barrier_packet(HSA_PACKET_TYPE_BARRIER_AND, 0, NULL, done[i]);
		places[i] = body(queues[0], index + i, &packets[i]);
	}
	hsa_signal_store_screlease(queues[0]->doorbell_signal, (int64_t)index + 2);
	usleep(10000);
	publish(places[2], &packets[2]);
	usleep(10000);
	check("the third waits for the first", hsa_signal_load_scacquire(done[2]) == 1);
	publish(places[0], &packets[0]);
	blocked(done[0]);
	usleep(10000);
	check("and for the second", hsa_signal_load_scacquire(done[1]) == 1 && hsa_signal_load_scacquire(done[2]) == 1);
	publish(places[1], &packets[1]);
	blocked(done[2]);
	check("the second came before it", hsa_signal_load_scacquire(done[1]) == 0);

	/* Ten times around the ring; each doorbell is rung twice, every third time with an older packet once more. */
	hsa_signal_t all = signal_of(10 * 64 + 7);
	hsa_barrier_packet_t packet = barrier_packet(HSA_PACKET_TYPE_BARRIER_AND, 0, NULL, all);
	for (unsigned i = 0; i < 10 * 64 + 7; i++) {
		index = put(queues[0], &packet);
		hsa_signal_store_screlease(queues[0]->doorbell_signal, (int64_t)(i % 3 ? index : index - 1));
	}
	hsa_signal_store_screlease(queues[0]->doorbell_signal, (int64_t)index);
	blocked(all);
	barrier(queues[0], HSA_PACKET_TYPE_BARRIER_AND, 0, NULL, last);
	blocked(last);
	printf("after ten times around: %ld are left\n", (long)hsa_signal_load_scacquire(all));
	for (unsigned i = 0; i < 3; i++)
		MUST(hsa_signal_destroy(done[i]));
	MUST(hsa_signal_destroy(all));
	MUST(hsa_signal_destroy(last));
}

#define PACKETS 50

void many(unsigned count)
{
	puts("= many");
	hsa_queue_t *all[QUEUES];
	hsa_signal_t left[QUEUES], gate = signal_of(1), behind = signal_of(1);
	unsigned done = 0;
	for (unsigned i = 0; i < count; i++) {
		MUST(hsa_queue_create(gpus[0], 64, HSA_QUEUE_TYPE_MULTI, on_error, NULL, UINT32_MAX, UINT32_MAX, &all[i]));
		left[i] = signal_of(PACKETS);
	}
	/* The first one stands all the time. */
	barrier(all[0], HSA_PACKET_TYPE_BARRIER_AND, 1, &gate, behind);
	for (unsigned k = 0; k < PACKETS; k++)
		for (unsigned i = 0; i < count; i++)
			barrier(all[i], HSA_PACKET_TYPE_BARRIER_AND, 0, NULL, left[i]);
	for (unsigned i = 1; i < count; i++)
		blocked(left[i]);
	for (unsigned i = 1; i < count; i++)
		done += hsa_signal_load_scacquire(left[i]) == 0;
	check("all others are done", done == count - 1);
	check("the first one stands", hsa_signal_load_scacquire(left[0]) == PACKETS);
	hsa_signal_store_screlease(gate, 0);
	blocked(left[0]);
	check("and goes on", hsa_signal_load_scacquire(behind) == 0);
	for (unsigned i = 0; i < count; i++) {
		MUST(hsa_queue_destroy(all[i]));
		MUST(hsa_signal_destroy(left[i]));
	}
	MUST(hsa_signal_destroy(gate));
	MUST(hsa_signal_destroy(behind));
}
