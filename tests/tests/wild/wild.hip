// Kernels that go wrong, one for each argument: what the process learns of it is up to the runtime. `keep FILE` is a neighbour
// of such processes: it runs kernels that are right until the file is there.
#include <hip/hip_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <unistd.h>

__global__ void store_nowhere(unsigned *words)
{
    words[1ull << 40] = 1;
}

__global__ void load_nowhere(unsigned *words)
{
    words[0] = *reinterpret_cast<volatile unsigned *>(0x10000);
}

__global__ void loop(volatile unsigned *words)
{
    while (words[0] == 0)
        ;
}

__global__ void illegal(unsigned *words)
{
    words[0] = 1;
    // No instruction of any gfx9.
    asm volatile(".long 0xbfff0000");
    words[1] = 1;
}

__global__ void trap(unsigned *words)
{
    words[0] = 1;
    __builtin_trap();
}

static __device__ __attribute__((noinline)) unsigned deep(unsigned n, volatile unsigned *words)
{
    volatile unsigned own[64];
    own[n % 64] = words[0];
    return deep(n + 1, words) + own[(n + 1) % 64];
}

__global__ void overflow(unsigned *words)
{
    words[0] = deep(words[1], words);
}

__global__ void fine(unsigned *words)
{
    words[threadIdx.x] = threadIdx.x * 3;
}

static int keep(unsigned *words, const char *file)
{
    unsigned rounds = 0;
    for (; access(file, F_OK) != 0; rounds++) {
        unsigned back[64] = {0};
        if (hipMemset(words, 0, sizeof back) != hipSuccess)
            return 4;
        fine<<<dim3(1), dim3(64)>>>(words);
        if (hipDeviceSynchronize() != hipSuccess || hipMemcpy(back, words, sizeof back, hipMemcpyDeviceToHost) != hipSuccess)
            return 4;
        for (unsigned i = 0; i < 64; i++) {
            if (back[i] != i * 3) {
                printf("round %u: word %u is %u\n", rounds, i, back[i]);
                return 1;
            }
        }
        if (rounds == 0) {
            printf("at work\n");
            fflush(stdout);
        }
        // The others want the CPUs.
        usleep(50000);
    }
    printf("%s\n", rounds > 1 ? "all rounds right" : "no rounds");
    return 0;
}

int main(int count, char **arguments)
{
    const char *kind = count > 1 ? arguments[1] : "fine";
    unsigned *words, back[64] = {0};
    if (hipMalloc(reinterpret_cast<void **>(&words), 4096) != hipSuccess || hipMemset(words, 0, 4096) != hipSuccess)
        return 3;
    if (!strcmp(kind, "keep"))
        return count > 2 ? keep(words, arguments[2]) : 3;
    dim3 grid(1), block(64);
    printf("%s\n", kind);
    fflush(stdout);
    if (!strcmp(kind, "store"))
        store_nowhere<<<grid, block>>>(words);
    else if (!strcmp(kind, "load"))
        load_nowhere<<<grid, block>>>(words);
    else if (!strcmp(kind, "loop"))
        loop<<<grid, block>>>(words);
    else if (!strcmp(kind, "illegal"))
        illegal<<<grid, block>>>(words);
    else if (!strcmp(kind, "trap"))
        trap<<<grid, block>>>(words);
    else if (!strcmp(kind, "overflow"))
        overflow<<<grid, block>>>(words);
    else if (!strcmp(kind, "absurd"))
        fine<<<dim3(1), dim3(2048, 2, 2)>>>(words);
    else
        fine<<<grid, block>>>(words);
    hipError_t launch = hipGetLastError(), end = hipDeviceSynchronize();
    printf("launch %s, end %s\n", hipGetErrorName(launch), hipGetErrorName(end));
    if (hipMemcpy(back, words, sizeof back, hipMemcpyDeviceToHost) != hipSuccess)
        return 4;
    bool right = true;
    for (unsigned i = 0; i < 64; i++)
        right = right && back[i] == i * 3;
    printf("results: %s\n", right ? "right" : "none");
    return launch == hipSuccess && end == hipSuccess && right ? 0 : 1;
}
