/* A gated MLP, W_down (activation(W_gate x) * W_up x), on all threads. */
#pragma once
#include "exponential.h"
#include "project.h"

/* How gate and up are joined: silu(gate) * up; gelu(gate) * up, by its form with a tanh; or the clamped form of GPT-OSS,
 * min(gate, limit) * sigmoid(alpha * min(gate, limit)) * (up + 1), with up within the limit. */
typedef enum { SILU, GELU, CLAMPED, FUNCTIONS } Function;

typedef struct {
    int64_t function;
    float alpha, limit;
} Activation;

INLINE Floats activated(Floats gate, Floats up, const Activation *by) {
    if (by->function == SILU)
        return multiply(sigmoid_times(gate, gate), up);
    if (by->function == GELU) { /* (1 + tanh(u)) / 2 is sigmoid(2 u). */
        const Floats cubic = multiply_add(multiply(gate, gate), all(0.044715f), all(1.0f));
        return multiply(sigmoid_times(multiply(multiply(gate, all(1.5957691216f)), cubic), gate), up);
    }
    const Floats limit = all(by->limit), bounded = smaller(limit, gate);
    const Floats glu = sigmoid_times(multiply(bounded, all(by->alpha)), bounded);
    return multiply(glu, add(larger(all(-by->limit), smaller(limit, up)), all(1.0f)));
}

/* The products of gate and up in tiles `begin` to `end` of the half that is gate; those of up lie half the weight behind. y is
 * hidden. */
static void gated_tiles(const Projecting *of, int64_t begin, int64_t end, const Activation *activation) {
    const Span every = {0, of->weight->in / GROUP};
    const int64_t half = of->weight->out / 2 / TILE;
    for (int64_t from = begin; from < end; from += of->items.near)
        for (int64_t first = 0; first < of->n; first += CHUNK)
            for (int64_t tile = from; tile < end && tile < from + of->items.near; tile++) {
                const int count = chunk(of->n, first);
                Floats gate[CHUNK * PARTS], up[CHUNK * PARTS];
                begin_sums(of->weight, tile, count, gate);
                begin_sums(of->weight, half + tile, count, up);
                products(of->weight, tile, of->rows, first, count, every, gate);
                products(of->weight, half + tile, of->rows, first, count, every, up);
                for (int r = 0; r < count * PARTS; r++)
                    store(of->y + (first + r / PARTS) * of->width + tile * TILE + r % PARTS * LANES,
                          activated(gate[r], up[r], activation));
            }
}

typedef struct {
    Projecting projecting;
    const Activation *activation;
} Gated;

static void gated_item(const void *about, int64_t item, int worker) {
    const Gated *of = about;
    const int64_t begin = first_tile(&of->projecting.items, item);
    (void)worker;
    gated_tiles(&of->projecting, begin, begin + tiles_from(&of->projecting.items, begin), of->activation);
}

/* The tiles of gate, with those of up, as items for n rows. */
static Items items_of_gated(const Weight *weight, int64_t tiles, int64_t n, Threads threads) {
    return items_of_tiles(weight, tiles, 2 * tile_bytes(formats[weight->format], weight->in / GROUP), n, threads);
}

/* hidden = gate joined with up, where the weight's outputs are those of gate, then those of up. */
static void gated(Threads threads, const Weight *weight, const Activation *activation, Rows rows, int64_t n, float *hidden) {
    const Items items = items_of_gated(weight, weight->out / 2 / TILE, n, threads);
    const Gated about = {{weight, rows, n, items, 0, hidden, weight->out / 2}, activation};
    each(threads, gated_item, &about, number_of(&items), 1);
}

/* The floats of memory that an MLP takes for n rows. */
static int64_t mlp_floats(const Weight *gate_up, const Weight *down, int64_t n) {
    return n * down->in + floats_of(gate_up, n) + floats_of(down, n);
}

static void mlp_on(Threads threads, const Weight *gate_up, const Weight *down, const Activation *activation,
                   const Connection *connection, const float *x, int64_t n, float *y, float *memory)
{
    float *outer = memory + n * down->in, *inner = outer + floats_of(gate_up, n);
    gated(threads, gate_up, activation, prepared(threads, x, norm_of(connection), n, gate_up, outer), n, memory);
    project_last(threads, down, prepared(threads, memory, 0, n, down, inner), n, connection, x, y);
}
