/* Products of fp32 rows with quantised weights, which are stored as `formats.h` says.
 *
 * A row is quantised to 8 bits with a scale of its own per group of columns, so the product of whatever shares the scales
 * of weight and row is an exact integer, and sums over groups run in one order: a row's result is the same to the bit
 * whatever rows stand beside it and however many threads there are.
 */
#pragma once
#include "lanes.h"
#include "pool.h"
#include <float.h>
#include <math.h>

#define CHUNK 16 /* Rows whose sums stay in registers together. */
#define HALF_CHUNK 8 /* Most rows of a pass where a chunk is not full. */
#define FEW 8    /* So few rows are quantised by the calling thread, which takes less time than to share them. */
/* Most and least bytes of a weight that a thread takes at a time. Memory is a tenth slower where two threads read turns of
 * the least all the time; at the end these balance their work. */
#define MOST_BYTES 1048576
#define LEAST_BYTES 65536
#define AHEAD 16 /* Blocks between the one that is read and the one that is fetched. Processors fetch ahead on their own
                  * within a page of 4 KiB alone; this takes a fifth off a row's time at 4 bits, a third at 8. */
#define PARTS (TILE / LANES)

typedef struct {
    int64_t format, out, in, own_threads, bytes, bias_bytes; /* The bytes of blocks and of bias. */
    const uint8_t *blocks;
    const float *bias; /* NULL for none. */
    const int32_t *chosen; /* The tiles that `linear` multiplies, `number` of them; NULL for all. */
    int64_t number;
} Weight;

typedef struct {
    const float *weight;
    int64_t bytes; /* Of the weight. */
    float epsilon;
} Norm;

/* Quantised rows, in chunks of CHUNK rows and the rest: per chunk of `count` rows, levels [in / GROUP][count][GROUP], and
 * [in / GROUP][count] scales, [3] sums of the levels of either half and of both, and -128 times both as INTEGER_BITS + that.
 * So the rows of a chunk lie at distances that are constant where `count` is. */
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
        int32_t sums[2] = {0, 0};
        int finite = 1;
#pragma GCC unroll 4
        for (int p = 0; p < GROUP / LANES; p++) {
            const Floats levels = multiply(parts[p], inverse);
            const int numbers = are_numbers(levels); /* Infinite ones are none either: their inverse is 0. */
            finite &= numbers;
            sums[p * LANES >= GROUP / 2] += store_levels(rows.levels + at * GROUP + p * LANES, numbers ? levels : zeros());
        }
        rows.scales[at] = finite ? scale : NAN;
        rows.sums[3 * at] = (float)sums[0];
        rows.sums[3 * at + 1] = (float)sums[1];
        rows.sums[3 * at + 2] = (float)(sums[0] + sums[1]);
        rows.offsets[at] = INTEGER_BITS - 128 * (sums[0] + sums[1]);
    }
}

/* The number of floats that n quantised rows take. */
static int64_t floats_of(int64_t n, int64_t in) {
    return n * (in / 4 + 5 * (in / GROUP));
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
    int32_t *offsets = (int32_t *)(memory + 4 * groups);
    const Rows rows = {.levels = (int8_t *)(offsets + groups), .scales = memory, .sums = memory + groups,
                       .offsets = offsets, .in = in};
    const Quantising about = {x, norm, rows, n};
    each(threads, quantise_item, &about, n, FEW);
    return rows;
}

/* The factors of a block's scales and minima, in the header before eight blocks. */
INLINE void factors_of(const uint8_t *header, int part, const Format format, Floats *factors) {
    factors[0] = halves(header + 2 * LANES * part);
    if (format.header > 2 * TILE)
        factors[1] = halves(header + 2 * TILE + 2 * LANES * part);
}

/* Scales and leasts of the `part`-th LANES outputs of a block, for both halves of its columns where these have their own. */
INLINE void scales_of(const uint8_t *at, int part, const Format format, const Floats *factors, Floats *scale, Floats *least)
{
    const int begin = LANES * part;
    if (format.scaling == SCALE || format.scaling == SCALE_LEAST)
        scale[0] = halves(at + 2 * begin);
    if (format.scaling == SCALE_LEAST)
        least[0] = halves(at + 2 * TILE + 2 * begin);
    if (format.scaling == EXPONENT)
        scale[0] = as_floats(shifted_left(bytes(at + begin), 23));
    if (format.scaling == SIXES) {
        const Ints low = bytes(at + begin), high = fours(at + TILE, part);
        scale[0] = multiply(factors[0], floats(either(low_bits(low, 4), shifted_left(low_bits(high, 2), 4))));
        least[0] = multiply(factors[1],
                            floats(either(shifted_right(low, 4), shifted_left(shifted_right(high, 2), 4))));
    }
    for (int half = 0; half < 2; half++) {
        if (format.scaling == SIGNED)
            scale[half] = multiply(factors[0], floats(signed_bytes(at + TILE * half + begin)));
        if (format.scaling == FOURS) {
            const Ints both = bytes(at + TILE * half + begin);
            scale[half] = multiply(factors[0], floats(low_bits(both, 4)));
            least[half] = multiply(factors[1], floats(shifted_right(both, 4)));
        }
        if (format.draft && (half == 0 || has_halves(format))) {
            const float middle = ((1 << format.second) - 1) / 2.0f - (float)format.centre;
            least[half] = multiply(scale[half], all(middle));
            scale[half] = multiply(scale[half], all((float)(1 << format.second)));
            continue;
        }
        if (has_minima(format) && (half == 0 || has_halves(format)))
            least[half] = subtract(zeros(), least[half]);
        if (format.centre && !has_offset(format) && (half == 0 || has_halves(format)))
            least[half] = multiply(scale[half], all((float)-format.centre));
    }
}

/* The products of `count` rows with the 16 outputs of a tile, [count][PARTS]: rows from `begin` of the chunk of `chunked`
 * rows from `first`. `count` and `format` are constant where it is called, so that the loops over rows unroll. */
INLINE void products_of(const Weight *weight, int64_t tile, Rows rows, int64_t first, int chunked, int begin,
                        const int count, const Format format, Floats *sums)
{
    const int64_t groups = rows.in / GROUP, size = block_bytes(format);
    const int halves_of = has_halves(format) ? 2 : 1, columns_of = GROUP / 4 / halves_of;
    const uint8_t *block = weight->blocks + tile * blocks_bytes(format, groups);
    const uint8_t *second = weight->blocks + weight->out / TILE * blocks_bytes(format, groups)
                            + tile * groups * second_bytes(format);
    const int64_t at_first = first * groups + begin;
    const int8_t *columns = rows.levels + at_first * GROUP;
    const float *row_scales = rows.scales + at_first, *row_sums = rows.sums + 3 * at_first;
    const int32_t *offsets = rows.offsets + at_first;
    Floats total[CHUNK * PARTS], factors[PARTS][2] = {0};
#pragma GCC unroll 32
    for (int r = 0; r < count * PARTS; r++)
        total[r] = weight->bias ? load(weight->bias + tile * TILE + r % PARTS * LANES) : zeros();
    for (int64_t group = 0; group < groups; group++) {
        if (format.header && group % HEADED == 0) {
#pragma GCC unroll 2
            for (int part = 0; part < PARTS; part++)
                factors_of(block, part, format, factors[part]);
            block += format.header;
        }
#pragma GCC unroll 9
        for (int64_t at = 0; at < size; at += 64)
            _mm_prefetch((const char *)block + AHEAD * size + at, _MM_HINT_T0);
        if (reads_second(format)) {
#pragma GCC unroll 4
            for (int64_t at = 0; at < second_bytes(format); at += 64)
                _mm_prefetch((const char *)second + AHEAD * second_bytes(format) + at, _MM_HINT_T0);
        }
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) {
            /* Rows are loaded again for the second part: GCC would keep what the first loaded, which takes more
             * registers than there are, and half of the time. */
            if (part)
                __asm__ volatile("" ::: "memory");
            const Levels levels = levels_of(block, second, part, format);
            Floats scale[2], least[2], shift[2];
            scales_of(block + size - format.scales, part, format, factors[part], scale, least);
            /* scale * (INTEGER + dot) - scale * INTEGER, rounded once, is scale * dot: a scale of 18 bits times INTEGER
             * is exact. That saves a conversion per row. */
            for (int half = 0; half < halves_of; half++)
                shift[half] = multiply(scale[half], all(-INTEGER));
#pragma GCC unroll 16
            for (int r = 0; r < count; r++) {
                Floats product = zeros();
#pragma GCC unroll 2
                for (int half = 0; half < halves_of; half++) {
                    const Floats dot = dots(&levels, columns + r * GROUP, offsets[r], format, half * columns_of,
                                            (half + 1) * columns_of);
                    const Floats part_of = multiply_add(scale[half], dot, shift[half]);
                    product = half ? add(product, part_of) : part_of;
                }
                if (halves_of == 2) {
                    product = multiply_add(least[0], all(row_sums[3 * r]), product);
                    product = multiply_add(least[1], all(row_sums[3 * r + 1]), product);
                } else if (!has_offset(format)) {
                    product = multiply_add(least[0], all(row_sums[3 * r + 2]), product);
                }
                total[r * PARTS + part] = multiply_add(product, all(row_scales[r]), total[r * PARTS + part]);
            }
        }
        block += size;
        second += second_bytes(format);
        columns += chunked * GROUP;
        row_scales += chunked;
        row_sums += 3 * chunked;
        offsets += chunked;
    }
#pragma GCC unroll 32
    for (int r = 0; r < count * PARTS; r++)
        sums[r] = total[r];
}

/* The products of a chunk of `count` rows from `first` with a tile of a format, as `products_of`. Chunks of 9 to 15 rows
 * take two passes, since a function for each number would take long to compile. */
#define CASE(format, n)                                                                               \
    case n:                                                                                           \
        products_of(weight, tile, rows, first, count, begin, n, formats[format], sums + begin * PARTS); \
        break;
#define PRODUCTS(format)                                                                                        \
    static void products_##format(const Weight *weight, int64_t tile, Rows rows, int64_t first, int count,      \
                                  Floats *sums)                                                                 \
    {                                                                                                           \
        for (int begin = 0, left; (left = count - begin) > 0; begin += left == CHUNK ? CHUNK : HALF_CHUNK)      \
            switch (left < CHUNK && left > HALF_CHUNK ? HALF_CHUNK : left) {                                    \
                CASE(format, 1) CASE(format, 2) CASE(format, 3) CASE(format, 4) CASE(format, 5) CASE(format, 6) \
                CASE(format, 7) CASE(format, 8) CASE(format, 16)                                                \
            }                                                                                                   \
    }
PRODUCTS(Q4_0) PRODUCTS(Q4_1) PRODUCTS(Q5_0) PRODUCTS(Q5_1) PRODUCTS(Q8_0) PRODUCTS(Q2_K) PRODUCTS(Q3_K) PRODUCTS(Q4_K)
PRODUCTS(Q5_K) PRODUCTS(Q6_K) PRODUCTS(IQ4_NL) PRODUCTS(MXFP4)
PRODUCTS(Q8_0_DRAFT) PRODUCTS(Q6_K_DRAFT)
#undef CASE

static void products(const Weight *weight, int64_t tile, Rows rows, int64_t first, int count, Floats *sums) {
    static void (*const of_format[FORMATS])(const Weight *, int64_t, Rows, int64_t, int, Floats *) = {
        [Q4_0] = products_Q4_0, [Q4_1] = products_Q4_1, [Q5_0] = products_Q5_0, [Q5_1] = products_Q5_1,
        [Q8_0] = products_Q8_0, [Q2_K] = products_Q2_K, [Q3_K] = products_Q3_K, [Q4_K] = products_Q4_K,
        [Q5_K] = products_Q5_K, [Q6_K] = products_Q6_K, [IQ4_NL] = products_IQ4_NL, [MXFP4] = products_MXFP4,
        [Q8_0_DRAFT] = products_Q8_0_DRAFT, [Q6_K_DRAFT] = products_Q6_K_DRAFT,
    };
    of_format[weight->format](weight, tile, rows, first, count, sums);
}

/* How tiles come to threads, one item after the other: each time a share of those that are left, from `most` tiles at first
 * to `least` at the end. So threads read long runs, and end together. */
typedef struct {
    int64_t tiles, most, least, shares;
} Items;

/* The items of `tiles` tiles of `bytes` each for a product of n rows; torch's threads have fixed shares of single tiles. */
static Items items_of_tiles(int64_t tiles, int64_t bytes, int64_t n, Threads threads) {
    if (!threads.own)
        return (Items){tiles, 1, 1, 1};
    const int64_t most = (MOST_BYTES + bytes - 1) / bytes, least = LEAST_BYTES / (bytes * n);
    return (Items){tiles, most, least > 1 ? least : 1, 2 * threads.count};
}

/* The number of tiles of the item that begins with tile `begin`. */
static int64_t tiles_from(const Items *items, int64_t begin) {
    const int64_t left = items->tiles - begin, share = left / items->shares;
    const int64_t size = share > items->most ? items->most : share < items->least ? items->least : share;
    return size < left ? size : left;
}

static int64_t number_of(const Items *items) {
    int64_t number = 0;
    if (items->most == 1)
        return items->tiles;
    for (int64_t begin = 0; begin < items->tiles; begin += tiles_from(items, begin))
        number++;
    return number;
}

static int64_t first_tile(const Items *items, int64_t item) {
    int64_t begin = 0;
    if (items->most == 1)
        return item;
    while (item-- > 0)
        begin += tiles_from(items, begin);
    return begin;
}

typedef struct {
    const Weight *weight;
    Rows rows;
    int64_t n;
    Items items;
    const float *residual;
    float *y;
    int64_t width; /* Of y's rows. */
} Projecting;

static void project_item(const void *about, int64_t item, int worker) {
    const Projecting *of = about;
    const int64_t begin = first_tile(&of->items, item), end = begin + tiles_from(&of->items, begin);
    (void)worker;
    for (int64_t place = begin; place < end; place++)
        for (int64_t first = 0; first < of->n; first += CHUNK) {
            const int64_t tile = of->weight->chosen ? of->weight->chosen[place] : place;
            const int count = chunk(of->n, first);
            Floats sums[CHUNK * PARTS];
            products(of->weight, tile, of->rows, first, count, sums);
            for (int r = 0; r < count * PARTS; r++) {
                const int64_t at = (first + r / PARTS) * of->width + tile * TILE + r % PARTS * LANES;
                store(of->y + at, of->residual ? add(sums[r], load(of->residual + at)) : sums[r]);
            }
        }
}

/* y = products of the rows, plus the residual unless it is NULL. Rows of both are `width` floats apart. Outputs of tiles
 * that are not chosen stay as they are. */
static void project(Threads threads, const Weight *weight, Rows rows, int64_t n, const float *residual, float *y,
                    int64_t width)
{
    const int64_t tiles = weight->chosen ? weight->number : weight->out / TILE;
    const int64_t bytes = tile_bytes(formats[weight->format], weight->in / GROUP);
    const Projecting about = {weight, rows, n, items_of_tiles(tiles, bytes, n, threads), residual, y, width};
    each(threads, project_item, &about, number_of(&about.items), 1);
}
