// Products of rows of activations with packed matrices, by vectors, or by tiles (AMX) where the CPU has them.
//
// With int4 and int8 weights they are sums of whole numbers. A row of activations is split into two digits of -63 .. 63 under
// its largest magnitude, whose steps are 1/7938 of it: finer than bf16. Sums of a group are exact, and floats are added in one
// order, so that a row's result is the same to the bit in any company: the law does not depend on how many tokens a pass
// verifies. With bf16 weights rows are multiplied in fp32; by tiles as the sum of two bf16 numbers, which is 2^-17 off.
//
// Outputs lie in blocks of 16, one to a lane. int4 (w = scale * (n - 8) + middle, n in 0 .. 15, groups of 32 inputs): by group
// 256 bytes, of which byte 4 o + i of vector j holds inputs 8 j + i (low half) and 8 j + 4 + i (high half) of output o; then
// 16 scales and 16 middles in bf16. int8: by 4 inputs 64 bytes, byte 4 o + i; at the end of a block 16 scales in fp32, and 16
// sums of 64 w. bf16: by 2 inputs 64 bytes, a pair an output.
#pragma once
#include "vectors.h"

extern "C" {

struct Matrix {
    const uint8_t* blocks;
    const float* bias;  // or null
    int64_t outputs, inputs, bits;
};

}  // extern "C"

namespace {

constexpr int MOST_ROWS = 32;  // that a block is multiplied with at a time

// Activations are unsigned in int8 products of vectors: so much is taken off again.
#ifdef TILES
constexpr int SHIFT8 = 0;
#else
constexpr int SHIFT8 = 64;
#endif

// Rows of activations as pairs of digits (rows, 2, width); for bf16 weights as they are, by tiles as pairs of bf16 numbers
// (rows, 2, width). There is room to read ROWS rows too many.
struct Digits {
    int64_t width, stride;
    float *units, *groups;  // what a unit of the second digit stands for; (rows, stride) sums of the digits of a group of 32
    union { float* values; uint16_t* halves; int8_t* digits; };

    static size_t bytes(int64_t rows, int64_t width) {
        return (rows + ROWS) * (4 * width + 4 * (width / GROUP + 1) + 4) + 256;
    }

    Digits(uint8_t* memory, int64_t rows, int64_t inputs) : width(inputs), stride(inputs / GROUP + 1) {
        units = (float*)memory;
        groups = units + rows + ROWS;
        values = groups + (rows + ROWS) * stride;
    }

    int8_t* first(int64_t row) const { return digits + 2 * row * width; }
    int8_t* second(int64_t row) const { return first(row) + width; }

    void set(int64_t row, const float* x, int64_t bits) {
        if (bits == 16) halve(row, x);
        else if (bits == 8) divide8(row, x);
        else divide4(row, x);
    }

    void halve(int64_t row, const float* x) {
#ifdef TILES
        uint16_t *high = halves + 2 * row * width, *low = high + width;
        for (int64_t i = 0; i < width; i++) {
            high[i] = narrowed(x[i]);
            low[i] = narrowed(x[i] - widened(high[i]));
        }
#else
        std::memcpy(values + row * width, x, 4 * width);
#endif
    }

    // The factor that makes digits of a row; 0 where a number is not finite, which spreads to all outputs.
    float up(int64_t row, const float* x) {
        Floats sizes = {}, sum = {};
        int64_t at = 0;
        for (; at + LANES <= width; at += LANES) {
            const Floats value = load(x + at), size = value < Floats{} ? -value : value;
            sizes = size > sizes ? size : sizes;
            sum += value * Floats{};  // NaN where a value is not finite
        }
        float most = largest(sizes), finite = total(sum);
        for (; at < width; at++) {
            most = std::fabs(x[at]) > most ? std::fabs(x[at]) : most;
            finite += x[at] * 0.0f;
        }
        most = most < 1e-30f ? 1e-30f : most;
        units[row] = finite == 0.0f ? most / (MOST * SECOND) : NAN;
        return finite == 0.0f ? MOST / most : 0.0f;
    }

    static Ints part(Floats value, Ints& rest) {
        const Ints digit = nearest(value);
        rest = nearest((value - __builtin_convertvector(digit, Floats)) * SECOND);
        return digit;
    }

    void divide8(int64_t row, const float* x) {
        int8_t *high = first(row), *low = second(row);
        const float by = up(row, x);
        int64_t at = 0;
        for (; at + LANES <= width; at += LANES) {
            Ints rest, digit = part(by ? load(x + at) * by : Floats{}, rest);
            *(LooseDigits16*)(high + at) = __builtin_convertvector(digit + SHIFT8, Digits16);
            *(LooseDigits16*)(low + at) = __builtin_convertvector(rest + SHIFT8, Digits16);
        }
        for (; at < width; at++) {
            const float value = by ? x[at] * by : 0.0f;
            const int digit = nearest(value);
            high[at] = (int8_t)(digit + SHIFT8);
            low[at] = (int8_t)(nearest((value - digit) * SECOND) + SHIFT8);
        }
    }

    void divide4(int64_t row, const float* x) {
        int8_t *high = first(row), *low = second(row);
        const float by = up(row, x);
        for (int64_t group = 0; group < width / GROUP; group++) {
            Ints sum = {};
            for (int i = 0; i < GROUP; i += LANES) {
                Ints rest, digit = part(by ? load(x + group * GROUP + i) * by : Floats{}, rest);
                *(LooseDigits16*)(high + group * GROUP + i) = __builtin_convertvector(digit, Digits16);
                *(LooseDigits16*)(low + group * GROUP + i) = __builtin_convertvector(rest, Digits16);
                sum += digit * (int)SECOND + rest;
            }
            groups[row * stride + group] = total(__builtin_convertvector(sum, Floats));
        }
    }
};

// Scales of a group of int4 weights, and what n = 0 stands for.
struct Scales4 {
    Floats scale, zero;
    explicit Scales4(const uint8_t* from) : scale(load_bf16(from)), zero(load_bf16(from + 32) - 8.0f * scale) {}

    // A row's sum, with the group's products with its digits, whose sum is `ones`.
    Floats added(Floats sum, Ints first, Ints second, float ones) const {
        const Floats whole = __builtin_convertvector(first, Floats) * SECOND + __builtin_convertvector(second, Floats);
        sum = sum + scale * whole;
        return sum + zero * ones;
    }
};

// The products of a block of int8 weights, before what follows it: the scales.
inline Floats scaled8(const uint8_t* scales, Ints first, Ints second, float unit) {
    Floats whole = __builtin_convertvector(first, Floats) * SECOND + __builtin_convertvector(second, Floats);
    return whole * load((const float*)scales) * unit;
}

inline int64_t block_bytes(const Matrix& matrix) {
    return matrix.bits == 4   ? matrix.inputs / GROUP * GROUP4_BYTES
           : matrix.bits == 8 ? matrix.inputs * LANES + 128
                              : matrix.inputs * LANES * 2;
}

}  // namespace

#include "by_vectors.h"
#ifdef TILES
#include "tiles.h"
#endif

namespace {

// This thread's share of blocks: from, to.
struct Share {
    int64_t begin, end;
    Share(const Matrix& matrix, int64_t thread, int64_t threads) {
        const int64_t blocks = (matrix.outputs + LANES - 1) / LANES;
        begin = blocks * thread / threads, end = blocks * (thread + 1) / threads;
    }
};

// This thread's share of y (rows, outputs) = x W^T + b, or y += that. next: whose weights are read then, or null.
void product(const Matrix& matrix, const Digits& x, int64_t rows, float* y, bool add, int64_t thread, int64_t threads,
             Tiles& tiles, const Matrix* next = nullptr) {
    const int64_t bytes = block_bytes(matrix);
    const Share share(matrix, thread, threads);
    const uint8_t* end = matrix.blocks + share.end * bytes;
    Multiplier multiply(matrix, x, rows, tiles);
    alignas(64) Floats result[MOST_ROWS];
    for (int64_t block = share.begin; block < share.end; block++) {
        const uint8_t* weights = matrix.blocks + block * bytes;
        int64_t ahead = AHEAD;
        if (next && end - weights <= AHEAD)
            ahead += next->blocks + Share(*next, thread, threads).begin * block_bytes(*next) - end;
        const int64_t lanes = matrix.outputs - block * LANES < LANES ? matrix.outputs - block * LANES : LANES;
        for (int64_t row = 0; row < rows; row += MOST_ROWS) {
            const int64_t some = rows - row < MOST_ROWS ? rows - row : MOST_ROWS;
            multiply(weights, row ? 0 : ahead, row, some, result);
            for (int64_t n = 0; n < some; n++) {
                float* to = y + (row + n) * matrix.outputs + block * LANES;
                if (lanes == LANES) {
                    Floats value = result[n];
                    if (matrix.bias) value += load(matrix.bias + block * LANES);
                    store(to, add ? load(to) + value : value);
                    continue;
                }
                for (int64_t lane = 0; lane < lanes; lane++) {
                    float value = result[n][lane];
                    if (matrix.bias) value += matrix.bias[block * LANES + lane];
                    to[lane] = add ? to[lane] + value : value;
                }
            }
        }
    }
}

}  // namespace
