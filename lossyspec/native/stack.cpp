// Passes of a decoder stack of the Llama family on x86 CPUs, with int4, int8 and bf16 weights, in one call: no operation of
// torch's in between, whose launch costs more than its work when a pass reads one to sixteen tokens.
#include <cstdlib>
#include <initializer_list>
#include <omp.h>

#include "attention.h"
#include "laws.h"
#include "products.h"

extern "C" {

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

Floats activated(Floats x, Floats up, int64_t kind) {
    const Floats inner = kind == 1 ? (x + x * x * x * 0.044715f) * 1.5957691216057308f : x;  // twice tanh's argument
    return x / (1.0f + exponential(-inner)) * up;
}

void activate(const float* gate_up, int64_t middle, int64_t kind, float* y) {
    const float* up = gate_up + middle;
    int64_t i = 0;
    for (; i + LANES <= middle; i += LANES) store(y + i, activated(load(gate_up + i), load(up + i), kind));
    if (i == middle) return;
    float gates[LANES] = {}, ups[LANES] = {}, both[LANES];
    std::memcpy(gates, gate_up + i, 4 * (middle - i));
    std::memcpy(ups, up + i, 4 * (middle - i));
    store(both, activated(load(gates), load(ups), kind));
    std::memcpy(y + i, both, 4 * (middle - i));
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
        Tiles tiles;
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) digits.set(row, x + row * matrix->inputs, matrix->bits);
        product(*matrix, digits, rows, y, false, thread, count, tiles);
    }
    return 0;
}

// Attention alone: y (rows, count, heads, size) of states (rows, count, heads, size), scaled. keys, values: (rows, kv_heads, slots,
// size) in fp32, or bf16 where `half`. Returns 0, or 1 for want of memory.
int lossyspec_attend(const void* keys, const void* values, const float* states, const int64_t* starts, int64_t rows,
                     int64_t count, int64_t heads, int64_t kv_heads, int64_t size, int64_t slots, int64_t window, int64_t half,
                     int64_t threads, float* y) {
    static thread_local Memory memory;
    const Attention attention{rows, count, heads, kv_heads, size, threads, starts, half != 0};
    float* shared = (float*)memory.get(4 * (attention.shared_room() + threads * attention.own_room()));
    if (!shared) return 1;
#pragma omp parallel num_threads(threads)
    {
        std::vector<Query> asked(attention.queries);
        float* own = shared + attention.shared_room() + omp_get_thread_num() * attention.own_room();
        attention.layer(keys, values, slots, window, states, heads * size, shared, own, asked.data(), y);
    }
    return 0;
}

// The stream x (tokens, hidden) through all layers; x is the final normed states then. Returns 0, or 1 for want of memory.
int lossyspec_pass(const Stack* stack, const Pass* pass, float* x) {
    static thread_local Memory memory;
    const int64_t tokens = pass->rows * pass->count, hidden = stack->hidden, size = stack->size, middle = stack->middle;
    const int64_t heads = stack->heads, kv_heads = stack->kv_heads, wide = (heads + 2 * kv_heads) * size;
    const int64_t attended_width = heads * size;
    const Attention attention{pass->rows, pass->count, heads, kv_heads, size, pass->threads, pass->starts, pass->half != 0};
    int64_t broadest = stack->entry.inputs;
    for (int64_t width : {middle, hidden, attended_width}) broadest = width > broadest ? width : broadest;
    const int64_t a_numbers = tokens * (2 * middle > wide ? 2 * middle : wide), b_numbers = tokens * broadest;
    const int64_t parts_numbers = attention.shared_room(), per_thread = attention.own_room() + broadest + 2 * LANES;
    const size_t digit_bytes = (Digits::bytes(tokens, broadest) + 63) / 64 * 64;
    uint8_t* place = memory.get(digit_bytes + 4 * (a_numbers + b_numbers + parts_numbers + pass->threads * per_thread) + 256);
    if (!place) return 1;
    float *a = (float*)(place + digit_bytes), *b = a + a_numbers, *parts = b + b_numbers, *scratch = parts + parts_numbers;
#pragma omp parallel num_threads(pass->threads)
    {
        const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        Tiles tiles;
        float *own = scratch + thread * per_thread, *line = own + attention.own_room();
        std::vector<Query> asked(attention.queries);
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
            product(stack->entry, joined, tokens, x, false, thread, threads, tiles, &stack->layers->qkv);
#pragma omp barrier
        }
        for (int64_t index = 0; index < stack->count; index++) {
            const Layer& layer = stack->layers[index];
            const Matrix* next = index + 1 < stack->count ? &stack->layers[index + 1].qkv : stack->table ? &stack->exit : nullptr;
            const float *cosines = pass->cosines[index], *sines = pass->sines[index];
            Digits narrow(place, tokens, hidden), attended(place, tokens, attended_width), broad(place, tokens, middle);
#pragma omp for schedule(static)
            for (int64_t token = 0; token < tokens; token++) {
                rms_norm(x + token * hidden, layer.before_attention, stack->epsilon, hidden, line, false);
                narrow.set(token, line, layer.qkv.bits);
            }
            product(layer.qkv, narrow, tokens, a, false, thread, threads, tiles, &layer.out);
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
            attention.layer(pass->keys[index], pass->values[index], pass->slots[index], layer.window, a, wide, parts, own,
                            asked.data(), b);
#pragma omp for schedule(static)
            for (int64_t token = 0; token < tokens; token++)
                attended.set(token, b + token * attended_width, layer.out.bits);
            product(layer.out, attended, tokens, layer.after_attention ? a : x, !layer.after_attention, thread, threads, tiles, &layer.gate_up);
#pragma omp barrier
#pragma omp for schedule(static)
            for (int64_t token = 0; token < tokens; token++) {
                float* stream = x + token * hidden;
                if (layer.after_attention)
                    rms_norm(a + token * hidden, layer.after_attention, stack->epsilon, hidden, stream, true);
                rms_norm(stream, layer.before_mlp, stack->epsilon, hidden, line, false);
                narrow.set(token, line, layer.gate_up.bits);
            }
            product(layer.gate_up, narrow, tokens, a, false, thread, threads, tiles, &layer.down);
#pragma omp barrier
#pragma omp for schedule(static)
            for (int64_t token = 0; token < tokens; token++) {
                activate(a + token * 2 * middle, middle, stack->activation, line);
                broad.set(token, line, layer.down.bits);
            }
            product(layer.down, broad, tokens, layer.after_mlp ? a : x, !layer.after_mlp, thread, threads, tiles, next);
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
            product(stack->exit, last, pass->rows, pass->logits, false, thread, threads, tiles);
        }
    }
    return 0;
}

// What a draft head draws from it, at most `limits[row]` tokens for each row, `steps` the largest of them: the pass reads the
// entries with true features, then one entry a step goes on from the head's own feature, one slot further. Of each step: `laws`
// (rows, steps, outputs) are softmax(logits / temperature); the token is drawn by `numbers` (rows, steps), or is the most likely
// one where there are none; `tokens` (rows, steps) are its ids, by `support`. A row stops before a law whose largest chance is
// under theta, or that is NaN: `lengths` (rows + 1) are the tokens that count, and last the steps that were taken. cosines,
// sines: of all positions. Returns 0, or 1 for want of memory.
int lossyspec_chain(const Stack* stack, const Pass* first, float* x, const int64_t* limits, int64_t steps, float temperature,
                    float theta, const double* numbers, const int64_t* support, const float* cosines, const float* sines,
                    float* laws, int64_t* tokens, int64_t* lengths) {
    const int64_t rows = first->rows, width = stack->entry.inputs / 2, outputs = stack->exit.outputs, size = stack->size;
    std::vector<float> features(rows * width), states(rows * width), turns(2 * rows * size);
    std::vector<int64_t> starts(rows), last(rows), none(rows);
    std::vector<const float*> cosine(stack->count, turns.data()), sine(stack->count, turns.data() + rows * size);
    std::fill(lengths, lengths + rows, 0);
    bool live = true;
    for (int64_t step = 0; step < steps && live; step++) {
        Pass pass = *first;
        const float* made = x;
        if (step) {
            for (int64_t row = 0; row < rows; row++) {
                starts[row] = first->starts[row] + first->picks[row] + step;
                std::memcpy(turns.data() + row * size, cosines + starts[row] * size, 4 * size);
                std::memcpy(turns.data() + (rows + row) * size, sines + starts[row] * size, 4 * size);
            }
            pass.starts = starts.data(), pass.count = 1, pass.cosines = cosine.data(), pass.sines = sine.data();
            pass.tokens = last.data(), pass.features = features.data(), pass.picks = none.data();
            made = states.data();
        }
        if (lossyspec_pass(stack, &pass, const_cast<float*>(made))) return 1;
        live = false;
        for (int64_t row = 0; row < rows; row++) {
            const int64_t count = step ? 1 : first->count, pick = step ? 0 : first->picks[row];
            std::memcpy(features.data() + row * width, made + (row * count + pick) * width, 4 * width);
            float* law = laws + (row * steps + step) * outputs;
            const float* logits = first->logits + row * outputs;
            lossyspec_softmax(logits, 1, outputs, temperature, law, 1);
            int64_t likely = 0, chosen;
            for (int64_t i = 1; i < outputs; i++) likely = law[i] > law[likely] ? i : likely;
            if (numbers) lossyspec_draw(law, 1, outputs, numbers + row * steps + step, &chosen);
            else chosen = likely;
            if (lengths[row] == step && step < limits[row] && law[likely] >= theta) lengths[row]++, live = true;
            last[row] = tokens[row * steps + step] = support[chosen < outputs ? chosen : outputs - 1];
        }
        lengths[rows] = step + 1;
    }
    return 0;
}

}  // extern "C"
