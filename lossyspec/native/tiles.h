// The same by tiles (AMX), whose products take the same time for up to 16 rows of digits. A tile of weights holds 16 outputs, a tile
// of sums a row for each row of digits. int8 and bf16: a tile of activations has the two digits of each of 8 rows. int4: the first
// ones, and another tile the second ones where there are some.
#pragma once
#include <initializer_list>
#include <sys/syscall.h>
#include <type_traits>
#include <unistd.h>

namespace {

// The sizes of the tiles, as `ldtilecfg` reads them.
struct Shape {
    uint8_t palette = 1, start = 0, zeros[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int64_t many, int64_t wide) { rows[tile] = many, bytes[tile] = wide; }
};

#ifdef EMULATED_TILES
}  // namespace
#include EMULATED_TILES
namespace {
#else
inline void tile_shapes(const Shape& shape) { asm volatile("ldtilecfg %0" ::"m"(shape)); }
inline void tile_release() { asm volatile("tilerelease" ::); }

// gcc's own intrinsics do not say that they read memory
template <int TILE>
inline void tile_load(const void* from, int64_t step) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(TILE), "r"(from), "r"(step) : "memory");
}
template <int TILE>
inline void tile_store(void* to) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(TILE), "r"(to), "r"((int64_t)64) : "memory");
}
template <int TILE>
inline void tile_zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}

// Adds to the sums: bf16 numbers; int8 weights; int4 weights.
template <int BITS, int SUMS, int ROWS_TILE, int WEIGHTS>
inline void tile_dot() {
    if constexpr (BITS == 16) asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(ROWS_TILE), "i"(WEIGHTS));
    else if constexpr (BITS == 8) asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(ROWS_TILE), "i"(WEIGHTS));
    else asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(ROWS_TILE), "i"(WEIGHTS));
}

// Asks the system for tiles.
inline bool tiles_allowed() { return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0; }
#endif

constexpr int TILE_BYTES = 1024, GROUP4_TILE_BYTES = 512;
// rows of int4 products from which on tiles are faster: weights are unpacked for them, and sums taken out for each group. Measured
// when vectors multiplied two digits of each row, which now do half the work: to be measured again
constexpr int MANY4 = 5;
// groups of a block of int4 weights that are unpacked at a time: so many stay in the nearest cache
constexpr int GROUPS = 24;
// steps after which sums of a group are read: until then they are not in the cache
constexpr int LATER = 3;

// The tiles of a thread, which are sized and given back as seldom as can be: both take a microsecond.
struct Tiles {
    Shape shape;
    bool used = false;

    void be(const Shape& wanted) {
        if (used && !std::memcmp(&shape, &wanted, sizeof shape)) return;
        shape = wanted, used = true;
        tile_shapes(shape);
    }
    ~Tiles() {
        if (used) tile_release();
    }
};

inline void prefetch(const uint8_t* from, int lines) {
    for (int line = 0; line < lines; line++) __builtin_prefetch(from + 64 * line, 0, 2);
}

// Multiplies `some` rows from `row` on with a block, `step` at a time: those past the last give numbers that nobody wants.
struct Multiplier {
    typedef void (Multiplier::*Kernel)(const uint8_t*, int64_t, int64_t, int64_t, Floats*);
    const Digits& x;
    int64_t step;
    Kernel kernel;
    alignas(64) uint8_t unpacked[GROUPS * GROUP4_TILE_BYTES];
    alignas(64) int32_t sums[4][2 * ROWS][LANES], seconds[4][ROWS][LANES];

    // tiles 0 - 3: sums. int4: 4, 5 rows and 6, 7 weights of a group. Else 4 rows and 5 weights, 6 and 7 those of the end.
    Multiplier(const Matrix& matrix, const Digits& x, int64_t rows, Tiles& tiles) : x(x) {
        if (matrix.bits == 4 && rows < MANY4) {
            kernel = &Multiplier::few4;
            return;
        }
        const int64_t pieces = (rows + ROWS - 1) / ROWS, end = x.width * (matrix.bits == 16 ? 2 : 1) % 64;
        step = rows < MOST_ROWS ? (rows + pieces - 1) / pieces : ROWS;
        Shape shape;
        for (int tile = 0; tile < 4; tile++) shape.set(tile, matrix.bits == 4 ? step : 2 * step, 64);
        if (matrix.bits == 4) {
            for (int tile : {4, 5}) shape.set(tile, step, GROUP);
            for (int tile : {6, 7}) shape.set(tile, GROUP / 4, 64);
        } else {
            shape.set(4, 2 * step, 64), shape.set(5, 16, 64);
            if (end) shape.set(6, 2 * step, end), shape.set(7, end / 4, 64);
        }
        tiles.be(shape);
        kernel = matrix.bits == 4 ? kernel_of<4>() : matrix.bits == 8 ? kernel_of<8>() : kernel_of<16>();
    }

    template <int BITS, int N = ROWS>
    Kernel kernel_of() {
        if constexpr (N > 1)
            if (step < N) return kernel_of<BITS, N - 1>();
        if constexpr (BITS == 4) return &Multiplier::rows4<N>;
        else if constexpr (BITS == 8) return &Multiplier::rows8<N>;
        else return &Multiplier::rows16<N>;
    }

    void operator()(const uint8_t* block, int64_t ahead, int64_t row, int64_t some, Floats* result) {
        (this->*kernel)(block, ahead, row, some, result);
    }

    void few4(const uint8_t* block, int64_t ahead, int64_t row, int64_t some, Floats* result) {
        BLOCKS4[some - 1](block, ahead, x, row, result);
    }

    void unpack(const uint8_t* block, int64_t groups) {
        for (int64_t group = 0; group < groups; group++, block += GROUP4_BYTES)
            for (int j = 0; j < 4; j++) {
                const Bytes both = *(const LooseBytes*)(block + 64 * j);
                uint8_t* to = unpacked + GROUP4_TILE_BYTES * group + 128 * j;
                *(LooseBytes*)to = both & 15;
                *(LooseBytes*)(to + 64) = both >> 4;
            }
    }

    template <int SUMS>
    void multiply4(int64_t group, int64_t row, const uint8_t* weights) {
        constexpr int ONE = 4 + SUMS % 2, OTHER = 6 + SUMS % 2;
        const Part* parts = x.part(group, row);
        tile_zero<SUMS>();
        tile_load<ONE>(parts->digits, sizeof(Part));
        tile_load<OTHER>(weights, 64);
        tile_dot<4, SUMS, ONE, OTHER>();
        tile_store<SUMS>(sums[SUMS]);
        if (!second_wanted(parts, step)) return;
        tile_zero<SUMS>();
        tile_load<ONE>(x.second(group, row), GROUP * x.groups);
        tile_dot<4, SUMS, ONE, OTHER>();
        tile_store<SUMS>(seconds[SUMS]);
    }

    template <int N>
    void rows4(const uint8_t* block, int64_t ahead, int64_t row, int64_t some, Floats* result) {
        for (int64_t begin = 0; begin < x.groups; begin += GROUPS) {
            const int64_t end = begin + GROUPS < x.groups ? begin + GROUPS : x.groups;
            unpack(block + begin * GROUP4_BYTES, end - begin);
            for (int64_t n = 0; n < some; n += N) {
                Floats sum[N];
                for (int i = 0; i < N; i++) sum[i] = begin ? result[n + i] : Floats{};
                for (int64_t group = begin; group < end + LATER; group++) {
                    if (group < end) {
                        if (n == 0) prefetch(block + group * GROUP4_BYTES + ahead, GROUP4_BYTES / 64);
                        const uint8_t* weights = unpacked + GROUP4_TILE_BYTES * (group - begin);
                        switch (group % 4) {
                            case 0: multiply4<0>(group, row + n, weights); break;
                            case 1: multiply4<1>(group, row + n, weights); break;
                            case 2: multiply4<2>(group, row + n, weights); break;
                            default: multiply4<3>(group, row + n, weights);
                        }
                    }
                    const int64_t done = group - LATER;
                    if (done < begin) continue;
                    const Part* parts = x.part(done, row + n);
                    const LooseInts *one = (const LooseInts*)sums[done % 4], *other = (const LooseInts*)seconds[done % 4];
                    const Scales4 scales(block + done * GROUP4_BYTES + 256);
                    if (second_wanted(parts, N))
                        for (int i = 0; i < N; i++) sum[i] = scales.added(sum[i], whole(one[i], other[i]), parts[i]);
                    else
                        for (int i = 0; i < N; i++) sum[i] = scales.added(sum[i], whole(one[i]), parts[i]);
                }
                for (int i = 0; i < N; i++) result[n + i] = sum[i];
            }
        }
    }

    // Rows of `bytes` bytes with whole tiles, in two chains, since one product waits for the last of its chain, then with what
    // is left. The sums are those of both chains. Returns what follows the weights.
    template <int BITS>
    const uint8_t* multiply(const void* from, int64_t bytes, const uint8_t* block, int64_t ahead) {
        const uint8_t* rows = (const uint8_t*)from;
        int64_t at = 0;
        auto full = [&](auto chain) {
            prefetch(block + ahead, TILE_BYTES / 64);
            tile_load<4>(rows + at, bytes);
            tile_load<5>(block, 64);
            tile_dot<BITS, chain.value, 4, 5>();
            at += 64, block += TILE_BYTES;
        };
        tile_zero<0>();
        tile_zero<1>();
        while (at + 128 <= bytes) full(std::integral_constant<int, 0>()), full(std::integral_constant<int, 1>());
        if (at + 64 <= bytes) full(std::integral_constant<int, 0>());
        if (at < bytes) {
            tile_load<6>(rows + at, bytes);
            tile_load<7>(block, 64);
            tile_dot<BITS, 1, 6, 7>();
            block += 16 * (bytes - at);
        }
        tile_store<0>(sums[0]);
        tile_store<1>(sums[1]);
        return block;
    }

    template <int N>
    void rows8(const uint8_t* block, int64_t ahead, int64_t row, int64_t some, Floats* result) {
        for (int64_t n = 0; n < some; n += N) {
            const Floats scale = load((const float*)multiply<8>(x.whole_row(row + n), x.width, block, n ? 0 : ahead));
            const LooseInts *one = (const LooseInts*)sums[0], *other = (const LooseInts*)sums[1];
            for (int i = 0; i < N; i++)
                result[n + i] = whole(one[2 * i] + other[2 * i], one[2 * i + 1] + other[2 * i + 1]) * scale * x.units[row + n + i];
        }
    }

    template <int N>
    void rows16(const uint8_t* block, int64_t ahead, int64_t row, int64_t some, Floats* result) {
        for (int64_t n = 0; n < some; n += N) {
            multiply<16>(x.halves + 2 * (row + n) * x.width, 2 * x.width, block, n ? 0 : ahead);
            const LooseFloats *one = (const LooseFloats*)sums[0], *other = (const LooseFloats*)sums[1];
            for (int i = 0; i < N; i++) result[n + i] = (one[2 * i] + other[2 * i]) + (one[2 * i + 1] + other[2 * i + 1]);
        }
    }
};

}  // namespace

extern "C" {

// Asks the system for tiles. 0: it has none for us.
int lossyspec_tiles() { return tiles_allowed(); }

}  // extern "C"
