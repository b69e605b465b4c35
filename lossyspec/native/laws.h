// Laws from logits, and tokens from laws.
#pragma once
#include <algorithm>
#include <vector>

#include "vectors.h"

extern "C" {

// Rows of y = softmax(x / temperature), both (rows, width). A row with NaN, or whose largest number is not finite, is NaN.
void lossyspec_softmax(const float* x, int64_t rows, int64_t width, float temperature, float* y, int64_t threads) {
    const float by = 1.0f / temperature;
    const auto scaled = [&](Floats value) {
        const Floats nearly = value * by, rest = value - nearly * temperature;  // rounded as a division is
        return rest == rest ? nearly + rest * by : nearly;
    };
#pragma omp parallel for schedule(static) num_threads(threads) if (rows > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float* from = x + row * width;
        float *to = y + row * width, rest[LANES];
        for (float& value : rest) value = -INFINITY;
        const int64_t whole = width / LANES * LANES, left = width - whole;
        std::memcpy(rest, from + whole, 4 * left);
        Floats last = scaled(load(rest)), most = last, odd = last == last ? Floats{} : last, sum = {};
        for (int64_t i = 0; i < whole; i += LANES) {
            const Floats value = scaled(load(from + i));
            store(to + i, value);
            most = value > most ? value : most;
            odd = value == value ? odd : value;  // NaN, which no comparison shows
        }
        float highest = largest(most);
        if (total(odd) != 0.0f || !std::isfinite(highest)) highest = NAN;
        for (int64_t i = 0; i < whole; i += LANES) {
            const Floats weight = exponential_or_0(load(to + i) - highest);
            store(to + i, weight);
            sum += weight;
        }
        last = exponential_or_0(last - highest);
        std::memcpy(to + whole, &last, 4 * left);
        const float unit = 1.0f / total(sum + last);
        for (int64_t i = 0; i < width; i++) to[i] *= unit;
    }
}

// By row -sum x log x, 0 for a 0; NaN spreads.
void lossyspec_entropy(const float* x, int64_t rows, int64_t width, float* y, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float* from = x + row * width;
        float rest[LANES] = {};
        const int64_t whole = width / LANES * LANES;
        std::memcpy(rest, from + whole, 4 * (width - whole));
        Floats sum = weighted_logarithm(load(rest));
        for (int64_t i = 0; i < whole; i += LANES) sum += weighted_logarithm(load(from + i));
        y[row] = -total(sum);
    }
}

// By row the largest number, or NaN where there is one.
void lossyspec_largest(const float* x, int64_t rows, int64_t width, float* y) {
    for (int64_t row = 0; row < rows; row++, x += width) {
        Floats most = all(-INFINITY), odd = {};
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) {
            const Floats value = load(x + i);
            most = value > most ? value : most;
            odd = value == value ? odd : value;
        }
        float result = total(odd) == 0.0f ? largest(most) : NAN;
        for (; i < width; i++) result = x[i] > result || x[i] != x[i] ? x[i] : result;
        y[row] = result;
    }
}

// By row the first token whose cumulated weight is over its number times all weight; `width` for a row without any weight.
void lossyspec_draw(const float* weights, int64_t rows, int64_t width, const double* numbers, int64_t* tokens) {
    constexpr int64_t PIECE = 256;
    const int64_t pieces = (width + PIECE - 1) / PIECE;
    static thread_local std::vector<double> sums;
    sums.resize(pieces);
    for (int64_t row = 0; row < rows; row++) {
        const float* from = weights + row * width;
        double all_weight = 0.0;
        for (int64_t piece = 0; piece < pieces; piece++) {
            const int64_t begin = piece * PIECE, end = begin + PIECE < width ? begin + PIECE : width;
            double parts[LANES] = {};
            int64_t i = begin;
            for (; i + LANES <= end; i += LANES)
                for (int lane = 0; lane < LANES; lane++) parts[lane] += from[i + lane];
            for (; i < end; i++) parts[i - end + LANES] += from[i];
            double sum = 0.0;
            for (int lane = 0; lane < LANES; lane++) sum += parts[lane];
            sums[piece] = sum;
            all_weight += sum;
        }
        tokens[row] = width;
        if (!(all_weight > 0.0)) continue;
        const double level = numbers[row] * all_weight;
        double before = 0.0;
        // rounding could pass by all: then it is the last token with any weight
        for (int64_t piece = 0; piece < pieces && tokens[row] == width; before += sums[piece++]) {
            if (!(before + sums[piece] > level)) continue;
            double reached = before;
            const int64_t end = (piece + 1) * PIECE < width ? (piece + 1) * PIECE : width;
            for (int64_t i = piece * PIECE; i < end && tokens[row] == width; i++)
                if ((reached += from[i]) > level && from[i] > 0.0f) tokens[row] = i;
        }
        for (int64_t i = width - 1; tokens[row] == width; i--)
            if (from[i] > 0.0f) tokens[row] = i;
    }
}

// What a rule says of a drafted token: `share` is its alpha there. By `exact` (0), `mixture` (1), `lenience` (2), and by `priced`
// (3) for tokens that are one-hot, the law after a rejection is that of p - q, as in acceptance.py.
struct Rule {
    int64_t kind;
    float share;

    // a(x) of a token with p(x) and q(x).
    float chance(float target, float draft) const {
        if (!(target > 0.0f)) return 0.0f;
        const float n = kind == 1 ? (1.0f - share) * target + share * draft : target;
        const float d = kind == 2 ? (1.0f - share) * draft : draft;
        return n >= d ? 1.0f : n / d;
    }

    // a(x) of a token that is one-hot.
    float chance(float target) const {
        if (kind != 3 || !(share > 0.0f) || !(target > 0.0f)) return chance(target, 1.0f);
        const double strict = 1.0 - share, kappa = share / (strict > 1e-12 ? strict : 1e-12), drop = 1.0 - kappa;
        const double root = std::sqrt(drop * drop + 4.0 * target * kappa);
        const double low = drop >= 0.0 ? 0.5 * (drop + root) : 2.0 * target * kappa / (root - drop);
        return target >= low ? 1.0f : (float)(target / low);
    }

    // TV between the rule's law and p: the sum of (q a - p)+, since no residual lifts a token over p. For `mixture` that is alpha
    // (q - p)+ for each token that p has at all, for `lenience` the smaller of q and p / (1 - alpha), less p.
    float variation(const float* target, const float* draft, const int64_t* support, int64_t outputs) const {
        float parts[LANES] = {};
        const float strict = 1.0f - share;
        const auto add = [&](int64_t i, int lane) {
            const float own = target[support ? support[i] : i], q = draft[i];
            const float most = kind == 1 ? own + share * (q - own) : strict * q <= own ? q : own / strict;
            parts[lane] += own > 0.0f && most > own ? most - own : 0.0f;
        };
        int64_t i = 0;
        for (; i + LANES <= outputs; i += LANES)
            for (int lane = 0; lane < LANES; lane++) add(i + lane, lane);
        for (; i < outputs; i++) add(i, 0);
        float sum = 0.0f;
        for (const float part : parts) sum += part;
        return sum;
    }
};

// The verdict over rows that draft `lengths` of `width` tokens each. p: (rows, width + 1, vocab) laws of the target. q: (rows,
// width, outputs) laws that the tokens are drawn from, of the ids of `support` (rising; null: all), or null where each is one-hot.
// shares: (rows, width). numbers: (rows, width + 1), the last for the token that follows. variation: (rows, width) TV between the
// rule's law and p at the positions that were reached, 0 elsewhere.
void lossyspec_judge(const float* p, int64_t rows, int64_t width, int64_t vocab, const float* q, int64_t outputs,
                     const int64_t* support, const int64_t* tokens, const int64_t* lengths, const double* numbers, int64_t kind,
                     const float* shares, int64_t* accepted, int64_t* following, float* variation) {
    static thread_local std::vector<float> rest;
    for (int64_t row = 0; row < rows; row++) {
        const double* number = numbers + row * (width + 1);
        int64_t kept = 0;
        for (; kept < lengths[row]; kept++) {
            const int64_t at = row * width + kept, token = tokens[at];
            const float* target = p + (row * (width + 1) + kept) * vocab;
            const float* draft = q ? q + at * outputs : nullptr;
            const Rule rule{kind, shares[at]};
            const int64_t place = q && support ? std::lower_bound(support, support + outputs, token) - support : token;
            const float chance = q ? rule.chance(target[token], draft[place]) : rule.chance(target[token]);
            if (rule.kind && rule.share > 0.0f)
                variation[at] = q ? rule.variation(target, draft, support, outputs) : chance - target[token];
            if (!(number[kept] < chance)) break;
        }
        accepted[row] = kept;
        const float* law = p + (row * (width + 1) + kept) * vocab;
        following[row] = vocab;
        if (kept < lengths[row]) {
            rest.assign(law, law + vocab);
            if (!q) rest[tokens[row * width + kept]] = 0.0f;
            else {
                const float* draft = q + (row * width + kept) * outputs;
                for (int64_t i = 0; i < outputs; i++) {
                    float& left = rest[support ? support[i] : i];
                    left = left > draft[i] ? left - draft[i] : 0.0f;
                }
            }
            lossyspec_draw(rest.data(), 1, vocab, number + width, following + row);
        }
        // p = q, and rounding: nothing is left over
        if (following[row] == vocab) lossyspec_draw(law, 1, vocab, number + width, following + row);
    }
}

}  // extern "C"
