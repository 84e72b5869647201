// Lines that kernels print. They come through a buffer that host and GPU share, while the kernel runs.
#include "suite.h"

__global__ void one_line(int number, const char *text)
{
    printf("kernel: %d %u %x %lld %llx %c %s %5.2f %g %%\n", number, 7u, 255u, -5ll, 0xfeedfacecafebeefull, 'k', text, 2.5, 1e-3);
}

__global__ void lines_in_order()
{
    // One lane after the other, so that the order is known.
    for (unsigned id = 0; id < 64; id++)
        if (threadIdx.x == id && id % 9 == 0)
            printf("lane %u of %u\n", id, unsigned(blockDim.x));
}

__global__ void returns(int *out)
{
    // HIP's printf tells how many bytes it took or an error; it is never 0 here.
    out[threadIdx.x] = printf("%s", "");
}

__global__ void many(unsigned rounds)
{
    for (unsigned i = 0; i < rounds; i++)
        if (threadIdx.x == 0)
            printf("%u ", i * i);
}

int main()
{
    static const char words[] = "from memory";
    Device<char> text(sizeof words);
    HIP(hipMemcpy(text, words, sizeof words, hipMemcpyHostToDevice));
    one_line<<<1, 1>>>(-42, text);
    launched();
    HIP(hipDeviceSynchronize());
    lines_in_order<<<1, 64>>>();
    launched();
    HIP(hipDeviceSynchronize());
    many<<<1, 64>>>(40);
    launched();
    HIP(hipDeviceSynchronize());
    printf("\n");
    Device<int> out(64);
    returns<<<1, 64>>>(out);
    launched();
    std::vector<int> counts = out.get();
    bool fine = true;
    for (int count : counts)
        fine = fine && count >= 0;
    say("printf's results", fine);
    return done("printf");
}
