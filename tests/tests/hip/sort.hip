// Sorting: a bitonic network in LDS and in memory, and a radix sort.
#include "suite.h"

#include <algorithm>

template <typename T> __global__ void bitonic_in_lds(T *data)
{
    __shared__ T line[512];
    unsigned base = blockIdx.x * 512, id = threadIdx.x;
    line[id] = data[base + id];
    line[id + 256] = data[base + id + 256];
    for (unsigned size = 2; size <= 512; size *= 2)
        for (unsigned step = size / 2; step > 0; step /= 2) {
            __syncthreads();
            unsigned at = 2 * step * (id / step) + id % step;
            bool up = (at & size) == 0;
            T a = line[at], b = line[at + step];
            if ((a > b) == up) {
                line[at] = b;
                line[at + step] = a;
            }
        }
    __syncthreads();
    data[base + id] = line[id];
    data[base + id + 256] = line[id + 256];
}

__global__ void bitonic_step(unsigned long long *data, unsigned size, unsigned step)
{
    unsigned id = blockIdx.x * blockDim.x + threadIdx.x, other = id ^ step;
    if (other > id) {
        unsigned long long a = data[id], b = data[other];
        if ((a > b) == ((id & size) == 0)) {
            data[id] = b;
            data[other] = a;
        }
    }
}

// One pass of a radix sort with one group: counts of 4-bit digits in LDS, then places in order.
__global__ void radix_pass(const unsigned *in, unsigned *out, unsigned n, unsigned shift)
{
    __shared__ unsigned counts[16][128];
    unsigned id = threadIdx.x, each = (n + 127) / 128;
    unsigned begin = min(id * each, n), end = min(begin + each, n);
    for (unsigned digit = 0; digit < 16; digit++)
        counts[digit][id] = 0;
    for (unsigned i = begin; i < end; i++)
        counts[in[i] >> shift & 15][id]++;
    __syncthreads();
    if (id == 0) {
        unsigned sum = 0;
        for (unsigned digit = 0; digit < 16; digit++)
            for (unsigned thread = 0; thread < 128; thread++) {
                unsigned count = counts[digit][thread];
                counts[digit][thread] = sum;
                sum += count;
            }
    }
    __syncthreads();
    for (unsigned i = begin; i < end; i++)
        out[counts[in[i] >> shift & 15][id]++] = in[i];
}

template <typename T> static void in_lds(const char *label)
{
    Random random(sizeof(T) + 11);
    std::vector<T> data(4 * 512);
    for (auto &value : data)
        value = T(int64_t(random.wide()));
    Device<T> on_gpu(data);
    bitonic_in_lds<T><<<4, 256>>>(on_gpu);
    launched();
    // Pieces alternate in direction only within a piece; each is sorted upwards at the end.
    for (int piece = 0; piece < 4; piece++)
        std::sort(data.begin() + piece * 512, data.begin() + (piece + 1) * 512);
    exact(label, on_gpu.get(), data);
}

int main()
{
    in_lds<int>("int in LDS");
    in_lds<unsigned long long>("unsigned long long in LDS");
    in_lds<float>("float in LDS");

    Random random(21);
    std::vector<unsigned long long> wide(2048);
    for (auto &value : wide)
        value = random.wide();
    Device<unsigned long long> wide_on_gpu(wide);
    for (unsigned size = 2; size <= wide.size(); size *= 2)
        for (unsigned step = size / 2; step > 0; step /= 2)
            bitonic_step<<<wide.size() / 256, 256>>>(wide_on_gpu, size, step);
    launched();
    std::sort(wide.begin(), wide.end());
    exact("66 launches of a network", wide_on_gpu.get(), wide);

    std::vector<unsigned> numbers(3001);
    for (auto &value : numbers)
        value = random.next();
    Device<unsigned> a(numbers), b(numbers.size());
    for (unsigned shift = 0; shift < 32; shift += 8) {
        radix_pass<<<1, 128>>>(a, b, numbers.size(), shift);
        radix_pass<<<1, 128>>>(b, a, numbers.size(), shift + 4);
    }
    launched();
    std::sort(numbers.begin(), numbers.end());
    exact("radix sort", a.get(), numbers);
    return done("sort");
}
