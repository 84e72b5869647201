// Memory: sets and copies of odd sizes in all directions, two dimensions, pinned and managed memory, pointers into the middle.
#include "suite.h"

#include <sys/mman.h>

static std::vector<unsigned char> noise(size_t bytes, unsigned seed)
{
    Random random(seed);
    std::vector<unsigned char> data(bytes);
    for (auto &byte : data)
        byte = (unsigned char)random.next();
    return data;
}

static void copies()
{
    // Above 1 MiB the runtime would rather lend the pages to the GPU than stage them.
    for (size_t size : {size_t(1), size_t(3), size_t(63), size_t(64), size_t(4095), size_t(4097), size_t(65539), size_t(1) << 20,
                        (size_t(1) << 20) + 1, (size_t(3) << 20) + 77}) {
        char label[64];
        std::vector<unsigned char> data = noise(size, unsigned(size)), back(size);
        Device<unsigned char> a(size + 64), b(size + 64);
        a.clear();
        b.clear();
        HIP(hipMemcpy(a + 5, data.data(), size, hipMemcpyHostToDevice));
        HIP(hipMemcpy(b + 3, a + 5, size, hipMemcpyDeviceToDevice));
        HIP(hipMemcpy(back.data(), b + 3, size, hipMemcpyDeviceToHost));
        snprintf(label, sizeof label, "copies of %zu bytes", size);
        exact(label, back, data);
        std::vector<unsigned char> around = b.get(), expected(size + 64, 0);
        memcpy(expected.data() + 3, data.data(), size);
        snprintf(label, sizeof label, "nothing beside %zu bytes", size);
        exact(label, around, expected);
    }
}

static void sets()
{
    const size_t size = 70001;
    Device<unsigned char> memory(size);
    std::vector<unsigned char> expected(size, 0x11);
    HIP(hipMemset(memory, 0x11, size));
    struct {
        size_t at, count;
    } pieces[] = {{0, 1}, {7, 3}, {33, 64}, {1001, 4099}, {20000, 16}, {65537, 4464}};
    for (auto piece : pieces) {
        HIP(hipMemset(memory + piece.at, int(piece.at), piece.count));
        memset(&expected[piece.at], int(piece.at), piece.count);
    }
    // Words and halves: the address counts in bytes, the number in elements.
    HIP(hipMemsetD16(hipDeviceptr_t(memory + 30002), 0xbeef, 101));
    HIP(hipMemsetD32(hipDeviceptr_t(memory + 40004), int(0xdeadbeef), 333));
    HIP(hipMemsetD8(hipDeviceptr_t(memory + 50001), 0x7e, 17));
    for (int i = 0; i < 101; i++)
        memcpy(&expected[30002 + 2 * i], "\xef\xbe", 2);
    for (int i = 0; i < 333; i++)
        memcpy(&expected[40004 + 4 * i], "\xef\xbe\xad\xde", 4);
    memset(&expected[50001], 0x7e, 17);
    exact("sets", memory.get(), expected);

    size_t pitch;
    unsigned char *plane;
    HIP(hipMallocPitch(reinterpret_cast<void **>(&plane), &pitch, 301, 20));
    HIP(hipMemset2D(plane, pitch, 0, pitch, 20));
    HIP(hipMemset2D(plane, pitch, 0x5a, 301, 19));
    std::vector<unsigned char> all(pitch * 20), wanted(pitch * 20, 0);
    HIP(hipMemcpy(all.data(), plane, all.size(), hipMemcpyDeviceToHost));
    for (int row = 0; row < 19; row++)
        memset(&wanted[row * pitch], 0x5a, 301);
    exact("set in two dimensions", all, wanted);
    HIP(hipFree(plane));
}

// Case C81: pitches that are no multiple of four.
static void planes()
{
    for (size_t width : {1, 3, 7, 129}) {
        for (size_t more : {0, 1, 3}) {
            const size_t height = 41, pitch = width + more, size = pitch * height;
            std::vector<unsigned char> source = noise(size, unsigned(width * 10 + more)), expected(size, 0xee), back(size, 0xee);
            for (size_t row = 0; row < height; row++)
                memcpy(&expected[row * pitch], &source[row * pitch], width);
            Device<unsigned char> a(size), b(size);
            HIP(hipMemset(a, 0x33, size));
            HIP(hipMemset(b, 0x44, size));
            HIP(hipMemcpy2D(a, pitch, source.data(), pitch, width, height, hipMemcpyHostToDevice));
            HIP(hipMemcpy2D(b, pitch, a, pitch, width, height, hipMemcpyDeviceToDevice));
            HIP(hipMemcpy2D(back.data(), pitch, b, pitch, width, height, hipMemcpyDeviceToHost));
            char label[64];
            snprintf(label, sizeof label, "plane of width %zu and pitch %zu", width, pitch);
            exact(label, back, expected);
            std::vector<unsigned char> padding = b.get();
            for (size_t row = 0; row < height; row++)
                memset(expected.data() + row * pitch + width, 0x44, more);
            snprintf(label, sizeof label, "padding of width %zu and pitch %zu", width, pitch);
            exact(label, padding, expected);
        }
    }
}

// Case C82: the direction is found out, also of pointers into the middle.
static void directions()
{
    const size_t width = 33, height = 12, pitch = 48, size = 4096;
    std::vector<unsigned char> source = noise(size, 1), expected(size, 0), back(size, 0);
    unsigned char *pinned;
    HIP(hipHostMalloc(reinterpret_cast<void **>(&pinned), size, hipHostMallocDefault));
    memset(pinned, 0, size);
    Device<unsigned char> a(size), b(size);
    a.clear();
    b.clear();
    HIP(hipMemcpy2D(a + 100, pitch, source.data() + 50, pitch, width, height, hipMemcpyDefault));
    HIP(hipMemcpy2D(b + 7, pitch, a + 100, pitch, width, height, hipMemcpyDefault));
    HIP(hipMemcpy2D(pinned + 11, pitch, b + 7, pitch, width, height, hipMemcpyDefault));
    HIP(hipMemcpy2D(back.data() + 13, pitch, pinned + 11, pitch, width, height, hipMemcpyDefault));
    for (size_t row = 0; row < height; row++)
        memcpy(&expected[13 + row * pitch], &source[50 + row * pitch], width);
    exact("directions that were found out", back, expected);
    HIP(hipHostFree(pinned));
}

__global__ void increment(unsigned *words, unsigned n)
{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        words[i] += i;
}

// Host memory that a kernel uses where it lies, also by a pointer into the middle (case C05).
static void pinned()
{
    const unsigned n = 5000;
    unsigned *words;
    HIP(hipHostMalloc(reinterpret_cast<void **>(&words), n * 4, hipHostMallocMapped));
    std::vector<unsigned> expected(n);
    for (unsigned i = 0; i < n; i++)
        words[i] = expected[i] = i * 3;
    for (unsigned at : {8u / 4, 4096u / 4, 1003u, n - 1}) {
        unsigned *device;
        HIP(hipHostGetDevicePointer(reinterpret_cast<void **>(&device), words + at, 0));
        increment<<<1, 1>>>(device, 1);
        launched();
    }
    unsigned *device;
    HIP(hipHostGetDevicePointer(reinterpret_cast<void **>(&device), words, 0));
    increment<<<(n + 255) / 256, 256>>>(device, n);
    launched();
    HIP(hipDeviceSynchronize());
    for (unsigned i = 0; i < n; i++)
        expected[i] += i;
    exact("pinned memory", std::vector<unsigned>(words, words + n), expected);
    hipPointerAttribute_t attributes;
    HIP(hipPointerGetAttributes(&attributes, words + 77));
    say("attributes of a pointer into the middle", attributes.hostPointer == words + 77 || attributes.hostPointer == words);
    HIP(hipHostFree(words));
}

// Memory of the program that it lends to the GPU (case C08). A guest library may refuse: then it must say so, and copies work.
static void registered()
{
    const size_t size = 3 * 4096;
    unsigned char *pages =
        static_cast<unsigned char *>(mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    unsigned *words = reinterpret_cast<unsigned *>(pages + 8);
    const unsigned n = 2000;
    for (unsigned i = 0; i < n; i++)
        words[i] = i;
    hipError_t error = hipHostRegister(words, n * 4, hipHostRegisterDefault);
    if (error == hipSuccess) {
        unsigned *device;
        HIP(hipHostGetDevicePointer(reinterpret_cast<void **>(&device), words, 0));
        increment<<<(n + 255) / 256, 256>>>(device, n);
        launched();
        HIP(hipDeviceSynchronize());
        bool right = true;
        for (unsigned i = 0; i < n; i++)
            right = right && words[i] == 2 * i;
        HIP(hipHostUnregister(words));
        say("registered memory is used in place, or refused", right);
    } else {
        (void)hipGetLastError();
        say("registered memory is used in place, or refused",
            error == hipErrorInvalidValue || error == hipErrorNotSupported || error == hipErrorOutOfMemory);
    }
    munmap(pages, size);
}

// Managed memory: this GPU announces none, and then the runtime gives host memory that both sides can use.
static void managed()
{
    hipDeviceProp_t properties;
    HIP(hipGetDeviceProperties(&properties, 0));
    printf("managed memory: %d, concurrent access: %d\n", properties.managedMemory, properties.concurrentManagedAccess);
    unsigned *words;
    const unsigned n = 3000;
    hipError_t error = hipMallocManaged(reinterpret_cast<void **>(&words), n * 4, hipMemAttachGlobal);
    if (error != hipSuccess) {
        (void)hipGetLastError();
        printf("hipMallocManaged: %s\n", hipGetErrorName(error));
        say("managed memory is refused as announced", !properties.managedMemory && error == hipErrorNotSupported);
        return;
    }
    for (unsigned i = 0; i < n; i++)
        words[i] = 7;
    increment<<<(n + 255) / 256, 256>>>(words, n);
    launched();
    HIP(hipDeviceSynchronize());
    bool right = true;
    for (unsigned i = 0; i < n; i++)
        right = right && words[i] == 7 + i;
    say("managed memory", right);
    HIP(hipFree(words));
}

// Cases C12 and C13: allocations of one program do not touch, and come back when they are freed.
static void accounts()
{
    size_t before, total, within, after;
    HIP(hipMemGetInfo(&before, &total));
    std::vector<unsigned char *> buffers(8);
    const size_t size = 1200000;
    for (size_t i = 0; i < buffers.size(); i++) {
        HIP(hipMalloc(reinterpret_cast<void **>(&buffers[i]), size));
        HIP(hipMemset(buffers[i], int(i + 1), size));
    }
    HIP(hipMemset(buffers[3] + size - 64, 0xff, 64));
    bool right = true;
    for (size_t i = 0; i < buffers.size(); i++) {
        std::vector<unsigned char> back(size);
        HIP(hipMemcpy(back.data(), buffers[i], size, hipMemcpyDeviceToHost));
        for (size_t byte = 0; byte < size; byte++)
            right = right && back[byte] == (i == 3 && byte >= size - 64 ? 0xff : i + 1);
    }
    say("buffers do not touch", right);
    HIP(hipMemGetInfo(&within, &total));
    for (auto buffer : buffers)
        HIP(hipFree(buffer));
    HIP(hipMemGetInfo(&after, &total));
    say("free memory goes down", within + buffers.size() * size <= before);
    say("free memory comes back", after + (2 << 20) >= before);
    void *huge;
    say("too much is refused", hipMalloc(&huge, total * 2) == hipErrorOutOfMemory);
    (void)hipGetLastError();
}

int main()
{
    copies();
    sets();
    planes();
    directions();
    pinned();
    registered();
    managed();
    accounts();
    return done("memory");
}
