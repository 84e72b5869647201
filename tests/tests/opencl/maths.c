// Maths functions of OpenCL C within the limits of its specification ("Relative error as ULPs", full profile), and printf.
#include "suite.h"

#define FUNCTIONS(each)                                                                                              \
    each(exp, 3, expl(x), -80, 80) each(exp2, 3, exp2l(x), -120, 120) each(log, 3, logl(x), 1e-6f, 1000)              \
        each(log2, 3, log2l(x), 1e-6f, 1000) each(log10, 3, log10l(x), 1e-6f, 1000) each(sin, 4, sinl(x), -30, 30)    \
            each(cos, 4, cosl(x), -30, 30) each(tan, 5, tanl(x), -1.5f, 1.5f) each(asin, 4, asinl(x), -1, 1)          \
                each(acos, 4, acosl(x), -1, 1) each(atan, 5, atanl(x), -50, 50) each(sinh, 4, sinhl(x), -9, 9)        \
                    each(tanh, 5, tanhl(x), -5, 5) each(cbrt, 2, cbrtl(x), -900, 900)                                 \
                        each(rsqrt, 2, 1 / sqrtl(x), 1e-3f, 1e6f) each(sqrt, 3, sqrtl(x), 0, 1e6f)                    \
                            each(erf, 16, erfl(x), -3, 3) each(expm1, 3, expm1l(x), -2, 5)

#define SOURCE(name, limit, reference, low, high)                                                                    \
    "kernel void do_" #name "(global const float *a, global float *c) { uint i = get_global_id(0); c[i] = " #name     \
    "(a[i]); }\n"

static const char source[] = FUNCTIONS(SOURCE)
    "kernel void doubles(global const double *a, global double *c) { uint i = get_global_id(0);\n"
    "  c[i * 3] = fma(a[i], a[i + 1], 0.5); c[i * 3 + 1] = a[i] / a[i + 1]; c[i * 3 + 2] = sqrt(fabs(a[i])); }\n"
    "kernel void print(int value, float number) { printf(\"kernel: %d %x %5.3f %v4d %s\\n\", value, value, number, (int4)(1, 2, 3, 4), \"text\"); }\n";

#define REFERENCE(name, limit, reference, low, high)                                                                 \
    static long double reference_##name(long double x) { return reference; }
FUNCTIONS(REFERENCE)

static cl_program program;

static void check(const char *name, double limit, long double (*reference)(long double), float low, float high)
{
    enum { N = 512 };
    static float a[N], c[N];
    char kernel_name[32];
    size_t wrong = 0, first = 0;
    double most = 0;
    for (int i = 0; i < N; i++)
        a[i] = low + (high - low) * ((float)(random_bits() >> 8) * 0x1p-24f);
    snprintf(kernel_name, sizeof kernel_name, "do_%s", name);
    cl_kernel kernel = kernel_of(program, kernel_name);
    cl_mem da = buffer_of(sizeof a, a), dc = buffer_of(sizeof c, NULL);
    ARGUMENT(kernel, 0, da);
    ARGUMENT(kernel, 1, dc);
    run(kernel, N, 256);
    get(dc, c, sizeof c);
    for (size_t i = 0; i < N; i++) {
        long double expected = reference(a[i]);
        int exponent;
        frexpl(expected, &exponent);
        double error = (double)(fabsl(c[i] - expected) / ldexpl(1, (exponent < -125 ? -125 : exponent) - 24));
        if (!(error <= limit) && wrong++ == 0) {
            first = i;
            most = error;
        }
    }
    if (wrong == 0) {
        printf("%s: %d values within %g ulp, %016llx\n", name, N, limit, (unsigned long long)hash_of(c, sizeof c));
    } else {
        wrong_results++;
        printf("%s: WRONG: %zu of %d, first at %zu: of %.9g found %.9g, %g ulp\n", name, wrong, N, first, a[first], c[first], most);
    }
    CL(clReleaseMemObject(da));
    CL(clReleaseMemObject(dc));
    CL(clReleaseKernel(kernel));
}

#define CHECK(name, limit, reference, low, high) check(#name, limit, reference_##name, low, high);

static void doubles(void)
{
    enum { N = 256 };
    static double a[N + 1], c[N * 3], expected[N * 3];
    for (int i = 0; i <= N; i++)
        a[i] = ldexp((double)(int)random_bits(), (int)(random_bits() % 200) - 100) + 1e-300;
    for (int i = 0; i < N; i++) {
        expected[i * 3] = fma(a[i], a[i + 1], 0.5);
        expected[i * 3 + 1] = a[i] / a[i + 1];
        expected[i * 3 + 2] = sqrt(fabs(a[i]));
    }
    cl_mem da = buffer_of(sizeof a, a), dc = buffer_of(sizeof c, NULL);
    cl_kernel kernel = kernel_of(program, "doubles");
    ARGUMENT(kernel, 0, da);
    ARGUMENT(kernel, 1, dc);
    run(kernel, N, 64);
    get(dc, c, sizeof c);
    exact("double", c, expected, sizeof c);
}

static void print(void)
{
    cl_kernel kernel = kernel_of(program, "print");
    cl_int value = 77;
    cl_float number = 2.125f;
    ARGUMENT(kernel, 0, value);
    ARGUMENT(kernel, 1, number);
    fflush(stdout);
    run(kernel, 1, 1);
    CL(clFinish(queue));
}

int main(int count, char **arguments)
{
    print_source(count, arguments, source);
    start(0);
    program = build(source, count > 1 ? arguments[1] : "");
    FUNCTIONS(CHECK)
    doubles();
    print();
    return done("maths");
}
