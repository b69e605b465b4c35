// Tiles (AMX) in software, by Intel's description of the instructions, so that their code is tested on CPUs without them.
#include <cstring>

namespace {

struct EmulatedTiles {
    Shape shape;
    uint8_t bytes[8][16][64];
};
thread_local EmulatedTiles emulated;

inline void tile_shapes(const Shape& shape) {
    emulated.shape = shape;
    std::memset(emulated.bytes, 0, sizeof emulated.bytes);
}
inline void tile_release() { std::memset(emulated.bytes, 0xff, sizeof emulated.bytes); }
inline bool tiles_allowed() { return true; }

template <int TILE>
inline void tile_load(const void* from, int64_t step) {
    std::memset(emulated.bytes[TILE], 0, sizeof emulated.bytes[TILE]);
    for (int row = 0; row < emulated.shape.rows[TILE]; row++)
        std::memcpy(emulated.bytes[TILE][row], (const char*)from + row * step, emulated.shape.bytes[TILE]);
}
template <int TILE>
inline void tile_store(void* to) {
    for (int row = 0; row < emulated.shape.rows[TILE]; row++)
        std::memcpy((char*)to + 64 * row, emulated.bytes[TILE][row], emulated.shape.bytes[TILE]);
}
template <int TILE>
inline void tile_zero() {
    std::memset(emulated.bytes[TILE], 0, sizeof emulated.bytes[TILE]);
}

template <int BITS, int SUMS, int ROWS_TILE, int WEIGHTS>
inline void tile_dot() {
    const Shape& shape = emulated.shape;
    const auto &rows = emulated.bytes[ROWS_TILE], &weights = emulated.bytes[WEIGHTS];
    for (int m = 0; m < shape.rows[SUMS]; m++)
        for (int k = 0; k < shape.bytes[ROWS_TILE] / 4; k++)
            for (int n = 0; n < shape.bytes[SUMS] / 4; n++) {
                const uint8_t *a = rows[m] + 4 * k, *b = weights[k] + 4 * n;
                uint8_t* to = emulated.bytes[SUMS][m] + 4 * n;
                if (BITS == 16) {
                    float sum;
                    std::memcpy(&sum, to, 4);
                    for (int i = 0; i < 2; i++) {
                        uint16_t one, other;
                        std::memcpy(&one, a + 2 * i, 2);
                        std::memcpy(&other, b + 2 * i, 2);
                        sum += widened(one) * widened(other);
                    }
                    std::memcpy(to, &sum, 4);
                } else {
                    int32_t sum;
                    std::memcpy(&sum, to, 4);
                    for (int i = 0; i < 4; i++) sum += (int8_t)a[i] * (BITS == 8 ? (int)(int8_t)b[i] : (int)b[i]);
                    std::memcpy(to, &sum, 4);
                }
            }
}

}  // namespace
