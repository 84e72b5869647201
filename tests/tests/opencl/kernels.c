// Kernels of many kinds: vectors, local memory, barriers, atomics, products, private arrays, images' absence, sub-groups of work.
#include "suite.h"

// The fence is CLK_LOCAL_MEM_FENCE by its number: for a macro of its own headers the compiler in the runtime looks them up below
// /usr, where an unpacked package set does not have them.
static const char source[] =
    "#define LOCAL_FENCE 1\n"
    "kernel void add(global const int *a, global const int *b, global int *c, uint n)\n"
    "{ uint i = get_global_id(0); if (i < n) c[i] = a[i] + b[i]; }\n"
    "kernel void wide(global const float4 *a, global const float4 *b, global float4 *c)\n"
    "{ uint i = get_global_id(0); c[i] = a[i].wzyx * 2.0f + b[i]; }\n"
    "kernel void bytes(global const uchar *a, global uchar *c)\n"
    "{ uint i = get_global_id(0); vstore3(vload3(i, a) * (uchar)3 + (uchar3)(1, 2, 3), i, c); }\n"
    "kernel void reduce(global const uint *a, global uint *sums, local uint *part)\n"
    "{ uint l = get_local_id(0); part[l] = a[get_global_id(0)]; barrier(LOCAL_FENCE);\n"
    "  for (uint s = get_local_size(0) / 2; s; s >>= 1) { if (l < s) part[l] += part[l + s]; barrier(LOCAL_FENCE); }\n"
    "  if (l == 0) sums[get_group_id(0)] = part[0]; }\n"
    "kernel void product(global const float *a, global const float *b, global float *c, uint n)\n"
    "{ uint x = get_global_id(0), y = get_global_id(1); float sum = 0;\n"
    "  for (uint k = 0; k < n; k++) sum += a[y * n + k] * b[k * n + x];\n"
    "  c[y * n + x] = sum; }\n"
    "kernel void histogram(global const uchar *a, global uint *bins, uint n)\n"
    "{ local uint mine[256]; for (uint i = get_local_id(0); i < 256; i += get_local_size(0)) mine[i] = 0;\n"
    "  barrier(LOCAL_FENCE);\n"
    "  for (uint i = get_global_id(0); i < n; i += get_global_size(0)) atomic_inc(&mine[a[i]]);\n"
    "  barrier(LOCAL_FENCE);\n"
    "  for (uint i = get_local_id(0); i < 256; i += get_local_size(0)) atomic_add(&bins[i], mine[i]); }\n"
    "kernel void own(global const uint *a, global uint *c)\n"
    "{ uint id = get_global_id(0), t[23]; for (uint i = 0; i < 23; i++) t[i] = a[i] + id;\n"
    "  for (uint i = 0; i < 60; i++) t[(i * 7 + id) % 23] ^= t[(i * 3 + id) % 23] << (i & 7);\n"
    "  uint sum = 0; for (uint i = 0; i < 23; i++) sum = sum * 31 + t[i]; c[id] = sum; }\n"
    "kernel void integers(global const int *a, global int *c)\n"
    "{ uint i = get_global_id(0); int x = a[i], y = a[i + 1]; global int *o = c + i * 12;\n"
    "  o[0] = add_sat(x, y); o[1] = sub_sat(x, y); o[2] = mul_hi(x, y); o[3] = hadd(x, y); o[4] = rhadd(x, y);\n"
    "  o[5] = clz(x); o[6] = popcount(x); o[7] = rotate(x, y & 31); o[8] = abs_diff(x, y); o[9] = mad24(x & 0x7fffff, y & 0x7fffff, 5);\n"
    "  o[10] = clamp(x, -1000, 1000); o[11] = upsample((short)x, (ushort)y); }\n"
    "kernel void places(global uint *c)\n"
    "{ size_t x = get_global_id(0), y = get_global_id(1), z = get_global_id(2);\n"
    "  size_t at = ((z - get_global_offset(2)) * get_global_size(1) + y - get_global_offset(1)) * get_global_size(0) + x - get_global_offset(0);\n"
    "  c[at] = x | y << 8 | z << 16 | get_local_id(0) << 24; }\n"
    "kernel void saturated(global const float *a, global int *c)\n"
    "{ uint i = get_global_id(0); global int *o = c + i * 4;\n"
    "  o[0] = convert_int_sat(a[i]); o[1] = convert_uchar_sat_rte(a[i]); o[2] = convert_short_sat(a[i]); o[3] = convert_uint_sat_rtp(a[i]); }\n";

static cl_program program;

static void additions(void)
{
    enum { N = 5003 };
    static int a[N], b[N], c[N], expected[N];
    for (int i = 0; i < N; i++) {
        a[i] = (int)random_bits();
        b[i] = (int)random_bits();
        expected[i] = (int)((unsigned)a[i] + (unsigned)b[i]);
    }
    cl_mem da = buffer_of(sizeof a, a), db = buffer_of(sizeof b, b), dc = buffer_of(sizeof c, NULL);
    cl_kernel kernel = kernel_of(program, "add");
    cl_uint n = N;
    ARGUMENT(kernel, 0, da);
    ARGUMENT(kernel, 1, db);
    ARGUMENT(kernel, 2, dc);
    ARGUMENT(kernel, 3, n);
    run(kernel, 5120, 256);
    get(dc, c, sizeof c);
    exact("add", c, expected, sizeof c);
    CL(clReleaseMemObject(da));
    CL(clReleaseMemObject(db));
    CL(clReleaseMemObject(dc));
    CL(clReleaseKernel(kernel));
}

static void vectors(void)
{
    enum { N = 512 };
    static float a[N * 4], b[N * 4], c[N * 4], expected[N * 4];
    static unsigned char bytes[N * 3 + 4], found[N * 3 + 4], wanted[N * 3 + 4];
    for (int i = 0; i < N * 4; i++) {
        a[i] = (float)((int)(random_bits() % 8192) - 4096);
        b[i] = (float)((int)(random_bits() % 8192) - 4096) * 0.5f;
    }
    for (int i = 0; i < N * 4; i++)
        expected[i] = a[i / 4 * 4 + 3 - i % 4] * 2 + b[i];
    cl_mem da = buffer_of(sizeof a, a), db = buffer_of(sizeof b, b), dc = buffer_of(sizeof c, NULL);
    cl_kernel kernel = kernel_of(program, "wide");
    ARGUMENT(kernel, 0, da);
    ARGUMENT(kernel, 1, db);
    ARGUMENT(kernel, 2, dc);
    run(kernel, N, 64);
    get(dc, c, sizeof c);
    exact("float4", c, expected, sizeof c);
    for (int i = 0; i < N * 3; i++) {
        bytes[i] = (unsigned char)random_bits();
        wanted[i] = (unsigned char)(bytes[i] * 3 + i % 3 + 1);
    }
    cl_mem from = buffer_of(sizeof bytes, bytes), to = buffer_of(sizeof found, found);
    cl_kernel three = kernel_of(program, "bytes");
    ARGUMENT(three, 0, from);
    ARGUMENT(three, 1, to);
    run(three, N, 128);
    get(to, found, sizeof found);
    exact("uchar3", found, wanted, sizeof found);
}

static void reductions(void)
{
    enum { N = 4096, GROUP = 128 };
    static unsigned a[N], sums[N / GROUP], expected[N / GROUP];
    for (int i = 0; i < N; i++) {
        a[i] = random_bits();
        expected[i / GROUP] += a[i];
    }
    cl_mem da = buffer_of(sizeof a, a), dc = buffer_of(sizeof sums, NULL);
    cl_kernel kernel = kernel_of(program, "reduce");
    ARGUMENT(kernel, 0, da);
    ARGUMENT(kernel, 1, dc);
    CL(clSetKernelArg(kernel, 2, GROUP * 4, NULL));
    run(kernel, N, GROUP);
    get(dc, sums, sizeof sums);
    exact("reduce", sums, expected, sizeof sums);
}

static void products(void)
{
    enum { N = 40 };
    static float a[N * N], b[N * N], c[N * N], expected[N * N];
    for (int i = 0; i < N * N; i++) {
        a[i] = (float)((int)(random_bits() % 17) - 8);
        b[i] = (float)((int)(random_bits() % 17) - 8);
    }
    for (int y = 0; y < N; y++)
        for (int x = 0; x < N; x++)
            for (int k = 0; k < N; k++)
                expected[y * N + x] += a[y * N + k] * b[k * N + x];
    cl_mem da = buffer_of(sizeof a, a), db = buffer_of(sizeof b, b), dc = buffer_of(sizeof c, NULL);
    cl_kernel kernel = kernel_of(program, "product");
    cl_uint n = N;
    ARGUMENT(kernel, 0, da);
    ARGUMENT(kernel, 1, db);
    ARGUMENT(kernel, 2, dc);
    ARGUMENT(kernel, 3, n);
    size_t global[2] = {N, N}, local[2] = {8, 8};
    CL(clEnqueueNDRangeKernel(queue, kernel, 2, NULL, global, local, 0, NULL, NULL));
    get(dc, c, sizeof c);
    exact("product", c, expected, sizeof c);
}

static void histograms(void)
{
    enum { N = 20000 };
    static unsigned char a[N];
    static unsigned bins[256], expected[256];
    for (int i = 0; i < N; i++) {
        a[i] = (unsigned char)(random_bits() | random_bits());
        expected[a[i]]++;
    }
    cl_mem da = buffer_of(sizeof a, a), dc = buffer_of(sizeof bins, bins);
    cl_kernel kernel = kernel_of(program, "histogram");
    cl_uint n = N;
    ARGUMENT(kernel, 0, da);
    ARGUMENT(kernel, 1, dc);
    ARGUMENT(kernel, 2, n);
    run(kernel, 7 * 128, 128);
    get(dc, bins, sizeof bins);
    exact("histogram", bins, expected, sizeof bins);
}

static void private_arrays(void)
{
    enum { N = 128 };
    static unsigned a[23], c[N], expected[N];
    for (int i = 0; i < 23; i++)
        a[i] = random_bits();
    for (unsigned id = 0; id < N; id++) {
        unsigned t[23], sum = 0;
        for (unsigned i = 0; i < 23; i++)
            t[i] = a[i] + id;
        for (unsigned i = 0; i < 60; i++)
            t[(i * 7 + id) % 23] ^= t[(i * 3 + id) % 23] << (i & 7);
        for (unsigned i = 0; i < 23; i++)
            sum = sum * 31 + t[i];
        expected[id] = sum;
    }
    cl_mem da = buffer_of(sizeof a, a), dc = buffer_of(sizeof c, NULL);
    cl_kernel kernel = kernel_of(program, "own");
    ARGUMENT(kernel, 0, da);
    ARGUMENT(kernel, 1, dc);
    run(kernel, N, 64);
    get(dc, c, sizeof c);
    exact("private arrays", c, expected, sizeof c);
}

static int saturate(long long value)
{
    return value > INT32_MAX ? INT32_MAX : value < INT32_MIN ? INT32_MIN : (int)value;
}

static void integers(void)
{
    enum { N = 256 };
    static int a[N + 1], c[N * 12], expected[N * 12];
    static const int edges[] = {0, 1, -1, INT32_MAX, INT32_MIN, 0x7fff, 0x8000, -0x8000, 100, -100, 0x10000, 0x55555555};
    for (int i = 0; i <= N; i++)
        a[i] = i < 144 ? edges[i % 2 ? i / 12 : i % 12] : (int)random_bits() >> random_bits() % 24;
    for (int i = 0; i < N; i++) {
        long long x = a[i], y = a[i + 1];
        unsigned ux = (unsigned)x;
        int *o = expected + i * 12, turn = (int)(y & 31);
        o[0] = saturate(x + y);
        o[1] = saturate(x - y);
        o[2] = (int)(x * y >> 32);
        o[3] = (int)((x + y) >> 1);
        o[4] = (int)((x + y + 1) >> 1);
        o[5] = ux ? __builtin_clz(ux) : 32;
        o[6] = __builtin_popcount(ux);
        o[7] = (int)(turn ? ux << turn | ux >> (32 - turn) : ux);
        o[8] = (int)(unsigned)(x > y ? x - y : y - x);
        o[9] = (int)((unsigned)(x & 0x7fffff) * (unsigned)(y & 0x7fffff) + 5);
        o[10] = (int)(x < -1000 ? -1000 : x > 1000 ? 1000 : x);
        o[11] = (int)((unsigned)(short)x << 16 | (unsigned short)y);
    }
    cl_mem da = buffer_of(sizeof a, a), dc = buffer_of(sizeof c, NULL);
    cl_kernel kernel = kernel_of(program, "integers");
    ARGUMENT(kernel, 0, da);
    ARGUMENT(kernel, 1, dc);
    run(kernel, N, 64);
    get(dc, c, sizeof c);
    exact("integer functions", c, expected, sizeof c);
}

static void places(void)
{
    enum { X = 12, Y = 6, Z = 4 };
    static unsigned c[X * Y * Z], expected[X * Y * Z];
    size_t offset[3] = {3, 5, 7}, global[3] = {X, Y, Z}, local[3] = {4, 3, 2};
    for (unsigned z = 0; z < Z; z++)
        for (unsigned y = 0; y < Y; y++)
            for (unsigned x = 0; x < X; x++)
                expected[(z * Y + y) * X + x] = (x + 3) | (y + 5) << 8 | (z + 7) << 16 | (x % 4) << 24;
    cl_mem dc = buffer_of(sizeof c, NULL);
    cl_kernel kernel = kernel_of(program, "places");
    ARGUMENT(kernel, 0, dc);
    CL(clEnqueueNDRangeKernel(queue, kernel, 3, offset, global, local, 0, NULL, NULL));
    get(dc, c, sizeof c);
    exact("places with an offset", c, expected, sizeof c);
}

static void conversions(void)
{
    enum { N = 64 };
    static float a[N] = {0, -0.0f, 0.5f, 1.5f, 2.5f, -0.5f, 254.5f, 255.5f, 300, -7, 40000, -40000, 3e9f, -3e9f, 1e20f, -1e20f,
                         INFINITY, -INFINITY, 4294967040.0f, 2147483520.0f, -2147483648.0f, 1e-30f};
    static int c[N * 4], expected[N * 4];
    for (int i = 22; i < N; i++)
        a[i] = ldexpf((float)((int)random_bits() >> 8), (int)(random_bits() % 12) - 12);
    for (int i = 0; i < N; i++) {
        double v = a[i], even = nearbyint(v), up = ceil(v), zero = trunc(v);
        int *o = expected + i * 4;
        o[0] = zero > INT32_MAX ? INT32_MAX : zero < INT32_MIN ? INT32_MIN : (int)zero;
        o[1] = even > 255 ? 255 : even < 0 ? 0 : (int)even;
        o[2] = zero > 32767 ? 32767 : zero < -32768 ? -32768 : (int)zero;
        o[3] = (int)(up > UINT32_MAX ? UINT32_MAX : up < 0 ? 0 : (unsigned)up);
    }
    cl_mem da = buffer_of(sizeof a, a), dc = buffer_of(sizeof c, NULL);
    cl_kernel kernel = kernel_of(program, "saturated");
    ARGUMENT(kernel, 0, da);
    ARGUMENT(kernel, 1, dc);
    run(kernel, N, 64);
    get(dc, c, sizeof c);
    exact("saturated conversions", c, expected, sizeof c);
}

int main(int count, char **arguments)
{
    print_source(count, arguments, source);
    start(0);
    program = build(source, count > 1 ? arguments[1] : "");
    additions();
    vectors();
    reductions();
    products();
    histograms();
    private_arrays();
    integers();
    places();
    conversions();
    return done("kernels");
}
