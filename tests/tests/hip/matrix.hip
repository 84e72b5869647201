// Matrix products, plain and through tiles in LDS, and a transposition.
#include "suite.h"

template <typename T> __global__ void product(const T *a, const T *b, T *c, int n)
{
    int row = blockIdx.y * blockDim.y + threadIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= n || column >= n)
        return;
    T sum = 0;
    for (int k = 0; k < n; k++)
        sum += a[row * n + k] * b[k * n + column];
    c[row * n + column] = sum;
}

template <typename T, int TILE> __global__ void tiled(const T *a, const T *b, T *c, int n)
{
    __shared__ T left[TILE][TILE], right[TILE][TILE + 1];
    int row = blockIdx.y * TILE + threadIdx.y, column = blockIdx.x * TILE + threadIdx.x;
    T sum = 0;
    for (int tile = 0; tile < (n + TILE - 1) / TILE; tile++) {
        int k = tile * TILE + threadIdx.x, l = tile * TILE + threadIdx.y;
        left[threadIdx.y][threadIdx.x] = row < n && k < n ? a[row * n + k] : T(0);
        right[threadIdx.y][threadIdx.x] = column < n && l < n ? b[l * n + column] : T(0);
        __syncthreads();
        for (int i = 0; i < TILE; i++)
            sum += left[threadIdx.y][i] * right[i][threadIdx.x];
        __syncthreads();
    }
    if (row < n && column < n)
        c[row * n + column] = sum;
}

__global__ void transpose(const unsigned *in, unsigned *out, int width, int height)
{
    __shared__ unsigned tile[16][17];
    int x = blockIdx.x * 16 + threadIdx.x, y = blockIdx.y * 16 + threadIdx.y;
    if (x < width && y < height)
        tile[threadIdx.y][threadIdx.x] = in[y * width + x];
    __syncthreads();
    x = blockIdx.y * 16 + threadIdx.x;
    y = blockIdx.x * 16 + threadIdx.y;
    if (x < height && y < width)
        out[y * height + x] = tile[threadIdx.x][threadIdx.y];
}

template <typename T> static void products(const char *plain, const char *tiles, int n)
{
    Random random(n);
    std::vector<T> a(n * n), b(n * n), expected(n * n, T(0));
    // Small integers: every sum is exact in every type and order.
    for (auto &value : a)
        value = T(int(random.next() % 17) - 8);
    for (auto &value : b)
        value = T(int(random.next() % 17) - 8);
    for (int i = 0; i < n; i++)
        for (int k = 0; k < n; k++)
            for (int j = 0; j < n; j++)
                expected[i * n + j] += a[i * n + k] * b[k * n + j];
    // A zero may come out as -0 only if a product is -0 and no +0 is added; sums begin with +0, so it does not.
    Device<T> da(a), db(b), dc(n * n);
    dc.clear();
    dim3 block(16, 16), grid((n + 15) / 16, (n + 15) / 16);
    product<T><<<grid, block>>>(da, db, dc, n);
    launched();
    exact(plain, dc.get(), expected);
    dc.clear();
    tiled<T, 16><<<grid, block>>>(da, db, dc, n);
    launched();
    exact(tiles, dc.get(), expected);
}

int main()
{
    products<float>("float, 48 by 48", "float, 48 by 48, tiles", 48);
    products<float>("float, 37 by 37", "float, 37 by 37, tiles", 37);
    products<double>("double, 40 by 40", "double, 40 by 40, tiles", 40);
    products<int>("int, 33 by 33", "int, 33 by 33, tiles", 33);
    products<long long>("long long, 20 by 20", "long long, 20 by 20, tiles", 20);

    const int width = 75, height = 41;
    std::vector<unsigned> in(width * height), expected(width * height);
    for (int y = 0; y < height; y++)
        for (int x = 0; x < width; x++) {
            in[y * width + x] = y << 16 | x;
            expected[x * height + y] = y << 16 | x;
        }
    Device<unsigned> from(in), to(in.size());
    transpose<<<dim3((width + 15) / 16, (height + 15) / 16), dim3(16, 16)>>>(from, to, width, height);
    launched();
    exact("transposed 75 by 41", to.get(), expected);
    return done("matrix");
}
