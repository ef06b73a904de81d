/* Sub-layers of a decoder on fp32 rows and weights of 4 and 8 bits, for processors with AVX-512 VNNI or AVX2. */
#include "attention.h"
#include "exponential.h"
#include "products.h"

/* Floats in a vector, which tell the instructions that this code was compiled for. */
const int lanes = LANES;

INLINE Floats silu(Floats x) {
    const Floats bounded = larger(smaller(x, all(87.0f)), all(-87.0f));
    return divide(x, add(all(1.0f), exponential(subtract(zeros(), bounded))));
}

/* hidden = silu(gate) * up, where the weight's outputs are those of gate, then those of up. */
static void gated(const Weight *weight, Rows rows, int64_t n, float *hidden) {
    const int64_t width = weight->out / 2, tiles = width / TILE;
#pragma omp for schedule(static)
    for (int64_t tile = 0; tile < tiles; tile++)
        for (int64_t first = 0; first < n; first += CHUNK) {
            const int count = chunk(n, first);
            Floats gate[CHUNK * PARTS], up[CHUNK * PARTS];
            products(weight, tile, rows, first, count, gate);
            products(weight, tiles + tile, rows, first, count, up);
            for (int r = 0; r < count * PARTS; r++)
                store(hidden + (first + r / PARTS) * width + tile * TILE + r % PARTS * LANES,
                      multiply(silu(gate[r]), up[r]));
        }
}

/* y [n, out] = W norm(x) + residual. `memory` holds the quantised rows of each thread. */
void linear(const Weight *weight, const float *norm_weight, float epsilon, const float *x, int64_t n,
            const float *residual, float *y, float *memory, int threads)
{
    const Norm norm = {norm_weight, epsilon};
#pragma omp parallel num_threads(threads)
    {
        const Rows rows = quantised(x, norm, n, weight->in, memory);
        project(weight, rows, n, residual, y);
    }
}

/* y [n, out] = x + W_down (silu(W_gate norm(x)) * W_up norm(x)). `memory` holds the inner rows in fp32, then the quantised
 * rows of each thread, those of x first and those of the inner rows after them. */
void mlp(const Weight *gate_up, const Weight *down, const float *norm_weight, float epsilon, const float *x, int64_t n,
         float *y, float *memory, int threads)
{
    const Norm norm = {norm_weight, epsilon}, none = {0, 0.0f};
    float *outer = memory + n * down->in;
    float *inner = outer + threads * floats_of(n, gate_up->in);
#pragma omp parallel num_threads(threads)
    {
        gated(gate_up, quantised(x, norm, n, gate_up->in, outer), n, memory);
        const Rows rows = quantised(memory, none, n, down->in, inner);
        project(down, rows, n, x, y);
    }
}

/* The queries of one segment and key-value head are attended in equal items, of which all threads have some. */
static int64_t together(const Block *block, int64_t rows, int threads) {
    const int64_t queries = rows * (block->heads / block->kv_heads);
    const int64_t wanted = (2 * threads + block->kv_heads - 1) / block->kv_heads;
    const int64_t size = (queries + wanted - 1) / wanted;
    return size < QUERIES ? size : QUERIES;
}

static int64_t most_together(const Block *block, int64_t rows) {
    const int64_t queries = rows * (block->heads / block->kv_heads);
    return queries < QUERIES ? queries : QUERIES;
}

/* Items per key-value head of a segment. */
static int64_t items_in(const Block *block, const Segment *segment, int threads) {
    const int64_t size = together(block, segment->rows, threads);
    return (segment->rows * (block->heads / block->kv_heads) + size - 1) / size;
}

static int64_t items_of(const Block *block, const Segment *segments, int64_t n, int threads) {
    int64_t items = 0;
    for (int64_t first = 0; first < n; first += segments++->rows)
        items += block->kv_heads * items_in(block, segments, threads);
    return items;
}

/* Attend the queries of one item, from the projections `qkv` of all rows to their places in `mixed`. */
static void attend_item(const Block *block, const Segment *segment, int64_t item, int threads, const float *qkv,
                        int64_t longest, float *scores, int32_t *slots, float *mixed)
{
    const int64_t heads = block->heads, kv_heads = block->kv_heads, size = block->head_dim, group = heads / kv_heads;
    int64_t row = 0;
    for (int64_t items; item >= (items = kv_heads * items_in(block, segment, threads)); segment++) {
        item -= items;
        row += segment->rows;
    }
    const int64_t per_head = items_in(block, segment, threads), kv_head = item / per_head;
    const int64_t step = together(block, segment->rows, threads), begin = item % per_head * step;
    const int64_t end = begin + step < segment->rows * group ? begin + step : segment->rows * group;
    Query queries[QUERIES];
    int64_t seen = segment->slots;
    for (int64_t i = begin; i < end; i++) {
        const int64_t own = i / group, head = kv_head * group + i % group;
        if (segment->bias && (i == begin || i % group == 0)) {
            slots += i == begin ? 0 : longest;
            seen = seen_slots(segment->bias + own * segment->slots, segment->slots, slots);
        }
        queries[i - begin] = (Query){
            .query = qkv + (row + own) * (heads + 2 * kv_heads) * size + head * size,
            .seen = segment->bias ? slots : 0,
            .count = seen,
            .scores = scores + (i - begin) * longest,
            .to = mixed + ((row + own) * heads + head) * size,
        };
    }
    attend(queries, (int)(end - begin), segment->keys + kv_head * segment->stride,
           segment->values + kv_head * segment->stride, block->scale, size);
}

/* y [n, hidden] = x + W_output attention(W_qkv norm(x)); writes the rows' keys and values into their caches. `memory` holds
 * the queries, keys and values, and the mixed values of all rows; then, per thread, the quantised rows of x and of the
 * mixed values, and the scores and slots of the queries that are attended together, `longest` each. That is the largest
 * number of slots plus 16. */
void attention(const Block *block, const Segment *segments, const float *cos, const float *sin,
               int64_t width, int64_t stride, const float *x, int64_t n, int64_t longest, float *y, float *memory,
               int threads)
{
    const int64_t heads = block->heads, kv_heads = block->kv_heads, size = block->head_dim;
    const int64_t columns = (heads + 2 * kv_heads) * size, most = most_together(block, n);
    const int64_t items = items_of(block, segments, n, threads);
    const Norm norm = {block->norm, block->epsilon}, none = {0, 0.0f};
    const Norm q_norm = {block->q_norm, block->q_epsilon}, k_norm = {block->k_norm, block->k_epsilon};
    const Rotation rotation = {cos, sin, width, stride}, still = {0, 0, 0, 0};
    float *qkv = memory, *mixed = qkv + n * columns, *outer = mixed + n * heads * size;
    float *inner = outer + threads * floats_of(n, block->qkv->in), *own = inner + threads * floats_of(n, heads * size);
#pragma omp parallel num_threads(threads)
    {
        float *scores = own + 2 * most * longest * omp_get_thread_num();
        int32_t *slots = (int32_t *)(scores + most * longest);
        const Rows rows = quantised(x, norm, n, block->qkv->in, outer);
        project(block->qkv, rows, n, 0, qkv);
#pragma omp barrier
        /* Heads of keys and values go to the caches, those of queries stay where they are. */
#pragma omp for schedule(static)
        for (int64_t item = 0; item < n * (heads + 2 * kv_heads); item++) {
            const int64_t row = item / (heads + 2 * kv_heads), head = item % (heads + 2 * kv_heads);
            const Segment *segment = segments;
            int64_t first = 0;
            while (row - first >= segment->rows)
                first += segment++->rows;
            float *from = qkv + row * columns + head * size;
            const int64_t at = (segment->own + row - first) * size;
            if (head < heads)
                place_head(from, q_norm, rotation, row, size, from);
            else if (head < heads + kv_heads)
                place_head(from, k_norm, rotation, row, size, segment->keys + (head - heads) * segment->stride + at);
            else
                place_head(from, none, still, row, size,
                           segment->values + (head - heads - kv_heads) * segment->stride + at);
        }
#pragma omp for schedule(static)
        for (int64_t item = 0; item < items; item++)
            attend_item(block, segments, item, threads, qkv, longest, scores, slots, mixed);
        const Rows mixed_rows = quantised(mixed, none, n, heads * size, inner);
        project(block->output, mixed_rows, n, x, y);
    }
}
