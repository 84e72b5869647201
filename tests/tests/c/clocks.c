// Clocks: which are whose, and whether time stamps of packets can be told in the system's time.
#include "aql.h"

static HSAuint32 gpu;

// A pair of clocks, and how far off the middle of the call they can be at most.
struct pair {
    HsaClockCounters counters;
    double width;
};

static uint64_t of(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    return (uint64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static struct pair read_pair(void) {
    struct pair pair;
    uint64_t before = of(CLOCK_BOOTTIME);
    need("clocks", hsaKmtGetClockCounters(gpu, &pair.counters));
    pair.width = (double)(of(CLOCK_BOOTTIME) - before);
    return pair;
}

// The narrowest of many: on a machine that has other work a call can be held up in its middle.
static struct pair narrow_pair(void) {
    struct pair best = read_pair();
    for (int i = 0; i < 100 && best.width > 20e3; i++) {
        struct pair pair = read_pair();
        if (pair.width < best.width)
            best = pair;
    }
    return best;
}

static const char *yes(int is) { return is ? "yes" : "no"; }

static void whose(void) {
    int cpu = 1, system = 1, monotone = 1, frequency = 1;
    uint64_t last = 0;
    for (int i = 0; i < 300; i++) {
        HsaClockCounters counters;
        uint64_t raw = of(CLOCK_MONOTONIC_RAW), boot = of(CLOCK_BOOTTIME);
        need("clocks", hsaKmtGetClockCounters(gpu, &counters));
        cpu &= raw <= counters.CPUClockCounter && counters.CPUClockCounter <= of(CLOCK_MONOTONIC_RAW);
        system &= boot <= counters.SystemClockCounter && counters.SystemClockCounter <= of(CLOCK_BOOTTIME);
        frequency &= counters.SystemClockFrequencyHz == 1000000000;
        monotone &= counters.GPUClockCounter >= last;
        last = counters.GPUClockCounter;
    }
    printf("the CPU's counter is this system's CLOCK_MONOTONIC_RAW: %s\n", yes(cpu));
    printf("the system's counter is this system's CLOCK_BOOTTIME: %s\n", yes(system));
    printf("the system's counter counts nanoseconds: %s\n", yes(frequency));
    printf("the GPU's counter is monotone: %s\n", yes(monotone));
    HsaClockCounters counters;
    say("clocks of the CPU's node", hsaKmtGetClockCounters(0, &counters));
    say("clocks of no node", hsaKmtGetClockCounters(99, &counters));
}

static double distance(uint64_t a, uint64_t b) { return (double)(int64_t)(b - a); }

// Ticks of the GPU for a nanosecond of the system.
static double rate(const struct pair *a, const struct pair *b) {
    return distance(a->counters.GPUClockCounter, b->counters.GPUClockCounter) /
           distance(a->counters.SystemClockCounter, b->counters.SystemClockCounter);
}

// What a runtime does with a time stamp: ticks since a pair, at the rate that two pairs show.
static double told(const struct pair *pair, double rate, uint64_t ticks) {
    return (double)pair->counters.SystemClockCounter + distance(pair->counters.GPUClockCounter, ticks) / rate;
}

int main(void) {
    int node = start();
    if (node < 0)
        return 1;
    gpu = node;
    whose();
    struct aql aql;
    aql_begin(&aql, gpu);
    int ordered = 1, after_each_other = 1;
    uint64_t last = 0;
    for (int i = 0; i < 300; i++) {
        HsaClockCounters before, after;
        need("clocks", hsaKmtGetClockCounters(gpu, &before));
        aql_submit(&aql);
        aql_wait(&aql);
        need("clocks", hsaKmtGetClockCounters(gpu, &after));
        uint64_t begin = aql.signal->start, end = aql.signal->end;
        ordered &= before.GPUClockCounter <= begin && begin <= end && end <= after.GPUClockCounter;
        after_each_other &= begin >= last;
        last = end;
    }
    printf("packets begin and end between looks at the GPU's counter: %s\n", yes(ordered));
    printf("packets begin after the end of those before: %s\n", yes(after_each_other));

    // Intervals between packets, each told by the pair that is the latest at its end, as runtimes do it.
    struct pair first = narrow_pair();
    usleep(300 * 1000);
    struct pair pair = narrow_pair();
    double per_nanosecond = rate(&first, &pair), worst = 0, uncertain = 0;
    printf("the GPU counts at %.0f MHz\n", per_nanosecond * 1e3);
    int right = 1;
    double submitted = 0, seen = 0, stamp = 0;
    for (int i = 0; i < 24; i++) {
        struct pair before = pair;
        double from = (double)of(CLOCK_BOOTTIME);
        aql_submit(&aql);
        aql_wait(&aql);
        double to = (double)of(CLOCK_BOOTTIME);
        pair = read_pair();
        double now_told = told(&pair, per_nanosecond, aql.signal->start);
        if (i) {
            // The packet began between its submission and the look that saw its end; pairs are as exact as their calls are short.
            double slack = (before.width + pair.width) / 2;
            double least = from - seen - slack, most = to - submitted + slack;
            double interval = now_told - stamp;
            right &= least <= interval && interval <= most;
            worst = interval < least && least - interval > worst ? least - interval : worst;
            worst = interval > most && interval - most > worst ? interval - most : worst;
            uncertain = slack > uncertain ? slack : uncertain;
        }
        submitted = from, seen = to, stamp = now_told;
        usleep(5000 + i * 3000);
    }
    printf("intervals between packets are the system's: %s\n", yes(right));
    fprintf(stderr, "pairs are off by up to %.0f ns, intervals by %.0f ns more\n", uncertain, worst);
    need("destroy", hsaKmtDestroyQueue(aql.queue.QueueId));
    say("close", hsaKmtCloseKFD());
    return 0;
}
