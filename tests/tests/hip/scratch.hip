// Memory of a lane's own: arrays with indices known at run time, recursion, calls through pointers, and generic pointers.
#include "suite.h"

__global__ void arrays(const unsigned *in, unsigned *out)
{
    unsigned id = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned table[37];
    for (int i = 0; i < 37; i++)
        table[i] = in[(id + i) % 64] + i;
    // Where these land depends on the lane.
    for (int i = 0; i < 100; i++)
        table[(id * 7 + i * 3) % 37] ^= table[(id + i * 5) % 37] << i % 8;
    unsigned sum = 0;
    for (int i = 0; i < 37; i++)
        sum = sum * 31 + table[i];
    out[id] = sum;
}

static void expect_arrays()
{
    std::vector<unsigned> in(64), expected(192);
    Random random(4);
    for (auto &value : in)
        value = random.next();
    for (unsigned id = 0; id < expected.size(); id++) {
        unsigned table[37], sum = 0;
        for (int i = 0; i < 37; i++)
            table[i] = in[(id + i) % 64] + i;
        for (int i = 0; i < 100; i++)
            table[(id * 7 + i * 3) % 37] ^= table[(id + i * 5) % 37] << i % 8;
        for (int i = 0; i < 37; i++)
            sum = sum * 31 + table[i];
        expected[id] = sum;
    }
    Device<unsigned> from(in), to(expected.size());
    arrays<<<3, 64>>>(from, to);
    launched();
    exact("arrays", to.get(), expected);
}

// Small types, and stores of one byte beside another.
__global__ void bytes(unsigned *out)
{
    unsigned id = threadIdx.x;
    unsigned char text[48];
    short halves[24];
    for (unsigned i = 0; i < 48; i++)
        text[(i * 5 + id) % 48] = (unsigned char)(i * id + 3);
    for (unsigned i = 0; i < 24; i++)
        halves[(i * 7 + id) % 24] = short(text[i] * 257 - text[i + 24] * 3);
    unsigned sum = 0;
    for (unsigned i = 0; i < 24; i++)
        sum = sum * 33 + unsigned(int(halves[i])) + text[2 * i];
    out[id] = sum;
}

static void expect_bytes()
{
    std::vector<unsigned> expected(64);
    for (unsigned id = 0; id < 64; id++) {
        unsigned char text[48];
        short halves[24];
        for (unsigned i = 0; i < 48; i++)
            text[(i * 5 + id) % 48] = (unsigned char)(i * id + 3);
        for (unsigned i = 0; i < 24; i++)
            halves[(i * 7 + id) % 24] = short(text[i] * 257 - text[i + 24] * 3);
        unsigned sum = 0;
        for (unsigned i = 0; i < 24; i++)
            sum = sum * 33 + unsigned(int(halves[i])) + text[2 * i];
        expected[id] = sum;
    }
    Device<unsigned> out(64);
    bytes<<<1, 64>>>(out);
    launched();
    exact("bytes and halves", out.get(), expected);
}

static __host__ __device__ __attribute__((noinline)) unsigned ackermann(unsigned m, unsigned n)
{
    if (m == 0)
        return n + 1;
    return ackermann(m - 1, n == 0 ? 1 : ackermann(m, n - 1));
}

static __host__ __device__ __attribute__((noinline)) unsigned long long fibonacci(unsigned n)
{
    return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2);
}

__global__ void recursion(unsigned long long *out)
{
    unsigned id = threadIdx.x;
    out[id] = fibonacci(id % 12) * 1000 + ackermann(id % 3, id % 4);
}

static void expect_recursion()
{
    std::vector<unsigned long long> expected(64);
    for (unsigned id = 0; id < 64; id++)
        expected[id] = fibonacci(id % 12) * 1000 + ackermann(id % 3, id % 4);
    Device<unsigned long long> out(64);
    recursion<<<1, 64>>>(out);
    launched();
    exact("recursion", out.get(), expected);
}

typedef unsigned (*Step)(unsigned, unsigned);
static __host__ __device__ __attribute__((noinline)) unsigned add(unsigned a, unsigned b) { return a + b; }
static __host__ __device__ __attribute__((noinline)) unsigned multiply(unsigned a, unsigned b) { return a * b + 1; }
static __host__ __device__ __attribute__((noinline)) unsigned mix(unsigned a, unsigned b) { return (a ^ b) * 9 + (a >> 3); }

__global__ void pointers(const unsigned *choice, unsigned *out)
{
    Step steps[3] = {add, multiply, mix};
    unsigned id = threadIdx.x, value = id;
    for (unsigned i = 0; i < 6; i++)
        value = steps[choice[(id + i) % 64]](value, i + 1);
    out[id] = value;
}

static void expect_pointers()
{
    Step steps[3] = {add, multiply, mix};
    std::vector<unsigned> choice(64), expected(64);
    Random random(6);
    for (auto &value : choice)
        value = random.next() % 3;
    for (unsigned id = 0; id < 64; id++) {
        unsigned value = id;
        for (unsigned i = 0; i < 6; i++)
            value = steps[choice[(id + i) % 64]](value, i + 1);
        expected[id] = value;
    }
    Device<unsigned> in(choice), out(64);
    pointers<<<1, 64>>>(in, out);
    launched();
    exact("calls through pointers", out.get(), expected);
}

struct Shape {
    __device__ virtual unsigned area(unsigned scale) const { return scale; }
};
struct Square : Shape {
    unsigned side;
    __device__ explicit Square(unsigned s) : side(s) {}
    __device__ unsigned area(unsigned scale) const final { return side * side * scale; }
};
struct Box : Shape {
    unsigned width, height;
    __device__ Box(unsigned w, unsigned h) : width(w), height(h) {}
    __device__ unsigned area(unsigned scale) const final { return width * height + scale; }
};

__global__ void virtuals(unsigned *out)
{
    unsigned id = threadIdx.x;
    Square square(id);
    Box box(id, 3);
    const Shape *shape = id % 2 ? static_cast<const Shape *>(&square) : &box;
    out[id] = shape->area(id + 2);
}

static void expect_virtuals()
{
    std::vector<unsigned> expected(64);
    for (unsigned id = 0; id < 64; id++)
        expected[id] = id % 2 ? id * id * (id + 2) : id * 3 + id + 2;
    Device<unsigned> out(64);
    virtuals<<<1, 64>>>(out);
    launched();
    exact("virtual functions", out.get(), expected);
}

// Case C76: a function that does not know where its pointer leads.
static __device__ unsigned kind_of([[maybe_unused]] const void *at)
{
#ifdef __HIP_DEVICE_COMPILE__
    return (__builtin_amdgcn_is_shared(at) ? 1000000 : 0) + (__builtin_amdgcn_is_private(at) ? 2000000 : 0);
#else
    return 0;
#endif
}

static __device__ __attribute__((noinline)) unsigned through(unsigned *at, unsigned value)
{
    unsigned before = *at;
    *at = before * 3 + value;
    return before + kind_of(at);
}

__global__ void generic(unsigned *memory, unsigned *out)
{
    __shared__ unsigned shared[64];
    unsigned id = threadIdx.x;
    // Large enough that the compiler does not make it a part of LDS.
    unsigned own[64];
    for (unsigned i = 0; i < 64; i++)
        own[i] = id + i;
    shared[id] = id * 2;
    __syncthreads();
    out[id * 8 + 0] = through(&memory[id], 1);
    out[id * 8 + 1] = through(&shared[63 - id], 2);
    out[id * 8 + 2] = through(&own[id % 4], 3);
    // Each lane somewhere else in one instruction.
    unsigned *mixed = id % 3 == 0 ? &memory[id] : id % 3 == 1 ? &shared[63 - id] : &own[id % 4];
    out[id * 8 + 3] = through(mixed, 4);
    __syncthreads();
    out[id * 8 + 4] = shared[id];
    out[id * 8 + 5] = own[id % 4];
    out[id * 8 + 6] = memory[id];
    // Atomics by a generic pointer.
    unsigned *counter = id % 2 ? &shared[0] : &memory[64];
    out[id * 8 + 7] = 0;
    atomicAdd(counter, 1u);
    __syncthreads();
    if (id == 0)
        out[7] = shared[0] - out[4];
}

static void expect_generic()
{
    std::vector<unsigned> memory(65), expected(64 * 8), shared(64);
    for (unsigned id = 0; id < 64; id++) {
        memory[id] = id * 11;
        shared[id] = id * 2;
    }
    Device<unsigned> memory_in(memory);
    std::vector<std::vector<unsigned>> own(64);
    auto through_it = [](unsigned &at, unsigned value, unsigned kind) {
        unsigned before = at;
        at = before * 3 + value;
        return before + kind;
    };
    for (unsigned id = 0; id < 64; id++) {
        own[id] = {id, id + 1, id + 2, id + 3};
        expected[id * 8 + 0] = through_it(memory[id], 1, 0);
        expected[id * 8 + 1] = through_it(shared[63 - id], 2, 1000000);
        expected[id * 8 + 2] = through_it(own[id][id % 4], 3, 2000000);
        if (id % 3 == 0)
            expected[id * 8 + 3] = through_it(memory[id], 4, 0);
        else if (id % 3 == 1)
            expected[id * 8 + 3] = through_it(shared[63 - id], 4, 1000000);
        else
            expected[id * 8 + 3] = through_it(own[id][id % 4], 4, 2000000);
    }
    for (unsigned id = 0; id < 64; id++) {
        expected[id * 8 + 4] = shared[id];
        expected[id * 8 + 5] = own[id][id % 4];
        expected[id * 8 + 6] = memory[id];
    }
    expected[7] = 32;
    Device<unsigned> out(expected.size());
    generic<<<1, 64>>>(memory_in, out);
    launched();
    exact("generic pointers", out.get(), expected);
    std::vector<unsigned> counter = memory_in.get();
    say("atomics by generic pointers", counter[64] == 32);
}

// Many groups at once, with more scratch than the runtime has ready at first.
__global__ void large(unsigned *out)
{
    unsigned id = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned table[2000];
    for (unsigned i = 0; i < 2000; i++)
        table[i] = id + i;
    for (unsigned i = 0; i < 40; i++)
        table[(id * 13 + i * 71) % 2000] *= 3;
    unsigned sum = 0;
    for (unsigned i = 0; i < 2000; i += 7)
        sum = sum * 17 + table[i];
    out[id] = sum;
}

static void expect_large()
{
    std::vector<unsigned> expected(8 * 64);
    for (unsigned id = 0; id < expected.size(); id++) {
        std::vector<unsigned> table(2000);
        for (unsigned i = 0; i < 2000; i++)
            table[i] = id + i;
        for (unsigned i = 0; i < 40; i++)
            table[(id * 13 + i * 71) % 2000] *= 3;
        unsigned sum = 0;
        for (unsigned i = 0; i < 2000; i += 7)
            sum = sum * 17 + table[i];
        expected[id] = sum;
    }
    Device<unsigned> out(expected.size());
    large<<<8, 64>>>(out);
    launched();
    exact("8000 bytes for each lane", out.get(), expected);
}

int main()
{
    expect_arrays();
    expect_bytes();
    expect_recursion();
    expect_pointers();
    expect_virtuals();
    expect_generic();
    expect_large();
    return done("scratch");
}
