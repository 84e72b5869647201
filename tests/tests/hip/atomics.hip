// Atomic operations, in LDS, in the GPU's memory and in the host's while the host takes part (case C79).
#include "suite.h"

#include <algorithm>
#include <thread>

template <typename T> struct Results {
    T add, sub, least, most, all, any, odd, swapped, compared;
};

template <typename T> __global__ void integers(Results<T> *out, T *fetched)
{
    unsigned id = blockIdx.x * blockDim.x + threadIdx.x;
    T value = T(id * 2654435761u);
    fetched[id] = atomicAdd(&out->add, T(1));
    atomicSub(&out->sub, T(3));
    atomicMin(&out->least, value);
    atomicMax(&out->most, value);
    atomicAnd(&out->all, ~(T(1) << (id % 29)));
    atomicOr(&out->any, T(1) << (id % 23));
    atomicXor(&out->odd, value);
    // A counter by compare and exchange: everyone gets through.
    T seen = out->compared, before;
    do {
        before = seen;
        seen = atomicCAS(&out->compared, before, T(before + 5));
    } while (seen != before);
}

template <typename T> static void expect_integers(const char *label, unsigned groups)
{
    unsigned n = groups * 128;
    std::vector<Results<T>> start(1);
    memset(start.data(), 0, sizeof(Results<T>));
    start[0].least = T(~T(0)) / 2;
    start[0].all = T(~T(0));
    Results<T> end = start[0];
    for (unsigned id = 0; id < n; id++) {
        T value = T(id * 2654435761u);
        end.add += 1;
        end.sub -= 3;
        end.least = std::min(end.least, value);
        end.most = std::max(end.most, value);
        end.all &= ~(T(1) << (id % 29));
        end.any |= T(1) << (id % 23);
        end.odd ^= value;
        end.compared += 5;
    }
    Device<Results<T>> out(start);
    Device<T> fetched(n);
    integers<T><<<groups, 128>>>(out, fetched);
    launched();
    exact(label, out.get(), {end});
    std::vector<T> order = fetched.get(), each(n);
    std::sort(order.begin(), order.end());
    for (unsigned i = 0; i < n; i++)
        each[i] = T(i);
    exact("each number fetched once", order, each);
}

__global__ void in_lds(unsigned *out, float *sums, unsigned long long *wide)
{
    __shared__ unsigned words[8];
    __shared__ float sum;
    __shared__ unsigned long long pair;
    unsigned id = threadIdx.x;
    if (id < 8)
        words[id] = id == 2 ? ~0u : 0;
    if (id == 0) {
        sum = 0;
        pair = 0;
    }
    __syncthreads();
    atomicAdd(&words[0], id);
    atomicMax(&words[1], id * 7 % 256);
    atomicMin(&words[2], id + 5);
    atomicOr(&words[3], 1u << id % 32);
    atomicXor(&words[4], id * 77);
    atomicInc(&words[5], 99);
    atomicDec(&words[6], 50);
    atomicExch(&words[7], 42);
    atomicAdd(&sum, 0.5f);
    atomicAdd(&pair, (unsigned long long)id << 33);
    __syncthreads();
    if (id < 8)
        out[id] = words[id];
    if (id == 0) {
        *sums = sum;
        *wide = pair;
    }
}

static void expect_in_lds()
{
    std::vector<unsigned> expected(8, 0);
    expected[2] = ~0u;
    unsigned long long pair = 0;
    for (unsigned id = 0; id < 256; id++) {
        expected[0] += id;
        expected[1] = std::max(expected[1], id * 7 % 256);
        expected[2] = std::min(expected[2], id + 5);
        expected[3] |= 1u << id % 32;
        expected[4] ^= id * 77;
        expected[5] = expected[5] >= 99 ? 0 : expected[5] + 1;
        expected[6] = expected[6] == 0 || expected[6] > 50 ? 50 : expected[6] - 1;
        expected[7] = 42;
        pair += (unsigned long long)id << 33;
    }
    Device<unsigned> out(8);
    Device<float> sums(1);
    Device<unsigned long long> wide(1);
    in_lds<<<1, 256>>>(out, sums, wide);
    launched();
    exact("in LDS", out.get(), expected);
    exact("float in LDS", sums.get(), {128.0f});
    exact("64 bits in LDS", wide.get(), {pair});
}

__global__ void floats(float *sum, double *wide)
{
    unsigned id = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(sum, 0.25f * (id % 8));
    atomicAdd(wide, 0.125 * (id % 16));
}

static void expect_floats()
{
    Device<float> sum(1);
    Device<double> wide(1);
    sum.clear();
    wide.clear();
    floats<<<16, 64>>>(sum, wide);
    launched();
    // Multiples of a quarter below 2^24 quarters: exact in every order.
    exact("sum of float", sum.get(), {0.25f * 3.5f * 1024});
    exact("sum of double", wide.get(), {0.125 * 7.5 * 1024});
}

// Ten lanes count ten down, and see 10 to 1 once each.
__global__ void countdown(int *counter, int *seen)
{
    seen[threadIdx.x] = atomicSub(counter, 1);
}

__global__ void with_the_host(unsigned *counters)
{
    for (int i = 0; i < 200; i++) {
        atomicAdd_system(&counters[0], 1u);
        atomicSub_system(&counters[1], 1u);
        atomicMax_system(&counters[2], blockIdx.x * blockDim.x + threadIdx.x + i);
        atomicOr_system(&counters[3], 1u << (threadIdx.x % 32));
    }
}

static void expect_host(const char *label, unsigned flags)
{
    unsigned *counters;
    HIP(hipHostMalloc(reinterpret_cast<void **>(&counters), 4096, flags));
    memset(counters, 0, 4096);
    int *ten = reinterpret_cast<int *>(counters + 16), *seen = ten + 1;
    *ten = 10;
    countdown<<<1, 10>>>(ten, seen);
    launched();
    HIP(hipDeviceSynchronize());
    std::vector<int> order(seen, seen + 10), expected;
    std::sort(order.begin(), order.end());
    for (int i = 1; i <= 10; i++)
        expected.push_back(i);
    say("countdown ends at zero", *ten == 0);
    exact("countdown fetches", order, expected);

    counters[1] = 1000000;
    with_the_host<<<4, 64>>>(counters);
    launched();
    for (int i = 0; i < 50000; i++) {
        __atomic_fetch_add(&counters[0], 1, __ATOMIC_SEQ_CST);
        __atomic_fetch_sub(&counters[1], 1, __ATOMIC_SEQ_CST);
    }
    HIP(hipDeviceSynchronize());
    std::vector<unsigned> found(counters, counters + 4);
    exact(label, found, {256 * 200 + 50000, 1000000 - 256 * 200 - 50000, 255 + 199, 0xffffffffu});
    HIP(hipHostFree(counters));
}

int main()
{
    expect_integers<int>("int", 6);
    expect_integers<unsigned>("unsigned", 6);
    expect_integers<unsigned long long>("unsigned long long", 3);
    expect_in_lds();
    expect_floats();
    expect_host("with the host, coherent memory", hipHostMallocCoherent);
    expect_host("with the host, non-coherent memory", hipHostMallocNonCoherent);
    return done("atomics");
}
