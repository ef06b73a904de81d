/* The MLP of a mixture: a router sends each row to `each` of `number` experts, of which every one is a gated MLP.
 *
 * A row with one of its experts is a pair. Pairs lie in the order of their experts, so that the rows of an expert meet its
 * tiles together. The sum over a row's experts runs in the order in which the router has named them, so that a row's result
 * is the same to the bit whatever rows stand beside it. There may be a further expert that all rows go to, whose output is
 * added at the end.
 */
#pragma once
#include "mlp.h"
#include <string.h>

/* Who routes: the caller, or this code by the softmax of the router's scores. With SHARES, the weights of a row's experts
 * are divided by their sum. With SIGMOIDS, weights are the scores' sigmoids, divided so too, and the bias is not added to
 * the scores but to the sigmoids by which experts are chosen. */
typedef enum { GIVEN, SOFTMAX, SHARES, SIGMOIDS } Routing;

typedef struct {
    const Weight *gate_up, *down;
    const float *gate; /* [in]: the sigmoid of its product with a row is the factor of the row's output; NULL for 1. */
    int64_t gate_bytes;
    const Norm *after; /* Of its output; NULL for none. */
} Shared;

typedef struct {
    const Weight *const *gate_up, *const *down; /* [number], all of the same sizes and format. */
    const float *router, *bias; /* [number][in] and [number]; NULL where the caller routes, and for no bias. */
    const float *factors;       /* [number], of the weights of a row's experts; NULL for 1. */
    const Activation *activation;
    const Shared *shared; /* NULL without an expert of all rows. */
    const Norm *router_norm, *norm, *after; /* Of the states that the router and experts receive, where these are other rows
                                               than those of the block; and of the weighted sum. NULL for none. */
    int64_t router_bytes, bias_bytes, factor_bytes, bytes; /* The last are those of either list of weights. */
    int64_t number, each, routing;
} Experts;

/* What the items of a mixture read and write. All but `x`, `y` and the caller's choice lies in the memory of the call. */
typedef struct {
    const Experts *experts;
    const Connection *connection; /* NULL where the weighted sum alone is the result. */
    const float *x, *rows, *own, *seen; /* [n][in]: states, and the rows of the block, of experts and of the router. */
    int64_t n;
    float *normed, *scores; /* [3][n][in] rows that are normed, [n][number] */
    int32_t *chosen;        /* [n][each] */
    float *weights;         /* [n][each] */
    int32_t *place;         /* [n][each]: where the pair lies. */
    int32_t *first;         /* [number + 1]: the first pair of every expert. */
    int32_t *next;          /* [number] */
    int32_t *hit;           /* [number + 1]: experts that have pairs; the last is their number. */
    float *outer, *hidden, *inner, *out; /* Rows for gate and up, [pairs][inner], rows for down, [pairs][hidden]. */
    float *of_all;                       /* [n][hidden]: the output of the expert of all rows. */
    float *y;
    Threads threads;
} Mixture;

/* The floats of memory that n rows take. */
static int64_t experts_floats(const Experts *of, int64_t n) {
    const Weight *gate_up = of->gate_up[0], *down = of->down[0];
    const int64_t pairs = n * of->each, shared = of->shared ? mlp_floats(of->shared->gate_up, of->shared->down, n) : 0;
    return n * (3 * gate_up->in + of->number) + 3 * pairs + 3 * of->number + 2
           + floats_of(gate_up, pairs) + floats_of(down, pairs) + pairs * (down->in + down->out) + n * down->out + shared;
}

/* The states of a row, normed for one of those that receive them. */
static void norm_item(const void *about, int64_t item, int worker) {
    const Mixture *of = about;
    const int64_t in = of->experts->gate_up[0]->in, row = item % of->n;
    const Norm *norms[] = {norm_of(of->connection), of->experts->norm, of->experts->router_norm};
    (void)worker;
    if (norms[item / of->n])
        norm_row(of->x + row * in, norms[item / of->n], 1.0f, 0, in, of->normed + item * in);
}

static float product_of(const float *a, const float *b, int64_t in) {
    Floats sums[GROUP / LANES];
    for (int p = 0; p < GROUP / LANES; p++)
        sums[p] = zeros();
    for (int64_t i = 0; i < in; i += GROUP)
#pragma GCC unroll 4
        for (int p = 0; p < GROUP / LANES; p++)
            sums[p] = multiply_add(load(a + i + p * LANES), load(b + i + p * LANES), sums[p]);
    for (int p = 1; p < GROUP / LANES; p++)
        sums[0] = add(sums[0], sums[p]);
    return sum_of(sums[0]);
}

/* The router's scores of one expert for all rows. */
static void score_item(const void *about, int64_t expert, int worker) {
    const Mixture *of = about;
    const int64_t in = of->experts->gate_up[0]->in;
    const int is_biased = of->experts->bias && of->experts->routing != SIGMOIDS;
    (void)worker;
    for (int64_t r = 0; r < of->n; r++)
        of->scores[r * of->experts->number + expert] =
            product_of(of->experts->router + expert * in, of->seen + r * in, in)
            + (is_biased ? of->experts->bias[expert] : 0.0f);
}

static int among(const int32_t *chosen, int64_t count, int64_t expert) {
    for (int64_t i = 0; i < count; i++)
        if (chosen[i] == expert)
            return 1;
    return 0;
}

static float rank_of(const float *scores, const float *bias, int64_t expert) {
    return bias ? scores[expert] + bias[expert] : scores[expert];
}

/* Choose a row's experts by their scores, the first of equals, and their weights. */
static void route_item(const void *about, int64_t row, int worker) {
    const Mixture *of = about;
    const int64_t number = of->experts->number, count = of->experts->each;
    const int by_sigmoid = of->experts->routing == SIGMOIDS;
    const float *bias = by_sigmoid ? of->experts->bias : 0;
    float *scores = of->scores + row * number;
    int32_t *chosen = of->chosen + row * count;
    float *weights = of->weights + row * count, sum = by_sigmoid ? 1e-6f : 0.0f;
    (void)worker;
    for (int64_t i = 0; by_sigmoid && i < number; i++)
        scores[i] = 1.0f / (1.0f + expf(-scores[i]));
    for (int64_t j = 0; j < count; j++) {
        int64_t best = -1;
        for (int64_t i = 0; i < number; i++)
            if ((best < 0 || rank_of(scores, bias, i) > rank_of(scores, bias, best)) && !among(chosen, j, i))
                best = i;
        chosen[j] = (int32_t)best;
        weights[j] = by_sigmoid ? scores[best] : expf(scores[best] - scores[chosen[0]]);
    }
    if (of->experts->routing != SOFTMAX)
        for (int64_t j = 0; j < count; j++)
            sum += weights[j];
    else
        for (int64_t i = 0; i < number; i++)
            sum += expf(scores[i] - scores[chosen[0]]);
    for (int64_t j = 0; j < count; j++)
        weights[j] = weights[j] / sum * (of->experts->factors ? of->experts->factors[chosen[j]] : 1.0f);
}

/* Find the place of every pair, in the order of experts and then of rows. It is one item. */
static void arrange_item(const void *about, int64_t item, int worker) {
    const Mixture *of = about;
    const int64_t number = of->experts->number, pairs = of->n * of->experts->each;
    (void)item, (void)worker;
    memset(of->first, 0, sizeof(int32_t) * (size_t)(number + 1));
    for (int64_t pair = 0; pair < pairs; pair++)
        of->first[of->chosen[pair] + 1]++;
    int32_t hits = 0;
    for (int64_t i = 0; i < number; i++) {
        if (of->first[i + 1])
            of->hit[hits++] = (int32_t)i;
        of->first[i + 1] += of->first[i];
        of->next[i] = of->first[i];
    }
    of->hit[number] = hits;
    for (int64_t pair = 0; pair < pairs; pair++)
        of->place[pair] = of->next[of->chosen[pair]]++;
}

/* The pairs of an expert. */
typedef struct {
    int64_t expert, first, count;
} Hit;

static Hit hit_of(const Mixture *of, int64_t expert) {
    return (Hit){expert, of->first[expert], of->first[expert + 1] - of->first[expert]};
}

/* The rows of an expert's pairs for its weight, in the memory of all pairs. */
static Rows rows_of(const Weight *weight, float *memory, Hit hit) {
    return rows_in(memory + floats_of(weight, hit.first), weight, hit.count);
}

/* Bring the pairs of a row into the order in which the weights of their experts read them: the row itself for gate and up,
 * its hidden numbers for down. */
INLINE void prepare_pairs(const Mixture *of, int64_t row, const int down) {
    const Weight *weight = (down ? of->experts->down : of->experts->gate_up)[0];
    for (int64_t pair = row * of->experts->each; pair < (row + 1) * of->experts->each; pair++) {
        const Hit hit = hit_of(of, of->chosen[pair]);
        const int64_t place = of->place[pair];
        const float *from = down ? of->hidden + place * weight->in : of->own + row * weight->in;
        prepare(from, 0, rows_of(weight, down ? of->inner : of->outer, hit), place - hit.first, hit.count);
    }
}

static void outer_item(const void *about, int64_t row, int worker) {
    (void)worker;
    prepare_pairs(about, row, 0);
}

static void inner_item(const void *about, int64_t row, int worker) {
    (void)worker;
    prepare_pairs(about, row, 1);
}

/* The tiles of gate, or of down, of all experts that are hit, one expert after the other. */
typedef struct {
    const Mixture *mixture;
    int64_t tiles; /* Of an expert. */
    Items items;
} Tiles;

/* The work of a function on the tiles of an item, expert by expert. */
INLINE void each_expert(const Tiles *of, int64_t item, const int down) {
    const Mixture *mixture = of->mixture;
    const Experts *experts = mixture->experts;
    int64_t begin = first_tile(&of->items, item);
    const int64_t end = begin + tiles_from(&of->items, begin);
    while (begin < end) {
        const int64_t before = begin / of->tiles * of->tiles, stop = before + of->tiles < end ? before + of->tiles : end;
        const Hit hit = hit_of(mixture, mixture->hit[begin / of->tiles]);
        const Weight *weight = (down ? experts->down : experts->gate_up)[hit.expert];
        const Rows rows = rows_of(weight, down ? mixture->inner : mixture->outer, hit);
        const int64_t width = down ? weight->out : weight->out / 2;
        float *y = (down ? mixture->out : mixture->hidden) + hit.first * width;
        if (down) {
            const int64_t bytes = tile_bytes(formats[weight->format], weight->in / GROUP);
            const Items own = items_of_tiles(weight, of->tiles, bytes, hit.count, mixture->threads);
            project_tiles(&(Projecting){weight, rows, hit.count, own, 0, y, width}, begin - before, stop - before);
        } else {
            const Items own = items_of_gated(weight, of->tiles, hit.count, mixture->threads);
            gated_tiles(&(Projecting){weight, rows, hit.count, own, 0, y, width}, begin - before, stop - before,
                        experts->activation);
        }
        begin = stop;
    }
}

static void gate_up_item(const void *about, int64_t item, int worker) {
    (void)worker;
    each_expert(about, item, 0);
}

static void down_item(const void *about, int64_t item, int worker) {
    (void)worker;
    each_expert(about, item, 1);
}

/* Add the output of the expert of all rows to that of a row's own. */
static void add_shared(const Mixture *of, int64_t row, const Shared *shared) {
    const int64_t out = shared->down->out;
    const float *gate = shared->gate, *x = of->rows + row * out;
    const float factor = gate ? 1.0f / (1.0f + expf(-product_of(gate, x, out))) : 1.0f;
    norm_row(of->of_all + row * out, shared->after, factor, of->y + row * out, out, of->y + row * out);
}

static void combine_item(const void *about, int64_t row, int worker) {
    const Mixture *of = about;
    const int64_t out = of->experts->down[0]->out, count = of->experts->each;
    const int32_t *places = of->place + row * count;
    const float *weights = of->weights + row * count;
    (void)worker;
    for (int64_t i = 0; i < out; i += LANES) {
        Floats sum = multiply(all(weights[0]), load(of->out + places[0] * out + i));
        for (int64_t j = 1; j < count; j++)
            sum = add(sum, multiply(all(weights[j]), load(of->out + places[j] * out + i)));
        store(of->y + row * out + i, sum);
    }
    if (of->experts->after)
        norm_row(of->y + row * out, of->experts->after, 1.0f, 0, out, of->y + row * out);
    if (of->experts->shared)
        add_shared(of, row, of->experts->shared);
    if (of->connection)
        connect_row(of->connection, of->x + row * out, out, of->y + row * out);
}

/* The mixture's output for its rows; `memory` is as large as `experts_floats` says. */
static void experts_on(Threads threads, Mixture of, float *memory) {
    const Experts *experts = of.experts;
    const Weight *gate_up = experts->gate_up[0], *down = experts->down[0];
    const int64_t n = of.n, pairs = n * experts->each;
    of.threads = threads;
    of.normed = memory;
    of.scores = of.normed + 3 * n * gate_up->in;
    of.place = (int32_t *)(of.scores + n * experts->number);
    of.first = of.place + pairs;
    of.next = of.first + experts->number + 1;
    of.hit = of.next + experts->number;
    of.outer = (float *)(of.hit + experts->number + 1);
    of.hidden = of.outer + floats_of(gate_up, pairs);
    of.inner = of.hidden + pairs * down->in;
    of.out = of.inner + floats_of(down, pairs);
    of.of_all = of.out + pairs * down->out;
    float *rest = of.of_all + n * down->out;
    of.rows = norm_of(of.connection) ? of.normed : of.x;
    of.own = experts->norm ? of.normed + n * gate_up->in : of.rows;
    of.seen = experts->router_norm ? of.normed + 2 * n * gate_up->in : of.own;
    if (experts->routing != GIVEN) {
        of.chosen = (int32_t *)rest;
        of.weights = rest + pairs;
        rest += 2 * pairs;
    }
    each(threads, norm_item, &of, 3 * n, 3 * FEW);
    if (experts->shared)
        mlp_on(threads, experts->shared->gate_up, experts->shared->down, experts->activation, 0, of.rows, n, of.of_all, rest);
    if (experts->routing != GIVEN) {
        each(threads, score_item, &of, experts->number, FEW);
        each(threads, route_item, &of, n, FEW);
    }
    each(threads, arrange_item, &of, 1, 1);
    each(threads, outer_item, &of, n, FEW);
    const int64_t hits = of.hit[experts->number], share = hits ? (pairs + hits - 1) / hits : 0;
    const int64_t halves = gate_up->out / 2 / TILE, tiles = down->out / TILE;
    const Tiles first = {&of, halves, items_of_gated(gate_up, hits * halves, share, threads)};
    each(threads, gate_up_item, &first, number_of(&first.items), 1);
    each(threads, inner_item, &of, n, FEW);
    const int64_t bytes = tile_bytes(formats[down->format], down->in / GROUP);
    const Tiles second = {&of, tiles, items_of_tiles(down, hits * tiles, bytes, share, threads)};
    each(threads, down_item, &second, number_of(&second.items), 1);
    each(threads, combine_item, &of, n, FEW);
}
