// Attention of a few tokens over a row's cache, by chunks of slots: a chunk is read once for all heads that share its keys,
// and folded into what the chunks before it gave, in their order. So a token's numbers depend neither on the tokens beside
// it nor on who takes which chunk.
#pragma once
#include <utility>

#include "vectors.h"

namespace {

constexpr int64_t CHUNK = 64;  // slots; keys and values of a head of 64 fill half of a core's nearest cache

// Queries of one head of keys: where each lies, and the slots [first, end) that it sees.
struct Query {
    const float* states;
    int64_t first, end;
};

// Of the slots that a token sees from its own; window 0: all.
inline int64_t first_seen(int64_t slot, int64_t window) { return window && slot + 1 > window ? slot + 1 - window : 0; }

// What a query has of a chunk, or of all until there: the sum of weighted values (size), then the largest score, and the sum of
// weights relative to it.
inline int64_t part_numbers(int64_t size) { return size + 2; }

inline int64_t rounded(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

// Numbers that `attend_chunk` needs beside its results.
inline int64_t chunk_scratch(int64_t queries, int64_t size) { return queries * CHUNK + 2 * CHUNK * rounded(size); }

inline void read_slots(const float* from, int64_t count, float* to) { std::memcpy(to, from, 4 * count); }
inline void read_slots(const uint16_t* from, int64_t count, float* to) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(to + i, load_bf16(from + i));
    for (; i < count; i++) to[i] = widened(from[i]);
}

// Pairs (`load_pair`) of a head's numbers: sums over a head do not mind its order, so queries and results have it too where keys
// and values are read in it.
inline void read_pairs(const uint16_t* from, int64_t count, float* to) {
    for (int64_t i = 0; i < count; i += LANES) store(to + i, load_pair(from + i / (2 * LANES) * 2 * LANES, i / LANES % 2));
}
// Numbers in their own order as pairs are read, and back, times a unit.
inline void into_pairs(const float* from, int64_t size, float* to) {
    for (int64_t i = 0; i < size; i += 2 * LANES) {
#if defined(__AVX512F__)
        const Floats one = load(from + i), other = load(from + i + LANES);
        const Ints even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30}, odd = even + 1;
        store(to + i, __builtin_shuffle(one, other, even));
        store(to + i + LANES, __builtin_shuffle(one, other, odd));
#else
        for (int j = 0; j < 2 * LANES; j++) to[i + j % 2 * LANES + j / 2] = from[i + j];
#endif
    }
}
inline void out_of_pairs(const float* from, int64_t size, float unit, float* to) {
    for (int64_t i = 0; i < size; i += 2 * LANES) {
#if defined(__AVX512F__)
        const Floats even = load(from + i) * all(unit), odd = load(from + i + LANES) * all(unit);
        const Ints low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23}, high = low + 8;
        store(to + i, __builtin_shuffle(even, odd, low));
        store(to + i + LANES, __builtin_shuffle(even, odd, high));
#else
        for (int j = 0; j < 2 * LANES; j++) to[i + j] = from[i + j % 2 * LANES + j / 2] * unit;
#endif
    }
}

// The j-th 16 numbers of a head's keys or values.
template <typename Number>
inline Floats part_of(const Number* from, int64_t j) {
    if constexpr (sizeof(Number) == sizeof(float)) return load(from + j * LANES);
    else return load_pair(from + j / 2 * 2 * LANES, j % 2);
}

// Has numbers brought near that are needed soon: a chunk is too short for the hardware to see what comes. A function that does
// nothing else than __builtin_prefetch is left out by the compiler.
template <typename Number>
inline void fetch(const Number* from, int64_t count) {
    for (int64_t i = 0; i < count; i += 64 / (int64_t)sizeof(Number)) asm volatile("prefetcht0 (%0)" ::"r"(from + i));
}

// Scores of one query over 16 slots.
template <int SIZE, typename Number>
inline Floats scores_of(const float* q, const Number* keys, int64_t size) {
    Floats sums[LANES];
    if constexpr (SIZE != 0) {
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++) {
            Floats sum = load(q) * part_of(keys + j * SIZE, 0);
#pragma GCC unroll 8
            for (int i = 1; i < SIZE / LANES; i++) sum = fused(load(q + i * LANES), part_of(keys + j * SIZE, i), sum);
            sums[j] = sum;
        }
        return totals(sums);
    } else {
        const int64_t whole = size / LANES * LANES;
        for (int j = 0; j < LANES; j++) {
            sums[j] = Floats{};
            for (int64_t i = 0; i < whole; i += LANES) sums[j] += load(q + i) * load(keys + j * size + i);
        }
        Floats score = totals(sums);
        for (int64_t i = whole; i < size; i++)
            for (int j = 0; j < LANES; j++) score[j] += q[i] * keys[j * size + i];
        return score;
    }
}

// Queries whose values are added up together: a value is loaded once for them.
#if defined(__AVX512F__)
constexpr int TOGETHER = 3;
#else
constexpr int TOGETHER = 1;
#endif

// For N queries, y + n * step (size) = the sum of weights[slot + n * CHUNK] times values (slots, size) over slots [from, to). Two
// chains, since one product waits for the last of its chain; their order does not depend on N.
template <int SIZE, int N, typename Number>
inline void weighted_sums(const float* weights, const Number* values, int64_t size, int64_t from, int64_t to, float* y, int64_t step) {
    constexpr int WIDE = 4;
    int64_t i = 0;
    for (; i + WIDE * LANES <= size; i += WIDE * LANES) {
        Floats even[N][WIDE] = {}, odd[N][WIDE] = {};
        const auto add = [&](Floats (*sums)[WIDE], int64_t slot) {
            Floats value[WIDE];
            for (int j = 0; j < WIDE; j++) value[j] = part_of(values + slot * size + i, j);
            for (int n = 0; n < N; n++) {
                const Floats weight = all(weights[n * CHUNK + slot]);
                for (int j = 0; j < WIDE; j++) sums[n][j] = fused(weight, value[j], sums[n][j]);
            }
        };
        int64_t slot = from;
        if (slot % 2 && slot < to) add(odd, slot++);
        for (; slot + 2 <= to; slot += 2) add(even, slot), add(odd, slot + 1);
        if (slot < to) add(even, slot);
        for (int n = 0; n < N; n++)
            for (int j = 0; j < WIDE; j++) store(y + n * step + i + j * LANES, even[n][j] + odd[n][j]);
    }
    if constexpr (SIZE == 0)
        for (; i < size; i++)
            for (int n = 0; n < N; n++) {
                float one = 0.0f;
                for (int64_t slot = from; slot < to; slot++)
                    one = std::fma(weights[n * CHUNK + slot], values[slot * size + i], one);
                y[n * step + i] = one;
            }
}

// Each query's part of a chunk of `slots` slots, `begin` slots from the row's first one. keys, values: (slots, size) of the chunk;
// 16 slots are read at a time, and what comes of those past the last is taken out. ahead(n, slot): called as work goes on.
template <int SIZE, typename Number, typename Ahead>
inline void attend_slots(const Query* queries, int64_t count, const Number* keys, const Number* values, int64_t any_size,
                         int64_t begin, int64_t slots, float* scores, float* parts, Ahead ahead) {
    const int64_t size = SIZE ? SIZE : any_size;
    const Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const auto seen = [&](int64_t n) {  // first and last slot of this chunk
        const int64_t first = queries[n].first - begin, last = queries[n].end - begin;
        return std::pair<int64_t, int64_t>(first > 0 ? first : 0, last < slots ? last : slots);
    };
    for (int64_t n = 0; n < count; n++) {
        float *part = parts + n * part_numbers(size), *weights = scores + n * CHUNK;
        const auto [first, last] = seen(n);
        if (first >= last) {
            std::memset(part, 0, 4 * size);
            part[size] = -INFINITY, part[size + 1] = 0.0f;
            continue;
        }
        const bool whole = first == 0 && last == CHUNK;
        Floats most = all(-INFINITY);
        for (int64_t slot = first / LANES * LANES; slot < last; slot += LANES) {
            ahead(n, slot);
            Floats score = scores_of<SIZE>(queries[n].states, keys + slot * size, size);
            if (!whole) {
                const Ints place = lanes + all((int32_t)slot);
                score = (place < all((int32_t)first)) | (place >= all((int32_t)last)) ? all(-INFINITY) : score;
            }
            store(weights + slot, score);
            most = score > most ? score : most;
        }
        const float top = largest(most);
        Floats sum = {};
        const auto weigh = [&](int64_t slot) {
            const Floats weight = decayed(load(weights + slot) - all(top));
            store(weights + slot, weight);
            sum += weight;
        };
        if (whole) {
#pragma GCC unroll 4
            for (int64_t slot = 0; slot < CHUNK; slot += LANES) weigh(slot);
        } else {
            for (int64_t slot = first / LANES * LANES; slot < last; slot += LANES) weigh(slot);
        }
        part[size] = top, part[size + 1] = total(sum);
    }
    for (int64_t n = 0, more; n < count; n += more) {
        const auto range = seen(n);
        for (more = 1; more < TOGETHER && n + more < count && seen(n + more) == range;) more++;
        if (range.first >= range.second) continue;
        const auto sums = more == 1   ? weighted_sums<SIZE, 1, Number>
                          : more == 2 ? weighted_sums<SIZE, 2, Number>
                                      : weighted_sums<SIZE, 3, Number>;
        sums(scores + n * CHUNK, values, size, range.first, range.second, parts + n * part_numbers(size), part_numbers(size));
    }
}

// The same of the slots [begin, end). keys, values: (slots, size) from slot 0 of the row on; there are `room` slots, of which those
// that no token has written yet hold anything. SIZE: of a head, or 0 where the compiler does not know it.
template <int SIZE, typename Number>
void attend_chunk(const Query* queries, int64_t count, const Number* keys, const Number* values, int64_t room, int64_t any_size,
                  int64_t begin, int64_t end, float* scratch, float* parts) {
    constexpr bool HALF = sizeof(Number) < sizeof(float);
    const int64_t size = SIZE ? SIZE : any_size, slots = end - begin, read = rounded(slots) * size;
    float *scores = scratch, *k = scores + count * CHUNK, *v = k + CHUNK * rounded(size);
    const Number *these_keys = keys + begin * size, *these_values = values + begin * size;
    const bool goes_on = queries[count - 1].end > end, inside = begin + rounded(slots) <= room;
    const auto ahead = [&](int64_t n, int64_t slot) {  // the next chunk is on its way while this one is worked on
        if (!goes_on) return;
        const int64_t from = end + (n * CHUNK + slot) / count, to = end + (n * CHUNK + slot + LANES) / count;
        fetch(keys + from * size, (to - from) * size);
        fetch(values + from * size, (to - from) * size);
    };
    if constexpr (SIZE || !HALF)
        if (inside) return attend_slots<SIZE>(queries, count, these_keys, these_values, size, begin, slots, scores, parts, ahead);
    const auto copy = [&](const Number* from, float* to) {
        if constexpr (SIZE && HALF) read_pairs(from, slots * size, to);
        else read_slots(from, slots * size, to);
        std::memset(to + slots * size, 0, 4 * (read - slots * size));
    };
    copy(these_keys, k);
    copy(these_values, v);
    attend_slots<SIZE>(queries, count, (const float*)k, (const float*)v, size, begin, slots, scores, parts, ahead);
}

// Takes the next chunk's part into what was seen until there.
inline void fold(float* seen, const float* part, int64_t size) {
    float &top = seen[size], &sum = seen[size + 1];
    const float other_top = part[size], other_sum = part[size + 1];
    if (other_sum == 0.0f) return;
    const bool higher = other_top > top;
    const float old = higher ? std::exp(top - other_top) : 1.0f, young = higher ? 1.0f : std::exp(other_top - top);
    sum = std::fma(other_sum, young, sum * old);
    top = higher ? other_top : top;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(seen + i, fused(load(part + i), all(young), load(seen + i) * all(old)));
    for (; i < size; i++) seen[i] = std::fma(part[i], young, seen[i] * old);
}

// y (size) of all that was seen, which is in the order of pairs or its own.
inline void finish(const float* seen, int64_t size, bool pairs, float* y) {
    const float unit = 1.0f / seen[size + 1];
    if (pairs) out_of_pairs(seen, size, unit, y);
    else for (int64_t i = 0; i < size; i++) y[i] = seen[i] * unit;
}

template <typename Number>
void attend_sized(const Query* queries, int64_t count, const void* keys, const void* values, int64_t at, int64_t room,
                  int64_t size, int64_t begin, int64_t end, float* scratch, float* parts) {
    const Number *k = (const Number*)keys + at, *v = (const Number*)values + at;
    if (size == 64) attend_chunk<64>(queries, count, k, v, room, size, begin, end, scratch, parts);
    else if (size == 128) attend_chunk<128>(queries, count, k, v, room, size, begin, end, scratch, parts);
    else attend_chunk<0>(queries, count, k, v, room, size, begin, end, scratch, parts);
}

// The attention of one pass: `rows` of `count` tokens from slots starts[row] on. A task is a head of keys and up to ROWS tokens
// of a row; where there are few of them, as in decoding, each of its chunks is a task of its own.
struct Attention {
    const int64_t rows, count, heads, kv_heads, size, threads;
    const int64_t* const starts;
    const bool half;  // whether keys and values are bf16
    const int64_t group = heads / kv_heads, pieces = (count + ROWS - 1) / ROWS, tasks = rows * pieces * kv_heads;
    const int64_t queries = (count < ROWS ? count : ROWS) * group, numbers = part_numbers(size);
    const int64_t chunks = most_chunks();
    const bool spread = chunks > 1 && tasks < 4 * threads, pairs = half && (size == 64 || size == 128);

    int64_t most_chunks() const {
        int64_t longest = 0;
        for (int64_t row = 0; row < rows; row++) longest = starts[row] > longest ? starts[row] : longest;
        return (longest + count + CHUNK - 1) / CHUNK;
    }

    // Room that all threads share, and that each has for itself, in numbers.
    int64_t shared_room() const { return spread ? tasks * chunks * queries * numbers : 0; }
    int64_t own_room() const { return chunk_scratch(queries, size) + queries * (2 * numbers + size) + LANES; }

    // One layer, by all threads of a parallel region. keys, values: (rows, kv_heads, slots, size). states: (tokens, wide), the
    // heads of q first, scaled and turned. y: (tokens, heads, size).
    void layer(const void* keys, const void* values, int64_t slots, int64_t window, const float* states, int64_t wide,
               float* shared, float* own, Query* asked, float* y) const {
        float *seen = own + chunk_scratch(queries, size), *part = seen + queries * numbers, *turned = part + queries * numbers;
        const auto see = spread ? chunks : 1, step = spread ? tasks * chunks / (4 * threads) + 1 : 1;
#pragma omp for schedule(dynamic, step)
        for (int64_t index = 0; index < tasks * see; index++) {
            const int64_t task = index / see, row = task / (pieces * kv_heads), piece = task / kv_heads % pieces;
            const int64_t head = task % kv_heads, at = (row * kv_heads + head) * slots * size;
            const int64_t first = piece * ROWS, some = count - first < ROWS ? count - first : ROWS;
            const int64_t from = first_seen(starts[row] + first, window) / CHUNK, only = index % see;
            const int64_t to = (starts[row] + first + some + CHUNK - 1) / CHUNK;
            if (spread && (only < from || only >= to)) continue;
            for (int64_t n = 0; n < some * group; n++) {
                const int64_t token = first + n / group, slot = starts[row] + token;
                const float* its = states + (row * count + token) * wide + (head * group + n % group) * size;
                if (pairs) into_pairs(its, size, turned + n * size), its = turned + n * size;
                asked[n] = {its, first_seen(slot, window), slot + 1};
            }
            const auto attend = [&](int64_t chunk, float* parts) {
                const int64_t last = asked[some * group - 1].end, begin = chunk * CHUNK;
                const int64_t end = begin + CHUNK < last ? begin + CHUNK : last;
                (half ? attend_sized<uint16_t> : attend_sized<float>)(asked, some * group, keys, values, at, slots, size, begin,
                                                                      end, own, parts);
            };
            if (spread) {
                attend(only, shared + index * queries * numbers);
                continue;
            }
            for (int64_t n = 0; n < some * group; n++) nothing_seen(seen + n * numbers);
            for (int64_t chunk = from; chunk < to; chunk++) {
                attend(chunk, part);
                for (int64_t n = 0; n < some * group; n++) fold(seen + n * numbers, part + n * numbers, size);
            }
            for (int64_t n = 0; n < some * group; n++) {
                const int64_t token = row * count + first + n / group;
                finish(seen + n * numbers, size, pairs, y + (token * heads + head * group + n % group) * size);
            }
        }
        if (!spread) return;
#pragma omp for schedule(static)
        for (int64_t index = 0; index < rows * count * heads; index++) {
            const int64_t token = index / heads, head = index % heads, row = token / count, n = token % count;
            const int64_t piece = n / ROWS, task = (row * pieces + piece) * kv_heads + head / group;
            const int64_t slot = starts[row] + piece * ROWS, query = n % ROWS * group + head % group;
            const int64_t from = first_seen(slot, window) / CHUNK;
            nothing_seen(seen);
            for (int64_t chunk = from; chunk * CHUNK <= starts[row] + n; chunk++)
                fold(seen, shared + ((task * chunks + chunk) * queries + query) * numbers, size);
            finish(seen, size, pairs, y + index * size);
        }
    }

    void nothing_seen(float* seen) const {
        std::memset(seen, 0, 4 * size);
        seen[size] = -INFINITY, seen[size + 1] = 0.0f;
    }
};

}  // namespace
