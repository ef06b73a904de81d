/* Products of fp32 rows with weights of 4 and 8 bits.
 *
 * Columns come in groups of 32. A weight is scale * level + least, where level is unsigned and scale and least belong to
 * one output and one group; 8-bit weights are scale * (level - 128). A row is quantised to 8 bits with a scale of its own
 * per group, so a group's product is an exact integer, and sums over groups run in one order: a row's result is the same
 * to the bit whatever rows stand beside it and however many threads there are.
 *
 * Blocks are ordered by 16 outputs (a tile), then by group: the levels of 8 times 4 columns, each [16 outputs][4 columns],
 * two of them in the low and the high halves of the same bytes at 4 bits; 16 scales; at 4 bits, 16 leasts. Scales and
 * leasts are fp16.
 */
#pragma once
#include "lanes.h"
#include "pool.h"
#include <float.h>
#include <math.h>

#define TILE 16
#define CHUNK 16 /* Rows whose sums stay in registers together. */
#define FEW 8    /* So few rows are quantised by the calling thread, which takes less time than to share them. */
#define ITEM 65536 /* Bytes of a large weight that a thread takes at a time: some microseconds. */
#define AHEAD 16 /* Blocks between the one that is read and the one that is fetched. Processors fetch ahead on their own
                  * within a page of 4 KiB alone; this takes a fifth off a row's time at 4 bits, a third at 8. */
#define PARTS (TILE / LANES)

typedef struct {
    int64_t bits, out, in, own_threads, bytes, bias_bytes; /* The bytes of blocks and of bias. */
    const uint8_t *blocks;
    const float *bias; /* NULL for none. */
} Weight;

/* Bytes of the block of a tile and a group. */
static int64_t block_bytes(int64_t bits) {
    return bits == 4 ? 320 : 544;
}

typedef struct {
    const float *weight;
    int64_t bytes; /* Of the weight. */
    float epsilon;
} Norm;

/* Quantised rows, in chunks of CHUNK rows and the rest: per chunk of `count` rows, levels [in / GROUP][count][GROUP], and
 * [in / GROUP][count] scales, sums of levels, and -128 * sum as INTEGER_BITS + that. So the rows of a chunk lie at
 * distances that are constant where `count` is. */
typedef struct {
    int8_t *levels;
    float *scales, *sums;
    int32_t *offsets;
    int64_t in;
} Rows;

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
        int32_t sum = 0;
        int finite = 1;
#pragma GCC unroll 4
        for (int p = 0; p < GROUP / LANES; p++) {
            const Floats levels = multiply(parts[p], inverse);
            const int numbers = are_numbers(levels); /* Infinite ones are none either: their inverse is 0. */
            finite &= numbers;
            sum += store_levels(rows.levels + at * GROUP + p * LANES, numbers ? levels : zeros());
        }
        rows.scales[at] = finite ? scale : NAN;
        rows.sums[at] = (float)sum;
        rows.offsets[at] = INTEGER_BITS - 128 * sum;
    }
}

/* The number of floats that n quantised rows take. */
static int64_t floats_of(int64_t n, int64_t in) {
    return n * (in / 4 + 3 * (in / GROUP));
}

typedef struct {
    const float *x;
    const Norm *norm;
    Rows rows;
    int64_t n;
} Quantising;

static void quantise_item(const void *about, int64_t row, int worker) {
    const Quantising *of = about;
    (void)worker;
    quantise(of->x + row * of->rows.in, of->norm, of->rows, row, of->n);
}

/* The quantised rows of x, in `memory`. */
static Rows quantised(Threads threads, const float *x, const Norm *norm, int64_t n, int64_t in, float *memory) {
    const int64_t groups = n * (in / GROUP);
    int32_t *offsets = (int32_t *)(memory + 2 * groups);
    const Rows rows = {.levels = (int8_t *)(offsets + groups), .scales = memory, .sums = memory + groups,
                       .offsets = offsets, .in = in};
    const Quantising about = {x, norm, rows, n};
    each(threads, quantise_item, &about, n, FEW);
    return rows;
}

/* The products of the chunk of `count` rows from `first` with the 16 outputs of a tile, [count][PARTS]. `count` and `bits`
 * are constant where it is called, so that the loops over rows unroll. */
INLINE void products_of(const Weight *weight, int64_t tile, Rows rows, int64_t first, const int count, const int bits,
                        Floats *sums)
{
    const int64_t groups = rows.in / GROUP;
    const int64_t size = bits == 4 ? 320 : 544, scales = bits == 4 ? 256 : 512;
    const uint8_t *block = weight->blocks + tile * groups * size;
    const int8_t *columns = rows.levels + first * rows.in;
    const float *row_scales = rows.scales + first * groups, *row_sums = rows.sums + first * groups;
    const int32_t *offsets = rows.offsets + first * groups;
    Floats total[CHUNK * PARTS];
#pragma GCC unroll 32
    for (int r = 0; r < count * PARTS; r++)
        total[r] = weight->bias ? load(weight->bias + tile * TILE + r % PARTS * LANES) : zeros();
    for (int64_t group = 0; group < groups; group++) {
#pragma GCC unroll 9
        for (int64_t at = 0; at < size; at += 64)
            _mm_prefetch((const char *)block + AHEAD * size + at, _MM_HINT_T0);
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) {
            const Levels levels = levels_of(block, part, bits);
            const Floats scale = halves(block + scales + 2 * LANES * part);
            const Floats least = bits == 4 ? halves(block + scales + 2 * TILE + 2 * LANES * part) : zeros();
            /* scale * (INTEGER + dot) - scale * INTEGER, rounded once, is scale * dot: a scale of 11 bits times INTEGER
             * is exact. That saves a conversion per row. */
            const Floats shift = multiply(scale, all(-INTEGER));
#pragma GCC unroll 16
            for (int r = 0; r < count; r++) {
                Floats product = multiply_add(scale, dots(&levels, columns + r * GROUP, offsets[r], bits), shift);
                if (bits == 4)
                    product = multiply_add(least, all(row_sums[r]), product);
                total[r * PARTS + part] = multiply_add(product, all(row_scales[r]), total[r * PARTS + part]);
            }
        }
        block += size;
        columns += count * GROUP;
        row_scales += count;
        row_sums += count;
        offsets += count;
    }
#pragma GCC unroll 32
    for (int r = 0; r < count * PARTS; r++)
        sums[r] = total[r];
}

static void products(const Weight *weight, int64_t tile, Rows rows, int64_t first, int count, Floats *sums)
{
#define CASE(n)                                                                 \
    case n:                                                                     \
        if (weight->bits == 4)                                                  \
            products_of(weight, tile, rows, first, n, 4, sums);                 \
        else                                                                    \
            products_of(weight, tile, rows, first, n, 8, sums);                 \
        break;
    switch (count) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
        CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14) CASE(15) CASE(16)
    }
#undef CASE
}

/* A weight's tiles come to threads in items of so many: torch's threads have fixed shares anyway. */
static int64_t tiles_together(const Weight *weight, int64_t tiles, Threads threads) {
    const int64_t bytes = weight->in / GROUP * block_bytes(weight->bits), most = tiles / (8 * threads.count);
    const int64_t tiles_of_item = (ITEM + bytes - 1) / bytes, fewer = tiles_of_item < most ? tiles_of_item : most;
    return threads.own && fewer > 1 ? fewer : 1;
}

typedef struct {
    const Weight *weight;
    Rows rows;
    int64_t n, tiles, together;
    const float *residual;
    float *y;
    int64_t width; /* Of y's rows. */
} Projecting;

static void project_item(const void *about, int64_t item, int worker) {
    const Projecting *of = about;
    const int64_t begin = item * of->together, end = begin + of->together;
    (void)worker;
    for (int64_t tile = begin; tile < end && tile < of->tiles; tile++)
        for (int64_t first = 0; first < of->n; first += CHUNK) {
            const int count = chunk(of->n, first);
            Floats sums[CHUNK * PARTS];
            products(of->weight, tile, of->rows, first, count, sums);
            for (int r = 0; r < count * PARTS; r++) {
                const int64_t at = (first + r / PARTS) * of->width + tile * TILE + r % PARTS * LANES;
                store(of->y + at, of->residual ? add(sums[r], load(of->residual + at)) : sums[r]);
            }
        }
}

/* y = products of the rows, plus the residual unless it is NULL. Rows of both are `width` floats apart. */
static void project(Threads threads, const Weight *weight, Rows rows, int64_t n, const float *residual, float *y,
                    int64_t width)
{
    const int64_t tiles = weight->out / TILE, together = tiles_together(weight, tiles, threads);
    const Projecting about = {weight, rows, n, tiles, together, residual, y, width};
    each(threads, project_item, &about, (tiles + together - 1) / together, 1);
}
