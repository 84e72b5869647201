// Writers, datagrams, pipes and short-lived threads while memory is exchanged.
#include "parts.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#define WRITERS 4
#define PAGES 64

static atomic_bool stop;
static char *area;

// Each writer has one word in every page.
static void *writer(void *argument) {
    unsigned number = (unsigned)(uintptr_t)argument;
    uint64_t *counts = calloc(PAGES, sizeof *counts);
    while (!stop)
        for (unsigned page = 0; page < PAGES; page++) {
            volatile uint64_t *word = (volatile uint64_t *)(area + page * PAGE + 64 * number);
            *word = *word + 1;
            counts[page]++;
        }
    return counts;
}

#define SLOTS 32
#define SLOT_PAGE 40
static int datagrams[2];
static atomic_ulong received, sent, interrupted;

static void *sender(void *unused) {
    for (uint64_t number = 1; !stop; number++) {
        uint64_t message[4] = {number, ~number, number * 3, number ^ 0x5555};
        while (send(datagrams[0], message, sizeof message, 0) != sizeof message)
            if (errno != EINTR)
                fail("send", errno, 0);
            else
                interrupted++;
        sent++;
    }
    return unused;
}

// Datagrams go to memory that is being exchanged: one that a failing copy drops is gone for good.
static void *receiver(void *unused) {
    for (uint64_t number = 1;; number++) {
        volatile uint64_t *slot = (volatile uint64_t *)(area + SLOT_PAGE * PAGE + 1024 + number % SLOTS * 8 * PAGE / 16);
        ssize_t length;
        while ((length = recv(datagrams[1], (void *)slot, 32, 0)) < 0)
            if (errno != EINTR)
                fail("recv: errno", errno, 0);
            else
                interrupted++;
        if (length == 0)
            return unused;
        if (slot[0] != number || slot[1] != ~number || slot[2] != number * 3 || slot[3] != (number ^ 0x5555))
            fail("number of a datagram", slot[0], number);
        received++;
    }
}

static int pipes[2];
static atomic_ulong bytes;

static void *pipe_writer(void *unused) {
    unsigned char block[1000], next = 0;
    while (!stop) {
        for (unsigned at = 0; at < sizeof block; at++)
            block[at] = next++;
        for (size_t done = 0; done < sizeof block;) {
            ssize_t length = write(pipes[1], block + done, sizeof block - done);
            if (length > 0)
                done += length;
            else if (errno != EINTR)
                fail("write", errno, 0);
        }
    }
    close(pipes[1]);
    return unused;
}

static void *pipe_reader(void *unused) {
    unsigned char *place = (unsigned char *)area + 20 * PAGE + 2000, next = 0;
    for (;;) {
        ssize_t length = read(pipes[0], place, 2000);
        if (length < 0 && errno == EINTR)
            continue;
        if (length < 0)
            fail("read: errno", errno, 0);
        if (length == 0)
            return unused;
        for (ssize_t at = 0; at < length; at++)
            if (place[at] != next++)
                fail("a byte of the pipe", place[at], next - 1);
        bytes += length;
    }
}

// Threads that come and go while all threads are to be held.
static void *short_lived(void *unused) {
    volatile uint64_t *word = (volatile uint64_t *)(area + 5 * PAGE + 3072);
    *word = *word + 1;
    return unused;
}

static void *breeder(void *argument) {
    uint64_t *made = argument;
    while (!stop) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, short_lived, NULL))
            fail("pthread_create", errno, 0);
        pthread_join(thread, NULL);
        ++*made;
    }
    return NULL;
}

void storm(int rounds) {
    area = own(PAGES * PAGE);
    pthread_t writers[WRITERS], others[5];
    uint64_t made = 0;
    if (socketpair(AF_UNIX, SOCK_DGRAM, 0, datagrams) || pipe(pipes))
        fail("socketpair", errno, 0);
    for (uintptr_t number = 0; number < WRITERS; number++)
        pthread_create(&writers[number], NULL, writer, (void *)number);
    pthread_create(&others[0], NULL, sender, NULL);
    pthread_create(&others[1], NULL, receiver, NULL);
    pthread_create(&others[2], NULL, pipe_writer, NULL);
    pthread_create(&others[3], NULL, pipe_reader, NULL);
    pthread_create(&others[4], NULL, breeder, &made);
    double start = now();
    for (int round = 0; round < rounds; round++) {
        unsigned first = random_number() % PAGES, count = 1 + random_number() % (PAGES - first);
        unsigned offset = random_number() % PAGE;
        char *memory = area + first * PAGE + offset;
        size_t size = count * PAGE - offset;
        switch (random_number() % 4) {
        case 0: // all of it
            given_and_taken(area, PAGES * PAGE);
            break;
        case 1: { // two that overlap, the first one ends first
            size_t half = size / 2 + 1;
            given(memory, size);
            given(memory + size - half, half);
            taken(memory);
            taken(memory + size - half);
            break;
        }
        default:
            given_and_taken(memory, size);
        }
    }
    double end = now();
    stop = true;
    uint64_t lost = 0, increments = 0;
    for (unsigned number = 0; number < WRITERS; number++) {
        void *counts;
        pthread_join(writers[number], &counts);
        for (unsigned page = 0; page < PAGES; page++) {
            uint64_t counted = ((uint64_t *)counts)[page];
            lost += counted - *(uint64_t *)(area + page * PAGE + 64 * number);
            increments += counted;
        }
    }
    pthread_join(others[0], NULL);
    pthread_join(others[2], NULL);
    pthread_join(others[4], NULL);
    // The end of the datagrams: an empty one is received after all others.
    send(datagrams[0], NULL, 0, 0);
    pthread_join(others[1], NULL);
    pthread_join(others[3], NULL);
    fprintf(stderr, "%d rounds in %.2f s: %.0f us each; %lu increments, %lu datagrams, %lu bytes, %lu threads; %lu EINTR\n",
            rounds, end - start, (end - start) * 1e6 / rounds, increments, received, bytes, made, interrupted);
    if (lost)
        fail("lost increments", lost, 0);
    if (received != sent)
        fail("datagrams received", received, sent);
    uint64_t threads = *(uint64_t *)(area + 5 * PAGE + 3072);
    if (threads != made)
        fail("increments by short-lived threads", threads, made);
    munmap(area, PAGES * PAGE);
    printf("storm: nothing is lost\n");
}
