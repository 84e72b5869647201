// Vector addition and its like, over types, sizes that do not fill a wave, and grids that are too large or too small.
#include "suite.h"

template <typename T> __global__ void add(const T *a, const T *b, T *c, unsigned n)
{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        c[i] = a[i] + b[i];
}

__global__ void saxpy(float a, const float *x, float *y, unsigned n)
{
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        y[i] = a * x[i] + y[i];
}

__global__ void places(unsigned *out)
{
    unsigned x = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned y = blockIdx.y * blockDim.y + threadIdx.y;
    unsigned z = blockIdx.z * blockDim.z + threadIdx.z;
    unsigned width = gridDim.x * blockDim.x, height = gridDim.y * blockDim.y;
    out[(z * height + y) * width + x] = x | y << 8 | z << 16 | threadIdx.x << 24;
}

template <typename T> static void additions(const char *label, unsigned n)
{
    Random random(n);
    std::vector<T> a(n), b(n), expected(n);
    for (unsigned i = 0; i < n; i++) {
        a[i] = T(int32_t(random.next()));
        b[i] = T(int32_t(random.next()));
        expected[i] = T(a[i] + b[i]);
    }
    Device<T> da(a), db(b), dc(n);
    dc.clear();
    add<T><<<(n + 255) / 256, 256>>>(da, db, dc, n);
    launched();
    exact(label, dc.get(), expected);
}

int main()
{
    additions<int>("int, 1", 1);
    additions<int>("int, 63", 63);
    additions<int>("int, 65", 65);
    additions<int>("int, 10007", 10007);
    additions<unsigned char>("unsigned char, 4099", 4099);
    additions<short>("short, 4099", 4099);
    additions<long long>("long long, 4099", 4099);
    additions<float>("float, 4099", 4099);
    additions<double>("double, 4099", 4099);

    const unsigned n = 20011;
    Random random(7);
    std::vector<float> x(n), y(n), expected(n);
    for (unsigned i = 0; i < n; i++) {
        // Few bits, so that the product and the sum are exact whether they are fused or not.
        x[i] = float(int(random.next() % 4096) - 2048);
        y[i] = float(int(random.next() % 4096) - 2048) * 0.25f;
        expected[i] = 2.5f * x[i] + y[i];
    }
    Device<float> dx(x), dy(y);
    saxpy<<<7, 192>>>(2.5f, dx, dy, n);
    launched();
    exact("saxpy over a short grid", dy.get(), expected);

    dim3 grid(3, 5, 2), block(4, 2, 3);
    const unsigned width = 12, height = 10, depth = 6;
    std::vector<unsigned> where(width * height * depth);
    for (unsigned z = 0; z < depth; z++)
        for (unsigned py = 0; py < height; py++)
            for (unsigned px = 0; px < width; px++)
                where[(z * height + py) * width + px] = px | py << 8 | z << 16 | (px % 4) << 24;
    Device<unsigned> out(where.size());
    places<<<grid, block>>>(out);
    launched();
    exact("indices in three dimensions", out.get(), where);
    return done("vectors");
}
