// A program with fork handlers of its own, which wait for a lock under which another thread registers memory.
#include "parts.h"

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static atomic_bool over;

static void locks(void) {
    pthread_mutex_lock(&mutex);
}

static void unlocks(void) {
    pthread_mutex_unlock(&mutex);
}

struct work {
    char *memory;
    int rounds;
};

static void *registers(void *argument) {
    struct work *work = argument;
    for (int round = 0; round < work->rounds; round++) {
        pthread_mutex_lock(&mutex);
        // The other one comes to its handlers meanwhile.
        usleep(2000);
        given_and_taken(work->memory, 3 * PAGE);
        pthread_mutex_unlock(&mutex);
        usleep(500);
    }
    atomic_store(&over, true);
    return NULL;
}

void handlers(int rounds) {
    struct work work = {own(3 * PAGE), rounds};
    pthread_t other;
    // After the library was opened, and before memory is registered.
    if (pthread_atfork(locks, unlocks, unlocks))
        fail("pthread_atfork", 1, 0);
    // They would wait for each other for ever.
    alarm(100);
    pthread_create(&other, NULL, registers, &work);
    while (!atomic_load(&over)) {
        pid_t child = fork();
        if (child == 0)
            _exit(0);
        int status = child_status(child);
        if (status)
            fail("status of a child", status, 0);
    }
    pthread_join(other, NULL);
    alarm(0);
    munmap(work.memory, 3 * PAGE);
    printf("handlers: nobody waits for ever\n");
}
