// Case C78: loads and stores through buffer descriptors, whose range counts (Vega shader ISA, buffer addressing: a load out of
// range gives 0, a store out of range does nothing, and a stride makes the index count).
#include "suite.h"

typedef unsigned Descriptor __attribute__((ext_vector_type(4)));

// Descriptors of gfx9: base address with the stride in bits 48 to 61, number of records, and format bits for 32-bit words.
static __device__ Descriptor describe(const void *base, unsigned stride, unsigned records)
{
    unsigned long long address = (unsigned long long)base;
    return Descriptor{unsigned(address), unsigned(address >> 32) | stride << 16, records, 0x00027fac};
}

// The descriptor in scalar registers, as the instructions take it.
#define IN_SCALARS                                                                                                   \
    "v_readfirstlane_b32 s20, %2\n v_readfirstlane_b32 s21, %3\n"                                                    \
    "v_readfirstlane_b32 s22, %4\n v_readfirstlane_b32 s23, %5\n s_nop 4\n"
#define DESCRIPTOR(words) "v"(words.x), "v"(words.y), "v"(words.z), "v"(words.w)

#define LOAD(how)                                                                                                    \
    asm volatile(IN_SCALARS "buffer_load_dword %0, %1, s[20:23], 0 " how "\n s_waitcnt vmcnt(0)"                      \
                 : "=&v"(value)                                                                                      \
                 : "v"(place), DESCRIPTOR(words)                                                                     \
                 : "memory", "s20", "s21", "s22", "s23")

#define STORE(how)                                                                                                   \
    asm volatile(IN_SCALARS "buffer_store_dword %0, %1, s[20:23], 0 " how "\n s_waitcnt vmcnt(0)"                     \
                 :                                                                                                   \
                 : "v"(value), "v"(place), DESCRIPTOR(words)                                                         \
                 : "memory", "s20", "s21", "s22", "s23")

__global__ void loads(const unsigned *memory, const unsigned *offsets, unsigned *out, unsigned n)
{
    unsigned id = threadIdx.x;
    if (id >= n)
        return;
    unsigned place = offsets[id], value;
    Descriptor words = describe(memory, 0, 64);
    LOAD("offen");
    out[id * 5 + 0] = value;
    LOAD("offen offset:4");
    out[id * 5 + 1] = value;
    words = describe(memory, 0, 0);
    LOAD("offen");
    out[id * 5 + 2] = value;
    // Four records of 16 bytes: index 3 is the last one.
    words = describe(memory, 16, 4);
    place = id;
    LOAD("idxen");
    out[id * 5 + 3] = value;
    LOAD("idxen offset:8");
    out[id * 5 + 4] = value;
}

__global__ void stores(unsigned *memory, const unsigned *offsets, unsigned n)
{
    unsigned id = threadIdx.x;
    if (id >= n)
        return;
    unsigned place = offsets[id], value = 0xabcd0000 + id;
    Descriptor words = describe(memory, 0, 64);
    STORE("offen");
    words = Descriptor{0, 0, 0, 0};
    STORE("offen");
}

int main()
{
    std::vector<unsigned> memory(64), offsets = {0, 4, 28, 56, 60, 64, 68, 252, 0x7ffffffc, 0x80000000, 0xfffffff0}, expected;
    for (unsigned i = 0; i < memory.size(); i++)
        memory[i] = 0x1000 + i;
    unsigned n = offsets.size();
    auto in_range = [&](unsigned long long offset) { return offset + 4 <= 64 ? memory[offset / 4] : 0; };
    for (unsigned id = 0; id < n; id++) {
        expected.push_back(in_range(offsets[id]));
        expected.push_back(in_range((unsigned long long)offsets[id] + 4));
        expected.push_back(0);
        expected.push_back(id < 4 ? memory[id * 4] : 0);
        expected.push_back(id < 4 ? memory[id * 4 + 2] : 0);
    }
    Device<unsigned> from(memory), places(offsets), out(expected.size());
    loads<<<1, 64>>>(from, places, out, n);
    launched();
    exact("loads", out.get(), expected);

    for (unsigned id = 0; id < n; id++)
        if (offsets[id] + 4ull <= 64)
            memory[offsets[id] / 4] = 0xabcd0000 + id;
    stores<<<1, 64>>>(from, places, n);
    launched();
    exact("stores", from.get(), memory);
    return done("buffers");
}
