// Case C56: the times of commands. Each is queued, submitted, started and ended in this order, none at time 0, a kernel that
// does something takes time, and commands of an in-order queue do not overlap.
//
// With `loose` as second argument overlaps do not count, nor a start before the submission, whose time is the system's: the runtime
// converts the GPU's time to the system's with pairs of both that it asks the thunk for, which in a guest are as exact as a round trip to the host is short (docs/limits.md).
#include "suite.h"

static const char source[] = "kernel void work(global uint *a) { uint i = get_global_id(0), v = a[i];\n"
                             "  for (uint k = 0; k < 50; k++) v = v * 1664525u + 1013904223u; a[i] = v; }\n";

enum { KERNELS = 200, COPIES = 50, N = 256 };

struct times {
    cl_ulong queued, submitted, started, ended;
};

static struct times times_of(cl_event event)
{
    struct times times;
    CL(clGetEventProfilingInfo(event, CL_PROFILING_COMMAND_QUEUED, sizeof(cl_ulong), &times.queued, NULL));
    CL(clGetEventProfilingInfo(event, CL_PROFILING_COMMAND_SUBMIT, sizeof(cl_ulong), &times.submitted, NULL));
    CL(clGetEventProfilingInfo(event, CL_PROFILING_COMMAND_START, sizeof(cl_ulong), &times.started, NULL));
    CL(clGetEventProfilingInfo(event, CL_PROFILING_COMMAND_END, sizeof(cl_ulong), &times.ended, NULL));
    return times;
}

int main(int count, char **arguments)
{
    print_source(count, arguments, source);
    static unsigned a[N], back[N], expected[N];
    static cl_event events[KERNELS + COPIES + 1];
    int loose = count > 2 && !strcmp(arguments[2], "loose");
    int number = 0, ordered = 1, none_zero = 1, kernels_take_time = 1, apart = 1;
    start(CL_QUEUE_PROFILING_ENABLE);
    cl_program program = build(source, count > 1 ? arguments[1] : "");
    cl_kernel kernel = kernel_of(program, "work");
    for (int i = 0; i < N; i++)
        expected[i] = a[i] = random_bits();
    cl_mem memory = buffer_of(sizeof a, a);
    ARGUMENT(kernel, 0, memory);
    size_t global = N, local = 64;
    for (int i = 0; i < KERNELS; i++) {
        CL(clEnqueueNDRangeKernel(queue, kernel, 1, NULL, &global, &local, 0, NULL, &events[number++]));
        if (i % (KERNELS / COPIES) == 0)
            CL(clEnqueueReadBuffer(queue, memory, CL_FALSE, 0, sizeof back, back, 0, NULL, &events[number++]));
    }
    CL(clEnqueueMarkerWithWaitList(queue, 0, NULL, &events[number++]));
    CL(clFinish(queue));
    struct times before = {0, 0, 0, 0};
    for (int i = 0; i < number; i++) {
        struct times times = times_of(events[i]);
        cl_command_type type;
        CL(clGetEventInfo(events[i], CL_EVENT_COMMAND_TYPE, sizeof type, &type, NULL));
        ordered &= times.queued <= times.submitted && (loose || times.submitted <= times.started) && times.started <= times.ended;
        none_zero &= times.queued && times.submitted && times.started && times.ended;
        if (type == CL_COMMAND_NDRANGE_KERNEL)
            kernels_take_time &= times.ended > times.started;
        if (i > 0 && type != CL_COMMAND_MARKER)
            apart &= before.ended <= times.started;
        before = times;
        CL(clReleaseEvent(events[i]));
    }
    printf("%d commands\n", number);
    say("queued, submitted, started, ended", ordered);
    say("no time is zero", none_zero);
    say("kernels take time", kernels_take_time);
    if (!loose)
        say("commands do not overlap", apart);
    for (int k = 0; k < KERNELS; k++)
        for (int i = 0; i < N; i++)
            for (int step = 0; step < 50; step++)
                expected[i] = expected[i] * 1664525u + 1013904223u;
    get(memory, a, sizeof a);
    exact("results", a, expected, sizeof a);
    return done("profiling");
}
