// What the HIP programs share: checked calls, buffers, and result lines.
//
// Every program prints one line for each result. A result that must be exact is printed as a hash of its bits and compared
// with a reference that the program computes on the CPU; a result of a maths function is compared within the limit that the
// OpenCL C specification gives (table of relative error as ULP values), and the hash of its bits is printed as well, so that
// two runs on the same GPU can be compared line by line. The last line says whether all was right.
#pragma once

#include <hip/hip_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define HIP(call)                                                                                                    \
    do {                                                                                                             \
        hipError_t error_ = (call);                                                                                  \
        if (error_ != hipSuccess) {                                                                                  \
            printf("%s:%d: %s: %s\n", __FILE_NAME__, __LINE__, #call, hipGetErrorName(error_));                      \
            exit(3);                                                                                                 \
        }                                                                                                            \
    } while (0)

inline int wrong_results = 0;

// FNV-1a with 64 bits.
inline uint64_t hash_of(const void *data, size_t bytes)
{
    const unsigned char *at = static_cast<const unsigned char *>(data);
    uint64_t hash = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ at[i]) * 0x100000001b3ull;
    return hash;
}

// The numbers of a xorshift generator, the same on every machine.
struct Random {
    uint64_t state;
    explicit Random(uint64_t seed) : state(seed * 0x9e3779b97f4a7c15ull + 1) {}
    uint32_t next()
    {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        return uint32_t(state >> 16);
    }
    uint64_t wide() { return uint64_t(next()) << 32 | next(); }
    // In [0, 1), with 24 bits.
    float unit() { return float(next() >> 8) * 0x1p-24f; }
};

inline void say(const char *label, bool right)
{
    printf("%s: %s\n", label, right ? "right" : "WRONG");
    if (!right)
        wrong_results++;
}

inline void print_bits(const void *value, size_t bytes)
{
    for (size_t i = bytes; i-- > 0;)
        printf("%02x", static_cast<const unsigned char *>(value)[i]);
}

// Compares bit by bit.
template <typename T> void exact(const char *label, const std::vector<T> &found, const std::vector<T> &expected)
{
    size_t wrong = found.size() != expected.size();
    size_t first = 0;
    for (size_t i = 0; i < found.size() && i < expected.size(); i++) {
        if (memcmp(&found[i], &expected[i], sizeof(T)) != 0) {
            if (wrong++ == 0)
                first = i;
        }
    }
    if (wrong == 0) {
        printf("%s: %zu values, %016llx\n", label, found.size(),
               (unsigned long long)hash_of(found.data(), found.size() * sizeof(T)));
        return;
    }
    wrong_results++;
    printf("%s: WRONG: %zu of %zu, first at %zu: found ", label, wrong, found.size(), first);
    if (first < found.size() && first < expected.size()) {
        print_bits(&found[first], sizeof(T));
        printf(", expected ");
        print_bits(&expected[first], sizeof(T));
    }
    printf("\n");
}

// The distance of `found` from the exact value, in units of the last place of a type with `digits` significant bits and the
// smallest normal exponent `least` (as frexp counts).
inline double ulps(long double found, long double exact_value, int digits, int least)
{
    if (std::isnan(exact_value) || std::isnan(found))
        return std::isnan(exact_value) && std::isnan(found) ? 0 : INFINITY;
    if (std::isinf(found) || std::isinf(exact_value))
        return found == exact_value ? 0 : INFINITY;
    int exponent;
    frexpl(exact_value, &exponent);
    if (exponent < least)
        exponent = least;
    return double(fabsl(found - exact_value) / ldexpl(1.0L, exponent - digits));
}

inline double ulps_of(float found, long double exact_value)
{
    // What rounds to infinity may be infinite.
    if (std::isinf(found) && fabsl(exact_value) >= 0x1.ffffffp127L && (found > 0) == (exact_value > 0))
        return 0;
    return ulps(found, exact_value, 24, -125);
}

inline double ulps_of(double found, long double exact_value)
{
    if (std::isinf(found) && fabsl(exact_value) >= ldexpl(0x1.fffffffffffff8p0L, 1023) && (found > 0) == (exact_value > 0))
        return 0;
    return ulps(found, exact_value, 53, -1021);
}

// Compares within `limit` units of the last place.
template <typename T>
void within(const char *label, double limit, const std::vector<T> &found, const std::vector<long double> &expected)
{
    size_t wrong = 0, first = 0;
    for (size_t i = 0; i < found.size(); i++) {
        if (!(ulps_of(found[i], expected[i]) <= limit)) {
            if (wrong++ == 0)
                first = i;
        }
    }
    if (wrong == 0) {
        printf("%s: %zu values within %g ulp, %016llx\n", label, found.size(), limit,
               (unsigned long long)hash_of(found.data(), found.size() * sizeof(T)));
        return;
    }
    wrong_results++;
    printf("%s: WRONG: %zu of %zu, first at %zu: found %.17g, expected %.17Lg, %g ulp\n", label, wrong, found.size(), first,
           double(found[first]), expected[first], ulps_of(found[first], expected[first]));
}

// An array in the GPU's memory.
template <typename T> struct Device {
    T *at = nullptr;
    size_t count;
    explicit Device(size_t n) : count(n) { HIP(hipMalloc(reinterpret_cast<void **>(&at), n * sizeof(T))); }
    explicit Device(const std::vector<T> &from) : Device(from.size()) { put(from); }
    Device(const Device &) = delete;
    ~Device() { (void)hipFree(at); }
    operator T *() const { return at; }
    void put(const std::vector<T> &from)
    {
        HIP(hipMemcpy(at, from.data(), from.size() * sizeof(T), hipMemcpyHostToDevice));
    }
    std::vector<T> get() const
    {
        std::vector<T> to(count);
        HIP(hipMemcpy(to.data(), at, count * sizeof(T), hipMemcpyDeviceToHost));
        return to;
    }
    void clear() { HIP(hipMemset(at, 0, count * sizeof(T))); }
};

// Asks whether a launch worked.
inline void launched() { HIP(hipGetLastError()); }

// The last line, and the exit status.
inline int done(const char *name)
{
    HIP(hipDeviceSynchronize());
    if (wrong_results == 0)
        printf("%s: all right\n", name);
    else
        printf("%s: %d results are wrong\n", name, wrong_results);
    return wrong_results != 0;
}
