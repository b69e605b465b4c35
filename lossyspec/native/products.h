// Products of rows of activations with packed matrices, by vectors, or by tiles (AMX) where the CPU has them.
//
// With int4 and int8 weights they are sums of whole numbers. Activations are digits of -127 .. 127 under the largest magnitude
// of their group of 32 inputs. A group 1.5 times as large as the row's groups are (root mean square) has second digits, 254 to a
// first one, and so has each of a row of under four: language models have outliers, and what is far below them does not need
// their range. The embedded model's law is nearer to that of exact activations than by bf16 ones (docs/runtime.md). Sums of a
// group are exact, and floats are added in one order, so that a row's result is the same to the bit in any company: the law does
// not depend on how many tokens a pass verifies. Tiles multiply int8 weights without groups: there a row has one unit, and all
// second digits.
// With bf16 weights rows are multiplied in fp32; by tiles as the sum of two bf16 numbers, which is 2^-17 off.
//
// Outputs lie in blocks of 16, one to a lane. int4 (w = scale * (n - 8) + middle, n in 0 .. 15, groups of 32 inputs): by group
// 256 bytes, of which byte 4 o + i of vector j holds inputs 8 j + i (low half) and 8 j + 4 + i (high half) of output o; then
// 16 scales and 16 middles in bf16. int8: by 4 inputs 64 bytes, byte 4 o + i; at the end of a block 16 scales in fp32. bf16: by
// 2 inputs 64 bytes, a pair an output.
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

// What a row has of a group of inputs, in a line of the cache: a thread that multiplies fetches no more of what another one made.
struct alignas(64) Part {
    int8_t digits[GROUP];   // the first ones, zeros past the last input
    float unit, all;        // what a first digit stands for; what all digits stand for
    int32_t first, second;  // what sums of int8 products with first and second digits begin with, as `dot8` adds to them
    int32_t two;            // whether there are second digits
};
static_assert(sizeof(Part) == 2 * GROUP, "Digits::bytes counts on it");

// Rows of activations: (groups, rows) parts, and (rows, groups, GROUP) second digits. For bf16 weights (rows, width) as they are;
// by tiles (rows, 2, width) pairs of bf16 numbers, and for int8 weights pairs of digits. There is room to read ROWS rows too many.
struct Digits {
    int64_t width, groups, pitch;  // pitch: of a group, in rows
    float* units;                  // of rows without groups, what a first digit stands for
    int8_t* seconds;
    union { float* values; uint16_t* halves; int8_t* digits; Part* parts; };

    static int64_t groups_of(int64_t width) { return (width + GROUP - 1) / GROUP; }

    static size_t bytes(int64_t rows, int64_t width) { return (rows + ROWS) * (4 + 4 * GROUP * groups_of(width)) + 256; }

    Digits(uint8_t* memory, int64_t rows, int64_t inputs) : width(inputs), groups(groups_of(inputs)), pitch(rows) {
        parts = (Part*)memory;
        seconds = (int8_t*)(parts + pitch * groups + ROWS);
        units = (float*)(memory + (rows + ROWS) * groups * 4 * GROUP);
    }

    Part* part(int64_t group, int64_t row) const { return parts + group * pitch + row; }
    int8_t* second(int64_t group, int64_t row) const { return seconds + (row * groups + group) * GROUP; }

    void set(int64_t row, const float* x, int64_t bits) {
        if (bits == 16) halve(row, x);
#ifdef TILES
        else if (bits == 8) divide_whole(row, x);
#endif
        else bits == 4 ? divide<false>(row, x) : divide<true>(row, x);
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

    // Numbers of a group, zeros past the last.
    struct Numbers {
        Floats half[2];
        Numbers(const float* x, int64_t count) {
            if (count >= GROUP) half[0] = load(x), half[1] = load(x + LANES);
            else half[0] = half[1] = Floats{}, std::memcpy(half, x, 4 * count);
        }
        // The largest magnitude; NaN where one is not finite: magnitudes are in the order of their bits, with those last.
        float most() const {
            const Ints one = (Ints)half[0] & 0x7fffffff, other = (Ints)half[1] & 0x7fffffff;
            const float result = as_float(largest(one > other ? one : other));
            return result < INFINITY ? result < 1e-30f ? 1e-30f : result : NAN;
        }
    };

    // Sets 16 first digits, and second ones, of which `SECOND` or none make a first one. Adds up both.
    static void digit(Floats value, float by, float second, int8_t* high, int8_t* low, Ints& ones, Ints& others) {
        value *= by;
        const Ints one = nearest(value), other = nearest((value - __builtin_convertvector(one, Floats)) * second);
        *(LooseDigits16*)high = __builtin_convertvector(one, Digits16);
        *(LooseDigits16*)low = __builtin_convertvector(other, Digits16);
        ones += one, others += other;
    }

    template <bool INT8>
    void divide(int64_t row, const float* x) {
        float squares = 0.0f;
        for (int64_t group = 0; group < groups; group++) {
            const float size = Numbers(x + group * GROUP, width - group * GROUP).most();
            part(group, row)->unit = size;
            squares += size * size;
        }
        for (int64_t group = 0; group < groups; group++) {
            Part& made = *part(group, row);
            Numbers numbers(x + group * GROUP, width - group * GROUP);
            const float size = made.unit, unit = size / MOST;
            if (size != size) numbers.half[0] = numbers.half[1] = Floats{};
            made.two = groups < FEW_GROUPS || size * size * groups >= LARGE_SQUARES * squares;
            Ints ones = {}, others = {};
            for (int i = 0; i < 2; i++)
                digit(numbers.half[i], size == size ? MOST / size : 0.0f, made.two ? SECOND : 0.0f, made.digits + LANES * i,
                      second(group, row) + LANES * i, ones, others);
            made.unit = unit, made.all = total(ones * (int)SECOND + others) * (unit / SECOND);
            if (INT8) made.first = -SHIFT8 * total(ones), made.second = -SHIFT8 * total(others);
        }
    }

#ifdef TILES
    int8_t* whole_row(int64_t row) const { return digits + 2 * row * width; }

    // One unit for the whole row.
    void divide_whole(int64_t row, const float* x) {
        float size = 0.0f;
        for (int64_t at = 0; at < width; at += GROUP) {
            const float other = Numbers(x + at, width - at).most();
            if (!(other <= size) && size == size) size = other;
        }
        int8_t *high = whole_row(row), *low = high + width;
        Ints ones = {}, others = {};
        alignas(64) int8_t some[GROUP], rest[GROUP];
        for (int64_t at = 0; at < width; at += GROUP) {
            Numbers numbers(x + at, width - at);
            if (size != size) numbers.half[0] = numbers.half[1] = Floats{};
            for (int i = 0; i < 2; i++)
                digit(numbers.half[i], size == size ? MOST / size : 0.0f, SECOND, some + LANES * i, rest + LANES * i, ones, others);
            const int64_t count = width - at < GROUP ? width - at : GROUP;
            std::memcpy(high + at, some, count);
            std::memcpy(low + at, rest, count);
        }
        units[row] = size / MOST;
    }
#endif
};

// Scales of a group of int4 weights, and what n = 0 stands for.
struct Scales4 {
    Floats scale, zero;
    explicit Scales4(const uint8_t* from) : scale(load_bf16(from)), zero(load_bf16(from + 32) - 8.0f * scale) {}

    // A row's sum, with the group's products with its digits.
    Floats added(Floats sum, Floats products, const Part& part) const {
        return fused(zero, all(part.all), fused(scale, products * all(part.unit), sum));
    }
};

inline Floats whole(Ints first) { return __builtin_convertvector(first, Floats); }
// The same to the bit where all second digits are 0.
inline Floats whole(Ints first, Ints second) { return fused(whole(second), all(1.0f / SECOND), whole(first)); }

inline int64_t block_bytes(const Matrix& matrix) {
    return matrix.bits == 4   ? matrix.inputs / GROUP * GROUP4_BYTES
           : matrix.bits == 8 ? matrix.inputs * LANES + 64
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
