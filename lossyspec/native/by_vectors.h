// Products of up to ROWS rows with a block of 16 outputs, by vectors. ahead: how far on to fetch weights.
#pragma once

namespace {

inline bool second_wanted(const Part* parts, int rows) {
    int32_t any = 0;
    for (int n = 0; n < rows; n++) any |= parts[n].two;
    return any;
}

// dots(digits, step) with the second digits of a group. Those of many rows are brought together: there are not enough registers
// for their addresses.
template <int N, typename Dots>
inline void with_seconds(const Digits& x, int64_t group, int64_t row, Dots dots) {
    const int8_t* from = x.second(group, row);
    if constexpr (N < 5) {
        dots(from, GROUP * x.groups);
    } else {
        alignas(64) int8_t near[N * GROUP];
#pragma GCC unroll 1
        for (int n = 0; n < N; n++, from += GROUP * x.groups) std::memcpy(near + n * GROUP, from, GROUP);
        dots(near, GROUP);
    }
}

// Of each row's digits, `step` bytes apart, with a group of int4 weights. With few rows in two chains: one product waits for the
// last of its chain.
template <int N>
inline void dots4(const Bytes* low, const Bytes* high, const int8_t* digits, int64_t step, Ints* products) {
    constexpr int CHAINS = N < 5 ? 2 : 1;
    Ints sums[N * CHAINS] = {};
    for (int j = 0; j < 4; j++) {
        for (int n = 0; n < N; n++) sums[n] = dot4(sums[n], low[j], four(digits + step * n + 8 * j));
        for (int n = 0; n < N; n++) {
            Ints& sum = sums[n + N * (CHAINS - 1)];
            sum = dot4(sum, high[j], four(digits + step * n + 8 * j + 4));
        }
    }
    for (int n = 0; n < N; n++) products[n] = CHAINS == 1 ? sums[n] : sums[n] + sums[n + N];
}

template <int N>
inline void block4(const uint8_t* block, int64_t ahead, const Digits& x, int64_t row, Floats* result) {
    Floats sum[N] = {};
    for (int64_t group = 0; group < x.groups; group++, block += GROUP4_BYTES) {
        Bytes low[4], high[4];
        for (int j = 0; j < 4; j++) {
            __builtin_prefetch(block + 64 * j + ahead, 0, 3);
            const Bytes both = read_once(block + 64 * j);
            low[j] = both & 15, high[j] = both >> 4;
        }
        __builtin_prefetch(block + 256 + ahead, 0, 3);
        const Scales4 scales(block + 256);
        const Part* parts = x.part(group, row);
        Ints products[N], seconds[N];
        dots4<N>(low, high, parts->digits, sizeof(Part), products);
        if (second_wanted(parts, N)) {
            with_seconds<N>(x, group, row, [&](auto digits, auto step) { dots4<N>(low, high, digits, step, seconds); });
            for (int n = 0; n < N; n++) sum[n] = scales.added(sum[n], whole(products[n], seconds[n]), parts[n]);
        } else {
            for (int n = 0; n < N; n++) sum[n] = scales.added(sum[n], whole(products[n]), parts[n]);
        }
    }
    for (int n = 0; n < N; n++) result[n] = sum[n];
}

typedef void (*Block)(const uint8_t*, int64_t, const Digits&, int64_t, Floats*);
const Block BLOCKS4[] = {block4<1>, block4<2>, block4<3>, block4<4>, block4<5>, block4<6>, block4<7>, block4<8>};

#ifndef TILES
// The same with int8 weights of a group of `count` inputs, from what the sums begin with.
template <int N>
inline void dots8(const uint8_t* block, int64_t count, const int8_t* digits, int64_t step, Ints* products) {
    constexpr int CHAINS = N < 5 ? 2 : 1;
    Ints more[N] = {};
    for (int64_t i = 0; i < count; i += 4) {
        const Bytes weights = *(const LooseBytes*)(block + LANES * i);
        for (int n = 0; n < N; n++) {
            Ints& sum = CHAINS == 2 && i / 4 % 2 ? more[n] : products[n];
            sum = dot8(sum, weights, four(digits + step * n + i));
        }
    }
    if (CHAINS == 2)
        for (int n = 0; n < N; n++) products[n] += more[n];
}

template <int N>
inline void block8(const uint8_t* block, int64_t ahead, const Digits& x, int64_t row, Floats* result) {
    Floats sum[N] = {};
    const auto add = [&](int64_t group, int64_t count) {
        for (int64_t i = 0; i < count; i += 4) __builtin_prefetch(block + LANES * i + ahead, 0, 3);
        const Part* parts = x.part(group, row);
        Ints products[N], seconds[N];
        for (int n = 0; n < N; n++) products[n] = all(parts[n].first), seconds[n] = all(parts[n].second);
        dots8<N>(block, count, parts->digits, sizeof(Part), products);
        if (second_wanted(parts, N)) {
            with_seconds<N>(x, group, row, [&](auto digits, auto step) { dots8<N>(block, count, digits, step, seconds); });
            for (int n = 0; n < N; n++) sum[n] = fused(whole(products[n], seconds[n]), all(parts[n].unit), sum[n]);
        } else {
            for (int n = 0; n < N; n++) sum[n] = fused(whole(products[n]), all(parts[n].unit), sum[n]);
        }
        block += LANES * count;
    };
    const int64_t full = x.width / GROUP;
    for (int64_t group = 0; group < full; group++) add(group, GROUP);
    if (full < x.groups) add(full, x.width % GROUP);
    for (int n = 0; n < N; n++) result[n] = sum[n] * load((const float*)block);
}

// Two chains of sums whatever N is: floats are added in one order in any company.
template <int N>
inline void block16(const uint8_t* block, int64_t ahead, const Digits& x, int64_t row, Floats* result) {
    const float* values = x.values + row * x.width;
    Floats even[N] = {}, odd[N] = {};
    for (int64_t i = 0; i < x.width; i += 2, block += 4 * LANES) {
        __builtin_prefetch(block + ahead, 0, 3);
        const Floats one = load_pair(block, 0), other = load_pair(block, 1);
        for (int n = 0; n < N; n++) {
            even[n] = fused(one, all(values[n * x.width + i]), even[n]);
            odd[n] = fused(other, all(values[n * x.width + i + 1]), odd[n]);
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
