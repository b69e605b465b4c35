// Vectors of 16 lanes, whatever the CPU has them in.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <initializer_list>

#if defined(EMULATED_TILES) || (defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__AVX512F__))
#define TILES
#endif

namespace {

constexpr int LANES = 16, GROUP = 32, GROUP4_BYTES = 320, ROWS = 8;
constexpr int AHEAD = 12288;  // bytes of weights that are fetched ahead: the hardware alone stays behind
// Of digits: the largest, and second ones to a first one. A group whose square is so many times the mean of squares has both, and
// each of a row of fewer groups than that.
constexpr float MOST = 127.0f, SECOND = 254.0f, LARGE_SQUARES = 2.25f;
constexpr int FEW_GROUPS = 4;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint8_t Bytes __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef int8_t Digits16 __attribute__((vector_size(16)));
typedef int8_t LooseDigits16 __attribute__((vector_size(16), aligned(1), may_alias));
typedef float LooseFloats __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint8_t LooseBytes __attribute__((vector_size(64), aligned(1), may_alias));
typedef int32_t LooseInts __attribute__((vector_size(64), aligned(1), may_alias));
typedef uint16_t LooseHalves __attribute__((vector_size(32), aligned(1), may_alias));

inline Floats load(const float* from) { return *(const LooseFloats*)from; }
inline void store(float* to, Floats value) { *(LooseFloats*)to = value; }
// What is used twice: the compiler would ask twice for a line that is still on its way, and wait in two places.
inline Bytes read_once(const void* from) {
    Bytes result = *(const LooseBytes*)from;
#if defined(__AVX512F__)
    asm volatile("" : "+v"(result));
#endif
    return result;
}
// The compiler lays a number into lanes that the CPU has not by storing it lane by lane.
#if defined(__AVX512F__)
inline Floats all(float value) { return value - Floats{}; }
inline Ints all(int32_t value) { return value - Ints{}; }
#else
inline Floats all(float value) {
    const __m256 half = _mm256_set1_ps(value);
    union { __m256 half[2]; Floats whole; } both{{half, half}};
    return both.whole;
}
inline Ints all(int32_t value) {
    const __m256i half = _mm256_set1_epi32(value);
    union { __m256i half[2]; Ints whole; } both{{half, half}};
    return both.whole;
}
#endif

// a b + c, rounded once. Left to the compiler, a sum is rounded once here and twice there, and then rows differ by company.
inline Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    union Split { Floats whole; __m256 half[2]; } x{a}, y{b}, z{c};
    for (int i = 0; i < 2; i++) z.half[i] = _mm256_fmadd_ps(x.half[i], y.half[i], z.half[i]);
    return z.whole;
#endif
}

inline Floats load_bf16(const void* from) {
    Halves halves = *(const LooseHalves*)from;
    return (Floats)(__builtin_convertvector(halves, Ints) << 16);
}

// Of 32 bf16 numbers the 16 even ones, or the odd ones: each an operation away from its pair.
inline Floats load_pair(const void* from, int odd) {
    const Ints pairs = *(const LooseInts*)from;
    return odd ? (Floats)(pairs & all((int32_t)0xffff0000)) : (Floats)(pairs << 16);
}

inline float as_float(uint32_t bits) {
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}
inline float widened(uint16_t half) { return as_float((uint32_t)half << 16); }

// To the nearest, halves to even; NaN stays one.
inline uint16_t narrowed(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return value == value ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
}

// Whole numbers, halves to the even one.
inline Ints nearest(Floats x) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtps_epi32((__m512)x);
#else
    union { Floats whole; __m256 half[2]; } from{x};
    union { Ints whole; __m256i half[2]; } to;
    for (int i = 0; i < 2; i++) to.half[i] = _mm256_cvtps_epi32(from.half[i]);
    return to.whole;
#endif
}

// All lanes by a function of two of them, or of two vectors of them: halves, then quarters, then their lanes.
template <typename Number, typename Vector, typename Both>
inline Number folded(Vector values, Both both) {
    typedef Number Half __attribute__((vector_size(32)));
    typedef Number Fourth __attribute__((vector_size(16)));
    union { Vector whole; Half half[2]; } sixteen{values};
    union { Half whole; Fourth half[2]; } eight{both(sixteen.half[0], sixteen.half[1])};
    const Fourth four = both(eight.half[0], eight.half[1]);
    return both(both(Number(four[0]), Number(four[2])), both(Number(four[1]), Number(four[3])));
}
struct Sum {
    template <typename T> T operator()(T a, T b) const { return a + b; }
};
struct Larger {
    template <typename T> T operator()(T a, T b) const { return a > b ? a : b; }
};

inline float total(Floats values) { return folded<float>(values, Sum()); }
inline int32_t total(Ints values) { return folded<int32_t>(values, Sum()); }
// No NaN among them.
inline float largest(Floats values) { return folded<float>(values, Larger()); }
inline int32_t largest(Ints values) { return folded<int32_t>(values, Larger()); }

// Sums of the lanes of 16 vectors, each as any other of them: pairs of vectors are laid into one, four times.
inline Floats totals(const Floats* from) {
#if defined(__AVX512F__)
    Floats values[LANES / 2];
    const auto pick = [](Floats a, Floats b, Ints which) { return __builtin_shuffle(a, b, which); };
    const Ints low = {0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29}, high = low + 2;
    for (int i = 0; i < 8; i++) {
        const Floats a = from[2 * i], b = from[2 * i + 1];
        values[i] = pick(a, b, low) + pick(a, b, high);
    }
    const Ints lows = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29}, highs = lows + 2;
    for (int i = 0; i < 4; i++) {
        const Floats a = values[2 * i], b = values[2 * i + 1];
        values[i] = pick(a, b, lows) + pick(a, b, highs);
    }
    // quarters of 4 lanes, each with sums of another four vectors
    const Ints even = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27}, odd = even + 4;
    for (int i = 0; i < 2; i++) {
        const Floats a = values[2 * i], b = values[2 * i + 1];
        values[i] = pick(a, b, even) + pick(a, b, odd);
    }
    return pick(values[0], values[1], even) + pick(values[0], values[1], odd);
#else
    union { Floats whole; __m256 half[2]; } result;
    for (int half = 0; half < 2; half++) {
        __m256 eight[8];
        for (int i = 0; i < 8; i++) {
            union { Floats whole; __m256 half[2]; } one{from[8 * half + i]};
            eight[i] = _mm256_add_ps(one.half[0], one.half[1]);
        }
        for (int left = 8; left > 2; left /= 2)
            for (int i = 0; i < left / 2; i++) eight[i] = _mm256_hadd_ps(eight[2 * i], eight[2 * i + 1]);
        result.half[half] = _mm256_add_ps(_mm256_permute2f128_ps(eight[0], eight[1], 0x20),
                                          _mm256_permute2f128_ps(eight[0], eight[1], 0x31));
    }
    return result.whole;
#endif
}

// Adds to each lane its four products of int4 weights with digits.
inline Ints dot4(Ints sum, Bytes weights, Bytes digits) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)digits);
#elif defined(__AVX512BW__)
    __m512i pairs = _mm512_maddubs_epi16((__m512i)weights, (__m512i)digits);
    return sum + (Ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
    union Split { Bytes whole; Ints ints; __m256i half[2]; } u{weights}, s{digits}, result;
    for (int i = 0; i < 2; i++)
        result.half[i] = _mm256_madd_epi16(_mm256_maddubs_epi16(u.half[i], s.half[i]), _mm256_set1_epi16(1));
    return sum + result.ints;
#else
#error "needs AVX2"
#endif
}

// The same of int8 weights, -127 .. 127. One side of the instruction is unsigned: weights are 128 more then, and SHIFT8 times
// the sum of the digits is taken off. Where two products are added in 16 bits, the sign goes over to the other side instead.
#if defined(__AVX512VNNI__)
constexpr int SHIFT8 = 128;
#else
constexpr int SHIFT8 = 0;
#endif
inline Ints dot8(Ints sum, Bytes weights, Bytes digits) {
#if defined(__AVX512VNNI__)
    return dot4(sum, weights ^ 128, digits);
#elif defined(__AVX512BW__)
    const __mmask64 below = _mm512_movepi8_mask((__m512i)digits);
    const __m512i turned = _mm512_mask_sub_epi8((__m512i)weights, below, _mm512_setzero_si512(), (__m512i)weights);
    return dot4(sum, (Bytes)_mm512_abs_epi8((__m512i)digits), (Bytes)turned);
#else
    union Split { Bytes whole; __m256i half[2]; } w{weights}, d{digits};
    for (int i = 0; i < 2; i++) {
        w.half[i] = _mm256_sign_epi8(w.half[i], d.half[i]);
        d.half[i] = _mm256_abs_epi8(d.half[i]);
    }
    return dot4(sum, d.whole, w.whole);
#endif
}

inline Bytes four(const int8_t* from) {
    int32_t word;
    std::memcpy(&word, from, 4);
    return (Bytes)(word - Ints{});
}

// exp by 2^n 2^f with a polynomial for 2^f (relative error 2e-7); 0 far below.
inline Floats exponential(Floats of) {
    Floats x = of, y = x * all(1.44269504088896341f);
    y = y < all(-126.0f) ? all(-126.0f) : y;
    y = y > all(126.0f) ? all(126.0f) : y;
    Ints n = nearest(y);
    const Floats whole = __builtin_convertvector(n, Floats);
    x = (y < all(-125.9f)) | (y > all(125.9f)) ? y * 0.693147180559945309f : x;
    Floats f = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;  // ln 2 in two parts
    Floats p = all(1.0f / 5040);
    p = p * f + all(1.0f / 720);
    p = p * f + all(1.0f / 120);
    p = p * f + all(1.0f / 24);
    p = p * f + all(1.0f / 6);
    p = p * f + all(0.5f);
    p = p * f + all(1.0f);
    p = p * f + all(1.0f);
    Floats result = p * (Floats)((n + 127) << 23);
    return of == of ? result : of;
}

inline bool any(Ints truths) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)truths, (__m512i)truths);
#else
    union { Ints whole; __m256 half[2]; } from{truths};
    return _mm256_movemask_ps(from.half[0]) | _mm256_movemask_ps(from.half[1]);
#endif
}

// The same down to the smallest number of fp32, and 0 below.
inline Floats exponential_or_0(Floats x) {
    const Ints low = x < all(-87.3f);
    Floats result = exponential(x);
    if (!any(low)) return result;
    result = low ? Floats{} : result;
    const Ints between = low & (x > all(-104.0f));
    if (any(between)) result = between ? exponential(x + all(40.0f)) * all(4.24835426e-18f) : result;
    return result;
}

// exp of what is at most 0, or NaN; 0 from -105 on.
inline Floats decayed(Floats x) {
#if defined(__AVX512F__)
    x = (Floats)_mm512_max_ps((__m512)all(-105.0f), (__m512)x);  // the second where it is NaN
    const __m512 n = _mm512_roundscale_ps((__m512)(x * all(1.44269504088896341f)), 8);
    const Floats whole = (Floats)n, f = fused(whole, all(2.12194440e-4f), fused(whole, all(-0.693359375f), x));
    Floats p = fused(all(1.0f / 5040), f, all(1.0f / 720));
    for (float next : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = fused(p, f, all(next));
    return (Floats)_mm512_scalef_ps((__m512)p, n);
#else
    return exponential_or_0(x);
#endif
}

// x log x (relative error 1e-6), and 0 times x for what no normal number of fp32 is. log m by its series in (m - 1) / (m + 1).
inline Floats weighted_logarithm(Floats x) {
    const Ints root = all(0x3f3504f3), bits = (Ints)x - root;  // so that m is between the square roots of 1/2 and 2
    const Floats exponent = __builtin_convertvector(bits >> 23, Floats), m = (Floats)((bits & all(0x007fffff)) + root);
    const Floats s = (m - all(1.0f)) / (m + all(1.0f)), t = s * s;
    const Floats series = ((t * all(2.0f / 9) + all(2.0f / 7)) * t + all(2.0f / 5)) * t + all(2.0f / 3);
    const Floats logarithm = exponent * all(0.693147180559945309f) + (series * t + all(2.0f)) * s;
    return x >= all(1.17549435e-38f) ? x * logarithm : x * Floats{};
}

}  // namespace

