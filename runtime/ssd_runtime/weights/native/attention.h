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

/* The slots that a row sees, in order; returns their number. */
static int64_t seen_slots(const float *bias, int64_t slots, int32_t *seen) {
    int64_t count = 0;
    __m512i at = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int64_t i = 0; i < slots; i += TILE, at = _mm512_add_epi32(at, _mm512_set1_epi32(TILE))) {
        const __mmask16 inside = slots - i < TILE ? (__mmask16)((1u << (slots - i)) - 1) : 0xffff;
        const __mmask16 open = _mm512_mask_cmpeq_ps_mask(inside, _mm512_maskz_loadu_ps(inside, bias + i),
                                                         _mm512_setzero_ps());
        _mm512_storeu_si512(seen + count, _mm512_maskz_compress_epi32(open, at));
        count += __builtin_popcount(open);
    }
    return count;
}

/* Attention of one query over the slots `seen`, or over slots 0, ..., count - 1 if that is NULL. All sums run over the
 * visible slots in order, so hidden ones change nothing. `parts`, a head's size / 16, is constant where it is called. */
static inline __attribute__((always_inline)) void attend_parts(
    const float *query, const float *keys, const float *values, const int32_t *seen, int64_t count, float scale,
    const int parts, float *scores, float *to)
{
    __m512 q[16], mixed[16];
#pragma GCC unroll 16
    for (int p = 0; p < parts; p++) {
        q[p] = _mm512_loadu_ps(query + p * TILE);
        mixed[p] = _mm512_setzero_ps();
    }
    __m512 peaks = _mm512_set1_ps(-INFINITY), sums = _mm512_setzero_ps();
    for (int64_t i = 0; i < count; i++) {
        const float *key = keys + (seen ? seen[i] : i) * parts * TILE;
        __m512 dot = _mm512_mul_ps(q[0], _mm512_loadu_ps(key));
#pragma GCC unroll 16
        for (int p = 1; p < parts; p++)
            dot = _mm512_fmadd_ps(q[p], _mm512_loadu_ps(key + p * TILE), dot);
        scores[i] = scale * _mm512_reduce_add_ps(dot);
    }
    for (int64_t i = 0; i < count; i += TILE) {
        const __mmask16 inside = count - i < TILE ? (__mmask16)((1u << (count - i)) - 1) : 0xffff;
        peaks = _mm512_mask_max_ps(peaks, inside, peaks, _mm512_loadu_ps(scores + i));
    }
    const __m512 peak = _mm512_set1_ps(_mm512_reduce_max_ps(peaks));
    for (int64_t i = 0; i < count; i += TILE) {
        const __mmask16 inside = count - i < TILE ? (__mmask16)((1u << (count - i)) - 1) : 0xffff;
        const __m512 lead = _mm512_sub_ps(_mm512_loadu_ps(scores + i), peak);
        const __m512 share = exponential(_mm512_max_ps(lead, _mm512_set1_ps(-87.0f)));
        _mm512_storeu_ps(scores + i, share);
        sums = _mm512_mask_add_ps(sums, inside, sums, share);
    }
    for (int64_t i = 0; i < count; i++) {
        const float *value = values + (seen ? seen[i] : i) * parts * TILE;
        const __m512 share = _mm512_set1_ps(scores[i]);
#pragma GCC unroll 16
        for (int p = 0; p < parts; p++)
            mixed[p] = _mm512_fmadd_ps(share, _mm512_loadu_ps(value + p * TILE), mixed[p]);
    }
    const __m512 inverse = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(sums));
#pragma GCC unroll 16
    for (int p = 0; p < parts; p++)
        _mm512_storeu_ps(to + p * TILE, _mm512_mul_ps(mixed[p], inverse));
}

static void attend(const float *query, const float *keys, const float *values, const int32_t *seen, int64_t count,
                   float scale, int64_t head_dim, float *scores, float *to)
{
#define CASE(parts)                                                                        \
    case parts * TILE:                                                                     \
        attend_parts(query, keys, values, seen, count, scale, parts, scores, to);          \
        break;
    switch (head_dim) { CASE(1) CASE(2) CASE(4) CASE(5) CASE(6) CASE(8) CASE(16) }
#undef CASE
}
