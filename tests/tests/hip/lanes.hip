// Exchange between the lanes of a wave, ballots, waves that are not full, LDS instructions with two offsets, swizzles.
#include "suite.h"

__global__ void shuffles(const unsigned *in, unsigned *out)
{
    unsigned id = threadIdx.x, value = in[id];
    out[0 * 64 + id] = __shfl(value, (id * 7 + 3) % 64);
    out[1 * 64 + id] = __shfl_up(value, 5);
    out[2 * 64 + id] = __shfl_down(value, 9);
    out[3 * 64 + id] = __shfl_xor(value, 33);
    out[4 * 64 + id] = __shfl(value, 2, 16);
    out[5 * 64 + id] = __shfl_xor(value, 1, 2);
    // Across the border of what is half a wave.
    out[6 * 64 + id] = __shfl(value, id ^ 32);
    // All read one lane.
    out[7 * 64 + id] = __shfl(value, 31) + __shfl(value, 32);
}

static void expect_shuffles()
{
    std::vector<unsigned> in(64), expected(8 * 64);
    Random random(1);
    for (auto &value : in)
        value = random.next();
    for (unsigned id = 0; id < 64; id++) {
        expected[0 * 64 + id] = in[(id * 7 + 3) % 64];
        expected[1 * 64 + id] = in[id < 5 ? id : id - 5];
        expected[2 * 64 + id] = in[id + 9 > 63 ? id : id + 9];
        expected[3 * 64 + id] = in[id ^ 33];
        expected[4 * 64 + id] = in[id / 16 * 16 + 2];
        expected[5 * 64 + id] = in[id ^ 1];
        expected[6 * 64 + id] = in[id ^ 32];
        expected[7 * 64 + id] = in[31] + in[32];
    }
    Device<unsigned> from(in), to(expected.size());
    shuffles<<<1, 64>>>(from, to);
    launched();
    exact("shuffles", to.get(), expected);
}

__global__ void shuffles_of_pairs(const double *in, double *out, long long *wide)
{
    unsigned id = threadIdx.x;
    out[id] = __shfl_xor(in[id], 17);
    wide[id] = __shfl((long long)id << 40 | id, (id + 40) % 64);
}

static void expect_pairs()
{
    std::vector<double> in(64), expected(64);
    std::vector<long long> wide(64);
    for (unsigned id = 0; id < 64; id++)
        in[id] = 1.0 / (id + 1);
    for (unsigned id = 0; id < 64; id++) {
        expected[id] = in[id ^ 17];
        unsigned from = (id + 40) % 64;
        wide[id] = (long long)from << 40 | from;
    }
    Device<double> from(in), to(64);
    Device<long long> wide_to(64);
    shuffles_of_pairs<<<1, 64>>>(from, to, wide_to);
    launched();
    exact("shuffle of double", to.get(), expected);
    exact("shuffle of long long", wide_to.get(), wide);
}

// Case C80: a wave has 64 lanes, and a last wave may have fewer.
__global__ void ballots(unsigned long long *out)
{
    unsigned id = threadIdx.x % 64, wave = threadIdx.x / 64;
    unsigned long long *at = out + wave * 6;
    unsigned long long high = __ballot(id >= 32), odd = __ballot(id & 1), all = __ballot(1);
    int any = __any(id == 39), none = __any(id == 64), every = __all(id < 40);
    unsigned below = __popcll(odd & ((1ull << id) - 1));
    unsigned long long counted = __ballot(below == id / 2);
    if (id == 0) {
        at[0] = high;
        at[1] = odd;
        at[2] = all;
        at[3] = any | none << 1 | every << 2;
        at[4] = counted;
    }
    // A branch that only some lanes take sees only these.
    if (id % 3 == 0) {
        unsigned long long inside = __ballot(1);
        if (id == 3)
            at[5] = inside;
    }
}

static void expect_ballots()
{
    std::vector<unsigned long long> expected(12);
    unsigned long long thirds = 0;
    for (unsigned id = 0; id < 64; id += 3)
        thirds |= 1ull << id;
    for (unsigned wave = 0; wave < 2; wave++) {
        unsigned long long lanes = wave == 0 ? ~0ull : (1ull << 40) - 1;
        expected[wave * 6 + 0] = 0xffffffff00000000ull & lanes;
        expected[wave * 6 + 1] = 0xaaaaaaaaaaaaaaaaull & lanes;
        expected[wave * 6 + 2] = lanes;
        expected[wave * 6 + 3] = wave == 0 ? 1 : 5;
        expected[wave * 6 + 4] = lanes;
        expected[wave * 6 + 5] = thirds & lanes;
    }
    Device<unsigned long long> out(12);
    out.clear();
    ballots<<<1, 104>>>(out);
    launched();
    exact("ballots of a full and of a partial wave", out.get(), expected);
}

// Case C77.
__global__ void two_offsets(unsigned long long *out)
{
    __shared__ unsigned long long lds[512];
    unsigned id = threadIdx.x;
    for (unsigned i = id; i < 512; i += 64)
        lds[i] = 0x0101010100000000ull * (i & 7) + i;
    __syncthreads();
    unsigned address = (unsigned)(size_t)(__attribute__((address_space(3))) void *)lds + (id % 8) * 8;
    typedef unsigned long long Pair __attribute__((ext_vector_type(2)));
    typedef unsigned Couple __attribute__((ext_vector_type(2)));
    Pair near, far;
    Couple words, wide_words;
    asm volatile("ds_read2_b64 %0, %4 offset0:1 offset1:5\n"
                 "ds_read2st64_b64 %1, %4 offset0:1 offset1:3\n"
                 "ds_read2_b32 %2, %4 offset0:3 offset1:8\n"
                 "ds_read2st64_b32 %3, %4 offset0:2 offset1:1\n"
                 "s_waitcnt lgkmcnt(0)"
                 : "=&v"(near), "=&v"(far), "=&v"(words), "=&v"(wide_words)
                 : "v"(address)
                 : "memory");
    out[id * 6 + 0] = near.x;
    out[id * 6 + 1] = near.y;
    out[id * 6 + 2] = far.x;
    out[id * 6 + 3] = far.y;
    out[id * 6 + 4] = (unsigned long long)words.y << 32 | words.x;
    out[id * 6 + 5] = (unsigned long long)wide_words.y << 32 | wide_words.x;
}

static void expect_two_offsets()
{
    auto lds = [](unsigned i) { return 0x0101010100000000ull * (i & 7) + i; };
    auto word = [&](unsigned byte) { return (unsigned long long)(unsigned)(lds(byte / 8) >> (byte % 8 * 8)); };
    std::vector<unsigned long long> expected(64 * 6);
    for (unsigned id = 0; id < 64; id++) {
        unsigned base = id % 8;
        expected[id * 6 + 0] = lds(base + 1);
        expected[id * 6 + 1] = lds(base + 5);
        expected[id * 6 + 2] = lds(base + 64);
        expected[id * 6 + 3] = lds(base + 3 * 64);
        expected[id * 6 + 4] = word(base * 8 + 32) << 32 | word(base * 8 + 12);
        expected[id * 6 + 5] = word(base * 8 + 256) << 32 | word(base * 8 + 512);
    }
    Device<unsigned long long> out(64 * 6);
    two_offsets<<<1, 64>>>(out);
    launched();
    exact("LDS reads with two offsets", out.get(), expected);
}

// Case C77: patterns of ds_swizzle are and, or and xor masks of 5 bits within 32 lanes (bit 15 clear), or a permutation of
// each four lanes (bit 15 set).
__global__ void swizzles(unsigned *out)
{
    int id = threadIdx.x;
    out[0 * 64 + id] = __builtin_amdgcn_ds_swizzle(id, 1 << 10 | 0x1f);
    out[1 * 64 + id] = __builtin_amdgcn_ds_swizzle(id, 2 << 10 | 0x1f);
    out[2 * 64 + id] = __builtin_amdgcn_ds_swizzle(id, 4 << 10 | 0x1f);
    out[3 * 64 + id] = __builtin_amdgcn_ds_swizzle(id, 8 << 10 | 0x1f);
    out[4 * 64 + id] = __builtin_amdgcn_ds_swizzle(id, 16 << 10 | 0x1f);
    out[5 * 64 + id] = __builtin_amdgcn_ds_swizzle(id, 3 << 5 | 0x18);
    out[6 * 64 + id] = __builtin_amdgcn_ds_swizzle(id, 0x8000 | 0x1b);
    out[7 * 64 + id] = __builtin_amdgcn_ds_bpermute((63 - id) * 4, id * 3);
    out[8 * 64 + id] = __builtin_amdgcn_ds_permute((id ^ 21) * 4, id * 5);
    // Data-parallel modifiers: a row shift, a row rotation, a mirror, a quad permutation, a broadcast of lane 15 of each row.
    out[9 * 64 + id] = __builtin_amdgcn_update_dpp(1000, id, 0x112, 0xf, 0xf, false);
    out[10 * 64 + id] = __builtin_amdgcn_update_dpp(1000, id, 0x124, 0xf, 0xf, false);
    out[11 * 64 + id] = __builtin_amdgcn_update_dpp(1000, id, 0x140, 0xf, 0xf, false);
    out[12 * 64 + id] = __builtin_amdgcn_update_dpp(1000, id, 0x4e, 0xf, 0xf, false);
    out[13 * 64 + id] = __builtin_amdgcn_update_dpp(1000, id, 0x142, 0xa, 0xf, false);
    out[14 * 64 + id] = __builtin_amdgcn_update_dpp(1000, id, 0x112, 0xf, 0x5, true);
    out[15 * 64 + id] = __builtin_amdgcn_readlane(id * id, 41);
    out[16 * 64 + id] = __builtin_amdgcn_readfirstlane(id + 77);
    out[17 * 64 + id] = __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0));
}

static void expect_swizzles()
{
    std::vector<unsigned> expected(18 * 64);
    auto at = [&](unsigned line, unsigned id) -> unsigned & { return expected[line * 64 + id]; };
    for (unsigned id = 0; id < 64; id++) {
        for (unsigned line = 0; line < 5; line++)
            at(line, id) = id ^ 1u << line;
        at(5, id) = (id & 32) | ((id & 0x18) | 3);
        at(6, id) = (id & ~3u) | (3 - (id & 3));
        at(7, id) = (63 - id) * 3;
        at(8, id ^ 21) = id * 5;
        at(9, id) = id % 16 >= 2 ? id - 2 : 1000;
        at(10, id) = (id & ~15u) | ((id + 16 - 4) % 16);
        at(11, id) = (id & ~15u) | (15 - id % 16);
        at(12, id) = (id & ~3u) | (0x4e >> (id % 4 * 2) & 3);
        // Rows 1 and 3 only; row n gets lane 15 of row n - 1.
        at(13, id) = id / 16 % 2 == 1 ? id / 16 * 16 - 1 : 1000;
        // Banks 0 and 2 only; what comes from outside of the row is 0.
        at(14, id) = id / 4 % 2 == 1 ? 1000 : id % 16 >= 2 ? id - 2 : 0;
        at(15, id) = 41 * 41;
        at(16, id) = 77;
        at(17, id) = id;
    }
    Device<unsigned> out(expected.size());
    swizzles<<<1, 64>>>(out);
    launched();
    exact("swizzles, permutations and row operations", out.get(), expected);
}

__global__ void lane_sums(const unsigned *in, unsigned *out, unsigned n)
{
    unsigned id = threadIdx.x;
    unsigned value = id < n ? in[id] : 0;
    for (unsigned step = 1; step < 64; step *= 2) {
        unsigned before = __shfl_up(value, step);
        if (id >= step)
            value += before;
    }
    if (id < n)
        out[id] = value;
}

static void expect_lane_sums()
{
    std::vector<unsigned> in(64), expected(64);
    unsigned sum = 0;
    for (unsigned id = 0; id < 64; id++) {
        in[id] = id * 0x01234567u;
        expected[id] = sum += in[id];
    }
    Device<unsigned> from(in), to(64);
    lane_sums<<<1, 64>>>(from, to, 64);
    launched();
    exact("prefix sums over a wave", to.get(), expected);
}

int main()
{
    expect_shuffles();
    expect_pairs();
    expect_ballots();
    expect_two_offsets();
    expect_swizzles();
    expect_lane_sums();
    return done("lanes");
}
