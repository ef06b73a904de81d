/* Products of fp32 rows with weights of 16 bits, which are exact numbers of fp32.
 *
 * A group's products are summed by columns, then the groups' sums, whatever rows stand beside a row: its result is the same
 * to the bit. Weights become fp32 once for all rows of a pass, which takes an operation each.
 */
#pragma once
#include "rows.h"

/* Bytes between the block that is read and those that are fetched. */
#define NEAR_FETCH 4096
#define FAR_FETCH 16384
/* Most rows of a pass, and most sums of a row's outputs that stay in registers together. */
#define MOST_ROWS (LANES == 16 ? 16 : 8)
#define MOST_SUMS (LANES == 16 ? 16 : 10)

/* The `part`-th LANES outputs' numbers of column `at` of a pair of columns. */
INLINE Floats column_of(const uint8_t *pair, int part, const int at, const Format format) {
    if (format.scaling == HALF)
        return halves(pair + 2 * TILE * at + 2 * LANES * part);
    const Ints both = ints(pair + 4 * LANES * part);
    return as_floats(at ? high_halves(both) : shifted_left(both, 16));
}

/* Adds to `sums` the products of `count` rows with the 16 outputs of a tile in the groups of `span`, as `products_of` in
 * products.h does in all groups. */
INLINE void products16_of(const Weight *weight, int64_t tile, Rows rows, int64_t first, int chunked, int begin, Span span,
                          const int count, const Format format, Floats *sums)
{
    const int64_t groups = rows.in / GROUP, size = block_bytes(format);
    const int together = count * PARTS <= MOST_SUMS ? PARTS : 1;
    const uint8_t *block = weight->blocks + (tile * groups + span.begin) * size;
    const float *columns = rows.numbers + first * rows.in + (span.begin * chunked + begin) * GROUP;
    Floats total[MOST_ROWS * PARTS];
#pragma GCC unroll 16
    for (int r = 0; r < count * PARTS; r++)
        total[r] = sums[r];
    for (int64_t group = span.begin; group < span.end; group++) {
        fetch(block, size, NEAR_FETCH, FAR_FETCH, count);
#pragma GCC unroll 2
        for (int from = 0; from < PARTS; from += together) {
            Floats of_group[MOST_ROWS * PARTS];
#pragma GCC unroll 16
            for (int r = 0; r < count * together; r++)
                of_group[r] = zeros();
            for (int pair = 0; pair < GROUP / 2; pair++) {
#pragma GCC unroll 2
                for (int at = 0; at < 2; at++) {
                    Floats numbers[PARTS];
#pragma GCC unroll 2
                    for (int part = 0; part < together; part++)
                        numbers[part] = column_of(block + 4 * TILE * pair, from + part, at, format);
#pragma GCC unroll 16
                    for (int r = 0; r < count; r++) {
                        const Floats row = all(columns[r * GROUP + 2 * pair + at]);
#pragma GCC unroll 2
                        for (int part = 0; part < together; part++)
                            of_group[r * together + part]
                                = multiply_add(numbers[part], row, of_group[r * together + part]);
                    }
                }
            }
#pragma GCC unroll 16
            for (int r = 0; r < count * together; r++) {
                const int to = r / together * PARTS + from + r % together;
                total[to] = add(total[to], of_group[r]);
            }
        }
        block += size;
        columns += chunked * GROUP;
    }
#pragma GCC unroll 16
    for (int r = 0; r < count * PARTS; r++)
        sums[r] = total[r];
}

#define CASE(format, n)                                                                                 \
    case n:                                                                                             \
        products16_of(weight, tile, rows, first, count, begin, span, n, formats[format], sums + begin * PARTS); \
        break;
#if LANES == 16
#define CASE16(format) CASE(format, 16)
#else
#define CASE16(format)
#endif
#define PRODUCTS16(format)                                                                                      \
    static void products_##format(const Weight *weight, int64_t tile, Rows rows, int64_t first, int count,      \
                                  Span span, Floats *sums)                                                      \
    {                                                                                                           \
        for (int begin = 0, now; begin < count; begin += now) {                                                 \
            now = count - begin;                                                                                \
            now = now >= MOST_ROWS ? MOST_ROWS : now > HALF_CHUNK ? HALF_CHUNK : now;                           \
            switch (now) {                                                                                      \
                CASE(format, 1) CASE(format, 2) CASE(format, 3) CASE(format, 4) CASE(format, 5) CASE(format, 6) \
                CASE(format, 7) CASE(format, 8) CASE16(format)                                                  \
            }                                                                                                   \
        }                                                                                                       \
    }
PRODUCTS16(BF16) PRODUCTS16(F16)
#undef CASE
