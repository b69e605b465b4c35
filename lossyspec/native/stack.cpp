// Passes of a decoder stack of the Llama family on x86 CPUs, with int4, int8 and bf16 weights, in one call: no operation of
// torch's in between, whose launch costs more than its work when a pass reads one to sixteen tokens.
//
// Products with int4 and int8 weights are sums of whole numbers. A row of activations is split into two digits of -63 .. 63
// under its largest magnitude, whose steps are 1/7938 of it: finer than bf16. Sums of a group are exact, and floats are added
// in one order, so that a row's result is the same to the bit in any company: the law does not depend on how many tokens a
// pass verifies.
//
// Outputs lie in blocks of 16, one to a lane. int4 (w = scale * (n - 8) + middle, n in 0 .. 15, groups of 32 inputs): by group
// 256 bytes, of which byte 4 o + i of vector j holds inputs 8 j + i (low half) and 8 j + 4 + i (high half) of output o; then
// 16 scales and 16 middles in bf16. int8: by 4 inputs 64 bytes, byte 4 o + i; at the end of a block 16 scales in fp32, and 16
// sums of 64 w. bf16: by input 32 bytes, one number an output; multiplied in fp32.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <immintrin.h>
#include <initializer_list>
#include <omp.h>

namespace {

constexpr int LANES = 16, GROUP = 32, GROUP4_BYTES = 320, ROWS = 8;
constexpr int AHEAD = 16384;  // bytes of weights that are fetched ahead: the hardware alone stays behind
constexpr float MOST = 63.0f, SECOND = 126.0f;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint8_t Bytes __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef float Eight __attribute__((vector_size(32)));
typedef float Quarter __attribute__((vector_size(16)));
typedef int8_t Digits16 __attribute__((vector_size(16)));
typedef int8_t LooseDigits16 __attribute__((vector_size(16), aligned(1), may_alias));
typedef float LooseFloats __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint8_t LooseBytes __attribute__((vector_size(64), aligned(1), may_alias));
typedef uint16_t LooseHalves __attribute__((vector_size(32), aligned(1), may_alias));

inline Floats load(const float* from) { return *(const LooseFloats*)from; }
inline void store(float* to, Floats value) { *(LooseFloats*)to = value; }
inline Floats all(float value) { return value - Floats{}; }

inline Floats load_bf16(const void* from) {
    Halves halves = *(const LooseHalves*)from;
    return (Floats)(__builtin_convertvector(halves, Ints) << 16);
}

inline float widened(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

// To the nearest, halves to even; NaN stays one.
inline uint16_t narrowed(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return value == value ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
}

// Numbers of a cache: 16 of them, and one.
inline Floats load(const uint16_t* from) { return load_bf16(from); }
inline float number(float value) { return value; }
inline float number(uint16_t value) { return widened(value); }

inline Ints nearest(Floats x) { return __builtin_convertvector(x + (x < Floats{} ? all(-0.5f) : all(0.5f)), Ints); }
inline int nearest(float x) { return (int)(x + (x < 0.0f ? -0.5f : 0.5f)); }

// Sums of four by four lanes.
inline Quarter quarters(Floats values) {
    union { Floats whole; Eight half[2]; } sixteen{values};
    union { Eight whole; Quarter half[2]; } eight{sixteen.half[0] + sixteen.half[1]};
    return eight.half[0] + eight.half[1];
}

inline float total(Floats values) {
    const Quarter four = quarters(values);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

inline float largest(Floats values) {
    float result = values[0];
    for (int lane = 1; lane < LANES; lane++) result = values[lane] > result ? values[lane] : result;
    return result;
}

// Sums of four at once, each as any other of them.
inline Quarter totals(const Floats* values) {
    __m128 sums[4];
    for (int i = 0; i < 4; i++) sums[i] = (__m128)quarters(values[i]);
    return (Quarter)_mm_hadd_ps(_mm_hadd_ps(sums[0], sums[1]), _mm_hadd_ps(sums[2], sums[3]));
}

// Adds to each lane its four products of unsigned and signed bytes. Where two products are added in 16 bits, 7 bits of one
// and 8 of the other do not overflow.
inline Ints dot(Ints sum, Bytes unsigned_bytes, Bytes signed_bytes) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)unsigned_bytes, (__m512i)signed_bytes);
#elif defined(__AVX512BW__)
    __m512i pairs = _mm512_maddubs_epi16((__m512i)unsigned_bytes, (__m512i)signed_bytes);
    return sum + (Ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
    union Split { Bytes whole; Ints ints; __m256i half[2]; } u{unsigned_bytes}, s{signed_bytes}, result;
    for (int i = 0; i < 2; i++)
        result.half[i] = _mm256_madd_epi16(_mm256_maddubs_epi16(u.half[i], s.half[i]), _mm256_set1_epi16(1));
    return sum + result.ints;
#else
#error "needs AVX2"
#endif
}

inline Bytes four(const int8_t* from) {
    int32_t word;
    std::memcpy(&word, from, 4);
    return (Bytes)(word - Ints{});
}

// exp by 2^n 2^f with a polynomial for 2^f (relative error 2e-7); 0 far below.
inline Floats exponential(Floats x) {
    Floats y = x * all(1.44269504088896341f);
    y = y < all(-126.0f) ? all(-126.0f) : y;
    y = y > all(126.0f) ? all(126.0f) : y;
    Ints n = nearest(y);
    Floats f = (y - __builtin_convertvector(n, Floats)) * all(0.693147180559945309f);
    Floats p = all(1.0f / 5040);
    p = p * f + all(1.0f / 720);
    p = p * f + all(1.0f / 120);
    p = p * f + all(1.0f / 24);
    p = p * f + all(1.0f / 6);
    p = p * f + all(0.5f);
    p = p * f + all(1.0f);
    p = p * f + all(1.0f);
    Floats result = p * (Floats)((n + 127) << 23);
    return x == x ? result : x;
}

}  // namespace

extern "C" {

struct Matrix {
    const uint8_t* blocks;
    const float* bias;  // or null
    int64_t outputs, inputs, bits;
};

struct Layer {
    Matrix qkv, out, gate_up, down;
    const float *before_attention, *after_attention, *before_mlp, *after_mlp;  // weights of norms; null: no such norm
    const float* head_weights;                                                  // (heads + kv_heads, size), or null
    int64_t window;                                                             // slots that are seen; 0: all
};

struct Stack {
    const Layer* layers;
    const float* norm;
    int64_t count, hidden, heads, kv_heads, size, middle, activation;  // activation 0: silu, 1: gelu by tanh
    float scale, epsilon, head_epsilon;
    // of a draft head, or null: embeddings (vocab, width) in fp32, or bf16 where `half_table`; the matrix that joins one with
    // a feature; the output rows
    const void* table;
    int64_t half_table;
    Matrix entry, exit;
};

// One pass: `rows` of `count` tokens each. keys, values: by layer (rows, kv_heads, slots, size). starts: by row, where its
// entries go. cosines, sines: by kind of layer, (tokens, size), the first half of the sines negative.
struct Pass {
    void *const *keys, *const *values;  // fp32, or bf16 where `half`
    const int64_t *starts, *slots;
    const float *const *cosines, *const *sines;
    int64_t rows, count, threads, half;
    // of a draft head, or null: (rows, count); (rows, count, width); by row, the token whose logits (rows, outputs) are wanted
    const int64_t* tokens;
    const float* features;
    const int64_t* picks;
    float* logits;
};

}  // extern "C"

namespace {

// Rows of activations as digits; for bf16 weights as they are.
struct Digits {
    int64_t width;
    int8_t *first, *second;
    float *groups, *units;  // sums of the digits of each group of 32; what a unit of the second digit stands for
    float* values;

    static size_t bytes(int64_t rows, int64_t width) {
        return rows * (6 * width + 4 * (width / GROUP + 1) + 4) + 256;
    }
    Digits(uint8_t* memory, int64_t rows, int64_t inputs) : width(inputs) {
        units = (float*)memory;
        groups = units + rows;
        values = groups + rows * (width / GROUP + 1);
        first = (int8_t*)(values + rows * width);
        second = first + rows * width;
    }

    // bits 8: digits 64 higher, as unsigned numbers.
    void set(int64_t row, const float* x, int64_t bits) {
        if (bits == 16) {
            std::memcpy(values + row * width, x, 4 * width);
            return;
        }
        Floats sizes = {}, sum = {};
        int64_t at = 0;
        for (; at + LANES <= width; at += LANES) {
            Floats value = load(x + at), size = value < Floats{} ? -value : value;
            sizes = size > sizes ? size : sizes;
            sum += value * Floats{};  // NaN where a value is not finite
        }
        float most = largest(sizes), finite = total(sum);
        for (; at < width; at++) {
            most = std::fabs(x[at]) > most ? std::fabs(x[at]) : most;
            finite += x[at] * 0.0f;
        }
        most = most < 1e-30f ? 1e-30f : most;
        if (!(finite == 0.0f)) {  // it spreads to all outputs
            units[row] = NAN;
            std::memset(first + row * width, 0, width);
            std::memset(second + row * width, 0, width);
            std::memset(groups + row * (width / GROUP + 1), 0, 4 * (width / GROUP + 1));
            return;
        }
        const float up = MOST / most;
        const int shift = bits == 8 ? 64 : 0;
        int8_t *high = first + row * width, *low = second + row * width;
        for (at = 0; at + LANES <= width; at += LANES) {
            const Floats value = load(x + at) * up;
            const Ints digit = nearest(value), rest = nearest((value - __builtin_convertvector(digit, Floats)) * SECOND);
            *(LooseDigits16*)(high + at) = __builtin_convertvector(digit + shift, Digits16);
            *(LooseDigits16*)(low + at) = __builtin_convertvector(rest + shift, Digits16);
        }
        for (; at < width; at++) {
            const float value = x[at] * up;
            const int digit = nearest(value);
            high[at] = (int8_t)(digit + shift);
            low[at] = (int8_t)(nearest((value - digit) * SECOND) + shift);
        }
        if (bits == 4)
            for (int64_t group = 0; group < width / GROUP; group++) {
                int a = 0, b = 0;
                for (int i = 0; i < GROUP; i++) a += high[group * GROUP + i], b += low[group * GROUP + i];
                groups[row * (width / GROUP + 1) + group] = SECOND * a + b;
            }
        units[row] = most / (MOST * SECOND);
    }
};

template <int N>
inline void block4(const uint8_t* block, const Digits& x, int64_t row, Floats* result) {
    const int64_t groups = x.width / GROUP, stride = groups + 1;
    Floats sum[N] = {};
    for (int64_t group = 0; group < groups; group++, block += GROUP4_BYTES) {
        Ints first[N] = {}, second[N] = {};
        for (int j = 0; j < 4; j++) {
            __builtin_prefetch(block + 64 * j + AHEAD, 0, 2);
            Bytes both = *(const LooseBytes*)(block + 64 * j);
            Bytes low = both & 15, high = both >> 4;
            for (int n = 0; n < N; n++) {
                const int64_t at = (row + n) * x.width + GROUP * group + 8 * j;
                first[n] = dot(first[n], low, four(x.first + at));
                second[n] = dot(second[n], low, four(x.second + at));
                first[n] = dot(first[n], high, four(x.first + at + 4));
                second[n] = dot(second[n], high, four(x.second + at + 4));
            }
        }
        __builtin_prefetch(block + 256 + AHEAD, 0, 2);
        const Floats scale = load_bf16(block + 256), middle = load_bf16(block + 288);
        for (int n = 0; n < N; n++) {
            Floats whole = __builtin_convertvector(first[n], Floats) * SECOND + __builtin_convertvector(second[n], Floats);
            const float all_ones = x.groups[(row + n) * stride + group];
            sum[n] = sum[n] + scale * (whole - 8.0f * all_ones);
            sum[n] = sum[n] + middle * all_ones;
        }
    }
    for (int n = 0; n < N; n++) result[n] = sum[n] * x.units[row + n];
}

template <int N>
inline void block8(const uint8_t* block, const Digits& x, int64_t row, Floats* result) {
    // with few rows, sums in several chains: one product waits for the last of its chain
    constexpr int CHAINS = N < 3 ? 4 : N < 5 ? 2 : 1;
    Ints first[N * CHAINS] = {}, second[N * CHAINS] = {};
    auto step = [&](int64_t i, int chain) {
        __builtin_prefetch(block + AHEAD, 0, 2);
        Bytes weights = *(const LooseBytes*)block;
        for (int n = 0; n < N; n++) {
            const int64_t at = (row + n) * x.width + i;
            first[n + N * chain] = dot(first[n + N * chain], four(x.first + at), weights);
            second[n + N * chain] = dot(second[n + N * chain], four(x.second + at), weights);
        }
        block += 64;
    };
    int64_t i = 0;
    for (; i + 4 * CHAINS <= x.width; i += 4 * CHAINS)
        for (int chain = 0; chain < CHAINS; chain++) step(i + 4 * chain, chain);
    for (; i < x.width; i += 4) step(i, 0);
    for (int chain = 1; chain < CHAINS; chain++)
        for (int n = 0; n < N; n++) first[n] += first[n + N * chain], second[n] += second[n + N * chain];
    const Floats scale = load((const float*)block);
    const Ints shift = *(const Ints*)(const void*)__builtin_assume_aligned(block + 64, 64);
    for (int n = 0; n < N; n++) {
        Floats whole = __builtin_convertvector(first[n] - shift, Floats) * SECOND;
        whole = whole + __builtin_convertvector(second[n] - shift, Floats);
        result[n] = whole * scale * x.units[row + n];
    }
}

template <int N>
inline void block16(const uint8_t* block, const Digits& x, int64_t row, Floats* result) {
    constexpr int CHAINS = N < 3 ? 4 : N < 5 ? 2 : 1;
    const float* values = x.values + row * x.width;
    Floats sum[N * CHAINS] = {};
    auto step = [&](int64_t i, int chain) {
        if (i % 2 == 0) __builtin_prefetch(block + AHEAD, 0, 2);
        const Floats weights = load_bf16(block);
        for (int n = 0; n < N; n++) sum[n + N * chain] += weights * values[n * x.width + i];
        block += 2 * LANES;
    };
    int64_t i = 0;
    for (; i + CHAINS <= x.width; i += CHAINS)
        for (int chain = 0; chain < CHAINS; chain++) step(i + chain, chain);
    for (; i < x.width; i++) step(i, 0);
    for (int n = 0; n < N; n++) {
        result[n] = sum[n];
        for (int chain = 1; chain < CHAINS; chain++) result[n] += sum[n + N * chain];
    }
}

typedef void (*Block)(const uint8_t*, const Digits&, int64_t, Floats*);
const Block BLOCKS4[] = {block4<1>, block4<2>, block4<3>, block4<4>, block4<5>, block4<6>, block4<7>, block4<8>};
const Block BLOCKS16[] = {block16<1>, block16<2>, block16<3>, block16<4>, block16<5>, block16<6>, block16<7>, block16<8>};
const Block BLOCKS8[] = {block8<1>, block8<2>, block8<3>, block8<4>, block8<5>, block8<6>, block8<7>, block8<8>};

// This thread's share of y (rows, outputs) = x W^T + b, or y += that.
void product(const Matrix& matrix, const Digits& x, int64_t rows, float* y, bool add, int64_t thread, int64_t threads) {
    const int64_t blocks = (matrix.outputs + LANES - 1) / LANES;
    const int64_t bytes = matrix.bits == 4    ? matrix.inputs / GROUP * GROUP4_BYTES
                          : matrix.bits == 8 ? matrix.inputs * LANES + 128
                                             : matrix.inputs * LANES * 2;
    const Block* kernels = matrix.bits == 4 ? BLOCKS4 : matrix.bits == 8 ? BLOCKS8 : BLOCKS16;
    Floats result[ROWS];
    for (int64_t block = blocks * thread / threads; block < blocks * (thread + 1) / threads; block++) {
        const int64_t lanes = matrix.outputs - block * LANES < LANES ? matrix.outputs - block * LANES : LANES;
        for (int64_t row = 0; row < rows; row += ROWS) {
            const int64_t some = rows - row < ROWS ? rows - row : ROWS;
            kernels[some - 1](matrix.blocks + block * bytes, x, row, result);
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

// y = x over its root mean square, times the weight where there is one; or y += that.
void rms_norm(const float* x, const float* weight, float epsilon, int64_t width, float* y, bool add) {
    Floats squares = {};
    int64_t at = 0;
    for (; at + LANES <= width; at += LANES) squares += load(x + at) * load(x + at);
    float sum = total(squares);
    for (; at < width; at++) sum += x[at] * x[at];
    const float unit = 1.0f / std::sqrt(sum / width + epsilon);
    for (int64_t i = 0; i < width; i++) {
        const float value = x[i] * unit * (weight ? weight[i] : 1.0f);
        y[i] = add ? y[i] + value : value;
    }
}

// Normed where a weight is given, then turned by its position, then times the scale.
void turn(float* x, const float* weight, const Stack& stack, const float* cosine, const float* sine, float scale) {
    const int64_t size = stack.size, half = size / 2;
    if (weight) rms_norm(x, weight, stack.head_epsilon, size, x, false);
    for (int64_t i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = (a * cosine[i] + b * sine[i]) * scale;
        x[i + half] = (b * cosine[i + half] + a * sine[i + half]) * scale;
    }
}

// One head of up to ROWS tokens over the slots of one row that each may see. scores: (ROWS, at least `slots` in 16s).
template <typename Number>
void attend(const float* const* q, int64_t tokens, const Number* keys, const Number* values, int64_t size, int64_t first_slot,
            int64_t window, float* scores, int64_t stride, float* const* y) {
    const int64_t end = first_slot + tokens;
    const int64_t begin = window && first_slot + 1 > window ? first_slot + 1 - window : 0;
    for (int64_t n = 0; n < tokens; n++) {
        const int64_t last = first_slot + n, seen = window && last + 1 - window > begin ? last + 1 - window : begin;
        float* row = scores + n * stride - begin;
        for (int64_t slot = begin; slot < seen; slot++) row[slot] = -INFINITY;
        int64_t slot = seen;
        for (; slot + 4 <= last + 1; slot += 4) {
            Floats sums[4] = {};
            for (int64_t i = 0; i + LANES <= size; i += LANES)
                for (int j = 0; j < 4; j++) sums[j] += load(q[n] + i) * load(keys + (slot + j) * size + i);
            Quarter four = totals(sums);
            for (int64_t i = size / LANES * LANES; i < size; i++)
                for (int j = 0; j < 4; j++) four[j] += q[n][i] * number(keys[(slot + j) * size + i]);
            std::memcpy(row + slot, &four, sizeof four);
        }
        for (; slot <= last; slot++) {
            Floats sums[4] = {};
            for (int64_t i = 0; i + LANES <= size; i += LANES) sums[0] += load(q[n] + i) * load(keys + slot * size + i);
            row[slot] = totals(sums)[0];
            for (int64_t i = size / LANES * LANES; i < size; i++) row[slot] += q[n][i] * number(keys[slot * size + i]);
        }
        for (slot = last + 1; slot < end; slot++) row[slot] = -INFINITY;
    }
    const int64_t length = end - begin, padded = (length + LANES - 1) / LANES * LANES;
    for (int64_t n = 0; n < tokens; n++) {
        float* row = scores + n * stride;
        for (int64_t i = length; i < padded; i++) row[i] = -INFINITY;
        Floats most = load(row);
        for (int64_t i = LANES; i < padded; i += LANES) {
            Floats value = load(row + i);
            most = value > most ? value : most;
        }
        const float highest = largest(most);
        Floats sum = {};
        for (int64_t i = 0; i < padded; i += LANES) {
            Floats score = load(row + i), weight = exponential(score - highest);
            weight = score == all(-INFINITY) ? Floats{} : weight;
            store(row + i, weight);
            sum += weight;
        }
        const float unit = 1.0f / total(sum);
        const int64_t seen = first_slot + n + 1 - begin;
        const Number* from = values + begin * size;
        int64_t i = 0;
        for (; i + 4 * LANES <= size; i += 4 * LANES) {
            Floats sums[4] = {};
            for (int64_t slot = 0; slot < seen; slot++)
                for (int j = 0; j < 4; j++) sums[j] += row[slot] * load(from + slot * size + i + j * LANES);
            for (int j = 0; j < 4; j++) store(y[n] + i + j * LANES, sums[j] * unit);
        }
        for (; i < size; i++) {
            float one = 0.0f;
            for (int64_t slot = 0; slot < seen; slot++) one += row[slot] * number(from[slot * size + i]);
            y[n][i] = one * unit;
        }
    }
}

void activate(const float* gate_up, int64_t middle, int64_t kind, float* y) {
    for (int64_t i = 0; i < middle; i += LANES) {
        float gates[LANES] = {}, ups[LANES] = {}, both[LANES];
        const int64_t some = middle - i < LANES ? middle - i : LANES;
        std::memcpy(gates, gate_up + i, 4 * some);
        std::memcpy(ups, gate_up + middle + i, 4 * some);
        Floats x = load(gates), inner = x;
        if (kind == 1) inner = (x + x * x * x * 0.044715f) * 1.5957691216057308f;  // twice tanh's argument
        store(both, x / (1.0f + exponential(-inner)) * load(ups));
        std::memcpy(y + i, both, 4 * some);
    }
}

struct Memory {
    uint8_t* bytes = nullptr;
    size_t size = 0;
    uint8_t* get(size_t wanted) {
        if (wanted > size) {
            std::free(bytes);
            bytes = (uint8_t*)std::aligned_alloc(64, (wanted + 63) / 64 * 64);
            size = bytes ? wanted : 0;
        }
        return bytes;
    }
    ~Memory() { std::free(bytes); }
};

}  // namespace

extern "C" {

// y (rows, outputs) = x (rows, inputs) W^T + b. Returns 0, or 1 for want of memory.
int lossyspec_product(const Matrix* matrix, const float* x, int64_t rows, float* y, int64_t threads) {
    static thread_local Memory memory;
    uint8_t* place = memory.get(Digits::bytes(rows, matrix->inputs));
    if (!place) return 1;
    Digits digits(place, rows, matrix->inputs);
#pragma omp parallel num_threads(threads)
    {
        const int64_t thread = omp_get_thread_num(), count = omp_get_num_threads();
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) digits.set(row, x + row * matrix->inputs, matrix->bits);
        product(*matrix, digits, rows, y, false, thread, count);
    }
    return 0;
}

// The stream x (tokens, hidden) through all layers; x is the final normed states then. Returns 0, or 1 for want of memory.
int lossyspec_pass(const Stack* stack, const Pass* pass, float* x) {
    static thread_local Memory memory;
    const int64_t tokens = pass->rows * pass->count, hidden = stack->hidden, size = stack->size, middle = stack->middle;
    const int64_t heads = stack->heads, kv_heads = stack->kv_heads, wide = (heads + 2 * kv_heads) * size;
    const int64_t attended_width = heads * size, group = heads / kv_heads, pieces = (pass->count + ROWS - 1) / ROWS;
    int64_t longest = 0;
    for (int64_t row = 0; row < pass->rows; row++)
        longest = pass->starts[row] > longest ? pass->starts[row] : longest;
    const int64_t stride = (longest + pass->count + LANES) / LANES * LANES;
    int64_t broadest = stack->entry.inputs;
    for (int64_t width : {middle, hidden, attended_width}) broadest = width > broadest ? width : broadest;
    const int64_t a_numbers = tokens * (2 * middle > wide ? 2 * middle : wide), b_numbers = tokens * broadest;
    const int64_t per_thread = ROWS * stride + broadest + 2 * LANES;
    const size_t digit_bytes = (Digits::bytes(tokens, broadest) + 63) / 64 * 64;
    uint8_t* place = memory.get(digit_bytes + 4 * (a_numbers + b_numbers + pass->threads * per_thread) + 256);
    if (!place) return 1;
    float *a = (float*)(place + digit_bytes), *b = a + a_numbers, *scratch = b + b_numbers;
#pragma omp parallel num_threads(pass->threads)
    {
        const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        float *scores = scratch + thread * per_thread, *line = scores + ROWS * stride;
        if (stack->table) {
            const int64_t width = stack->entry.inputs / 2;
            Digits joined(place, tokens, 2 * width);
#pragma omp for schedule(static)
            for (int64_t token = 0; token < tokens; token++) {
                const int64_t at = pass->tokens[token] * width;
                const float* embedding = (const float*)stack->table + at;
                if (stack->half_table) {
                    for (int64_t i = 0; i < width; i++) line[i] = widened(((const uint16_t*)stack->table)[at + i]);
                    embedding = line;
                }
                rms_norm(embedding, nullptr, stack->epsilon, width, line, false);
                rms_norm(pass->features + token * width, nullptr, stack->epsilon, width, line + width, false);
                joined.set(token, line, stack->entry.bits);
            }
            product(stack->entry, joined, tokens, x, false, thread, threads);
#pragma omp barrier
        }
        for (int64_t index = 0; index < stack->count; index++) {
            const Layer& layer = stack->layers[index];
            const float *cosines = pass->cosines[index], *sines = pass->sines[index];
            Digits narrow(place, tokens, hidden), attended(place, tokens, attended_width), broad(place, tokens, middle);
#pragma omp for schedule(static)
            for (int64_t token = 0; token < tokens; token++) {
                rms_norm(x + token * hidden, layer.before_attention, stack->epsilon, hidden, line, false);
                narrow.set(token, line, layer.qkv.bits);
            }
            product(layer.qkv, narrow, tokens, a, false, thread, threads);
#pragma omp barrier
#pragma omp for schedule(static)
            for (int64_t task = 0; task < tokens * (heads + 2 * kv_heads); task++) {
                const int64_t token = task / (heads + 2 * kv_heads), head = task % (heads + 2 * kv_heads);
                const int64_t row = token / pass->count, slot = pass->starts[row] + token % pass->count;
                float* states = a + token * wide + head * size;
                if (head < heads + kv_heads)
                    turn(states, layer.head_weights ? layer.head_weights + head * size : nullptr, *stack,
                         cosines + token * size, sines + token * size, head < heads ? stack->scale : 1.0f);
                if (head < heads) continue;
                const int64_t of = (head - heads) % kv_heads;
                void* kept = head < heads + kv_heads ? pass->keys[index] : pass->values[index];
                const int64_t at = ((row * kv_heads + of) * pass->slots[index] + slot) * size;
                if (!pass->half) std::memcpy((float*)kept + at, states, 4 * size);
                else for (int64_t i = 0; i < size; i++) ((uint16_t*)kept)[at + i] = narrowed(states[i]);
            }
#pragma omp for schedule(dynamic, 1)
            for (int64_t task = 0; task < pass->rows * pieces * heads; task++) {
                const int64_t row = task / (pieces * heads), head = task % heads, first = task / heads % pieces * ROWS;
                const int64_t some = pass->count - first < ROWS ? pass->count - first : ROWS;
                const int64_t at = (row * kv_heads + head / group) * pass->slots[index] * size;
                const float* q[ROWS];
                float* y[ROWS];
                for (int64_t n = 0; n < some; n++) {
                    const int64_t token = row * pass->count + first + n;
                    q[n] = a + token * wide + head * size;
                    y[n] = b + token * attended_width + head * size;
                }
                const void *keys = pass->keys[index], *values = pass->values[index];
                const int64_t begin = pass->starts[row] + first;
                if (pass->half)
                    attend(q, some, (const uint16_t*)keys + at, (const uint16_t*)values + at, size, begin, layer.window,
                           scores, stride, y);
                else
                    attend(q, some, (const float*)keys + at, (const float*)values + at, size, begin, layer.window, scores,
                           stride, y);
            }
#pragma omp for schedule(static)
            for (int64_t token = 0; token < tokens; token++)
                attended.set(token, b + token * attended_width, layer.out.bits);
            product(layer.out, attended, tokens, layer.after_attention ? a : x, !layer.after_attention, thread, threads);
#pragma omp barrier
#pragma omp for schedule(static)
            for (int64_t token = 0; token < tokens; token++) {
                float* stream = x + token * hidden;
                if (layer.after_attention)
                    rms_norm(a + token * hidden, layer.after_attention, stack->epsilon, hidden, stream, true);
                rms_norm(stream, layer.before_mlp, stack->epsilon, hidden, line, false);
                narrow.set(token, line, layer.gate_up.bits);
            }
            product(layer.gate_up, narrow, tokens, a, false, thread, threads);
#pragma omp barrier
#pragma omp for schedule(static)
            for (int64_t token = 0; token < tokens; token++) {
                activate(a + token * 2 * middle, middle, stack->activation, line);
                broad.set(token, line, layer.down.bits);
            }
            product(layer.down, broad, tokens, layer.after_mlp ? a : x, !layer.after_mlp, thread, threads);
#pragma omp barrier
            if (layer.after_mlp) {
#pragma omp for schedule(static)
                for (int64_t token = 0; token < tokens; token++)
                    rms_norm(a + token * hidden, layer.after_mlp, stack->epsilon, hidden, x + token * hidden, true);
            }
        }
#pragma omp for schedule(static)
        for (int64_t token = 0; token < tokens; token++) {
            float* stream = x + token * hidden;
            rms_norm(stream, stack->norm, stack->epsilon, hidden, stream, false);
        }
        if (pass->logits) {
            Digits last(place, pass->rows, hidden);
#pragma omp for schedule(static)
            for (int64_t row = 0; row < pass->rows; row++)
                last.set(row, x + (row * pass->count + pass->picks[row]) * hidden, stack->exit.bits);
            product(stack->exit, last, pass->rows, pass->logits, false, thread, threads);
        }
    }
    return 0;
}

}  // extern "C"
