// Reductions, prefix sums and histograms: LDS, barriers, lane exchange, atomics.
#include "suite.h"

template <typename T> __global__ void sum_in_lds(const T *in, T *out, unsigned n)
{
    __shared__ T part[256];
    T sum = 0;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        sum += in[i];
    part[threadIdx.x] = sum;
    __syncthreads();
    for (unsigned step = blockDim.x / 2; step > 0; step /= 2) {
        if (threadIdx.x < step)
            part[threadIdx.x] += part[threadIdx.x + step];
        __syncthreads();
    }
    if (threadIdx.x == 0)
        out[blockIdx.x] = part[0];
}

__global__ void sum_in_lanes(const unsigned *in, unsigned *out, unsigned n)
{
    unsigned sum = 0;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        sum += in[i];
    for (int step = warpSize / 2; step > 0; step /= 2)
        sum += __shfl_down(sum, step);
    if (threadIdx.x % warpSize == 0)
        atomicAdd(out, sum);
}

__global__ void largest(const int *in, int *out, unsigned n)
{
    extern __shared__ int part[];
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    part[threadIdx.x] = i < n ? in[i] : INT32_MIN;
    __syncthreads();
    for (unsigned step = blockDim.x / 2; step > 0; step /= 2) {
        if (threadIdx.x < step)
            part[threadIdx.x] = max(part[threadIdx.x], part[threadIdx.x + step]);
        __syncthreads();
    }
    if (threadIdx.x == 0)
        atomicMax(out, part[0]);
}

__global__ void histogram(const unsigned char *in, unsigned *out, unsigned n)
{
    __shared__ unsigned bins[256];
    for (unsigned i = threadIdx.x; i < 256; i += blockDim.x)
        bins[i] = 0;
    __syncthreads();
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        atomicAdd(&bins[in[i]], 1u);
    __syncthreads();
    for (unsigned i = threadIdx.x; i < 256; i += blockDim.x)
        atomicAdd(&out[i], bins[i]);
}

// An inclusive prefix sum of one group's piece, and the group's sum.
__global__ void scan(const unsigned *in, unsigned *out, unsigned *sums, unsigned n)
{
    __shared__ unsigned line[2][256];
    unsigned i = blockIdx.x * 256 + threadIdx.x, now = 0;
    line[0][threadIdx.x] = i < n ? in[i] : 0;
    __syncthreads();
    for (unsigned step = 1; step < 256; step *= 2) {
        unsigned value = line[now][threadIdx.x];
        if (threadIdx.x >= step)
            value += line[now][threadIdx.x - step];
        now ^= 1;
        line[now][threadIdx.x] = value;
        __syncthreads();
    }
    if (i < n)
        out[i] = line[now][threadIdx.x];
    if (threadIdx.x == 255 && sums)
        sums[blockIdx.x] = line[now][255];
}

__global__ void add_before(unsigned *out, const unsigned *sums, unsigned n)
{
    unsigned i = blockIdx.x * 256 + threadIdx.x;
    if (blockIdx.x > 0 && i < n)
        out[i] += sums[blockIdx.x - 1];
}

template <typename T> static void sums(const char *label)
{
    const unsigned n = 30011, groups = 5;
    Random random(sizeof(T));
    std::vector<T> in(n), expected(1, T(0)), found(1, T(0));
    for (auto &value : in) {
        value = T(int(random.next() % 2001) - 1000);
        expected[0] += value;
    }
    Device<T> from(in), to(groups);
    sum_in_lds<T><<<groups, 256>>>(from, to, n);
    launched();
    for (T value : to.get())
        found[0] += value;
    exact(label, found, expected);
}

int main()
{
    sums<int>("sum of int in LDS");
    sums<long long>("sum of long long in LDS");
    sums<float>("sum of float in LDS");
    sums<double>("sum of double in LDS");

    const unsigned n = 40009;
    Random random(3);
    std::vector<unsigned> numbers(n), total(1, 0);
    std::vector<int> signs(n), most(1, INT32_MIN);
    std::vector<unsigned char> bytes(n);
    std::vector<unsigned> bins(256, 0), prefix(n);
    for (unsigned i = 0; i < n; i++) {
        numbers[i] = random.next();
        total[0] += numbers[i];
        prefix[i] = total[0];
        signs[i] = int(random.next());
        most[0] = std::max(most[0], signs[i]);
        bytes[i] = (unsigned char)(random.next() & random.next());
        bins[bytes[i]]++;
    }
    Device<unsigned> from(numbers), sum(1);
    sum.clear();
    sum_in_lanes<<<6, 128>>>(from, sum, n);
    launched();
    exact("sum by lane exchange and atomics", sum.get(), total);

    Device<int> signs_in(signs), most_out(1);
    HIP(hipMemsetD32(hipDeviceptr_t(most_out.at), INT32_MIN, 1));
    largest<<<(n + 127) / 128, 128, 128 * sizeof(int)>>>(signs_in, most_out, n);
    launched();
    exact("largest, LDS of a size given at launch", most_out.get(), most);

    Device<unsigned char> bytes_in(bytes);
    Device<unsigned> bins_out(256);
    bins_out.clear();
    histogram<<<9, 192>>>(bytes_in, bins_out, n);
    launched();
    exact("histogram", bins_out.get(), bins);

    const unsigned groups = (n + 255) / 256;
    Device<unsigned> scanned(n), parts(groups), parts_scanned(groups);
    scan<<<groups, 256>>>(from, scanned, parts, n);
    launched();
    scan<<<1, 256>>>(parts, parts_scanned, nullptr, groups);
    launched();
    add_before<<<groups, 256>>>(scanned, parts_scanned, n);
    launched();
    exact("prefix sums", scanned.get(), prefix);
    return done("reduce");
}
