// Laws from logits, and tokens from laws.
#pragma once
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
