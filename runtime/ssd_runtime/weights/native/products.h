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
#define ROWS 8 /* Rows whose sums stay in registers together. */

typedef struct {
    int64_t bits, out, in;
    const uint8_t *blocks;
    const float *bias; /* NULL for none. */
} Weight;

typedef struct {
    const float *weight; /* NULL: rows are not normed. */
    float epsilon;
} Norm;

/* Quantised rows: levels [n][in]; scales, and sums of levels, [n][in / GROUP]. Every thread quantises few rows
 * for itself, which takes less time than to wait for another thread that does it. */
typedef struct {
    int8_t *levels;
    float *scales;
    int32_t *sums;
    int64_t in;
} Rows;


/* 1 / the root mean square of a row. */
static float norm_factor(const float *x, int64_t in, float epsilon) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < in; i += TILE) {
        const __m512 part = _mm512_loadu_ps(x + i);
        sum = _mm512_fmadd_ps(part, part, sum);
    }
    return 1.0f / sqrtf(_mm512_reduce_add_ps(sum) / (float)in + epsilon);
}

static void quantise(const float *x, Norm norm, Rows rows, int64_t row) {
    const int64_t in = rows.in;
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
        const __m512i first = _mm512_cvtps_epi32(_mm512_mul_ps(low, inverse));
        const __m512i second = _mm512_cvtps_epi32(_mm512_mul_ps(high, inverse));
        int8_t *levels = rows.levels + row * in + i;
        _mm_storeu_si128((__m128i *)levels, _mm512_cvtsepi32_epi8(first));
        _mm_storeu_si128((__m128i *)(levels + TILE), _mm512_cvtsepi32_epi8(second));
        const int64_t at = (row * in + i) / GROUP;
        rows.scales[at] = scale;
        rows.sums[at] = _mm512_reduce_add_epi32(_mm512_add_epi32(first, second));
    }
}

/* The number of floats that n quantised rows take. */
static int64_t floats_of(int64_t n, int64_t in) {
    return n * (in / 4 + 2 * (in / GROUP));
}

/* The quantised rows of x; to be called by all threads of a parallel region. `memory` has room for them per thread. */
static Rows quantised(const float *x, Norm norm, int64_t n, int64_t in, float *memory) {
    const int64_t groups = n * (in / GROUP);
    if (n <= ROWS)
        memory += omp_get_thread_num() * floats_of(n, in);
    int32_t *sums = (int32_t *)(memory + groups);
    const Rows rows = {.levels = (int8_t *)(sums + groups), .scales = memory, .sums = sums, .in = in};
    if (n <= ROWS) {
        for (int64_t row = 0; row < n; row++)
            quantise(x + row * in, norm, rows, row);
    } else {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < n; row++)
            quantise(x + row * in, norm, rows, row);
    }
    return rows;
}

static inline __m512 halves(const uint8_t *at) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at));
}

/* The products of rows first, ..., first + count - 1 with the 16 outputs of a tile. count is constant where it is called,
 * so that the loops over rows unroll. */
static inline __attribute__((always_inline)) void products_of(
    const Weight *weight, int64_t tile, Rows rows, int64_t first, const int count, const int bits, __m512 *sums)
{
    const int64_t in = rows.in;
    const int64_t size = bits == 4 ? 320 : 544;
    const uint8_t *block = weight->blocks + tile * (in / GROUP) * size;
    const __m512i low_half = _mm512_set1_epi8(15);
    __m512 total[ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < count; r++)
        total[r] = weight->bias ? _mm512_loadu_ps(weight->bias + tile * TILE) : _mm512_setzero_ps();
    for (int64_t i = 0; i < in; i += GROUP, block += size) {
        __m512i levels[8];
        __m512 scale, least;
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
#pragma GCC unroll 8
        for (int r = 0; r < count; r++) {
            const int64_t at = (first + r) * in + i;
            const int32_t *fours = (const int32_t *)(rows.levels + at);
            const int32_t sum = rows.sums[at / GROUP];
            __m512i dot = bits == 4 ? _mm512_setzero_si512() : _mm512_set1_epi32(-128 * sum);
#pragma GCC unroll 8
            for (int q = 0; q < 8; q++)
                dot = _mm512_dpbusd_epi32(dot, levels[q], _mm512_set1_epi32(fours[q]));
            __m512 product = _mm512_mul_ps(scale, _mm512_cvtepi32_ps(dot));
            if (bits == 4)
                product = _mm512_fmadd_ps(least, _mm512_set1_ps((float)sum), product);
            total[r] = _mm512_fmadd_ps(product, _mm512_set1_ps(rows.scales[at / GROUP]), total[r]);
        }
    }
#pragma GCC unroll 8
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
    switch (count) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) }
#undef CASE
}

static int chunk(int64_t n, int64_t first) {
    return n - first < ROWS ? (int)(n - first) : ROWS;
}

/* y = products of the rows, plus the residual unless it is NULL; to be called by all threads of a parallel region. */
static void project(const Weight *weight, Rows rows, int64_t n, const float *residual, float *y) {
#pragma omp for schedule(static) nowait
    for (int64_t tile = 0; tile < weight->out / TILE; tile++)
        for (int64_t first = 0; first < n; first += ROWS) {
            const int count = chunk(n, first);
            __m512 sums[ROWS];
            products(weight, tile, rows, first, count, sums);
            for (int r = 0; r < count; r++) {
                const int64_t at = (first + r) * weight->out + tile * TILE;
                const __m512 sum = residual ? _mm512_add_ps(sums[r], _mm512_loadu_ps(residual + at)) : sums[r];
                _mm512_storeu_ps(y + at, sum);
            }
        }
}
