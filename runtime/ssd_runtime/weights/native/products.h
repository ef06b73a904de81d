/* Products of rows with quantised weights, which are stored as `formats.h` says.
 *
 * A row is quantised to 8 bits with a scale of its own per group of columns, so the product of whatever shares the scales
 * of weight and row is an exact integer, and sums over groups run in one order: a row's result is the same to the bit
 * whatever rows stand beside it and however many threads there are.
 */
#pragma once
#include "rows.h"
#include <string.h>

/* Blocks between the one that is read and those that are fetched. */
#define NEAR 10
#define FAR 40

/* The factors of the blocks' scales and of minus their minima, in the header before eight blocks. */
INLINE void factors_of(const uint8_t *header, int part, const Format format, Floats *factors) {
    factors[0] = halves(header + 2 * LANES * part);
    if (has_minima(format))
        factors[1] = subtract(zeros(), halves(header + 2 * TILE + 2 * LANES * part));
}

/* The scales and minima of 6 bits under a header, each in a byte. */
typedef struct {
    uint8_t scales[HEADED * TILE], minima[HEADED * TILE];
} Sixes;

/* Numbers of all groups are put together at once, since that takes as many instructions as those of one. */
INLINE void sixes_of(const uint8_t *header, Sixes *sixes) {
    typedef uint8_t Bytes __attribute__((vector_size(HEADED / 2 * TILE)));
    Bytes low, high;
    memcpy(&high, header + 4 * TILE + HEADED * TILE, sizeof high);
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        memcpy(&low, header + 4 * TILE + half * (int)sizeof low, sizeof low);
        const Bytes scales = (low & 15) | (high >> 4 * half & 3) << 4, minima = low >> 4 | (high >> (4 * half + 2) & 3) << 4;
        memcpy(sixes->scales + half * (int)sizeof low, &scales, sizeof low);
        memcpy(sixes->minima + half * (int)sizeof low, &minima, sizeof low);
    }
}

/* Scales and leasts of the `part`-th LANES outputs of a block, for both halves of its columns where these have their own.
 * `group` is the block's place under its header. */
INLINE void scales_of(const uint8_t *at, int part, const Format format, const Floats *factors, const Sixes *sixes, int group,
                      Floats *scale, Floats *least)
{
    const int begin = LANES * part;
    if (format.scaling == SCALE || format.scaling == SCALE_LEAST)
        scale[0] = halves(at + 2 * begin);
    if (format.scaling == SCALE_LEAST)
        least[0] = halves(at + 2 * TILE + 2 * begin);
    if (format.scaling == EXPONENT)
        scale[0] = as_floats(shifted_left(bytes(at + begin), 23));
    if (format.scaling == SIXES) {
        scale[0] = multiply(factors[0], floats(bytes(sixes->scales + TILE * group + begin)));
        least[0] = multiply(factors[1], floats(bytes(sixes->minima + TILE * group + begin)));
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
        }
    }
}

/* The place of the sum of a group's columns that share a scale, or of a half of these, among the three of a row. */
INLINE int place_of(int half, const Format format) {
    return has_halves(format) ? half : 2;
}

/* INTEGER - centre * the sum of a row's levels, with which a sum of products begins, so that a weight's levels count from
 * their centre. `start` is that for the largest centre. */
INLINE Ints start_of(int32_t start, const Format format) {
    const int largest = has_halves(format) ? HALF_CENTRE : WHOLE_CENTRE;
    if (!format.centre || format.draft || (SIGNED_BYTES && fills_bytes(format)))
        return all_ints(INTEGER_BITS);
    if (format.centre == largest)
        return all_ints(start);
    const int down = __builtin_ctz(largest / format.centre);
    return plus(shifted_right(all_ints(start), down), all_ints(INTEGER_BITS - (INTEGER_BITS >> down)));
}

/* Adds to `sums` the products of `count` rows with the 16 outputs of a tile, [count][PARTS]: rows from `begin` of the chunk of
 * `chunked` rows from `first`. `count` and `format` are constant where it is called, so that the loops over rows unroll. */
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
    const int32_t *row_starts = rows.starts + 3 * at_first;
    Floats total[CHUNK * PARTS], factors[PARTS][2] = {0};
    Sixes sixes;
#pragma GCC unroll 32
    for (int r = 0; r < count * PARTS; r++)
        total[r] = sums[r];
    for (int64_t group = 0; group < groups; group++) {
        if (format.header && group % HEADED == 0) {
#pragma GCC unroll 2
            for (int part = 0; part < PARTS; part++)
                factors_of(block, part, format, factors[part]);
            if (format.scaling == SIXES)
                sixes_of(block, &sixes);
            fetch(block, format.header, NEAR * size, FAR * size, count);
            block += format.header;
        }
        fetch(block, size, NEAR * size, FAR * size, count);
        if (reads_second(format))
            fetch(second, second_bytes(format), NEAR * second_bytes(format), FAR * second_bytes(format), count);
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) {
            /* Rows are loaded again for the second part: GCC would keep what the first loaded, which takes more
             * registers than there are, and half of the time. */
            if (part)
                __asm__ volatile("" ::: "memory");
            const Levels levels = levels_of(block, second, part, format);
            Floats scale[2], least[2], shift[2];
            scales_of(block + size - format.scales, part, format, factors[part], &sixes, group % HEADED, scale, least);
            /* scale * (INTEGER + dot) - scale * INTEGER, rounded once, is scale * dot: a scale of 18 bits times INTEGER
             * is exact. That saves a conversion per row. */
            for (int half = 0; half < halves_of; half++)
                shift[half] = multiply(scale[half], all(-INTEGER));
#pragma GCC unroll 16
            for (int from = 0; from < count; from += abreast(format, count)) {
                const int to = from + abreast(format, count) < count ? from + abreast(format, count) : count;
                Ints dot[2][ABREAST];
#pragma GCC unroll 2
                for (int half = 0; half < halves_of; half++) {
#pragma GCC unroll 4
                    for (int r = from; r < to; r++)
                        dot[half][r - from] = start_of(row_starts[3 * r + place_of(half, format)], format);
                    dots(&levels, columns + from * GROUP, to - from, format, half * columns_of, (half + 1) * columns_of,
                         dot[half]);
                }
#pragma GCC unroll 4
                for (int r = from; r < to; r++) {
                    Floats product = multiply_add(scale[0], as_floats(dot[0][r - from]), shift[0]);
                    if (halves_of == 2)
                        product = add(product, multiply_add(scale[1], as_floats(dot[1][r - from]), shift[1]));
#pragma GCC unroll 2
                    for (int half = 0; has_leasts(format) && half < halves_of; half++)
                        product = multiply_add(least[half], all(row_sums[3 * r + place_of(half, format)]), product);
                    total[r * PARTS + part] = multiply_add(product, all(row_scales[r]), total[r * PARTS + part]);
                }
            }
        }
        block += size;
        second += second_bytes(format);
        columns += chunked * GROUP;
        row_scales += chunked;
        row_sums += 3 * chunked;
        row_starts += 3 * chunked;
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
                                  Span span, Floats *sums)                                                      \
    {                                                                                                           \
        (void)span; /* It is all groups. */                                                                     \
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
