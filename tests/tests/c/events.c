// Statuses of event calls (cases C26 and C29): what is wrong, what is set, who is woken, who is told that it failed.
#include "kmt.h"

#include <pthread.h>

struct sleeper {
    HsaEvent **events;
    HSAuint32 count;
    bool all;
    volatile pid_t number;
    HSAKMT_STATUS status;
    double woken;
    pthread_t thread;
};

static void *sleep_on(void *argument) {
    struct sleeper *sleeper = argument;
    sleeper->number = own_number();
    sleeper->status = sleeper->count == 1
                          ? hsaKmtWaitOnEvent(sleeper->events[0], 0xffffffff)
                          : hsaKmtWaitOnMultipleEvents(sleeper->events, sleeper->count, sleeper->all, 0xffffffff);
    sleeper->woken = now();
    return NULL;
}

static void begin(struct sleeper *sleeper, HsaEvent **events, HSAuint32 count, bool all) {
    *sleeper = (struct sleeper){.events = events, .count = count, .all = all};
    if (pthread_create(&sleeper->thread, NULL, sleep_on, sleeper))
        _exit(2);
    until_asleep(&sleeper->number);
}

static void end(struct sleeper *sleeper, const char *what, double since) {
    pthread_join(sleeper->thread, NULL);
    printf("%s: %s, %s\n", what, status_name(sleeper->status),
           sleeper->woken - since < 60 ? "soon" : "late");
    fflush(stdout);
}

static void arguments(void) {
    HsaEvent *event = NULL, *memory = NULL, *exception = NULL;
    say("create of type MAXID", create(HSA_EVENTTYPE_MAXID, false, false, &event));
    say("destroy NULL", hsaKmtDestroyEvent(NULL));
    say("set NULL", hsaKmtSetEvent(NULL));
    say("reset NULL", hsaKmtResetEvent(NULL));
    say("query NULL", hsaKmtQueryEventState(NULL));
    say("wait on NULL", hsaKmtWaitOnEvent(NULL, 0));
    say("wait on several at NULL", hsaKmtWaitOnMultipleEvents(NULL, 2, true, 0));
    say("memory event", create(HSA_EVENTTYPE_MEMORY, false, false, &memory));
    say("hardware exception", create(HSA_EVENTTYPE_HW_EXCEPTION, false, false, &exception));
    if (memory) {
        say("set a memory event", hsaKmtSetEvent(memory));
        say("reset a memory event", hsaKmtResetEvent(memory));
        say("wait on a memory event", hsaKmtWaitOnEvent(memory, 0));
        say("destroy a memory event", hsaKmtDestroyEvent(memory));
    }
    if (exception) {
        say("set a hardware exception", hsaKmtSetEvent(exception));
        say("wait on a hardware exception", hsaKmtWaitOnEvent(exception, 20));
        say("destroy a hardware exception", hsaKmtDestroyEvent(exception));
    }
}

static void one(bool manual) {
    HsaEvent *event = signal_event(manual);
    printf("%s event\n", manual ? "manual" : "auto-reset");
    double before = now();
    say("look", hsaKmtWaitOnEvent(event, 0));
    say("100 ms", hsaKmtWaitOnEvent(event, 100));
    printf("both took at least 100 ms: %d\n", now() - before >= 0.099);
    say("set", hsaKmtSetEvent(event));
    say("look", hsaKmtWaitOnEvent(event, 0));
    say("look again", hsaKmtWaitOnEvent(event, 0));
    say("set", hsaKmtSetEvent(event));
    say("set again", hsaKmtSetEvent(event));
    say("query", hsaKmtQueryEventState(event));
    say("reset", hsaKmtResetEvent(event));
    say("look after the reset", hsaKmtWaitOnEvent(event, 0));
    say("destroy", hsaKmtDestroyEvent(event));
}

static void born_set(void) {
    HsaEvent *event = NULL;
    say("create one that is set", create(HSA_EVENTTYPE_SIGNAL, true, true, &event));
    if (!event)
        return;
    say("look", hsaKmtWaitOnEvent(event, 0));
    say("destroy", hsaKmtDestroyEvent(event));
}

// The kernel sets none of these; AMD's library does not look at its answer.
static void debug_born_set(void) {
    HsaEvent *event = NULL;
    say("create a debug event that is set", create(HSA_EVENTTYPE_DEBUG_EVENT, true, true, &event));
    if (!event)
        return;
    say("look", hsaKmtWaitOnEvent(event, 0));
    say("destroy", hsaKmtDestroyEvent(event));
}

// Events do not need the topology to have been read: GPUs reach this one as any, and those after it.
static void early(void) {
    HsaEvent *event = signal_event(false);
    printf("an event from before the topology has a slot: %d\n", event->EventData.HWData2 != 0);
    say("set", hsaKmtSetEvent(event));
    say("wait", hsaKmtWaitOnEvent(event, 1000));
    say("destroy", hsaKmtDestroyEvent(event));
}

static void several(void) {
    HsaEvent *events[4];
    for (int number = 0; number < 4; number++)
        events[number] = signal_event(false);
    say("any of four, none set", hsaKmtWaitOnMultipleEvents(events, 4, false, 0));
    say("set the third", hsaKmtSetEvent(events[2]));
    say("any of four", hsaKmtWaitOnMultipleEvents(events, 4, false, 0));
    for (int number = 0; number < 3; number++)
        say("set", hsaKmtSetEvent(events[number]));
    say("all of four with three set, 100 ms", hsaKmtWaitOnMultipleEvents(events, 4, true, 100));
    for (int number = 0; number < 4; number++)
        say("look at one", hsaKmtWaitOnEvent(events[number], 0));
    for (int number = 0; number < 4; number++)
        say("set", hsaKmtSetEvent(events[number]));
    say("all of four", hsaKmtWaitOnMultipleEvents(events, 4, true, 100));
    say("none at all", hsaKmtWaitOnMultipleEvents(events, 0, true, 0));
    for (int number = 0; number < 4; number++)
        say("destroy", hsaKmtDestroyEvent(events[number]));
}

static void ages(void) {
    HsaEvent *event = signal_event(true);
    uint64_t age = 1;
    say("age 1 before any set", hsaKmtWaitOnEvent_Ext(event, 20, &age));
    printf("age: %lu\n", (unsigned long)age);
    say("set", hsaKmtSetEvent(event));
    say("wait", hsaKmtWaitOnEvent_Ext(event, 1000, &age));
    printf("age: %lu\n", (unsigned long)age);
    say("reset", hsaKmtResetEvent(event));
    say("wait with the new age", hsaKmtWaitOnEvent_Ext(event, 20, &age));
    say("destroy", hsaKmtDestroyEvent(event));
}

static void destroyed_under_a_sleeper(void) {
    struct sleeper sleeper;
    HsaEvent *event = signal_event(false);
    begin(&sleeper, &event, 1, true);
    double since = now();
    say("destroy under a sleeper", hsaKmtDestroyEvent(event));
    end(&sleeper, "the sleeper", since);
    HsaEvent *next = signal_event(false);
    say("a new one in its place", hsaKmtWaitOnEvent(next, 0));

    HsaEvent *events[3] = {signal_event(false), signal_event(false), signal_event(false)};
    begin(&sleeper, events, 3, true);
    since = now();
    say("destroy one of three under a sleeper", hsaKmtDestroyEvent(events[1]));
    end(&sleeper, "the sleeper", since);
    say("set the new one", hsaKmtSetEvent(next));
    say("the new one works", hsaKmtWaitOnEvent(next, 1000));
    say("destroy", hsaKmtDestroyEvent(events[0]));
    say("destroy", hsaKmtDestroyEvent(events[2]));
    say("destroy", hsaKmtDestroyEvent(next));
}

static void woken(void) {
    struct sleeper sleepers[3];
    HsaEvent *event = signal_event(true);
    for (int number = 0; number < 3; number++)
        begin(&sleepers[number], &event, 1, true);
    double since = now();
    say("set under three sleepers", hsaKmtSetEvent(event));
    for (int number = 0; number < 3; number++)
        end(&sleepers[number], "one of three sleepers", since);
    say("destroy", hsaKmtDestroyEvent(event));
}

int main(void) {
    HsaSystemProperties system;
    need("open", hsaKmtOpenKFD());
    early();
    need("system properties", hsaKmtAcquireSystemProperties(&system));
    HsaEvent *event = signal_event(false);
    printf("one from after it: %d\n", event->EventData.HWData2 != 0);
    say("destroy", hsaKmtDestroyEvent(event));
    arguments();
    one(false);
    one(true);
    born_set();
    debug_born_set();
    several();
    ages();
    destroyed_under_a_sleeper();
    woken();
    say("close", hsaKmtCloseKFD());
    return 0;
}
