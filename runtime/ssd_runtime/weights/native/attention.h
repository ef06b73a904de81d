/* Attention over the slots of a cache that a row sees. */
#pragma once
#include "exponential.h"
#include "products.h"

/* One sequence's rows, and the slots of its cache that they see. Heads' keys are `stride` floats apart, and slots of a head
 * follow each other. A row sees the slots where its bias is 0, or all without a bias. */
typedef struct {
    float *keys, *values; /* Of the first slot. */
    int64_t stride, rows, slots;
    int64_t own; /* The first slot to which the rows' own keys and values are written. */
    const float *bias; /* [rows][slots], or NULL. */
} Segment;

typedef struct {
    const Weight *qkv, *output;
    const float *norm, *q_norm, *k_norm; /* NULL for none. */
    float epsilon, q_epsilon, k_epsilon, scale;
    int64_t heads, kv_heads, head_dim;
} Block;

/* cos and signed sin, [rows][width] with rows `stride` floats apart; NULL for layers without a rotation. */
typedef struct {
    const float *cos, *sin;
    int64_t width, stride;
} Rotation;

/* to = the head, normed and rotated. */
static void place_head(const float *x, Norm norm, Rotation rotation, int64_t row, int64_t size, float *to) {
    float head[256];
    const float factor = norm.weight ? norm_factor(x, size, norm.epsilon) : 1.0f;
    for (int64_t i = 0; i < size; i++)
        head[i] = norm.weight ? x[i] * factor * norm.weight[i] : x[i];
    const int64_t half = rotation.cos ? rotation.width / 2 : 0;
    const float *cos = rotation.cos + row * rotation.stride, *sin = rotation.sin + row * rotation.stride;
    for (int64_t i = 0; i < half; i++) {
        to[i] = head[i] * cos[i] + head[half + i] * sin[i];
        to[half + i] = head[half + i] * cos[half + i] + head[i] * sin[half + i];
    }
    for (int64_t i = 2 * half; i < size; i++)
        to[i] = head[i];
}

/* Which of the numbers i, ..., i + 15 are below count. */
static __mmask16 inside(int64_t i, int64_t count) {
    return count - i < TILE ? (__mmask16)((1u << (count - i)) - 1) : 0xffff;
}

/* The slots that a row sees, in order; returns their number. */
static int64_t seen_slots(const float *bias, int64_t slots, int32_t *seen) {
    int64_t count = 0;
    __m512i at = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int64_t i = 0; i < slots; i += TILE, at = _mm512_add_epi32(at, _mm512_set1_epi32(TILE))) {
        const __mmask16 within = inside(i, slots);
        const __mmask16 open = _mm512_mask_cmpeq_ps_mask(within, _mm512_maskz_loadu_ps(within, bias + i),
                                                         _mm512_setzero_ps());
        _mm512_storeu_si512(seen + count, _mm512_maskz_compress_epi32(open, at));
        count += __builtin_popcount(open);
    }
    return count;
}

/* The sums of 16 vectors each, in order. Vectors are folded in pairs, to a half, a quarter, an eighth and one number each,
 * so that all sums take 15 additions, where they take 64 one by one. */
static inline __attribute__((always_inline)) __m512 sums_of(__m512 *v) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        const __m512 low = _mm512_shuffle_f32x4(v[i], v[i + 8], 0x44), high = _mm512_shuffle_f32x4(v[i], v[i + 8], 0xee);
        v[i] = _mm512_add_ps(low, high);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512 low = _mm512_shuffle_f32x4(v[i], v[i + 4], 0x88), high = _mm512_shuffle_f32x4(v[i], v[i + 4], 0xdd);
        v[i] = _mm512_add_ps(low, high);
    }
    /* The four lanes of v[i] hold vectors i, i + 8, i + 4 and i + 12, in four numbers each. */
    const __m512 first = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
    const __m512 second = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
    const __m512 sums = _mm512_add_ps(_mm512_shuffle_ps(first, second, 0x44), _mm512_shuffle_ps(first, second, 0xee));
    return _mm512_shuffle_f32x4(sums, sums, 0xd8);
}

#define QUERIES 32 /* Most queries that are attended together. */
#define BLOCK 64   /* Slots that all of these read before they go on, so that keys and values come from the nearest cache. */

/* One query of a head, and the slots that it sees: `seen` [count] in order, or slots 0, ..., count - 1 if that is NULL. */
typedef struct {
    const float *query;
    const int32_t *seen;
    int64_t count;
    float *scores; /* [count + TILE] */
    float *to;
} Query;

static int64_t slot_of(const Query *query, int64_t i) {
    return query->seen ? query->seen[i] : i;
}

/* Scores of the slots first, ..., last - 1 that a query sees, and of up to 15 after them, which mean nothing. */
static inline __attribute__((always_inline)) void score(
    const Query *query, const float *keys, int64_t first, int64_t last, float scale, const int parts)
{
    for (int64_t i = first; i < last; i += TILE) {
        __m512 dots[TILE];
#pragma GCC unroll 16
        for (int k = 0; k < TILE; k++) {
            const float *key = keys + slot_of(query, i + k < last ? i + k : last - 1) * parts * TILE;
            dots[k] = _mm512_mul_ps(_mm512_loadu_ps(query->query), _mm512_loadu_ps(key));
#pragma GCC unroll 16
            for (int p = 1; p < parts; p++)
                dots[k] = _mm512_fmadd_ps(_mm512_loadu_ps(query->query + p * TILE), _mm512_loadu_ps(key + p * TILE),
                                          dots[k]);
        }
        _mm512_storeu_ps(query->scores + i, _mm512_mul_ps(_mm512_set1_ps(scale), sums_of(dots)));
    }
}

/* Turn scores into exp(score - peak); returns their sum. */
static float shares(const Query *query) {
    const int64_t count = query->count;
    __m512 peaks = _mm512_set1_ps(-INFINITY), sums = _mm512_setzero_ps();
    for (int64_t i = 0; i < count; i += TILE)
        peaks = _mm512_mask_max_ps(peaks, inside(i, count), peaks, _mm512_loadu_ps(query->scores + i));
    const __m512 peak = _mm512_set1_ps(_mm512_reduce_max_ps(peaks));
    for (int64_t i = 0; i < count; i += TILE) {
        const __m512 lead = _mm512_sub_ps(_mm512_loadu_ps(query->scores + i), peak);
        const __m512 share = exponential(_mm512_max_ps(lead, _mm512_set1_ps(-87.0f)));
        _mm512_storeu_ps(query->scores + i, share);
        sums = _mm512_mask_add_ps(sums, inside(i, count), sums, share);
    }
    return _mm512_reduce_add_ps(sums);
}

/* Add the values of the slots first, ..., last - 1 that a query sees, by their shares, to `mixed` [2][parts][TILE]: those
 * at even places to the first, those at odd places to the second, since an addition waits for the one before it. */
static inline __attribute__((always_inline)) void mix(
    const Query *query, const float *values, int64_t first, int64_t last, const int parts, float *mixed)
{
    __m512 sums[2][16];
#pragma GCC unroll 32
    for (int p = 0; p < 2 * parts; p++)
        sums[p / parts][p % parts] = _mm512_loadu_ps(mixed + p * TILE);
    for (int64_t i = first; i < last; i += 2) {
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; odd++) {
            if (i + odd == last)
                break;
            const float *value = values + slot_of(query, i + odd) * parts * TILE;
            const __m512 share = _mm512_set1_ps(query->scores[i + odd]);
#pragma GCC unroll 16
            for (int p = 0; p < parts; p++)
                sums[odd][p] = _mm512_fmadd_ps(share, _mm512_loadu_ps(value + p * TILE), sums[odd][p]);
        }
    }
#pragma GCC unroll 32
    for (int p = 0; p < 2 * parts; p++)
        _mm512_storeu_ps(mixed + p * TILE, sums[p / parts][p % parts]);
}

/* Attention of queries of heads that share keys and values. A query's sums run over the slots that it sees in order, so
 * neither hidden slots nor other queries change anything. `parts`, a head's size / 16, is constant where it is called. */
static inline __attribute__((always_inline)) void attend_parts(
    const Query *queries, int n, const float *keys, const float *values, float scale, const int parts)
{
    float mixed[QUERIES][2 * 16 * TILE], sums[QUERIES];
    int64_t longest = 0;
    for (int q = 0; q < n; q++) {
        longest = queries[q].count > longest ? queries[q].count : longest;
        for (int p = 0; p < 2 * parts; p++)
            _mm512_storeu_ps(mixed[q] + p * TILE, _mm512_setzero_ps());
    }
    for (int64_t first = 0; first < longest; first += BLOCK)
        for (int q = 0; q < n; q++) {
            const int64_t last = queries[q].count < first + BLOCK ? queries[q].count : first + BLOCK;
            score(&queries[q], keys, first, last, scale, parts);
        }
    for (int q = 0; q < n; q++)
        sums[q] = shares(&queries[q]);
    for (int64_t first = 0; first < longest; first += BLOCK)
        for (int q = 0; q < n; q++) {
            const int64_t last = queries[q].count < first + BLOCK ? queries[q].count : first + BLOCK;
            mix(&queries[q], values, first, last, parts, mixed[q]);
        }
    for (int q = 0; q < n; q++) {
        const __m512 inverse = _mm512_set1_ps(1.0f / sums[q]);
        for (int p = 0; p < parts; p++) {
            const __m512 both = _mm512_add_ps(_mm512_loadu_ps(mixed[q] + p * TILE),
                                              _mm512_loadu_ps(mixed[q] + (parts + p) * TILE));
            _mm512_storeu_ps(queries[q].to + p * TILE, _mm512_mul_ps(both, inverse));
        }
    }
}

static void attend(const Query *queries, int n, const float *keys, const float *values, float scale, int64_t head_dim)
{
#define CASE(parts)                                                \
    case parts * TILE:                                             \
        attend_parts(queries, n, keys, values, scale, parts);      \
        break;
    switch (head_dim) { CASE(1) CASE(2) CASE(4) CASE(5) CASE(6) CASE(8) CASE(16) }
#undef CASE
}
