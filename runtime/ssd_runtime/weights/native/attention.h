/* Attention over the slots of a cache that a row sees. */
#pragma once
#include "exponential.h"
#include "project.h"
#include <string.h>

#define MOST_HEAD 512 /* The largest size of a head. */

/* One sequence's rows, and the slots of its cache that they see. Heads' keys are `stride` bytes apart, and slots of a head
 * follow each other. A row sees the slots where its bias is 0, or all without a bias. */
typedef struct {
    char *keys, *values; /* Of the first slot. */
    int64_t bytes;       /* Of all keys from the first slot of the first head on; of all values too. */
    int64_t room;        /* Slots of a head from the first one on. */
    int64_t stride, rows, slots;
    int64_t own; /* The first slot to which the rows' own keys and values are written. */
    const float *bias; /* [rows][slots], or NULL. */
    int64_t bias_stride, bias_bytes;
} Segment;

typedef struct {
    const Weight *const *qkv; /* `projections` weights, whose outputs together are queries and what else is `made`. */
    const Weight *output;
    const Norm *q_norm, *k_norm; /* Of each head, or of all heads of a row together; NULL for none. */
    const Norm *v_norm;          /* Of each head; NULL for none. */
    const float *sinks; /* [heads] scores of a key that has no value; NULL for none. */
    int64_t sink_bytes;
    float scale, cap; /* Of scores (`capped`); 0 for no cap. */
    int64_t projections, heads, kv_heads, head_dim;
    int64_t made; /* Vectors that the weights make for a key-value head: 2, a key and a value; 1, a key that is the value, too,
                     before its norm and rotation; or 0, where the keys and values of another layer are read. */
    int64_t gated;     /* 1 if every query is followed by the gates of its head's output, before their sigmoid; else 0. */
    int64_t norms_last; /* 1 if queries and keys are normed after their rotation, 0 if before it. */
    int64_t alternate; /* 1 if a rotation turns pairs of neighbours, 0 if pairs half of its width apart. */
    int64_t kv_bits; /* Of a number in the cache: 32, or 8 with a scale in fp32 after those of each slot and head. */
} Block;

/* The numbers of all queries of a row, with their gates. */
static int64_t query_numbers(const Block *block) {
    return block->heads * block->head_dim * (1 + block->gated);
}

/* The numbers that the weights make of a row. */
static int64_t columns_of(const Block *block) {
    return query_numbers(block) + block->made * block->kv_heads * block->head_dim;
}

/* The queries, keys and values of a row, by heads. */
static int64_t placed_by(const Block *block) {
    return block->heads + (block->made ? 2 * block->kv_heads : 0);
}

/* The norm of each head, if it is one. */
static const Norm *of_head(const Norm *norm, const Block *block) {
    return norm && norm->bytes == 4 * block->head_dim ? norm : 0;
}

/* The bytes of one head's key or value. */
static int64_t slot_bytes(const Block *block) {
    return block->kv_bits == 8 ? block->head_dim + 4 : 4 * block->head_dim;
}

/* Numbers i, ..., i + LANES - 1 of a slot, without its scale. */
INLINE Floats numbers(const char *slot, int64_t i, const int bits) {
    return bits == 8 ? floats(signed_bytes((const uint8_t *)slot + i)) : load((const float *)slot + i);
}

INLINE float scale_of(const char *slot, int64_t size) {
    float scale;
    memcpy(&scale, slot + size, sizeof scale);
    return scale;
}

/* Write a head of fp32 into a slot of 8 bits. What is not finite stays so. */
static void store_slot(char *slot, const float *head, int64_t size) {
    Floats peaks = zeros(), odd = zeros();
    for (int64_t i = 0; i < size; i += LANES) {
        peaks = larger(peaks, magnitude(load(head + i)));
        odd = multiply_add(load(head + i), zeros(), odd);
    }
    const float peak = peak_of(peaks), inverse = peak > 1e-30f ? 127.0f / peak : 0.0f;
    const float scale = peak / 127.0f + sum_of(odd);
    for (int64_t i = 0; i < size; i += LANES)
        store_levels((int8_t *)slot + i, multiply(load(head + i), all(inverse)));
    memcpy(slot + size, &scale, sizeof scale);
}

/* cos and signed sin of rows, [rows][vectors][width]: one vector for queries and keys, or one of either. NULL for layers
 * without a rotation. */
typedef struct {
    const float *cos, *sin;
    int64_t bytes, width, vectors; /* The bytes of each. */
} Rotation;

/* to = the head, normed unless `norm` is NULL; they may be one. */
static void norm_head(const float *head, const Norm *norm, int64_t size, float *to) {
    const float factor = norm ? norm_factor(head, size, norm->epsilon) : 1.0f;
    for (int64_t i = 0; i < size; i++)
        to[i] = norm ? head[i] * factor * norm->weight[i] : head[i];
}

/* to = the head, normed and rotated by the angles that begin `at` numbers after the first. */
static void place_head(const float *x, const Norm *norm, Rotation rotation, int64_t at, const Block *block, float *to) {
    const int64_t size = block->head_dim, alternate = block->alternate;
    float head[MOST_HEAD];
    norm_head(x, block->norms_last ? 0 : norm, size, head);
    const int64_t half = rotation.cos ? rotation.width / 2 : 0;
    const float *cos = rotation.cos + at, *sin = rotation.sin + at;
    for (int64_t i = 0; i < half; i++) {
        const int64_t one = alternate ? 2 * i : i, other = one + (alternate ? 1 : half);
        to[one] = head[one] * cos[one] + head[other] * sin[one];
        to[other] = head[other] * cos[other] + head[one] * sin[other];
    }
    for (int64_t i = 2 * half; i < size; i++)
        to[i] = head[i];
    if (block->norms_last && norm)
        norm_head(to, norm, size, to);
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
    const float *sink; /* NULL for none. */
} Query;

static int64_t slot_of(const Query *query, int64_t i) {
    return query->seen ? query->seen[i] : i;
}

/* Scores of the slots first, ..., last - 1 that `together` queries see, and of fewer than LANES after them, which mean nothing.
 * Queries that are scored together see the same slots, so that each key is loaded once for all of them. */
INLINE void score(const Query *query, const int together, const char *keys, int64_t first, int64_t last, float scale,
                  const int parts, const int bits)
{
    const int64_t size = parts * LANES, apart = bits == 8 ? size + 4 : 4 * size;
    for (int64_t i = first; i < last; i += LANES) {
        Floats dots[2][LANES];
        float scales[LANES];
#pragma GCC unroll 4
        for (int k = 0; k < LANES; k++) {
            const char *key = keys + slot_of(query, i + k < last ? i + k : last - 1) * apart;
#pragma GCC unroll 32
            for (int p = 0; p < parts; p++) {
                const Floats part = numbers(key, p * LANES, bits);
#pragma GCC unroll 2
                for (int t = 0; t < together; t++) {
                    const Floats own = load(query[t].query + p * LANES);
                    dots[t][k] = p ? multiply_add(own, part, dots[t][k]) : multiply(own, part);
                }
            }
            if (bits == 8)
                scales[k] = scale_of(key, size);
        }
#pragma GCC unroll 2
        for (int t = 0; t < together; t++) {
            const Floats sums = multiply(all(scale), sums_of(dots[t]));
            store(query[t].scores + i, bits == 8 ? multiply(sums, load(scales)) : sums);
        }
    }
}

/* Turn scores into exp(score - peak), of capped scores unless `cap` is 0; returns their sum, with that of the sink. */
static float shares(const Query *query, float cap) {
    const int64_t count = query->count;
    Floats peaks = all(-INFINITY), sums = zeros();
    for (int64_t i = 0; cap != 0.0f && i < count; i += LANES)
        store(query->scores + i, capped(load(query->scores + i), cap));
    for (int64_t i = 0; i < count; i += LANES)
        peaks = larger_inside(peaks, load(query->scores + i), count - i);
    const float highest = peak_of(peaks), top = query->sink && *query->sink > highest ? *query->sink : highest;
    const Floats peak = all(top);
    for (int64_t i = 0; i < count; i += LANES) {
        const Floats share = exponential(larger(all(-87.0f), subtract(load(query->scores + i), peak)));
        store(query->scores + i, share);
        sums = add_inside(sums, share, count - i);
    }
    return sum_of(sums) + (query->sink ? expf(*query->sink - top) : 0.0f);
}

/* Add the values of the slots first, ..., last - 1 that `together` queries see, by their shares, to each one's `mixed`
 * [2][parts][LANES]: those at even places to the first, those at odd places to the second, since an addition waits for the
 * one before it. So many parts of a head are summed at a time that their sums stay in registers. */
INLINE void mix(const Query *query, const int together, const char *values, int64_t first, int64_t last, const int parts,
                const int bits, float (*mixed)[2 * MOST_HEAD])
{
    const int64_t size = parts * LANES, apart = bits == 8 ? size + 4 : 4 * size;
    const int most = LANES / 2 / together;
#pragma GCC unroll 4
    for (int begin = 0; begin < parts; begin += most) {
        const int count = parts - begin < most ? parts - begin : most;
        Floats sums[2][2][LANES / 2];
#pragma GCC unroll 32
        for (int p = 0; p < 2 * together * count; p++)
            sums[p / count / 2][p / count % 2][p % count] =
                load(mixed[p / count / 2] + (p / count % 2 * parts + begin + p % count) * LANES);
        for (int64_t i = first; i < last; i += 2) {
#pragma GCC unroll 2
            for (int odd = 0; odd < 2; odd++) {
                if (i + odd == last)
                    break;
                const char *value = values + slot_of(query, i + odd) * apart;
                const float scale = bits == 8 ? scale_of(value, size) : 1.0f;
#pragma GCC unroll 8
                for (int p = 0; p < count; p++) {
                    const Floats part = numbers(value, (begin + p) * LANES, bits);
#pragma GCC unroll 2
                    for (int t = 0; t < together; t++)
                        sums[t][odd][p] = multiply_add(all(query[t].scores[i + odd] * scale), part, sums[t][odd][p]);
                }
            }
        }
#pragma GCC unroll 32
        for (int p = 0; p < 2 * together * count; p++)
            store(mixed[p / count / 2] + (p / count % 2 * parts + begin + p % count) * LANES,
                  sums[p / count / 2][p / count % 2][p % count]);
    }
}

/* Whether a query sees the slots of the one before it, so that both are attended together. */
static int sees_alike(const Query *query, int n) {
    return n > 1 && query[0].seen == query[1].seen && query[0].count == query[1].count;
}

/* Attention of queries of heads that share keys and values. A query's sums run over the slots that it sees in order, so
 * neither hidden slots nor other queries change anything. `parts`, a head's size / LANES, and `bits` are constant where it is
 * called. */
INLINE void attend_parts(const Query *queries, int n, const char *keys, const char *values, float scale, float cap,
                         const int parts, const int bits)
{
    float mixed[QUERIES][2 * MOST_HEAD], sums[QUERIES];
    int64_t longest = 0;
    for (int q = 0; q < n; q++) {
        longest = queries[q].count > longest ? queries[q].count : longest;
        for (int p = 0; p < 2 * parts; p++)
            store(mixed[q] + p * LANES, zeros());
    }
    for (int64_t first = 0; first < longest; first += BLOCK)
        for (int q = 0; q < n; q++) {
            const int64_t last = queries[q].count < first + BLOCK ? queries[q].count : first + BLOCK;
            if (sees_alike(&queries[q], n - q))
                score(&queries[q++], 2, keys, first, last, scale, parts, bits);
            else
                score(&queries[q], 1, keys, first, last, scale, parts, bits);
        }
    for (int q = 0; q < n; q++)
        sums[q] = shares(&queries[q], cap);
    for (int64_t first = 0; first < longest; first += BLOCK)
        for (int q = 0; q < n; q++) {
            const int64_t last = queries[q].count < first + BLOCK ? queries[q].count : first + BLOCK;
            if (sees_alike(&queries[q], n - q)) {
                mix(&queries[q], 2, values, first, last, parts, bits, &mixed[q]);
                q++;
            } else {
                mix(&queries[q], 1, values, first, last, parts, bits, &mixed[q]);
            }
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
#define HEAD_DIMS(CASE) CASE(16) CASE(32) CASE(64) CASE(80) CASE(96) CASE(128) CASE(256) CASE(512)

static void attend(const Query *queries, int n, const char *keys, const char *values, const Block *block)
{
#define CASE(size)                                                                              \
    case size:                                                                                  \
        if (block->kv_bits == 8)                                                                \
            attend_parts(queries, n, keys, values, block->scale, block->cap, size / LANES, 8);  \
        else                                                                                    \
            attend_parts(queries, n, keys, values, block->scale, block->cap, size / LANES, 32); \
        break;
    switch (block->head_dim) { HEAD_DIMS(CASE) }
#undef CASE
}
