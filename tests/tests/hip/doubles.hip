// Floating point of 64 bits, as floats.hip does for 32.
#include "suite.h"

static std::vector<double> numbers()
{
    std::vector<double> values = {0.0, -0.0, 1.0, -1.0, 0.5, 1.5, -2.5, 3.5, INFINITY, -INFINITY, NAN, 0x1p-1022, 0x1p-1074,
                                  -0x1.8p-1030, 0x1.fffffffffffffp1023, -0x1.fffffffffffffp1023, 0x1p52, 4503599627370495.5,
                                  9223372036854775808.0, 1e-200, 1e200, 3.141592653589793};
    Random random(5);
    while (values.size() < 80) {
        uint64_t bits = random.wide();
        double value;
        memcpy(&value, &bits, 8);
        if (!std::isnan(value))
            values.push_back(value);
    }
    return values;
}

static std::vector<uint64_t> bits_of(const std::vector<double> &values)
{
    std::vector<uint64_t> bits(values.size());
    for (size_t i = 0; i < values.size(); i++) {
        memcpy(&bits[i], &values[i], 8);
        if (std::isnan(values[i]))
            bits[i] = 0x7ff8000000000000;
    }
    return bits;
}

#define PAIR(name, BODY)                                                                                             \
    struct name {                                                                                                    \
        static __host__ __device__ double run(double a, double b) BODY                                               \
    };

#pragma clang fp contract(off)
PAIR(Sum, { return a + b; })
PAIR(Product, { return a * b; })
PAIR(Quotient, { return a / b; })
PAIR(Fused, { return __builtin_fma(a, b, 1.25); })
PAIR(Root, { return __builtin_sqrt(a) + 0 * b; })
PAIR(Rounded, { return __builtin_floor(a) + __builtin_ceil(b); })
PAIR(Truncated, { return __builtin_trunc(a) + __builtin_rint(b); })
PAIR(Compares, {
    return double((a < b) + 2 * (a <= b) + 4 * (a == b) + 8 * (a != b) + 16 * (a > b) + 32 * (a >= b) +
                  64 * __builtin_isunordered(a, b) + 128 * __builtin_isinf(a));
})
PAIR(Scaled, { return ldexp(a, b > 0 ? 3 : -40); })
PAIR(Narrowed, { return double(float(a)) + double(float(b)); })

template <typename Body> __global__ void all_pairs(const double *values, double *out, unsigned n)
{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n * n)
        out[i] = Body::run(values[i / n], values[i % n]);
}

template <typename Body> static void pairs(const char *label)
{
    std::vector<double> values = numbers();
    unsigned n = values.size();
    std::vector<double> expected(n * n);
    for (unsigned i = 0; i < n * n; i++)
        expected[i] = Body::run(values[i / n], values[i % n]);
    Device<double> in(values), out(n * n);
    all_pairs<Body><<<(n * n + 255) / 256, 256>>>(in, out, n);
    launched();
    exact(label, bits_of(out.get()), bits_of(expected));
}

__global__ void conversions(const double *values, const long long *ints, long long *out, unsigned n)
{
    unsigned i = threadIdx.x;
    if (i >= n)
        return;
    double a = values[i];
    out[i * 6 + 0] = int(a * 0x1p-32);
    out[i * 6 + 1] = unsigned(fabs(a) * 0x1p-31);
    out[i * 6 + 2] = (long long)a;
    out[i * 6 + 3] = (long long)(unsigned long long)fabs(a);
    out[i * 6 + 4] = __double_as_longlong(double(ints[i]));
    out[i * 6 + 5] = __double_as_longlong(double((unsigned long long)ints[i])) ^ __double_as_longlong(double(int(ints[i])));
}

static void expect_conversions()
{
    std::vector<double> values;
    std::vector<long long> ints, expected;
    Random random(9);
    auto bits = [](double value) {
        long long result;
        memcpy(&result, &value, 8);
        return result;
    };
    for (int i = 0; i < 64; i++) {
        double a = ldexp(random.unit() - 0.5, int(random.next() % 63));
        long long b = (long long)random.wide() >> random.next() % 64;
        values.push_back(a);
        ints.push_back(b);
        expected.push_back(int(a * 0x1p-32));
        expected.push_back(unsigned(fabs(a) * 0x1p-31));
        expected.push_back((long long)a);
        expected.push_back((long long)fabs(a));
        expected.push_back(bits(double(b)));
        expected.push_back(bits(double((unsigned long long)b)) ^ bits(double(int(b))));
    }
    Device<double> in(values);
    Device<long long> in_ints(ints), out(expected.size());
    conversions<<<1, 64>>>(in, in_ints, out, values.size());
    launched();
    exact("conversions", out.get(), expected);
}

#define ONE(name, DEVICE, HOST)                                                                                      \
    struct name {                                                                                                    \
        static __device__ double run(double x) { return DEVICE; }                                                    \
        static long double expected(long double x) { return HOST; }                                                  \
    };
ONE(Exp, exp(x), expl(x))
ONE(Exp2, exp2(x), exp2l(x))
ONE(Log, log(x), logl(x))
ONE(Log2, log2(x), log2l(x))
ONE(Sin, sin(x), sinl(x))
ONE(Cos, cos(x), cosl(x))
ONE(Tan, tan(x), tanl(x))
ONE(Asin, asin(x), asinl(x))
ONE(Atan, atan(x), atanl(x))
ONE(Sinh, sinh(x), sinhl(x))
ONE(Tanh, tanh(x), tanhl(x))
ONE(Cbrt, cbrt(x), cbrtl(x))
ONE(Rsqrt, rsqrt(x), 1 / sqrtl(x))
ONE(Sqrt, sqrt(x), sqrtl(x))
ONE(Erf, erf(x), erfl(x))
ONE(Gamma, tgamma(x), tgammal(x))
ONE(Power, pow(x, 1.7), powl(x, 1.7))
ONE(Modulo, fmod(x * 1000, 7.25), fmodl(double(x) * 1000.0, 7.25L))
ONE(Reciprocal, 1.0 / x, 1 / x)

template <typename Body> __global__ void one(const double *in, double *out, unsigned n)
{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        out[i] = Body::run(in[i]);
}

template <typename Body> static void function(const char *label, double limit, double low, double high)
{
    const unsigned n = 256;
    Random random(n);
    std::vector<double> in(n);
    std::vector<long double> expected(n);
    for (unsigned i = 0; i < n; i++) {
        in[i] = low + (high - low) * (double(random.wide() >> 11) * 0x1p-53);
        expected[i] = Body::expected(in[i]);
    }
    Device<double> from(in), to(n);
    one<Body><<<1, 256>>>(from, to, n);
    launched();
    within(label, limit, to.get(), expected);
}

int main()
{
    pairs<Sum>("sums");
    pairs<Product>("products");
    pairs<Quotient>("quotients");
    pairs<Fused>("fused products and sums");
    pairs<Root>("square roots");
    pairs<Rounded>("floor and ceil");
    pairs<Truncated>("trunc and rint");
    pairs<Compares>("compares");
    pairs<Scaled>("ldexp");
    pairs<Narrowed>("conversions to float");
    expect_conversions();

    // The reference has 64 significant bits, so it is off by 1/2048 of a unit here at most.
    function<Exp>("exp", 3, -600, 600);
    function<Exp2>("exp2", 3, -1000, 1000);
    function<Log>("log", 3, 1e-9, 1e9);
    function<Log2>("log2", 3, 1e-9, 1e9);
    function<Sin>("sin", 4, -20, 20);
    function<Sin>("sin of large numbers", 4, -1e15, 1e15);
    function<Cos>("cos", 4, -20, 20);
    function<Tan>("tan", 5, -1.5, 1.5);
    function<Asin>("asin", 4, -1, 1);
    function<Atan>("atan", 5, -50, 50);
    function<Sinh>("sinh", 4, -20, 20);
    function<Tanh>("tanh", 5, -5, 5);
    function<Cbrt>("cbrt", 2, -1000, 1000);
    function<Rsqrt>("rsqrt", 2, 1e-3, 1e6);
    function<Sqrt>("sqrt", 0.501, 0, 1e6);
    function<Reciprocal>("reciprocal", 0.501, 0.001, 1000);
    function<Erf>("erf", 16, -3, 3);
    function<Gamma>("tgamma", 16, 0.5, 20);
    function<Power>("pow", 16, 0.01, 100);
    function<Modulo>("fmod", 0, 0.01, 100);
    return done("doubles");
}
