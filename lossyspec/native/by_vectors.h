// Products of up to ROWS rows with a block of 16 outputs, by vectors. ahead: how far on to fetch weights.
#pragma once

namespace {

template <int N>
inline void block4(const uint8_t* block, int64_t ahead, const Digits& x, int64_t row, Floats* result) {
    Floats sum[N] = {};
    for (int64_t group = 0; group < x.width / GROUP; group++, block += GROUP4_BYTES) {
        Ints first[N] = {}, second[N] = {};
        for (int j = 0; j < 4; j++) {
            __builtin_prefetch(block + 64 * j + ahead, 0, 2);
            Bytes both = *(const LooseBytes*)(block + 64 * j);
            Bytes low = both & 15, high = both >> 4;
            for (int n = 0; n < N; n++) {
                const int8_t *a = x.first(row + n) + GROUP * group + 8 * j, *b = x.second(row + n) + GROUP * group + 8 * j;
                first[n] = dot(first[n], low, four(a));
                second[n] = dot(second[n], low, four(b));
                first[n] = dot(first[n], high, four(a + 4));
                second[n] = dot(second[n], high, four(b + 4));
            }
        }
        __builtin_prefetch(block + 256 + ahead, 0, 2);
        const Scales4 scales(block + 256);
        for (int n = 0; n < N; n++)
            sum[n] = scales.added(sum[n], first[n], second[n], x.groups[(row + n) * x.stride + group]);
    }
    for (int n = 0; n < N; n++) result[n] = sum[n] * x.units[row + n];
}

typedef void (*Block)(const uint8_t*, int64_t, const Digits&, int64_t, Floats*);
const Block BLOCKS4[] = {block4<1>, block4<2>, block4<3>, block4<4>, block4<5>, block4<6>, block4<7>, block4<8>};

#ifndef TILES
template <int N>
inline void block8(const uint8_t* block, int64_t ahead, const Digits& x, int64_t row, Floats* result) {
    // with few rows, sums in several chains: one product waits for the last of its chain
    constexpr int CHAINS = N < 3 ? 4 : N < 5 ? 2 : 1;
    Ints first[N * CHAINS] = {}, second[N * CHAINS] = {};
    auto step = [&](int64_t i, int chain) {
        __builtin_prefetch(block + ahead, 0, 2);
        Bytes weights = *(const LooseBytes*)block;
        for (int n = 0; n < N; n++) {
            first[n + N * chain] = dot(first[n + N * chain], four(x.first(row + n) + i), weights);
            second[n + N * chain] = dot(second[n + N * chain], four(x.second(row + n) + i), weights);
        }
        block += 64;
    };
    int64_t i = 0;
    for (; i + 4 * CHAINS <= x.width; i += 4 * CHAINS)
        for (int chain = 0; chain < CHAINS; chain++) step(i + 4 * chain, chain);
    for (; i < x.width; i += 4) step(i, 0);
    for (int chain = 1; chain < CHAINS; chain++)
        for (int n = 0; n < N; n++) first[n] += first[n + N * chain], second[n] += second[n + N * chain];
    const Ints shift = *(const LooseInts*)(block + 64);
    for (int n = 0; n < N; n++) first[n] -= shift, second[n] -= shift;
    for (int n = 0; n < N; n++) result[n] = scaled8(block, first[n], second[n], x.units[row + n]);
}

// Two chains of sums whatever N is: floats are added in one order in any company.
template <int N>
inline void block16(const uint8_t* block, int64_t ahead, const Digits& x, int64_t row, Floats* result) {
    const float* values = x.values + row * x.width;
    Floats even[N] = {}, odd[N] = {};
    for (int64_t i = 0; i < x.width; i += 2, block += 4 * LANES) {
        __builtin_prefetch(block + ahead, 0, 2);
        const Ints pairs = *(const LooseInts*)block;
        const Floats one = (Floats)(pairs << 16), other = (Floats)(pairs & (int32_t)0xffff0000);
        for (int n = 0; n < N; n++) {
            even[n] += one * values[n * x.width + i];
            odd[n] += other * values[n * x.width + i + 1];
        }
    }
    for (int n = 0; n < N; n++) result[n] = even[n] + odd[n];
}

const Block BLOCKS8[] = {block8<1>, block8<2>, block8<3>, block8<4>, block8<5>, block8<6>, block8<7>, block8<8>};
const Block BLOCKS16[] = {block16<1>, block16<2>, block16<3>, block16<4>, block16<5>, block16<6>, block16<7>, block16<8>};

struct Tiles {};

// Multiplies `some` rows from `row` on with a block.
struct Multiplier {
    const Digits& x;
    const Block* kernels;

    Multiplier(const Matrix& matrix, const Digits& x, int64_t, Tiles&)
        : x(x), kernels(matrix.bits == 4 ? BLOCKS4 : matrix.bits == 8 ? BLOCKS8 : BLOCKS16) {}

    void operator()(const uint8_t* block, int64_t ahead, int64_t row, int64_t some, Floats* result) {
        for (int64_t n = 0; n < some; n += ROWS) {
            const int64_t few = some - n < ROWS ? some - n : ROWS;
            kernels[few - 1](block, n ? 0 : ahead, x, row + n, result + n);
        }
    }
};
#endif

}  // namespace
