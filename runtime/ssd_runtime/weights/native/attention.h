/* Attention over the slots of a cache that a row sees. */
#pragma once
#include "exponential.h"
#include "products.h"

/* One sequence's rows, and the slots of its cache that they see. Heads' keys are `stride` floats apart, and slots of a head
 * follow each other. A row sees the slots where its bias is 0, or all without a bias. */
typedef struct {
    float *keys, *values; /* Of the first slot. */
    int64_t bytes;        /* Of all keys from the first slot of the first head on; of all values too. */
    int64_t room;         /* Slots of a head from the first one on. */
    int64_t stride, rows, slots;
    int64_t own; /* The first slot to which the rows' own keys and values are written. */
    const float *bias; /* [rows][slots], or NULL. */
    int64_t bias_stride, bias_bytes;
} Segment;

typedef struct {
    const Weight *const *qkv; /* `projections` weights, whose outputs together are queries, keys and values. */
    const Weight *output;
    const Norm *norm, *q_norm, *k_norm; /* NULL for none. */
    float scale;
    int64_t projections, heads, kv_heads, head_dim;
} Block;

/* cos and signed sin, [rows][heads][width] with rows `stride` floats apart; those of the first head serve all heads. NULL
 * for layers without a rotation. */
typedef struct {
    const float *cos, *sin;
    int64_t bytes, width, stride; /* The bytes of each. */
} Rotation;

/* to = the head, normed and rotated. */
static void place_head(const float *x, const Norm *norm, Rotation rotation, int64_t row, int64_t size, float *to) {
    float head[256];
    const float factor = norm ? norm_factor(x, size, norm->epsilon) : 1.0f;
    for (int64_t i = 0; i < size; i++)
        head[i] = norm ? x[i] * factor * norm->weight[i] : x[i];
    const int64_t half = rotation.cos ? rotation.width / 2 : 0;
    const float *cos = rotation.cos + row * rotation.stride, *sin = rotation.sin + row * rotation.stride;
    for (int64_t i = 0; i < half; i++) {
        to[i] = head[i] * cos[i] + head[half + i] * sin[i];
        to[half + i] = head[half + i] * cos[half + i] + head[i] * sin[half + i];
    }
    for (int64_t i = 2 * half; i < size; i++)
        to[i] = head[i];
}

/* The slots that a row sees, in order; returns their number. `seen` has room for LANES more. */
static int64_t seen_slots(const float *bias, int64_t slots, int32_t *seen) {
    int64_t count = 0;
    for (int64_t i = 0; i < slots; i += LANES)
        count += open_places(bias + i, slots - i, i, seen + count);
    return count;
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

/* Scores of the slots first, ..., last - 1 that a query sees, and of fewer than LANES after them, which mean nothing. */
INLINE void score(const Query *query, const float *keys, int64_t first, int64_t last, float scale, const int parts)
{
    for (int64_t i = first; i < last; i += LANES) {
        Floats dots[LANES];
#pragma GCC unroll 16
        for (int k = 0; k < LANES; k++) {
            const float *key = keys + slot_of(query, i + k < last ? i + k : last - 1) * parts * LANES;
            dots[k] = multiply(load(query->query), load(key));
#pragma GCC unroll 32
            for (int p = 1; p < parts; p++)
                dots[k] = multiply_add(load(query->query + p * LANES), load(key + p * LANES), dots[k]);
        }
        store(query->scores + i, multiply(all(scale), sums_of(dots)));
    }
}

/* Turn scores into exp(score - peak); returns their sum. */
static float shares(const Query *query) {
    const int64_t count = query->count;
    Floats peaks = all(-INFINITY), sums = zeros();
    for (int64_t i = 0; i < count; i += LANES)
        peaks = larger_inside(peaks, load(query->scores + i), count - i);
    const Floats peak = all(peak_of(peaks));
    for (int64_t i = 0; i < count; i += LANES) {
        const Floats share = exponential(larger(subtract(load(query->scores + i), peak), all(-87.0f)));
        store(query->scores + i, share);
        sums = add_inside(sums, share, count - i);
    }
    return sum_of(sums);
}

/* Add the values of the slots first, ..., last - 1 that a query sees, by their shares, to `mixed` [2][parts][LANES]: those
 * at even places to the first, those at odd places to the second, since an addition waits for the one before it. */
INLINE void mix(const Query *query, const float *values, int64_t first, int64_t last, const int parts, float *mixed)
{
    Floats sums[2][256 / LANES];
#pragma GCC unroll 64
    for (int p = 0; p < 2 * parts; p++)
        sums[p / parts][p % parts] = load(mixed + p * LANES);
    for (int64_t i = first; i < last; i += 2) {
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; odd++) {
            if (i + odd == last)
                break;
            const float *value = values + slot_of(query, i + odd) * parts * LANES;
            const Floats share = all(query->scores[i + odd]);
#pragma GCC unroll 32
            for (int p = 0; p < parts; p++)
                sums[odd][p] = multiply_add(share, load(value + p * LANES), sums[odd][p]);
        }
    }
#pragma GCC unroll 64
    for (int p = 0; p < 2 * parts; p++)
        store(mixed + p * LANES, sums[p / parts][p % parts]);
}

/* Attention of queries of heads that share keys and values. A query's sums run over the slots that it sees in order, so
 * neither hidden slots nor other queries change anything. `parts`, a head's size / LANES, is constant where it is called. */
INLINE void attend_parts(const Query *queries, int n, const float *keys, const float *values, float scale, const int parts)
{
    float mixed[QUERIES][2 * 256], sums[QUERIES];
    int64_t longest = 0;
    for (int q = 0; q < n; q++) {
        longest = queries[q].count > longest ? queries[q].count : longest;
        for (int p = 0; p < 2 * parts; p++)
            store(mixed[q] + p * LANES, zeros());
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
        const Floats inverse = all(1.0f / sums[q]);
        for (int p = 0; p < parts; p++) {
            const Floats both = add(load(mixed[q] + p * LANES), load(mixed[q] + (parts + p) * LANES));
            store(queries[q].to + p * LANES, multiply(both, inverse));
        }
    }
}

/* The sizes of heads for which there is code. */
#define HEAD_DIMS(CASE) CASE(16) CASE(32) CASE(64) CASE(80) CASE(96) CASE(128) CASE(256)

static void attend(const Query *queries, int n, const float *keys, const float *values, float scale, int64_t head_dim)
{
#define CASE(size)                                                     \
    case size:                                                         \
        attend_parts(queries, n, keys, values, scale, size / LANES);   \
        break;
    switch (head_dim) { HEAD_DIMS(CASE) }
#undef CASE
}
