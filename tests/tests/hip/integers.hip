// Integer arithmetic: division, wide products, shifts, bit operations, carries, small types, dot products, and scalar compares.
#include "suite.h"

// Runs `BODY`, which takes a and b, over all pairs on the GPU and on the CPU.
#define PAIRS(label, type, result, BODY)                                                                             \
    do {                                                                                                             \
        struct Body {                                                                                                \
            static __host__ __device__ result run(type a, type b) BODY                                               \
        };                                                                                                           \
        pairs<type, result, Body>(label);                                                                            \
    } while (0)

template <typename T, typename R, typename Body> __global__ void all_pairs(const T *values, R *out, unsigned n)
{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n * n)
        out[i] = Body::run(values[i / n], values[i % n]);
}

template <typename T> static std::vector<T> edges()
{
    std::vector<T> values;
    for (unsigned bit = 0; bit < sizeof(T) * 8; bit += sizeof(T) > 4 ? 3 : 1) {
        T power = T(T(1) << bit);
        values.push_back(power);
        values.push_back(T(power - 1));
        values.push_back(T(~power));
    }
    Random random(sizeof(T));
    for (int i = 0; i < 20; i++)
        values.push_back(T(random.wide()));
    return values;
}

template <typename T, typename R, typename Body> static void pairs(const char *label)
{
    std::vector<T> values = edges<T>();
    unsigned n = values.size();
    std::vector<R> expected(n * n);
    for (unsigned i = 0; i < n * n; i++)
        expected[i] = Body::run(values[i / n], values[i % n]);
    Device<T> in(values);
    Device<R> out(n * n);
    all_pairs<T, R, Body><<<(n * n + 255) / 256, 256>>>(in, out, n);
    launched();
    exact(label, out.get(), expected);
}

static __host__ __device__ unsigned add_with_carry(unsigned a, unsigned b)
{
    unsigned long long sum = (unsigned long long)a + b;
    return unsigned(sum) + unsigned(sum >> 32);
}

// Bit counts with the compiler's functions, which the host has as well.
struct Bits {
    static __host__ __device__ unsigned run(unsigned a, unsigned b)
    {
        unsigned count = __builtin_popcount(a) + 100 * __builtin_popcountll((unsigned long long)a << 32 | b);
        count += 10000 * (a ? __builtin_clz(a) : 32) + 1000000 * (b ? __builtin_ctz(b) : 32);
        return count;
    }
};

struct WideBits {
    static __host__ __device__ unsigned run(unsigned long long a, unsigned long long b)
    {
        return (a ? __builtin_clzll(a) : 64) + 100 * (b ? __builtin_ctzll(b) : 64) +
               10000 * __builtin_ffsll((long long)(a & b)) + 1000000 * __builtin_popcountll(a ^ b);
    }
};

__global__ void device_only(const unsigned *values, unsigned *out, unsigned n)
{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n * n)
        return;
    unsigned a = values[i / n], b = values[i % n];
    unsigned *at = out + i * 12;
    at[0] = __brev(a);
    at[1] = __umulhi(a, b);
    at[2] = unsigned(__mulhi(int(a), int(b)));
    at[3] = __umul24(a, b);
    at[4] = unsigned(__mul24(int(a), int(b)));
    at[5] = __byte_perm(a, b, 0x5410);
    at[6] = __funnelshift_r(a, b, i);
    at[7] = __usad(a, b, 5u);
    at[8] = __builtin_amdgcn_ubfe(a, b & 31, i & 31);
    at[9] = unsigned(__builtin_amdgcn_sbfe(int(a), b & 31, i & 31));
    at[10] = __builtin_amdgcn_perm(a, b, 0x0c07020d);
    at[11] = __builtin_amdgcn_alignbyte(a, b, i & 3);
}

static void expect_device_only()
{
    std::vector<unsigned> values = edges<unsigned>();
    unsigned n = values.size();
    std::vector<unsigned> expected(n * n * 12);
    for (unsigned i = 0; i < n * n; i++) {
        unsigned a = values[i / n], b = values[i % n], reversed = 0;
        unsigned *at = &expected[i * 12];
        for (unsigned bit = 0; bit < 32; bit++)
            reversed |= (a >> bit & 1) << (31 - bit);
        at[0] = reversed;
        at[1] = unsigned((unsigned long long)a * b >> 32);
        at[2] = unsigned((long long)int(a) * int(b) >> 32);
        at[3] = (a & 0xffffff) * (b & 0xffffff);
        at[4] = unsigned(int(a << 8) >> 8) * unsigned(int(b << 8) >> 8);
        at[5] = (a & 0xffff) | b << 16;
        at[6] = unsigned(((unsigned long long)b << 32 | a) >> (i & 31));
        at[7] = (a > b ? a - b : b - a) + 5;
        unsigned offset = b & 31, width = i & 31;
        at[8] = width == 0 ? 0 : offset + width < 32 ? a << (32 - offset - width) >> (32 - width) : a >> offset;
        at[9] = width == 0               ? 0
                : offset + width < 32 ? unsigned(int(a << (32 - offset - width)) >> (32 - width))
                                      : unsigned(int(a) >> offset);
        // Selectors from low to high: 0x0d is 0xff, 2 is byte 2 of b, 7 is byte 3 of a, 0x0c is 0.
        at[10] = 0xff | (b >> 16 & 0xff) << 8 | a >> 24 << 16;
        at[11] = unsigned(((unsigned long long)a << 32 | b) >> (8 * (i & 3)));
    }
    Device<unsigned> in(values), out(expected.size());
    device_only<<<(n * n + 255) / 256, 256>>>(in, out, n);
    launched();
    exact("functions of the device", out.get(), expected);
}

// Case C80: dot products saturate where that is asked for.
__global__ void dots(const int *a, const int *b, const int *c, int *out, unsigned n)
{
    unsigned i = threadIdx.x;
    if (i >= n)
        return;
    typedef short Shorts __attribute__((ext_vector_type(2)));
    typedef unsigned short Words __attribute__((ext_vector_type(2)));
    out[i * 6 + 0] = __builtin_amdgcn_sdot4(a[i], b[i], c[i], false);
    out[i * 6 + 1] = __builtin_amdgcn_sdot4(a[i], b[i], c[i], true);
    out[i * 6 + 2] = __builtin_amdgcn_udot4(a[i], b[i], c[i], false);
    out[i * 6 + 3] = __builtin_amdgcn_udot4(a[i], b[i], c[i], true);
    out[i * 6 + 4] = __builtin_amdgcn_sdot2(__builtin_bit_cast(Shorts, a[i]), __builtin_bit_cast(Shorts, b[i]), c[i], false);
    out[i * 6 + 5] = __builtin_amdgcn_udot2(__builtin_bit_cast(Words, a[i]), __builtin_bit_cast(Words, b[i]), c[i], true);
}

static void expect_dots()
{
    std::vector<int> a = {0x7f7f7f7f, int(0x80808080), 0x01020304, -1, 0x7fff7fff, int(0xffffffff), 0x12345678},
                     b = {0x7f7f7f7f, 0x7f7f7f7f, 0x05060708, -1, 0x7fff7fff, int(0xffffffff), int(0x9abcdef0)},
                     c = {INT32_MAX, INT32_MIN, 100, 0, INT32_MAX, -2, 77};
    std::vector<int> expected;
    for (size_t i = 0; i < a.size(); i++) {
        long long sum = c[i], halves = c[i];
        unsigned long long bytes = unsigned(c[i]), words = unsigned(c[i]);
        for (int byte = 0; byte < 4; byte++) {
            sum += int(int8_t(a[i] >> 8 * byte)) * int(int8_t(b[i] >> 8 * byte));
            bytes += unsigned(uint8_t(a[i] >> 8 * byte)) * unsigned(uint8_t(b[i] >> 8 * byte));
        }
        for (int half = 0; half < 2; half++) {
            halves += int(int16_t(a[i] >> 16 * half)) * int(int16_t(b[i] >> 16 * half));
            words += (unsigned long long)uint16_t(a[i] >> 16 * half) * uint16_t(b[i] >> 16 * half);
        }
        expected.push_back(int(sum));
        expected.push_back(int(std::min<long long>(std::max<long long>(sum, INT32_MIN), INT32_MAX)));
        expected.push_back(int(bytes));
        expected.push_back(int(unsigned(std::min<unsigned long long>(bytes, UINT32_MAX))));
        expected.push_back(int(halves));
        expected.push_back(int(unsigned(std::min<unsigned long long>(words, UINT32_MAX))));
    }
    Device<int> da(a), db(b), dc(c), out(expected.size());
    dots<<<1, 64>>>(da, db, dc, out, a.size());
    launched();
    exact("dot products", out.get(), expected);
}

// Case C73: all compares of scalars, where an equal pair is what told a wrong one.
#define COMPARE(name, at)                                                                                            \
    asm volatile("s_cmp_" name " %1, %2\n s_cselect_b32 %0, 1, 0"                                                     \
                 : "=s"(bit)                                                                                         \
                 : "s"(__builtin_amdgcn_readfirstlane(a)), "s"(__builtin_amdgcn_readfirstlane(b))                    \
                 : "scc");                                                                                           \
    bits |= bit << at;

__global__ void scalar_compares(const unsigned *values, unsigned *out, unsigned n)
{
    for (unsigned i = 0; i < n * n; i++) {
        unsigned a = values[i / n], b = values[i % n];
        unsigned bits = 0, bit;
        COMPARE("eq_i32", 0)
        COMPARE("lg_i32", 1)
        COMPARE("gt_i32", 2)
        COMPARE("ge_i32", 3)
        COMPARE("lt_i32", 4)
        COMPARE("le_i32", 5)
        COMPARE("eq_u32", 6)
        COMPARE("lg_u32", 7)
        COMPARE("gt_u32", 8)
        COMPARE("ge_u32", 9)
        COMPARE("lt_u32", 10)
        COMPARE("le_u32", 11)
        if (threadIdx.x == 0)
            out[i] = bits;
    }
}

static void expect_scalar_compares()
{
    std::vector<unsigned> values = {0, 1, 0x7fffffff, 0x80000000, 0xffffffff}, expected;
    for (unsigned a : values)
        for (unsigned b : values) {
            int sa = int(a), sb = int(b);
            expected.push_back(unsigned(sa == sb) | (sa != sb) << 1 | (sa > sb) << 2 | (sa >= sb) << 3 | (sa < sb) << 4 |
                               (sa <= sb) << 5 | (a == b) << 6 | (a != b) << 7 | (a > b) << 8 | (a >= b) << 9 |
                               (a < b) << 10 | (a <= b) << 11);
        }
    Device<unsigned> in(values), out(expected.size());
    scalar_compares<<<1, 64>>>(in, out, values.size());
    launched();
    exact("scalar compares", out.get(), expected);
}

// Case C74: which part of a register an instruction with byte and word selection takes and leaves.
#define SELECT(at, op, rest)                                                                                         \
    {                                                                                                                \
        unsigned value = c;                                                                                          \
        asm volatile(op "_sdwa %0, %1, %2 " rest : "+v"(value) : "v"(a), "v"(b));                                     \
        out[i * 10 + at] = value;                                                                                    \
    }

__global__ void parts(const unsigned *values, unsigned *out, unsigned n)
{
    unsigned i = threadIdx.x;
    if (i >= n)
        return;
    unsigned a = values[i], b = values[(i + 1) % n], c = values[(i + 2) % n];
    SELECT(0, "v_or_b32", "dst_sel:BYTE_0 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_3 src1_sel:BYTE_1")
    SELECT(1, "v_or_b32", "dst_sel:BYTE_2 dst_unused:UNUSED_PRESERVE src0_sel:WORD_1 src1_sel:BYTE_2")
    SELECT(2, "v_or_b32", "dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:WORD_0 src1_sel:DWORD")
    SELECT(3, "v_or_b32", "dst_sel:BYTE_1 dst_unused:UNUSED_PAD src0_sel:BYTE_0 src1_sel:BYTE_3")
    SELECT(4, "v_or_b32", "dst_sel:BYTE_3 dst_unused:UNUSED_PAD src0_sel:BYTE_2 src1_sel:WORD_0")
    SELECT(5, "v_or_b32", "dst_sel:BYTE_1 dst_unused:UNUSED_SEXT src0_sel:BYTE_1 src1_sel:BYTE_0")
    SELECT(6, "v_or_b32", "dst_sel:WORD_0 dst_unused:UNUSED_SEXT src0_sel:WORD_1 src1_sel:WORD_0")
    SELECT(7, "v_add_u32", "dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_1 src1_sel:WORD_1")
    SELECT(8, "v_add_u32", "dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:BYTE_3")
    SELECT(9, "v_and_b32", "dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:WORD_1")
}

static void expect_parts()
{
    std::vector<unsigned> values = {0x81c3a5e7, 0x12345678, 0xfedcba98, 0x7f80ff01, 0, 0xffffffff, 0x80007fff}, expected;
    auto byte = [](unsigned value, int at) { return value >> 8 * at & 0xff; };
    auto word = [](unsigned value, int at) { return value >> 16 * at & 0xffff; };
    for (size_t i = 0; i < values.size(); i++) {
        unsigned a = values[i], b = values[(i + 1) % values.size()], c = values[(i + 2) % values.size()];
        expected.push_back((c & 0xffffff00) | byte(a, 3) | byte(b, 1));
        expected.push_back((c & 0xff00ffff) | ((word(a, 1) | byte(b, 2)) & 0xff) << 16);
        expected.push_back((c & 0xffff) | (word(a, 0) | b) << 16);
        expected.push_back((byte(a, 0) | byte(b, 3)) << 8);
        expected.push_back((byte(a, 2) | word(b, 0)) << 24);
        // The sign of the part fills what is above it; what is below is zero.
        expected.push_back(unsigned(int((byte(a, 1) | byte(b, 0)) << 24) >> 16));
        expected.push_back(unsigned(int((word(a, 1) | word(b, 0)) << 16) >> 16));
        expected.push_back(byte(a, 1) + word(b, 1));
        expected.push_back(a + byte(b, 3));
        expected.push_back((a & word(b, 1)) << 16);
    }
    Device<unsigned> in(values), out(expected.size());
    parts<<<1, 64>>>(in, out, values.size());
    launched();
    exact("parts of registers", out.get(), expected);
}

// Case C74 as a compiler writes it: four bytes packed in a loop.
__global__ void pack(const unsigned char *in, unsigned *out, unsigned n)
{
    unsigned i = threadIdx.x;
    if (i >= n)
        return;
    unsigned word = 0;
    for (int byte = 0; byte < 4; byte++)
        word |= (unsigned)(unsigned char)(in[i * 4 + byte] * 3 + byte) << 8 * byte;
    out[i] = word;
}

static void expect_pack()
{
    std::vector<unsigned char> in(200);
    std::vector<unsigned> expected(50);
    for (size_t i = 0; i < in.size(); i++) {
        in[i] = (unsigned char)(i * 37 + 11);
        expected[i / 4] |= unsigned((unsigned char)(in[i] * 3 + i % 4)) << 8 * (i % 4);
    }
    Device<unsigned char> from(in);
    Device<unsigned> to(expected.size());
    pack<<<1, 64>>>(from, to, expected.size());
    launched();
    exact("packed bytes", to.get(), expected);
}

int main()
{
    PAIRS("unsigned division", unsigned, unsigned, { return b ? a / b * 31 + a % b : 7; });
    PAIRS("signed division", int, int, {
        return b && !(a == INT32_MIN && b == -1) ? int(unsigned(a / b) * 31 + unsigned(a % b)) : 7;
    });
    PAIRS("unsigned division, 64 bits", unsigned long long, unsigned long long, { return b ? a / b * 31 + a % b : 7; });
    PAIRS("signed division, 64 bits", long long, long long, {
        typedef unsigned long long U;
        return b && !(a == INT64_MIN && b == -1) ? (long long)(U(a / b) * 31 + U(a % b)) : 7;
    });
    PAIRS("division, 16 bits", short, int, { return b ? a / b * 31 + a % b : 7; });
    PAIRS("division, 8 bits", unsigned char, unsigned, { return b ? a / b * 31u + a % b : 7u; });
    PAIRS("products", unsigned, unsigned long long, { return (unsigned long long)a * b + (a ^ b); });
    PAIRS("signed products", int, long long, { return (long long)a * b - a; });
    PAIRS("products, 64 bits", unsigned long long, unsigned long long, { return a * b + (a >> 7); });
    PAIRS("high half of products, 64 bits", unsigned long long, unsigned long long, {
        return (unsigned long long)((unsigned __int128)a * b >> 64);
    });
    PAIRS("carries", unsigned, unsigned, { return add_with_carry(a, b) * 2 + (a < b); });
    PAIRS("sums and differences, 64 bits", unsigned long long, unsigned long long, { return (a + b) ^ (a - b); });
    PAIRS("shifts", unsigned, unsigned, { return a << (b & 31) ^ a >> (b & 31) ^ unsigned(int(a) >> (b & 31)); });
    PAIRS("shifts, 64 bits", unsigned long long, unsigned long long, {
        return a << (b & 63) ^ a >> (b & 63) ^ (unsigned long long)((long long)a >> (b & 63));
    });
    PAIRS("rotations", unsigned, unsigned, { return a << (b & 31) | a >> (-b & 31); });
    PAIRS("logic", unsigned, unsigned, { return ((a & b) | (~a & 0x0f0f0f0f)) ^ (a & ~b) ^ ~(a ^ b); });
    PAIRS("minima and maxima", int, int, { return (a < b ? a : b) ^ ((a > b ? a : b) >> 1) ^ (a < 0 ? -unsigned(a) : a); });
    PAIRS("compares", long long, unsigned, {
        typedef unsigned long long U;
        return (a < b) | (a <= b) << 1 | (a == b) << 2 | (U(a) < U(b)) << 3 | (U(a) >= U(b)) << 4 | (a != b) << 5;
    });
    PAIRS("16 bits", unsigned short, unsigned short, { return (unsigned short)((a + b) * 3 ^ (a >> (b & 15)) ^ (a * b)); });
    PAIRS("conversions", long long, unsigned, { return unsigned((signed char)a) + unsigned((short)b) + unsigned(int(a)); });
    pairs<unsigned, unsigned, Bits>("bit counts");
    pairs<unsigned long long, unsigned, WideBits>("bit counts, 64 bits");
    expect_device_only();
    expect_dots();
    expect_scalar_compares();
    expect_parts();
    expect_pack();
    return done("integers");
}
