// Buffers: reads, writes, fills and copies of odd sizes, rectangles, maps, parts of buffers, host pointers, queues out of order,
// user events, shared virtual memory.
#include "suite.h"

static const char source[] = "kernel void twice(global uchar *a, uint n) { uint i = get_global_id(0); if (i < n) a[i] = a[i] * 2 + 1; }\n";

static unsigned char noise_of(size_t i, unsigned seed)
{
    return (unsigned char)((i * 2654435761u + seed * 97) >> 13);
}

static void pieces(void)
{
    enum { SIZE = 100003 };
    static unsigned char from[SIZE + 1], back[SIZE + 1], expected[SIZE + 1];
    for (size_t i = 0; i < SIZE; i++)
        from[i] = noise_of(i, 1);
    cl_mem a = buffer_of(SIZE + 1, expected), b = buffer_of(SIZE + 1, expected);
    CL(clEnqueueWriteBuffer(queue, a, CL_TRUE, 0, SIZE, from, 0, NULL, NULL));
    CL(clEnqueueWriteBuffer(queue, a, CL_FALSE, 77, 1001, from + 5000, 0, NULL, NULL));
    CL(clEnqueueCopyBuffer(queue, a, b, 3, 11, 65537, 0, NULL, NULL));
    static const unsigned char one = 0x5a;
    static const unsigned words[4] = {0x11223344, 0x55667788, 0x99aabbcc, 0xddeeff00};
    CL(clEnqueueFillBuffer(queue, b, &one, 1, 20001, 333, 0, NULL, NULL));
    CL(clEnqueueFillBuffer(queue, b, words, 16, 40000, 160, 0, NULL, NULL));
    CL(clEnqueueReadBuffer(queue, b, CL_TRUE, 1, SIZE - 1, back + 1, 0, NULL, NULL));
    memcpy(from + 77, from + 5000, 1001);
    memcpy(expected + 11, from + 3, 65537);
    memset(expected + 20001, 0x5a, 333);
    for (int i = 0; i < 10; i++)
        memcpy(expected + 40000 + i * 16, words, 16);
    exact("pieces", back, expected, SIZE + 1);
    CL(clReleaseMemObject(a));
    CL(clReleaseMemObject(b));
}

static void rectangles(void)
{
    enum { PITCH = 37, ROWS = 20, SIZE = PITCH * ROWS };
    static unsigned char from[SIZE], back[SIZE], expected[SIZE];
    for (size_t i = 0; i < SIZE; i++)
        from[i] = noise_of(i, 2);
    cl_mem a = buffer_of(SIZE, from), b = buffer_of(SIZE, expected);
    size_t source_origin[3] = {5, 2, 0}, origin[3] = {1, 7, 0}, region[3] = {23, 11, 1}, zero[3] = {0, 0, 0}, whole[3] = {PITCH, ROWS, 1};
    CL(clEnqueueCopyBufferRect(queue, a, b, source_origin, origin, region, PITCH, 0, PITCH, 0, 0, NULL, NULL));
    CL(clEnqueueReadBufferRect(queue, b, CL_TRUE, zero, zero, whole, PITCH, 0, PITCH, 0, back, 0, NULL, NULL));
    for (int row = 0; row < 11; row++)
        memcpy(expected + (7 + row) * PITCH + 1, from + (2 + row) * PITCH + 5, 23);
    exact("rectangles", back, expected, SIZE);
}

static void maps(cl_kernel kernel, cl_mem_flags flags, const char *label)
{
    enum { SIZE = 8192 };
    static unsigned char host[SIZE] __attribute__((aligned(4096))), expected[SIZE];
    cl_mem buffer;
    for (size_t i = 0; i < SIZE; i++)
        host[i] = noise_of(i, 3);
    CLE(buffer, clCreateBuffer(context, CL_MEM_READ_WRITE | flags, SIZE, flags & (CL_MEM_USE_HOST_PTR | CL_MEM_COPY_HOST_PTR) ? host : NULL, &error));
    unsigned char *at;
    CLE(at, clEnqueueMapBuffer(queue, buffer, CL_TRUE, CL_MAP_WRITE, 100, 4000, 0, NULL, NULL, &error));
    for (size_t i = 0; i < 4000; i++)
        at[i] = noise_of(i, 4);
    CL(clEnqueueUnmapMemObject(queue, buffer, at, 0, NULL, NULL));
    cl_buffer_region part = {0, 4096};
    cl_mem sub;
    CLE(sub, clCreateSubBuffer(buffer, CL_MEM_READ_WRITE, CL_BUFFER_CREATE_TYPE_REGION, &part, &error));
    cl_uint n = 4096;
    ARGUMENT(kernel, 0, sub);
    ARGUMENT(kernel, 1, n);
    run(kernel, 4096, 256);
    CLE(at, clEnqueueMapBuffer(queue, buffer, CL_TRUE, CL_MAP_READ, 100, 4000, 0, NULL, NULL, &error));
    for (size_t i = 0; i < 4000; i++)
        expected[i] = (unsigned char)(noise_of(i, 4) * (i + 100 < 4096 ? 2 : 1) + (i + 100 < 4096));
    exact(label, at, expected, 4000);
    CL(clEnqueueUnmapMemObject(queue, buffer, at, 0, NULL, NULL));
    CL(clFinish(queue));
    CL(clReleaseMemObject(sub));
    CL(clReleaseMemObject(buffer));
}

static void waits(cl_kernel kernel)
{
    enum { SIZE = 256 };
    static unsigned char host[SIZE], expected[SIZE];
    cl_command_queue other = queue_of(CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE);
    cl_mem buffer = buffer_of(SIZE, host);
    cl_event gate, first, second;
    CLE(gate, clCreateUserEvent(context, &error));
    cl_uint n = SIZE;
    ARGUMENT(kernel, 0, buffer);
    ARGUMENT(kernel, 1, n);
    size_t global = SIZE, local = 64;
    CL(clEnqueueNDRangeKernel(other, kernel, 1, NULL, &global, &local, 1, &gate, &first));
    CL(clFlush(other));
    cl_int status;
    CL(clGetEventInfo(first, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof status, &status, NULL));
    say("a command waits for a user event", status != CL_COMPLETE);
    CL(clEnqueueNDRangeKernel(queue, kernel, 1, NULL, &global, &local, 1, &first, &second));
    CL(clSetUserEventStatus(gate, CL_COMPLETE));
    CL(clWaitForEvents(1, &second));
    get(buffer, host, SIZE);
    memset(expected, 3, SIZE);
    exact("one queue after the other", host, expected, SIZE);
    CL(clReleaseEvent(gate));
    CL(clReleaseEvent(first));
    CL(clReleaseEvent(second));
    CL(clReleaseCommandQueue(other));
}

static void shared(cl_kernel kernel)
{
    cl_device_svm_capabilities capabilities = 0;
    CL(clGetDeviceInfo(device, CL_DEVICE_SVM_CAPABILITIES, sizeof capabilities, &capabilities, NULL));
    printf("shared virtual memory: %llx\n", (unsigned long long)capabilities);
    if (!(capabilities & CL_DEVICE_SVM_COARSE_GRAIN_BUFFER))
        return;
    enum { SIZE = 4096 };
    static unsigned char expected[SIZE];
    unsigned char *memory = clSVMAlloc(context, CL_MEM_READ_WRITE, SIZE, 0);
    if (!memory) {
        say("shared virtual memory", 0);
        return;
    }
    CL(clEnqueueSVMMap(queue, CL_TRUE, CL_MAP_WRITE, memory, SIZE, 0, NULL, NULL));
    for (size_t i = 0; i < SIZE; i++) {
        memory[i] = noise_of(i, 5);
        expected[i] = (unsigned char)(memory[i] * 2 + 1);
    }
    CL(clEnqueueSVMUnmap(queue, memory, 0, NULL, NULL));
    cl_uint n = SIZE;
    CL(clSetKernelArgSVMPointer(kernel, 0, memory));
    ARGUMENT(kernel, 1, n);
    run(kernel, SIZE, 256);
    CL(clEnqueueSVMMap(queue, CL_TRUE, CL_MAP_READ, memory, SIZE, 0, NULL, NULL));
    exact("shared virtual memory", memory, expected, SIZE);
    CL(clEnqueueSVMUnmap(queue, memory, 0, NULL, NULL));
    CL(clFinish(queue));
    clSVMFree(context, memory);
}

int main(int count, char **arguments)
{
    print_source(count, arguments, source);
    start(0);
    cl_program program = build(source, count > 1 ? arguments[1] : "");
    cl_kernel kernel = kernel_of(program, "twice");
    pieces();
    rectangles();
    maps(kernel, 0, "a buffer that is mapped");
    maps(kernel, CL_MEM_ALLOC_HOST_PTR, "a buffer in host memory");
    maps(kernel, CL_MEM_USE_HOST_PTR, "a buffer in the program's memory");
    waits(kernel);
    shared(kernel);
    return done("memory");
}
