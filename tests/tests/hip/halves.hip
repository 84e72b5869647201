// Floating point of 16 bits: conversions, scalar and packed arithmetic, denormals.
#include "suite.h"

typedef _Float16 Half;
typedef Half Halves __attribute__((ext_vector_type(2)));

// Written out from the format (IEEE 754 binary16), as a reference that shares nothing with a compiler.
static uint16_t half_of(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, 8);
    uint16_t sign = bits >> 48 & 0x8000;
    double magnitude = fabs(value);
    if (std::isnan(value))
        return 0x7e00;
    if (magnitude >= 65520)
        return sign | 0x7c00;
    if (magnitude == 0)
        return sign;
    int exponent;
    frexp(magnitude, &exponent);
    if (exponent < -13)
        exponent = -13;
    // A multiple of the last place, rounded to nearest, ties to even.
    double unit = ldexp(1.0, exponent - 11);
    double count = nearbyint(magnitude / unit);
    uint32_t whole = uint32_t(count);
    // count has at most 11 bits; with the exponent of the smallest normal numbers it may have fewer.
    return sign | uint16_t(whole + (uint32_t(exponent + 13) << 10));
}

static double double_of(uint16_t half)
{
    int exponent = half >> 10 & 31;
    double fraction = half & 0x3ff, value;
    if (exponent == 31)
        value = fraction != 0 ? NAN : INFINITY;
    else if (exponent == 0)
        value = ldexp(fraction, -24);
    else
        value = ldexp(fraction + 1024, exponent - 25);
    return half & 0x8000 ? -value : value;
}

static uint16_t same_nan(uint16_t half)
{
    return (half & 0x7fff) > 0x7c00 ? 0x7e00 : half;
}

static std::vector<uint16_t> same_nans(std::vector<uint16_t> halves)
{
    for (auto &half : halves)
        half = same_nan(half);
    return halves;
}

__global__ void from_float(const float *in, uint16_t *out, unsigned n)
{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        out[i] = __builtin_bit_cast(uint16_t, Half(in[i]));
}

__global__ void to_float(float *out)
{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = float(__builtin_bit_cast(Half, uint16_t(i)));
}

__global__ void arithmetic(const uint16_t *in, uint16_t *out, unsigned n)
{
#pragma clang fp contract(off)
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n * n)
        return;
    Half a = __builtin_bit_cast(Half, in[i / n]), b = __builtin_bit_cast(Half, in[i % n]);
    out[i * 6 + 0] = __builtin_bit_cast(uint16_t, Half(a + b));
    out[i * 6 + 1] = __builtin_bit_cast(uint16_t, Half(a * b));
    out[i * 6 + 2] = __builtin_bit_cast(uint16_t, Half(a - b));
    out[i * 6 + 3] = __builtin_bit_cast(uint16_t, Half(__builtin_fmaf16(a, b, Half(1))));
    out[i * 6 + 4] = uint16_t((a < b) + 2 * (a == b) + 4 * (a >= b) + 8 * (a != b));
    out[i * 6 + 5] = uint16_t(short(__builtin_fabsf16(a) < Half(30000) ? a : Half(0)));
}

__global__ void packed(const uint32_t *in, uint32_t *out, unsigned n)
{
#pragma clang fp contract(off)
    unsigned i = threadIdx.x;
    if (i >= n)
        return;
    Halves a = __builtin_bit_cast(Halves, in[i]), b = __builtin_bit_cast(Halves, in[(i + 1) % n]);
    out[i * 3 + 0] = __builtin_bit_cast(uint32_t, a + b);
    out[i * 3 + 1] = __builtin_bit_cast(uint32_t, a * b.yx);
    out[i * 3 + 2] = __builtin_bit_cast(uint32_t, __builtin_elementwise_max(a, b));
}

// Case C80: a product and sum of mixed widths keeps denormals of 16 bits. gfx906 has it fused, gfx900 does not.
__global__ void mixed(const uint16_t *in, float *out)
{
    unsigned i = threadIdx.x;
    uint32_t a = in[i];
    float result = 0;
#if defined(__gfx906__)
    asm volatile("v_fma_mix_f32 %0, %1, 1.0, 0 op_sel_hi:[1,0,0]" : "=v"(result) : "v"(a));
#elif defined(__gfx900__)
    asm volatile("v_mad_mix_f32 %0, %1, 1.0, 0 op_sel_hi:[1,0,0]" : "=v"(result) : "v"(a));
#else
    result = float(__builtin_bit_cast(Half, uint16_t(a)));
#endif
    out[i] = result;
}

int main()
{
    std::vector<float> floats;
    std::vector<uint16_t> expected;
    Random random(16);
    for (int i = 0; i < 4096; i++) {
        float value = ldexpf(random.unit() * 2 - 1, int(random.next() % 48) - 30);
        // Some that lie in the middle between two.
        if (i % 4 == 0)
            value = ldexpf(float(int(random.next() % 4096) * 2 + 1), int(random.next() % 16) - 13);
        floats.push_back(value);
    }
    for (float value : {0.0f, -0.0f, INFINITY, -INFINITY, NAN, 65504.0f, 65519.99f, 65520.0f, 0x1p-24f, 0x1p-25f, 0x1.8p-25f,
                        0x1p-14f, 0x1.ffep-15f, 0x1p-149f})
        floats.push_back(value);
    for (float value : floats)
        expected.push_back(half_of(value));
    Device<float> in(floats);
    Device<uint16_t> out(floats.size());
    from_float<<<(floats.size() + 255) / 256, 256>>>(in, out, floats.size());
    launched();
    exact("from float", same_nans(out.get()), expected);

    std::vector<uint32_t> all(65536), found(65536);
    Device<float> widened(65536);
    to_float<<<256, 256>>>(widened);
    launched();
    std::vector<float> back = widened.get();
    for (unsigned i = 0; i < 65536; i++) {
        float value = float(double_of(i));
        all[i] = std::isnan(value) ? 0x7fc00000 : __builtin_bit_cast(uint32_t, value);
        found[i] = std::isnan(back[i]) ? 0x7fc00000 : __builtin_bit_cast(uint32_t, back[i]);
    }
    exact("to float, all", found, all);

    std::vector<uint16_t> halves = {0, 0x8000, 1, 0x8001, 0x3ff, 0x400, 0x3c00, 0xbc00, 0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7e00,
                                    0x3555, 0x4248};
    while (halves.size() < 64)
        halves.push_back(same_nan(uint16_t(random.next())));
    unsigned n = halves.size();
    std::vector<uint16_t> results;
    for (unsigned i = 0; i < n * n; i++) {
        double a = double_of(halves[i / n]), b = double_of(halves[i % n]);
        // Sums, products and fused ones of halves are exact in double, so there is one rounding.
        results.push_back(half_of(a + b));
        results.push_back(half_of(a * b));
        results.push_back(half_of(a - b));
        results.push_back(half_of(fma(a, b, 1.0)));
        results.push_back(uint16_t((a < b) + 2 * (a == b) + 4 * (a >= b) + 8 * (a != b)));
        results.push_back(uint16_t(short(fabs(a) < 30000 ? a : 0)));
    }
    Device<uint16_t> halves_in(halves), halves_out(results.size());
    arithmetic<<<(n * n + 255) / 256, 256>>>(halves_in, halves_out, n);
    launched();
    std::vector<uint16_t> came = halves_out.get();
    for (size_t i = 0; i < came.size(); i++)
        if (i % 6 < 4)
            came[i] = same_nan(came[i]);
    exact("arithmetic", came, results);

    std::vector<uint32_t> pairs(48), pairs_expected;
    for (auto &pair : pairs)
        pair = half_of(ldexp(random.unit() - 0.5, int(random.next() % 20) - 10)) |
               uint32_t(half_of(ldexp(random.unit() - 0.5, int(random.next() % 20) - 10))) << 16;
    auto low = [](uint32_t pair) { return double_of(uint16_t(pair)); };
    auto high = [](uint32_t pair) { return double_of(uint16_t(pair >> 16)); };
    for (size_t i = 0; i < pairs.size(); i++) {
        uint32_t a = pairs[i], b = pairs[(i + 1) % pairs.size()];
        pairs_expected.push_back(half_of(low(a) + low(b)) | uint32_t(half_of(high(a) + high(b))) << 16);
        pairs_expected.push_back(half_of(low(a) * high(b)) | uint32_t(half_of(high(a) * low(b))) << 16);
        pairs_expected.push_back(half_of(std::max(low(a), low(b))) | uint32_t(half_of(std::max(high(a), high(b)))) << 16);
    }
    Device<uint32_t> pairs_in(pairs), pairs_out(pairs_expected.size());
    packed<<<1, 64>>>(pairs_in, pairs_out, pairs.size());
    launched();
    exact("packed arithmetic", pairs_out.get(), pairs_expected);

    std::vector<uint16_t> small = {1, 2, 0x8001, 0x3ff, 0x400, 0x3c00, 0xc500, 0x7bff};
    std::vector<float> small_expected;
    for (uint16_t half : small)
        small_expected.push_back(float(double_of(half)));
    Device<uint16_t> small_in(small);
    Device<float> small_out(small.size());
    mixed<<<1, small.size()>>>(small_in, small_out);
    launched();
    exact("mixed widths", small_out.get(), small_expected);
    return done("halves");
}
