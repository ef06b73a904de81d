/* Weights, and the rows that they multiply, in the order in which the products read them. */
#pragma once
#include "lanes.h"
#include "pool.h"
#include <float.h>
#include <math.h>

#define CHUNK 16 /* Rows whose sums stay in registers together. */
#define HALF_CHUNK 8 /* Most rows of a pass where a chunk is not full. */
#define FEW 8    /* Work on so few rows is done by the calling thread, which takes less time than to share it. */
#define PARTS (TILE / LANES)
/* The largest centres of levels that have their scale with half a group, and with all of it. */
#define HALF_CENTRE 32
#define WHOLE_CENTRE 128

typedef struct {
    int64_t format, out, in, own_threads, bytes, bias_bytes; /* The bytes of blocks and of bias. */
    const uint8_t *blocks;
    const float *bias; /* NULL for none. */
    const int32_t *chosen; /* The tiles that `linear` multiplies, `number` of them; NULL for all. */
    int64_t number, padding; /* The last outputs that are zeros to fill a tile, which callers of `linear` cut off. */
} Weight;

typedef struct {
    const float *weight;
    int64_t bytes; /* Of the weight. */
    float epsilon;
} Norm;

/* A block's connection to the residual stream: its result is x + factor * after(block(norm(x))). */
typedef struct {
    const Norm *norm, *after; /* NULL for none. */
    float factor;
} Connection;

/* Rows, in chunks of CHUNK rows and the rest. Quantised ones have per chunk of `count` rows levels [in / GROUP][count][GROUP],
 * and [in / GROUP][count] scales, [3] sums of the levels of either half and of both, and [3] integers with which sums of
 * products begin: INTEGER_BITS less these sums times HALF_CENTRE, HALF_CENTRE and WHOLE_CENTRE. Those for weights of 16 bits
 * have `numbers` alone, ordered as levels are. So the rows of a chunk lie at distances that are constant where `count` is. */
typedef struct {
    int8_t *levels;
    float *scales, *sums;
    int32_t *starts;
    float *numbers;
    int64_t in;
} Rows;

/* Groups of columns. */
typedef struct {
    int64_t begin, end;
} Span;

/* Where fetched lines go, as __builtin_prefetch has it. */
#define NEAREST 3
#define NEXT 2
#define READ_ONCE 0

/* Fetch the `bytes` bytes that lie `near` bytes after `from` into the nearest cache, and those `far` after it into the next,
 * for products with `rows` rows. Processors fetch ahead on their own within a page of 4 KiB alone, and the nearest cache
 * waits for few lines at a time. On Zen 4 steps of 4 rows cost 1.09 plain steps so, and 1.24 where all is fetched into the
 * nearest cache; but one row leaves the processor enough time to fetch on its own, and a plain step of Q4_K_M takes 0.93 of
 * the time. On Zen 5 the former lie twice as far, and the latter are fetched as lines that are read once: that takes 0.90. */
INLINE void fetch(const uint8_t *from, const int64_t bytes, const int64_t near, const int64_t far, const int rows) {
    const int is_zen4 = LANES == 16 && amd_family == 25;
    if (amd_family >= 26)
#pragma GCC unroll 16
        for (int64_t at = 0; at < bytes; at += 64) {
            __builtin_prefetch(from + 2 * near + at, 0, NEAREST);
            __builtin_prefetch(from + far + at, 0, READ_ONCE);
        }
    else if (!is_zen4 || rows > 1)
#pragma GCC unroll 16
        for (int64_t at = 0; at < bytes; at += 64) {
            __builtin_prefetch(from + near + at, 0, NEAREST);
            __builtin_prefetch(from + far + at, 0, NEXT);
        }
}

/* The rows of the chunk that begins with row `first`. */
static int chunk(int64_t n, int64_t first) {
    return n - first < CHUNK ? (int)(n - first) : CHUNK;
}

/* 1 / the root mean square of a row. */
static float norm_factor(const float *x, int64_t in, float epsilon) {
    Floats sum = zeros();
    for (int64_t i = 0; i < in; i += LANES) {
        const Floats part = load(x + i);
        sum = multiply_add(part, part, sum);
    }
    return 1.0f / sqrtf(sum_of(sum) / (float)in + epsilon);
}

/* to = norm(x) + residual, or without the latter if that is NULL; `factor` multiplies the norm, which may be NULL. */
static void norm_row(const float *x, const Norm *norm, float factor, const float *residual, int64_t in, float *to) {
    const float by = norm ? factor * norm_factor(x, in, norm->epsilon) : factor;
    for (int64_t i = 0; i < in; i += LANES) {
        Floats part = multiply(load(x + i), all(by));
        if (norm)
            part = multiply(part, load(norm->weight + i));
        store(to + i, residual ? add(load(residual + i), part) : part);
    }
}

/* y = the block's result for a row x, where y is its output. */
static void connect_row(const Connection *by, const float *x, int64_t width, float *y) {
    norm_row(y, by->after, by->factor, x, width, y);
}

/* Quantise row `row` of n, normed unless `norm` is NULL. */
static void quantise(const float *x, const Norm *norm, Rows rows, int64_t row, int64_t n) {
    const int64_t in = rows.in, first = row - row % CHUNK, count = chunk(n, first);
    const float factor = norm ? norm_factor(x, in, norm->epsilon) : 1.0f;
    for (int64_t i = 0; i < in; i += GROUP) {
        Floats parts[GROUP / LANES], peaks = zeros();
#pragma GCC unroll 4
        for (int p = 0; p < GROUP / LANES; p++) {
            parts[p] = load(x + i + p * LANES);
            if (norm)
                parts[p] = multiply(multiply(parts[p], all(factor)), load(norm->weight + i + p * LANES));
            peaks = larger(peaks, magnitude(parts[p]));
        }
        /* The inverse of a smaller scale would be infinite. Its group counts as zeros. */
        const float scale = peak_of(peaks) / 127.0f;
        const Floats inverse = all(scale >= FLT_MIN ? 1.0f / scale : 0.0f);
        const int64_t at = (first * in + i * count) / GROUP + row - first;
        int32_t sums[3] = {0, 0, 0};
        int finite = 1;
#pragma GCC unroll 4
        for (int p = 0; p < GROUP / LANES; p++) {
            const Floats levels = multiply(parts[p], inverse);
            const int numbers = are_numbers(levels); /* Infinite ones are none either: their inverse is 0. */
            finite &= numbers;
            sums[p * LANES >= GROUP / 2] += store_levels(rows.levels + at * GROUP + p * LANES, numbers ? levels : zeros());
        }
        rows.scales[at] = finite ? scale : NAN;
        sums[2] = sums[0] + sums[1];
#pragma GCC unroll 3
        for (int s = 0; s < 3; s++) {
            rows.sums[3 * at + s] = (float)sums[s];
            rows.starts[3 * at + s] = INTEGER_BITS - (s < 2 ? HALF_CENTRE : WHOLE_CENTRE) * sums[s];
        }
    }
}

/* Order the numbers of row `row` of n, normed unless `norm` is NULL. */
static void order(const float *x, const Norm *norm, Rows rows, int64_t row, int64_t n) {
    const int64_t in = rows.in, first = row - row % CHUNK, count = chunk(n, first);
    const float factor = norm ? norm_factor(x, in, norm->epsilon) : 1.0f;
    for (int64_t i = 0; i < in; i += LANES) {
        float *to = rows.numbers + first * in + (i / GROUP * count + row - first) * GROUP + i % GROUP;
        const Floats part = load(x + i);
        store(to, norm ? multiply(multiply(part, all(factor)), load(norm->weight + i)) : part);
    }
}

/* The number of floats that n rows take for a weight. */
static int64_t floats_of(const Weight *weight, int64_t n) {
    const int64_t in = weight->in;
    return n * (has_levels(formats[weight->format]) ? in / 4 + 7 * (in / GROUP) : in);
}

/* Where n rows for a weight lie in `memory`. */
static Rows rows_in(float *memory, const Weight *weight, int64_t n) {
    const int64_t in = weight->in, groups = n * (in / GROUP);
    int32_t *starts = (int32_t *)(memory + 4 * groups);
    if (!has_levels(formats[weight->format]))
        return (Rows){.numbers = memory, .in = in};
    return (Rows){.levels = (int8_t *)(starts + 3 * groups), .scales = memory, .sums = memory + groups,
                  .starts = starts, .in = in};
}

/* Bring row `row` of n, normed unless `norm` is NULL, into the order of `rows`. */
static void prepare(const float *x, const Norm *norm, Rows rows, int64_t row, int64_t n) {
    (rows.numbers ? order : quantise)(x, norm, rows, row, n);
}

typedef struct {
    const float *x;
    const Norm *norm;
    Rows rows;
    int64_t n;
} Preparing;

/* The rows of a chunk, whose numbers lie in the same lines of a cache: by two threads they take twice as long. */
static void prepare_item(const void *about, int64_t item, int worker) {
    const Preparing *of = about;
    const int64_t first = item * CHUNK, end = first + chunk(of->n, first);
    (void)worker;
    for (int64_t row = first; row < end; row++)
        prepare(of->x + row * of->rows.in, of->norm, of->rows, row, of->n);
}

/* The rows of x as a weight takes them, in `memory`. */
static Rows prepared(Threads threads, const float *x, const Norm *norm, int64_t n, const Weight *weight, float *memory) {
    const Preparing about = {x, norm, rows_in(memory, weight, n), n};
    each(threads, prepare_item, &about, (n + CHUNK - 1) / CHUNK, 1);
    return about.rows;
}
