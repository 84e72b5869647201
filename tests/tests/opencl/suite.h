// What the OpenCL programs share: checked calls, one device with a queue, kernels built from source, result lines.
//
// The first argument is an option for the kernels' compiler in the runtime, such as -O3; or @ and the path of a code object of the
// same kernels that a compiler has made before; or `source`, for that compiler: then they are printed and nothing runs.
#pragma once

#include <CL/cl.h>

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CL(call)                                                                                                     \
    do {                                                                                                             \
        cl_int error_ = (call);                                                                                      \
        if (error_ != CL_SUCCESS) {                                                                                  \
            printf("%s:%d: %s: %d\n", __FILE_NAME__, __LINE__, #call, error_);                                       \
            exit(3);                                                                                                 \
        }                                                                                                            \
    } while (0)

// The same for calls that give their status through a last argument `&error`.
#define CLE(value, call)                                                                                             \
    do {                                                                                                             \
        cl_int error = CL_SUCCESS;                                                                                   \
        (value) = (call);                                                                                            \
        if (error != CL_SUCCESS) {                                                                                   \
            printf("%s:%d: %s: %d\n", __FILE_NAME__, __LINE__, #call, error);                                        \
            exit(3);                                                                                                 \
        }                                                                                                            \
    } while (0)

static int wrong_results;
static cl_platform_id platform;
static cl_device_id device;
static cl_context context;
static cl_command_queue queue;

static cl_command_queue __attribute__((unused)) queue_of(cl_command_queue_properties properties)
{
    const cl_queue_properties list[] = {CL_QUEUE_PROPERTIES, properties, 0};
    cl_command_queue made;
    CLE(made, clCreateCommandQueueWithProperties(context, device, list, &error));
    return made;
}

static void __attribute__((unused)) start(cl_command_queue_properties properties)
{
    CL(clGetPlatformIDs(1, &platform, NULL));
    CL(clGetDeviceIDs(platform, CL_DEVICE_TYPE_GPU, 1, &device, NULL));
    CLE(context, clCreateContext(NULL, 1, &device, NULL, NULL, &error));
    queue = queue_of(properties);
}

// For `source` as the argument: needs no device.
static void __attribute__((unused)) print_source(int count, char **arguments, const char *source)
{
    if (count < 2 || strcmp(arguments[1], "source") != 0)
        return;
    fputs(source, stdout);
    exit(fflush(stdout) != 0);
}

static cl_program __attribute__((unused)) load(const char *path)
{
    static unsigned char code[1 << 22];
    FILE *file = fopen(path, "rb");
    size_t bytes = file ? fread(code, 1, sizeof code, file) : 0;
    if (bytes == 0 || bytes == sizeof code) {
        printf("%s: no code object, or one that is too large\n", path);
        exit(3);
    }
    fclose(file);
    const unsigned char *binary = code;
    cl_int status = CL_SUCCESS;
    cl_program program;
    CLE(program, clCreateProgramWithBinary(context, 1, &device, &bytes, &binary, &status, &error));
    CL(status);
    return program;
}

static cl_program __attribute__((unused)) build(const char *source, const char *options)
{
    cl_program program;
    if (options[0] == '@') {
        program = load(options + 1);
        options = "";
    } else {
        CLE(program, clCreateProgramWithSource(context, 1, &source, NULL, &error));
    }
    if (clBuildProgram(program, 1, &device, options, NULL, NULL) != CL_SUCCESS) {
        static char log[16384];
        clGetProgramBuildInfo(program, device, CL_PROGRAM_BUILD_LOG, sizeof log - 1, log, NULL);
        printf("the kernels do not compile: %s\n", log);
        exit(3);
    }
    return program;
}

static cl_kernel __attribute__((unused)) kernel_of(cl_program program, const char *name)
{
    cl_kernel kernel;
    CLE(kernel, clCreateKernel(program, name, &error));
    return kernel;
}

static cl_mem __attribute__((unused)) buffer_of(size_t bytes, const void *content)
{
    cl_mem buffer;
    cl_mem_flags flags = CL_MEM_READ_WRITE | (content ? CL_MEM_COPY_HOST_PTR : 0);
    CLE(buffer, clCreateBuffer(context, flags, bytes, (void *)(uintptr_t)content, &error));
    return buffer;
}

static void __attribute__((unused)) get(cl_mem buffer, void *to, size_t bytes)
{
    CL(clEnqueueReadBuffer(queue, buffer, CL_TRUE, 0, bytes, to, 0, NULL, NULL));
}

#define ARGUMENT(kernel, index, value) CL(clSetKernelArg(kernel, index, sizeof(value), &(value)))

static void __attribute__((unused)) run(cl_kernel kernel, size_t global, size_t local)
{
    CL(clEnqueueNDRangeKernel(queue, kernel, 1, NULL, &global, &local, 0, NULL, NULL));
}

// FNV-1a with 64 bits.
static uint64_t __attribute__((unused)) hash_of(const void *data, size_t bytes)
{
    const unsigned char *at = data;
    uint64_t hash = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ at[i]) * 0x100000001b3ull;
    return hash;
}

static uint64_t random_state = 88172645463325252ull;

static uint32_t __attribute__((unused)) random_bits(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 16);
}

static void __attribute__((unused)) say(const char *label, int right)
{
    printf("%s: %s\n", label, right ? "right" : "WRONG");
    wrong_results += !right;
}

// Compares words bit by bit.
static void __attribute__((unused)) exact(const char *label, const void *found, const void *expected, size_t bytes)
{
    const uint32_t *a = found, *b = expected;
    size_t wrong = 0, first = 0;
    for (size_t i = 0; i < bytes / 4; i++)
        if (a[i] != b[i] && wrong++ == 0)
            first = i;
    if (wrong == 0) {
        printf("%s: %zu bytes, %016llx\n", label, bytes, (unsigned long long)hash_of(found, bytes));
        return;
    }
    wrong_results++;
    printf("%s: WRONG: %zu of %zu words, first at %zu: found %08x, expected %08x\n", label, wrong, bytes / 4, first, a[first],
           b[first]);
}

static int __attribute__((unused)) done(const char *name)
{
    CL(clFinish(queue));
    if (wrong_results == 0)
        printf("%s: all right\n", name);
    else
        printf("%s: %d results are wrong\n", name, wrong_results);
    return wrong_results != 0;
}
