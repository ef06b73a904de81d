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
#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>

#define GROUP 32
#define TILE 16
#define CHUNK 16 /* Rows whose sums stay in registers together. */
#define OWN 8    /* So few rows are quantised by every thread for itself, which takes less time than to wait. */
#define AHEAD 16 /* Blocks between the one that is read and the one that is fetched. Processors fetch ahead on their own
                  * within a page of 4 KiB alone; this takes a fifth off a row's time at 4 bits, a third at 8. */
#define INTEGER 12582912.0f       /* 1.5 * 2^23: the bits of this number plus an integer of 22 bits are those of their sum. */
#define INTEGER_BITS 0x4b400000

typedef struct {
    int64_t bits, out, in;
    const uint8_t *blocks;
    const float *bias; /* NULL for none. */
} Weight;

typedef struct {
    const float *weight; /* NULL: rows are not normed. */
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
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < in; i += TILE) {
        const __m512 part = _mm512_loadu_ps(x + i);
        sum = _mm512_fmadd_ps(part, part, sum);
    }
    return 1.0f / sqrtf(_mm512_reduce_add_ps(sum) / (float)in + epsilon);
}

/* Quantise row `row` of n. */
static void quantise(const float *x, Norm norm, Rows rows, int64_t row, int64_t n) {
    const int64_t in = rows.in, first = row - row % CHUNK, count = chunk(n, first);
    const float factor = norm.weight ? norm_factor(x, in, norm.epsilon) : 1.0f;
    for (int64_t i = 0; i < in; i += GROUP) {
        __m512 low = _mm512_loadu_ps(x + i), high = _mm512_loadu_ps(x + i + TILE);
        if (norm.weight) {
            const __m512 all = _mm512_set1_ps(factor);
            low = _mm512_mul_ps(_mm512_mul_ps(low, all), _mm512_loadu_ps(norm.weight + i));
            high = _mm512_mul_ps(_mm512_mul_ps(high, all), _mm512_loadu_ps(norm.weight + i + TILE));
        }
        const float peak = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high)));
        const float scale = peak / 127.0f;
        const __m512 inverse = _mm512_set1_ps(scale > 0.0f ? 1.0f / scale : 0.0f);
        const __m512i left = _mm512_cvtps_epi32(_mm512_mul_ps(low, inverse));
        const __m512i right = _mm512_cvtps_epi32(_mm512_mul_ps(high, inverse));
        const int64_t at = (first * in + i * count) / GROUP + row - first;
        int8_t *levels = rows.levels + at * GROUP;
        _mm_storeu_si128((__m128i *)levels, _mm512_cvtsepi32_epi8(left));
        _mm_storeu_si128((__m128i *)(levels + TILE), _mm512_cvtsepi32_epi8(right));
        const int32_t sum = _mm512_reduce_add_epi32(_mm512_add_epi32(left, right));
        rows.scales[at] = scale;
        rows.sums[at] = (float)sum;
        rows.offsets[at] = INTEGER_BITS - 128 * sum;
    }
}

/* The number of floats that n quantised rows take. */
static int64_t floats_of(int64_t n, int64_t in) {
    return n * (in / 4 + 3 * (in / GROUP));
}

/* The quantised rows of x; to be called by all threads of a parallel region. `memory` has room for them per thread. */
static Rows quantised(const float *x, Norm norm, int64_t n, int64_t in, float *memory) {
    const int64_t groups = n * (in / GROUP);
    if (n <= OWN)
        memory += omp_get_thread_num() * floats_of(n, in);
    int32_t *offsets = (int32_t *)(memory + 2 * groups);
    const Rows rows = {.levels = (int8_t *)(offsets + groups), .scales = memory, .sums = memory + groups,
                       .offsets = offsets, .in = in};
    if (n <= OWN) {
        for (int64_t row = 0; row < n; row++)
            quantise(x + row * in, norm, rows, row, n);
    } else {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < n; row++)
            quantise(x + row * in, norm, rows, row, n);
    }
    return rows;
}

static inline __m512 halves(const uint8_t *at) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at));
}

/* The products of the chunk of `count` rows from `first` with the 16 outputs of a tile. `count` and `bits` are constant
 * where it is called, so that the loops over rows unroll. */
static inline __attribute__((always_inline)) void products_of(
    const Weight *weight, int64_t tile, Rows rows, int64_t first, const int count, const int bits, __m512 *sums)
{
    const int64_t groups = rows.in / GROUP;
    const int64_t size = bits == 4 ? 320 : 544;
    const uint8_t *block = weight->blocks + tile * groups * size;
    const int8_t *columns = rows.levels + first * rows.in;
    const float *row_scales = rows.scales + first * groups, *row_sums = rows.sums + first * groups;
    const int32_t *offsets = rows.offsets + first * groups;
    const __m512i low_half = _mm512_set1_epi8(15), zero = _mm512_set1_epi32(INTEGER_BITS);
    __m512 total[CHUNK];
#pragma GCC unroll 16
    for (int r = 0; r < count; r++)
        total[r] = weight->bias ? _mm512_loadu_ps(weight->bias + tile * TILE) : _mm512_setzero_ps();
    for (int64_t group = 0; group < groups; group++) {
        __m512i levels[8];
        __m512 scale, least;
#pragma GCC unroll 9
        for (int64_t at = 0; at < size; at += 64)
            _mm_prefetch((const char *)block + AHEAD * size + at, _MM_HINT_T0);
        if (bits == 4) {
#pragma GCC unroll 4
            for (int q = 0; q < 4; q++) {
                const __m512i pair = _mm512_loadu_si512(block + 64 * q);
                levels[2 * q] = _mm512_and_si512(pair, low_half);
                levels[2 * q + 1] = _mm512_and_si512(_mm512_srli_epi16(pair, 4), low_half);
            }
            scale = halves(block + 256);
            least = halves(block + 288);
        } else {
#pragma GCC unroll 8
            for (int q = 0; q < 8; q++)
                levels[q] = _mm512_loadu_si512(block + 64 * q);
            scale = halves(block + 512);
            least = _mm512_setzero_ps();
        }
        /* scale * (INTEGER + dot) - scale * INTEGER, rounded once, is scale * dot: a scale of 11 bits times INTEGER is
         * exact. That saves a conversion per row. */
        const __m512 shift = _mm512_mul_ps(scale, _mm512_set1_ps(-INTEGER));
#pragma GCC unroll 16
        for (int r = 0; r < count; r++) {
            const int32_t *fours = (const int32_t *)(columns + r * GROUP);
            __m512i dot = bits == 4 ? zero : _mm512_set1_epi32(offsets[r]);
#pragma GCC unroll 8
            for (int q = 0; q < 8; q++)
                dot = _mm512_dpbusd_epi32(dot, levels[q], _mm512_set1_epi32(fours[q]));
            __m512 product = _mm512_fmadd_ps(scale, _mm512_castsi512_ps(dot), shift);
            if (bits == 4)
                product = _mm512_fmadd_ps(least, _mm512_set1_ps(row_sums[r]), product);
            total[r] = _mm512_fmadd_ps(product, _mm512_set1_ps(row_scales[r]), total[r]);
        }
        block += size;
        columns += count * GROUP;
        row_scales += count;
        row_sums += count;
        offsets += count;
    }
#pragma GCC unroll 16
    for (int r = 0; r < count; r++)
        sums[r] = total[r];
}

static void products(const Weight *weight, int64_t tile, Rows rows, int64_t first, int count, __m512 *sums)
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

/* y = products of the rows, plus the residual unless it is NULL; to be called by all threads of a parallel region. */
static void project(const Weight *weight, Rows rows, int64_t n, const float *residual, float *y) {
#pragma omp for schedule(static) nowait
    for (int64_t tile = 0; tile < weight->out / TILE; tile++)
        for (int64_t first = 0; first < n; first += CHUNK) {
            const int count = chunk(n, first);
            __m512 sums[CHUNK];
            products(weight, tile, rows, first, count, sums);
            for (int r = 0; r < count; r++) {
                const int64_t at = (first + r) * weight->out + tile * TILE;
                const __m512 sum = residual ? _mm512_add_ps(sums[r], _mm512_loadu_ps(residual + at)) : sums[r];
                _mm512_storeu_ps(y + at, sum);
            }
        }
}
