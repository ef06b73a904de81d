/* Rounds numbers to the blocks of Q4_1 and Q8_0 of a file, for weights that are multiplied by in fewer bits. */
#pragma once
#include "repack.h"

#define GROUP_PARTS (GROUP / LANES)
#define SMALLEST_HALF 5.9604645e-8f /* 2^-24, the smallest positive number of fp16. */

/* Shares of a group's range that are tried: a narrower grid cuts its ends and is finer within. */
static const float narrowed[] = {1.0f, 0.95f, 0.9f, 0.85f, 0.8f};

/* A grid of 16 levels from `least` on. */
typedef struct {
    float scale, least;
} Grid;

/* The nearest number of fp16. */
INLINE float as_half(float x) { return of_half(half_of(x)); }
INLINE void put_half(uint8_t *to, float x) {
    const uint16_t half = half_of(x);
    memcpy(to, &half, 2);
}

INLINE Grid grid_of(float low, float high, float share) {
    const float scale = as_half(share * (high - low) / 15);
    return (Grid){scale, as_half((low + high) / 2 - 7.5f * scale)};
}

/* The levels of numbers on a grid: the nearest of 0 to 15. */
INLINE Floats levels_on(Grid grid, Floats x) {
    const float inverse = grid.scale > 0 ? 1 / grid.scale : 0;
    return smaller(larger(rounded(multiply(subtract(x, all(grid.least)), all(inverse))), zeros()), all(15));
}

INLINE Floats squares_of(const Floats *parts) {
    Floats sum = zeros();
#pragma GCC unroll 4
    for (int p = 0; p < GROUP_PARTS; p++)
        sum = multiply_add(parts[p], parts[p], sum);
    return sum;
}

INLINE float error_on(Grid grid, const Floats *x) {
    Floats errors[GROUP_PARTS];
#pragma GCC unroll 4
    for (int p = 0; p < GROUP_PARTS; p++)
        errors[p] = subtract(subtract(x[p], all(grid.least)), multiply(levels_on(grid, x[p]), all(grid.scale)));
    return sum_of(squares_of(errors));
}

/* Write a group as a block of Q4_1, on the grid that is nearest to it; returns the squared error. */
static float round_to_4(const Floats *x, uint8_t *block) {
    Floats high = x[0], low = x[0];
#pragma GCC unroll 4
    for (int p = 1; p < GROUP_PARTS; p++) {
        high = larger(high, x[p]);
        low = smaller(low, x[p]);
    }
    const float most = peak_of(high), least = -peak_of(subtract(zeros(), low));
    Grid best = grid_of(least, most, narrowed[0]);
    float error = error_on(best, x);
    for (int i = 1; i < (int)(sizeof narrowed / sizeof *narrowed); i++) {
        const Grid other = grid_of(least, most, narrowed[i]);
        const float found = error_on(other, x);
        if (found < error) {
            best = other;
            error = found;
        }
    }
    put_half(block, best.scale);
    put_half(block + 2, best.least);
    int8_t levels[GROUP];
#pragma GCC unroll 4
    for (int p = 0; p < GROUP_PARTS; p++)
        store_levels(levels + p * LANES, levels_on(best, x[p]));
    for (int i = 0; i < GROUP / 2; i++)
        block[4 + i] = (uint8_t)(levels[i] | levels[GROUP / 2 + i] << 4);
    return error;
}

/* Write a group as a block of Q8_0. */
static void round_to_8(const Floats *x, uint8_t *block) {
    Floats peaks = zeros();
#pragma GCC unroll 4
    for (int p = 0; p < GROUP_PARTS; p++)
        peaks = larger(peaks, magnitude(x[p]));
    const float peak = as_half(peak_of(peaks) / 127), scale = peak > SMALLEST_HALF ? peak : SMALLEST_HALF;
    put_half(block, scale);
#pragma GCC unroll 4
    for (int p = 0; p < GROUP_PARTS; p++) {
        const Floats level = rounded(divide(x[p], all(scale)));
        store_levels((int8_t *)block + 2 + p * LANES, smaller(larger(level, all(-127)), all(127)));
    }
}

typedef struct {
    const uint8_t *numbers; /* [out][in] of `size` bytes each: fp32, bf16 or fp16. */
    int64_t in, size, is_brain, bits;
    uint8_t *blocks;
    double *sums; /* [out][2]: the squared error of each row, for 4 bits, and its sum of squares. */
} Rounding;

/* Bytes of a block. */
static int rounded_bytes(const Rounding *of) {
    return stored[of->bits == 4 ? Q4_1 : Q8_0].bytes;
}

/* LANES numbers of a row. */
INLINE Floats numbers_at(const Rounding *of, const uint8_t *at) {
    return of->size == 4 ? load((const float *)at) : of->is_brain ? as_floats(shifted_left(shorts(at), 16)) : halves(at);
}

static void round_row(const void *about, int64_t row, int worker) {
    const Rounding *of = about;
    const uint8_t *at = of->numbers + row * of->in * of->size;
    uint8_t *block = of->blocks + row * (of->in / GROUP) * rounded_bytes(of);
    double error = 0, squares = 0;
    (void)worker;
    for (int64_t i = 0; i < of->in; i += GROUP, block += rounded_bytes(of)) {
        Floats parts[GROUP_PARTS];
#pragma GCC unroll 4
        for (int p = 0; p < GROUP_PARTS; p++, at += LANES * of->size)
            parts[p] = numbers_at(of, at);
        squares += sum_of(squares_of(parts));
        if (of->bits == 4)
            error += round_to_4(parts, block);
        else
            round_to_8(parts, block);
    }
    of->sums[2 * row] = error;
    of->sums[2 * row + 1] = squares;
}
