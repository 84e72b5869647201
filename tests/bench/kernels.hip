// Kernels that run long enough for their rate to be that of the instructions, one for each argument: what `cargo xtask bench compute`
// counts. Each result is checked.
#include <hip/hip_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define CHECK(call)                                                                                                  \
    do {                                                                                                             \
        hipError_t error_ = (call);                                                                                  \
        if (error_ != hipSuccess) {                                                                                  \
            printf("%d: %s: %s\n", __LINE__, #call, hipGetErrorName(error_));                                        \
            exit(3);                                                                                                 \
        }                                                                                                            \
    } while (0)

enum { GROUPS = 64, SIZE = 256, THREADS = GROUPS * SIZE, SIDE = 512, TILE = 16, WORDS = 1 << 22 };

template <typename Number> static __host__ __device__ Number polynomial(unsigned seed, unsigned rounds)
{
    Number a = Number(seed & 1023) / 1024, b = a + Number(0.25), c = a - Number(0.5), d = Number(0.75) - a;
    for (unsigned i = 0; i < rounds; i++) {
        a = fma(a, Number(0.5), b);
        b = fma(b, Number(-0.25), c);
        c = fma(c, Number(0.375), d);
        d = fma(d, Number(0.125), a);
    }
    return a + b + c + d;
}

static __host__ __device__ uint32_t mixed(uint32_t seed, unsigned rounds)
{
    uint32_t a = seed, b = seed * 2654435761u + 1;
    for (unsigned i = 0; i < rounds; i++) {
        a ^= a << 13;
        a ^= a >> 17;
        b += a;
        b = b << 7 | b >> 25;
        a ^= b;
    }
    return a + b;
}

__global__ void floats(float *out, unsigned rounds)
{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = polynomial<float>(i, rounds);
}

__global__ void doubles(double *out, unsigned rounds)
{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = polynomial<double>(i, rounds);
}

__global__ void integers(uint32_t *out, unsigned rounds)
{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = mixed(i, rounds);
}

__global__ void product(const float *a, const float *b, float *c)
{
    __shared__ float left[TILE][TILE], right[TILE][TILE];
    unsigned x = blockIdx.x * TILE + threadIdx.x, y = blockIdx.y * TILE + threadIdx.y;
    float sum = 0;
    for (unsigned tile = 0; tile < SIDE / TILE; tile++) {
        left[threadIdx.y][threadIdx.x] = a[y * SIDE + tile * TILE + threadIdx.x];
        right[threadIdx.y][threadIdx.x] = b[(tile * TILE + threadIdx.y) * SIDE + x];
        __syncthreads();
        for (unsigned k = 0; k < TILE; k++)
            sum += left[threadIdx.y][k] * right[k][threadIdx.x];
        __syncthreads();
    }
    c[y * SIDE + x] = sum;
}

__global__ void stream(const uint32_t *in, uint32_t *out, unsigned rounds)
{
    unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
    uint32_t sum = 0;
    for (unsigned round = 0; round < rounds; round++)
        for (unsigned i = thread; i < WORDS; i += THREADS)
            sum = sum * 3 + in[i];
    out[thread] = sum;
}

template <typename Number, typename Kernel, typename Reference> static bool each(Kernel kernel, Reference reference, unsigned rounds)
{
    std::vector<Number> found(THREADS);
    Number *out;
    CHECK(hipMalloc(reinterpret_cast<void **>(&out), THREADS * sizeof(Number)));
    kernel<<<dim3(GROUPS), dim3(SIZE)>>>(out, rounds);
    CHECK(hipGetLastError());
    CHECK(hipMemcpy(found.data(), out, THREADS * sizeof(Number), hipMemcpyDeviceToHost));
    CHECK(hipFree(out));
    // Fused steps are exact on both sides; a sample of the threads will do.
    for (unsigned i = 0; i < THREADS; i += 61) {
        Number expected = reference(i, rounds);
        if (memcmp(&expected, &found[i], sizeof expected) != 0) {
            printf("thread %u is wrong\n", i);
            return false;
        }
    }
    return true;
}

static bool matrices()
{
    // Small integers, whose sums are exact.
    std::vector<float> a(SIDE * SIDE), b(SIDE * SIDE), c(SIDE * SIDE);
    for (unsigned i = 0; i < SIDE * SIDE; i++) {
        a[i] = float(mixed(i, 1) % 15) - 7;
        b[i] = float(mixed(i + SIDE * SIDE, 1) % 15) - 7;
    }
    float *places[3];
    for (float *&place : places)
        CHECK(hipMalloc(reinterpret_cast<void **>(&place), SIDE * SIDE * sizeof(float)));
    CHECK(hipMemcpy(places[0], a.data(), SIDE * SIDE * sizeof(float), hipMemcpyHostToDevice));
    CHECK(hipMemcpy(places[1], b.data(), SIDE * SIDE * sizeof(float), hipMemcpyHostToDevice));
    product<<<dim3(SIDE / TILE, SIDE / TILE), dim3(TILE, TILE)>>>(places[0], places[1], places[2]);
    CHECK(hipGetLastError());
    CHECK(hipMemcpy(c.data(), places[2], SIDE * SIDE * sizeof(float), hipMemcpyDeviceToHost));
    for (unsigned y = 0; y < SIDE; y += 7) {
        for (unsigned x = 0; x < SIDE; x += 5) {
            float sum = 0;
            for (unsigned k = 0; k < SIDE; k++)
                sum += a[y * SIDE + k] * b[k * SIDE + x];
            if (sum != c[y * SIDE + x]) {
                printf("%u, %u is %g, not %g\n", x, y, double(c[y * SIDE + x]), double(sum));
                return false;
            }
        }
    }
    return true;
}

static bool streams(unsigned rounds)
{
    std::vector<uint32_t> in(WORDS), found(THREADS);
    for (unsigned i = 0; i < WORDS; i++)
        in[i] = mixed(i, 1);
    uint32_t *from, *out;
    CHECK(hipMalloc(reinterpret_cast<void **>(&from), WORDS * 4));
    CHECK(hipMalloc(reinterpret_cast<void **>(&out), THREADS * 4));
    CHECK(hipMemcpy(from, in.data(), WORDS * 4, hipMemcpyHostToDevice));
    stream<<<dim3(GROUPS), dim3(SIZE)>>>(from, out, rounds);
    CHECK(hipGetLastError());
    CHECK(hipMemcpy(found.data(), out, THREADS * 4, hipMemcpyDeviceToHost));
    for (unsigned thread = 0; thread < THREADS; thread++) {
        uint32_t sum = 0;
        for (unsigned round = 0; round < rounds; round++)
            for (unsigned i = thread; i < WORDS; i += THREADS)
                sum = sum * 3 + in[i];
        if (sum != found[thread]) {
            printf("thread %u is wrong\n", thread);
            return false;
        }
    }
    return true;
}

int main(int count, char **arguments)
{
    const char *name = count > 1 ? arguments[1] : "";
    bool right = false;
    if (!strcmp(name, "f32"))
        right = each<float>(floats, polynomial<float>, 6000);
    else if (!strcmp(name, "f64"))
        right = each<double>(doubles, polynomial<double>, 6000);
    else if (!strcmp(name, "integers"))
        right = each<uint32_t>(integers, mixed, 5000);
    else if (!strcmp(name, "product"))
        right = matrices();
    else if (!strcmp(name, "stream"))
        right = streams(8);
    printf("%s: %s\n", name, right ? "all right" : "not right");
    return !right;
}
