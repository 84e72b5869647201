// Floating point of 32 bits: IEEE operations and conversions exactly, maths functions within the limits of the OpenCL C
// specification ("Relative error as ULPs"), which is what the device library is written to.
#include "suite.h"

static std::vector<float> numbers()
{
    std::vector<float> values = {0.0f, -0.0f, 1.0f, -1.0f, 0.5f, 1.5f, -2.5f, 3.5f, INFINITY, -INFINITY, NAN, 0x1p-126f,
                                 0x1p-149f, -0x1.8p-130f, 0x1.fffffep127f, -0x1.fffffep127f, 0x1p23f, 0x1.000002p23f,
                                 8388607.5f, 2147483648.0f, 4294967296.0f, -2147483648.0f, 1e-20f, 1e20f, 3.14159274f};
    Random random(5);
    while (values.size() < 96) {
        uint32_t bits = random.next();
        float value;
        memcpy(&value, &bits, 4);
        if (!std::isnan(value))
            values.push_back(value);
    }
    return values;
}

// NaNs have no payload that anything promises.
static std::vector<uint32_t> bits_of(const std::vector<float> &values)
{
    std::vector<uint32_t> bits(values.size());
    for (size_t i = 0; i < values.size(); i++) {
        memcpy(&bits[i], &values[i], 4);
        if (std::isnan(values[i]))
            bits[i] = 0x7fc00000;
    }
    return bits;
}

#define PAIR(name, BODY)                                                                                             \
    struct name {                                                                                                    \
        static __host__ __device__ float run(float a, float b) BODY                                                  \
    };

// Contraction would make the CPU and the GPU differ.
#pragma clang fp contract(off)
PAIR(Sum, { return a + b; })
PAIR(Difference, { return a - b; })
PAIR(Product, { return a * b; })
PAIR(Quotient, { return a / b; })
PAIR(Fused, { return __builtin_fmaf(a, b, 1.25f); })
// V_SQRT_F32 flushes denormals (Vega shader ISA), and compilers before LLVM 18 take it as it is.
PAIR(Root, { return __builtin_sqrtf(a != 0 && __builtin_fabsf(a) < 0x1p-126f ? 1.0f : a) + 0 * b; })
PAIR(Rounded, { return __builtin_floorf(a) + __builtin_ceilf(b); })
PAIR(Truncated, { return __builtin_truncf(a) + __builtin_rintf(b); })
PAIR(Least, { return a < b ? a : b; })
PAIR(Sign, { return __builtin_copysignf(a, b) - __builtin_fabsf(b); })
PAIR(Compares, {
    return float((a < b) + 2 * (a <= b) + 4 * (a == b) + 8 * (a != b) + 16 * (a > b) + 32 * (a >= b) +
                 64 * __builtin_isunordered(a, b) + 128 * __builtin_isinf(a) + 256 * __builtin_isnan(b));
})
PAIR(Scaled, { return ldexpf(a, b > 0 ? 3 : -20); })

template <typename Body> __global__ void all_pairs(const float *values, float *out, unsigned n)
{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n * n)
        out[i] = Body::run(values[i / n], values[i % n]);
}

template <typename Body> static void pairs(const char *label)
{
    std::vector<float> values = numbers();
    unsigned n = values.size();
    std::vector<float> expected(n * n);
    for (unsigned i = 0; i < n * n; i++)
        expected[i] = Body::run(values[i / n], values[i % n]);
    Device<float> in(values), out(n * n);
    all_pairs<Body><<<(n * n + 255) / 256, 256>>>(in, out, n);
    launched();
    exact(label, bits_of(out.get()), bits_of(expected));
}

__global__ void conversions(const float *values, const int *ints, long long *out, unsigned n)
{
    unsigned i = threadIdx.x;
    if (i >= n)
        return;
    float a = values[i];
    out[i * 8 + 0] = int(a);
    out[i * 8 + 1] = unsigned(fabsf(a));
    out[i * 8 + 2] = (long long)a;
    out[i * 8 + 3] = (long long)(unsigned long long)fabsf(a);
    out[i * 8 + 4] = __float_as_int(float(ints[i]));
    out[i * 8 + 5] = __float_as_int(float(unsigned(ints[i])));
    out[i * 8 + 6] = __float_as_int(float((long long)ints[i] * 0x12345671));
    out[i * 8 + 7] = __float_as_int(float((unsigned long long)unsigned(ints[i]) * 0xfedcba98765ull)) + (unsigned char)ints[i];
}

static void expect_conversions()
{
    std::vector<float> values;
    std::vector<int> ints;
    std::vector<long long> expected;
    Random random(9);
    auto bits = [](float value) {
        int result;
        memcpy(&result, &value, 4);
        return result;
    };
    for (int i = 0; i < 64; i++) {
        // In the range of each type: others have no value that the language promises.
        float a = ldexpf(random.unit() - 0.5f, int(random.next() % 32));
        int b = int(random.next()) >> random.next() % 32;
        values.push_back(a);
        ints.push_back(b);
        expected.push_back(int(a));
        expected.push_back(unsigned(fabsf(a)));
        expected.push_back((long long)a);
        expected.push_back((long long)fabsf(a));
        expected.push_back(bits(float(b)));
        expected.push_back(bits(float(unsigned(b))));
        expected.push_back(bits(float((long long)b * 0x12345671)));
        expected.push_back(bits(float((unsigned long long)unsigned(b) * 0xfedcba98765ull)) + (unsigned char)b);
    }
    Device<float> in(values);
    Device<int> in_ints(ints);
    Device<long long> out(expected.size());
    conversions<<<1, 64>>>(in, in_ints, out, values.size());
    launched();
    exact("conversions", out.get(), expected);
}

// Case C74: results outside of 0 to 1 stay where nothing asks for clamping, and modifiers of sources count in compares.
__global__ void modifiers(const float *values, float *out, unsigned n)
{
    unsigned i = threadIdx.x;
    if (i >= n)
        return;
    float a = values[i], b = values[(i + 1) % n], plain, clamped, doubled, halved, negated;
    unsigned long long less;
    asm volatile("v_add_f32_e64 %0, %1, %2" : "=v"(plain) : "v"(a), "v"(b));
    asm volatile("v_add_f32_e64 %0, %1, %2 clamp" : "=v"(clamped) : "v"(a), "v"(b));
    asm volatile("v_mul_f32_e64 %0, %1, %2 mul:2" : "=v"(doubled) : "v"(a), "v"(b));
    asm volatile("v_mul_f32_e64 %0, %1, |%2| div:2" : "=v"(halved) : "v"(a), "v"(b));
    asm volatile("v_fma_f32 %0, -%1, |%2|, -%1" : "=v"(negated) : "v"(a), "v"(b));
    asm volatile("v_cmp_lt_f32_e64 %0, |%1|, -%2" : "=s"(less) : "v"(a), "v"(b));
    out[i * 6 + 0] = plain;
    out[i * 6 + 1] = clamped;
    out[i * 6 + 2] = doubled;
    out[i * 6 + 3] = halved;
    out[i * 6 + 4] = negated;
    out[i * 6 + 5] = float(less >> i & 1);
}

static void expect_modifiers()
{
    std::vector<float> values = {-2.0f, 0.5f, 3.0f, -0.25f, 0.125f, -7.0f, 1.0f, 0.75f, -0.5f}, expected;
    for (size_t i = 0; i < values.size(); i++) {
        float a = values[i], b = values[(i + 1) % values.size()];
        expected.push_back(a + b);
        expected.push_back(std::min(std::max(a + b, 0.0f), 1.0f));
        // Output modifiers are ignored where results may be denormal, as in the mode of this program (Vega shader ISA, output
        // modifiers).
        expected.push_back(a * b);
        expected.push_back(a * fabsf(b));
        expected.push_back(fmaf(-a, fabsf(b), -a));
        expected.push_back(fabsf(a) < -b);
    }
    Device<float> in(values), out(expected.size());
    modifiers<<<1, 64>>>(in, out, values.size());
    launched();
    std::vector<float> found = out.get();
    exact("modifiers", bits_of(found), bits_of(expected));
}

#define ONE(name, DEVICE, HOST)                                                                                      \
    struct name {                                                                                                    \
        static __device__ float run(float x) { return DEVICE; }                                                      \
        static long double expected(long double x) { return HOST; }                                                  \
    };
ONE(Exp, expf(x), expl(x))
ONE(Exp2, exp2f(x), exp2l(x))
ONE(Exp10, exp10f(x), powl(10, x))
ONE(Expm1, expm1f(x), expm1l(x))
ONE(Log, logf(x), logl(x))
ONE(Log2, log2f(x), log2l(x))
ONE(Log10, log10f(x), log10l(x))
ONE(Log1p, log1pf(x), log1pl(x))
ONE(Sin, sinf(x), sinl(x))
ONE(Cos, cosf(x), cosl(x))
ONE(Tan, tanf(x), tanl(x))
ONE(Asin, asinf(x), asinl(x))
ONE(Acos, acosf(x), acosl(x))
ONE(Atan, atanf(x), atanl(x))
ONE(Sinh, sinhf(x), sinhl(x))
ONE(Cosh, coshf(x), coshl(x))
ONE(Tanh, tanhf(x), tanhl(x))
ONE(Cbrt, cbrtf(x), cbrtl(x))
ONE(Rsqrt, rsqrtf(x), 1 / sqrtl(x))
ONE(Sqrt, sqrtf(x), sqrtl(x))
ONE(Erf, erff(x), erfl(x))
ONE(Gamma, tgammaf(x), tgammal(x))
ONE(Reciprocal, 1.0f / x, 1 / x)
ONE(SinPi, sinpif(x), sinl(3.14159265358979323846264338327950288L * x))

template <typename Body> __global__ void one(const float *in, float *out, unsigned n)
{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        out[i] = Body::run(in[i]);
}

template <typename Body> static void function(const char *label, double limit, float low, float high)
{
    const unsigned n = 512;
    Random random(n);
    std::vector<float> in(n);
    std::vector<long double> expected(n);
    for (unsigned i = 0; i < n; i++) {
        in[i] = low + (high - low) * random.unit();
        expected[i] = Body::expected(in[i]);
    }
    Device<float> from(in), to(n);
    one<Body><<<2, 256>>>(from, to, n);
    launched();
    within(label, limit, to.get(), expected);
}

#define TWO(name, DEVICE, HOST)                                                                                      \
    struct name {                                                                                                    \
        static __device__ float run(float x, float y) { return DEVICE; }                                             \
        static long double expected(long double x, long double y) { return HOST; }                                   \
    };
TWO(Pow, powf(x, y), powl(x, y))
TWO(Atan2, atan2f(x - 8, y), atan2l(x - 8, y))
TWO(Hypot, hypotf(x, y), hypotl(x, y))
TWO(Modulo, fmodf(x * 1000, y + 3), fmodl(float(x) * 1000.0f, float(y) + 3.0f))
TWO(Divide, x / y, x / y)
TWO(FastDivide, __fdividef(x, y), x / y)

template <typename Body> __global__ void two(const float *x, const float *y, float *out, unsigned n)
{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        out[i] = Body::run(x[i], y[i]);
}

template <typename Body> static void function_of_two(const char *label, double limit)
{
    const unsigned n = 512;
    Random random(n + 1);
    std::vector<float> x(n), y(n);
    std::vector<long double> expected(n);
    for (unsigned i = 0; i < n; i++) {
        x[i] = 0.01f + 16 * random.unit();
        y[i] = 8 * random.unit() - 4;
        expected[i] = Body::expected(x[i], y[i]);
    }
    Device<float> dx(x), dy(y), to(n);
    two<Body><<<2, 256>>>(dx, dy, to, n);
    launched();
    within(label, limit, to.get(), expected);
}

int main()
{
    pairs<Sum>("sums");
    pairs<Difference>("differences");
    pairs<Product>("products");
    pairs<Quotient>("quotients");
    pairs<Fused>("fused products and sums");
    pairs<Root>("square roots");
    pairs<Rounded>("floor and ceil");
    pairs<Truncated>("trunc and rint");
    pairs<Least>("the smaller one");
    pairs<Sign>("signs");
    pairs<Compares>("compares");
    pairs<Scaled>("ldexp");
    expect_conversions();
    expect_modifiers();

    function<Exp>("exp", 3, -80, 80);
    function<Exp2>("exp2", 3, -120, 120);
    function<Exp10>("exp10", 3, -35, 35);
    function<Expm1>("expm1", 3, -2, 5);
    function<Log>("log", 3, 1e-6f, 1000);
    function<Log2>("log2", 3, 1e-6f, 1000);
    function<Log10>("log10", 3, 1e-6f, 1000);
    function<Log1p>("log1p", 2, -0.9f, 10);
    function<Sin>("sin", 4, -20, 20);
    function<Sin>("sin of large numbers", 4, -1e7f, 1e7f);
    function<Cos>("cos", 4, -20, 20);
    function<Tan>("tan", 5, -1.5f, 1.5f);
    function<Asin>("asin", 4, -1, 1);
    function<Acos>("acos", 4, -1, 1);
    function<Atan>("atan", 5, -50, 50);
    function<Sinh>("sinh", 4, -10, 10);
    function<Cosh>("cosh", 4, -10, 10);
    function<Tanh>("tanh", 5, -5, 5);
    function<Cbrt>("cbrt", 2, -1000, 1000);
    function<Rsqrt>("rsqrt", 2, 1e-3f, 1e6f);
    // Correctly rounded, as HIP's compiler makes them unless told otherwise.
    function<Sqrt>("sqrt", 0.5, 0, 1e6f);
    function<Reciprocal>("reciprocal", 0.5, 0.001f, 1000);
    function<Erf>("erf", 16, -3, 3);
    function<Gamma>("tgamma", 16, 0.5f, 20);
    function<SinPi>("sinpi", 4, 0.01f, 0.9f);
    function_of_two<Pow>("pow", 16);
    function_of_two<Atan2>("atan2", 6);
    function_of_two<Hypot>("hypot", 4);
    function_of_two<Modulo>("fmod", 0);
    function_of_two<Divide>("division", 0.5);
    function_of_two<FastDivide>("fast division", 2.5);
    return done("floats");
}
