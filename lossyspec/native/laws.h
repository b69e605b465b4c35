// Laws from logits, and tokens from laws.
#pragma once
#include <algorithm>
#include <limits>
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

}  // extern "C"

namespace {

// A position's p and q on the tokens that the draft has, and what p has on all others: each rule sees those through their sum.
struct Position {
    std::vector<float> p;
    const float* q = nullptr;
    double others = 0.0, impossible = 0.0;  // the draft's weight on tokens that the target excludes

    // N sums over all tokens: sums(p, q, values) says what one adds to each.
    template <int N, typename Sums>
    void sum(double (&result)[N], Sums sums) const {
        double parts[N][LANES] = {};
        const int64_t count = p.size();
        int64_t i = 0;
        for (; i + LANES <= count; i += LANES)
            for (int lane = 0; lane < LANES; lane++) {
                double values[N];
                sums((double)p[i + lane], (double)q[i + lane], values);
                for (int n = 0; n < N; n++) parts[n][lane] += values[n];
            }
        for (; i < count; i++) {
            double values[N];
            sums((double)p[i], (double)q[i], values);
            for (int n = 0; n < N; n++) parts[n][0] += values[n];
        }
        for (int n = 0; n < N; n++) {
            result[n] = 0.0;
            for (const double part : parts[n]) result[n] += part;
        }
    }

    void set(const float* target, int64_t vocab, const float* draft, const int64_t* support, int64_t outputs) {
        q = draft;
        p.resize(outputs);
        if (!support) std::memcpy(p.data(), target, 4 * outputs);
        else for (int64_t i = 0; i < outputs; i++) p[i] = target[support[i]];
        double both[2], whole = 0.0;
        sum(both, [](double own, double its, double* values) { values[0] = own, values[1] = own > 0.0 ? 0.0 : its; });
        impossible = both[1], others = 0.0;
        if (!support) return;
        double parts[LANES] = {};
        int64_t i = 0;
        for (; i + LANES <= vocab; i += LANES)
            for (int lane = 0; lane < LANES; lane++) parts[lane] += target[i + lane];
        for (; i < vocab; i++) parts[0] += target[i];
        for (const double part : parts) whole += part;
        others = whole > both[0] ? whole - both[0] : 0.0;
    }

    // 1 / lo: f >= 1 with sum (q - f p)+ = excess, by Newton's method: see acceptance.py.
    double cap(double excess) const {
        double factor = 1.0;
        for (int step = 0; step < MOST_STEPS; step++) {
            double both[2];
            sum(both, [&](double own, double its, double* values) {
                const bool active = its > factor * own;
                values[0] = active ? own : 0.0, values[1] = active ? its : 0.0;
            });
            const double moved = both[0] > 0.0 ? (both[1] - excess) / both[0] : factor;
            if (!(moved > factor)) break;
            factor = moved;
        }
        return factor;
    }

    // 1 / hi: m <= 1 with sum (m p - q)+ = excess.
    double under(double excess) const {
        double factor = 1.0;
        for (int step = 0; step < MOST_STEPS; step++) {
            double both[2];
            sum(both, [&](double own, double its, double* values) {
                const bool active = factor * own > its;
                values[0] = active ? own : 0.0, values[1] = active ? its : 0.0;
            });
            const double slope = both[0] + (factor > 0.0 ? others : 0.0);
            const double moved = slope > 0.0 ? (both[1] + excess) / slope : factor;
            if (!(moved < factor)) break;
            factor = moved;
        }
        return factor;
    }

    static constexpr int MOST_STEPS = 64;
};

// `optimal` accepts q up to p / lo and fills up to p / hi: here 1 / lo, at most the largest number of fp32 as in acceptance.py, whose
// law it has to be, and 1 / hi.
struct Clip {
    double cap = 1.0, under = 1.0;

    Clip() = default;
    Clip(double cap, double under) : cap(std::min(cap, (double)std::numeric_limits<float>::max())), under(under) {}

    static Clip optimal(const Position& at, float share) {
        double difference[1];
        at.sum(difference, [](double own, double its, double* values) { values[0] = std::fabs(own - its); });
        const double excess = std::max((1.0 - share) * 0.5 * (difference[0] + at.others), at.impossible);
        return {at.cap(excess), at.under(excess)};
    }

    // hi - lo = kappa at each position: an active-set step inside a bracket, see acceptance.py.
    static Clip priced(const Position& at, float share) {
        const double kappa = share / std::max(1.0 - share, 1e-12);
        double low = 1.0, high = 1.0;
        for (size_t i = 0; i < at.p.size(); i++)
            if (at.p[i] > 0.0f && at.q[i] > 0.0f) low = std::min(low, (double)at.p[i] / at.q[i]);
        low = std::min(std::max({1.0 - kappa, low, 1e-300}), 1.0);
        double lo = high;
        for (int step = 0; step < Position::MOST_STEPS && kappa > 0.0; step++) {
            const double hi = lo + kappa;
            double sums[3];  // q of capped and of floored tokens; p of each
            at.sum(sums, [&](double own, double its, double* values) {
                const bool capped = its * lo > own, floored = own > its * hi;
                values[0] = capped || floored ? its : 0.0, values[1] = capped ? own : 0.0, values[2] = floored ? own : 0.0;
            });
            const double a = sums[0], p_cap = sums[1], p_floor = sums[2] + at.others;
            const double gap = a - p_cap / lo - p_floor / hi, b = a * kappa - p_cap - p_floor;
            const double spread = std::sqrt(b * b + 4.0 * a * p_cap * kappa);
            const double root = b > 0.0 ? 2.0 * p_cap * kappa / (spread + b) : (spread - b) / (2.0 * a);
            if (std::fabs(gap) <= 1e-12 || std::fabs(root - lo) <= 1e-10 * lo || high - low <= 1e-12 * high) break;
            (gap > 0.0 ? high : low) = lo;
            lo = root > low && root < high ? root : std::sqrt(low) * std::sqrt(high);
        }
        Clip clip{1.0 / lo, 1.0 / std::max(lo + kappa, 1.0)};
        double left[1];
        at.sum(left, [&](double own, double its, double* values) { values[0] = std::max(clip.under * own - its, 0.0); });
        if (left[0] + clip.under * at.others < at.impossible)  // their weight must go somewhere
            clip = {at.cap(at.impossible), at.under(at.impossible)};
        return clip;
    }

    // a(x) of a token with p(x) and q(x).
    float chance(float target, float draft) const {
        const float n = (float)(target * cap);
        return !(target > 0.0f) ? 0.0f : n >= draft ? 1.0f : n / draft;
    }

    // TV between the rule's law and p: the sum of (q a - p)+.
    float variation(const Position& at) const {
        double sum[1];
        at.sum(sum, [&](double own, double its, double* values) { values[0] = std::max(std::min(its, own * cap) - own, 0.0); });
        return sum[0];
    }
};

}  // namespace

extern "C" {

// What a rule says of a drafted token: `share` is its alpha there. By `exact` (0), `mixture` (1), `lenience` (2), and by `priced`
// (3) for tokens that are one-hot, the law after a rejection is that of p - q, as in acceptance.py; by `priced` and `optimal` (4)
// for others see `Clip`.
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
    static thread_local Position position;
    const bool clips = q && kind >= 3;
    for (int64_t row = 0; row < rows; row++) {
        const double* number = numbers + row * (width + 1);
        int64_t kept = 0;
        Clip clip;
        for (; kept < lengths[row]; kept++) {
            const int64_t at = row * width + kept, token = tokens[at];
            const float* target = p + (row * (width + 1) + kept) * vocab;
            const float* draft = q ? q + at * outputs : nullptr;
            const Rule rule{kind, shares[at]};
            const int64_t place = q && support ? std::lower_bound(support, support + outputs, token) - support : token;
            float chance = q ? rule.chance(target[token], draft[place]) : rule.chance(target[token]);
            clip = {};
            if (clips && rule.share > 0.0f) {
                position.set(target, vocab, draft, support, outputs);
                clip = kind == 3 ? Clip::priced(position, rule.share) : Clip::optimal(position, rule.share);
                chance = clip.chance(target[token], draft[place]);
                variation[at] = clip.variation(position);
            } else if (rule.kind && rule.share > 0.0f)
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
                if (clip.under != 1.0)
                    for (float& left : rest) left *= (float)clip.under;
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
