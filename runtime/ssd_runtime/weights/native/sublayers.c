/* Sub-layers of a decoder on fp32 rows and weights of 2 to 16 bits, for processors with AVX-512 VNNI, AVX2 or NEON. */
#ifdef __clang__
#error "Only GCC's code runs on the threads of torch's OpenMP library."
#endif
#include "checks.h"

/* Beginning of kernels' names: the instructions that this code was compiled for. */
const char instructions[8] = INSTRUCTIONS;

/* Let torch use so many threads for work of the calling thread, where `torch.set_num_threads` is for all threads. */
void set_torch_threads(int threads) {
    omp_set_num_threads(threads);
}

/* Order `out` outputs of a file, of `in` columns, as the tiles `begin`, ... of a weight `to`; zeros fill the last one. Returns
 * the code of the rule that a call breaks (`checks.h`), and then has touched nothing, as all of the following do. */
int repack(int64_t format, const uint8_t *from, int64_t bytes, int64_t out, int64_t in, uint8_t *to, int64_t to_bytes,
           int64_t begin, int wanted)
{
    AGREE(check_stored(format, from, bytes, out, in, to, to_bytes, begin, wanted));
    const int64_t groups = in / GROUP, first = blocks_bytes(formats[format], groups);
    const int64_t second = groups * second_bytes(formats[format]), tiles = to_bytes / (first + second);
    const Repacking about = {(int)format, from, bytes / out, out, groups, to + begin * first, first,
                             to + tiles * first + begin * second, second};
    const Threads threads = join(wanted, 1);
    ON(threads, each(threads, repack_tile, &about, (out + TILE - 1) / TILE, 1));
    leave(threads);
    return AGREED;
}

/* Round the rows of `numbers` [out, in] of `size` bytes to `blocks` of 4 or 8 bits, with the `sums` of each. */
int round_rows(const uint8_t *numbers, int64_t bytes, int64_t size, int64_t is_brain, int64_t out, int64_t in, int64_t bits,
               uint8_t *blocks, int64_t blocks_bytes, double *sums, int64_t sums_bytes, int wanted)
{
    const Rounding about = {numbers, in, size, is_brain, bits, blocks, sums};
    AGREE(check_rounding(&about, bytes, out, blocks_bytes, sums_bytes, wanted));
    const Threads threads = join(wanted, 1);
    ON(threads, each(threads, round_row, &about, out, 1));
    leave(threads);
    return AGREED;
}

/* y [n, out] = W norm(x) + residual, capped unless `cap` is 0. `memory` [floats] holds the rows as the weight takes them
 * (`rows.h`). */
int linear(const Weight *weight, const Norm *norm, const float *x, int64_t bytes, int64_t n, const float *residual,
           int64_t residual_bytes, float cap, float *y, float *memory, int64_t floats, int wanted)
{
    AGREE(check_linear(weight, norm, x, bytes, n, residual, residual_bytes, y, memory, floats, wanted));
    const Threads threads = join(wanted, (int)weight->own_threads);
    ON(threads, project_capped(threads, weight, prepared(threads, x, norm, n, weight, memory), n, residual, y, weight->out,
                               cap));
    leave(threads);
    return AGREED;
}

/* y [n, out] = a gated MLP's result for x. `memory` holds the inner rows in fp32, then the quantised rows of x and those of
 * the inner rows. */
int mlp(const Weight *gate_up, const Weight *down, const Activation *activation, const Connection *connection, const float *x,
        int64_t bytes, int64_t n, float *y, float *memory, int64_t floats, int wanted)
{
    AGREE(check_mlp(gate_up, down, activation, connection, x, bytes, n, y, memory, floats, wanted));
    const Threads threads = join(wanted, (int)gate_up->own_threads);
    ON(threads, mlp_on(threads, gate_up, down, activation, connection, x, n, y, memory));
    leave(threads);
    return AGREED;
}

/* y [n, hidden] = the states after a layer whose MLP has left x; each row's token gives the layer its row of `inputs`. */
int end_layer(const Ending *of, const float *inputs, int64_t input_bytes, const float *x, int64_t bytes, int64_t n, float *y,
              float *memory, int64_t floats, int wanted)
{
    AGREE(check_ending(of, inputs, input_bytes, x, bytes, n, y, memory, floats, wanted));
    const Threads threads = join(wanted, of->gate ? (int)of->gate->own_threads : 1);
    ON(threads, end_on(threads, of, inputs, x, n, y, memory));
    leave(threads);
    return AGREED;
}

/* y [n, hidden] = the result of a mixture for x, whose output is the weighted sum of those of a row's experts. `chosen` and
 * `weights` [n][each] are the caller's choice; NULL where the router chooses. */
int experts(const Experts *of, const Connection *connection, const float *x, int64_t bytes, int64_t n, const int32_t *chosen,
            const float *weights, int64_t choice_bytes, float *y, float *memory, int64_t floats, int wanted)
{
    AGREE(check_experts(of, connection, x, bytes, n, chosen, weights, choice_bytes, y, memory, floats, wanted));
    const Threads threads = join(wanted, (int)of->gate_up[0]->own_threads);
    const Mixture about = {.experts = of, .connection = connection, .x = x, .n = n, .chosen = (int32_t *)chosen,
                           .weights = (float *)weights, .y = y};
    ON(threads, experts_on(threads, about, memory));
    leave(threads);
    return AGREED;
}

/* y [n, heads, value] = the outputs of a recurrence for the `inputs` [n] of rows that follow the convolution's `window` and the
 * `state`; writes those after them to `next` and `after`. `memory` holds the convolved channels of all rows. */
int recur(const Recurrence *of, const float *window, int64_t window_bytes, const float *state, int64_t state_bytes,
          float *next, float *after, const float *inputs, int64_t bytes, int64_t n, float *y, float *memory, int64_t floats,
          int wanted)
{
    AGREE(check_recur(of, window, window_bytes, state, state_bytes, next, after, inputs, bytes, n, y, memory, floats, wanted));
    const Threads threads = join(wanted, (int)of->own_threads);
    const Recurring about = {.recurrence = of, .window = window, .before = state, .inputs = inputs, .n = n, .next = next,
                             .after = after, .convolved = memory, .y = y};
    ON(threads, recur_on(threads, &about));
    leave(threads);
    return AGREED;
}

/* y [n, hidden] = a mixer's result for x, of rows that continue `count` states one after the other: a later one may be that
 * after an earlier one's rows. Writes these rows' inputs and the states after them. The result is added to the `residual`
 * [n, hidden] of attention beside it, which is not y, where sums are kept meanwhile; or to x if that is NULL. */
int mixer(const Mixing *of, const Connection *connection, const Continuation *continuations, int64_t count, const float *x,
          int64_t bytes, int64_t n, const float *residual, int64_t residual_bytes, float *y, float *memory, int64_t floats,
          int wanted)
{
    AGREE(check_mixing(of, continuations, count, n));
    AGREE(check_rows(x, bytes, n, of->inputs[0]->in, y, memory, wanted));
    AGREE(check_connection(connection, of->inputs[0]->in));
    REQUIRE(RESIDUAL, !residual || (residual != y && residual_bytes == bytes && is_plain(connection)));
    REQUIRE(MEMORY, floats == mixing_floats(of, n));
    const Threads threads = join(wanted, (int)of->output->own_threads);
    ON(threads, mixing_on(threads, of, connection, continuations, count, x, n, residual ? residual : x, y, memory));
    leave(threads);
    return AGREED;
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

/* What the items of an attention block read and write. */
typedef struct {
    const Block *block;
    const Segment *segments;
    Rotation rotation;
    int64_t n, longest, most;
    int threads; /* So many have scores and slots of their own. */
    float *qkv, *mixed, *own;
} Attending;

/* Norm a row's queries and keys where a norm is of all heads together. */
static void norm_heads_item(const void *about, int64_t row, int worker) {
    const Attending *of = about;
    const Block *block = of->block;
    float *queries = of->qkv + row * columns_of(block), *keys = queries + query_numbers(block);
    (void)worker;
    if (block->q_norm && !of_head(block->q_norm, block))
        norm_row(queries, block->q_norm, 1.0f, 0, block->heads * block->head_dim, queries);
    if (block->k_norm && !of_head(block->k_norm, block))
        norm_row(keys, block->k_norm, 1.0f, 0, block->kv_heads * block->head_dim, keys);
}

/* Place one head of one row: those of keys and values go to the caches, those of queries stay where they are. */
static void place_item(const void *about, int64_t item, int worker) {
    const Attending *of = about;
    const Block *block = of->block;
    const Segment *segment = of->segments;
    const int64_t heads = block->heads, kv_heads = block->kv_heads, size = block->head_dim;
    const int64_t all = placed_by(block), row = item / all, head = item % all;
    const Rotation still = {0, 0, 0, 0, 0};
    const int64_t vectors = of->rotation.vectors, width = of->rotation.width, angles = row * vectors * width;
    int64_t first = 0;
    (void)worker;
    while (row - first >= segment->rows)
        first += segment++->rows;
    float *queries = of->qkv + row * columns_of(block);
    if (head < heads) {
        float *query = queries + head * size * (1 + block->gated);
        place_head(query, of_head(block->q_norm, block), of->rotation, angles, block, query);
        return;
    }
    const int is_key = head < heads + kv_heads;
    const int64_t own = is_key || block->made == 2 ? head - heads : head - heads - kv_heads;
    const float *from = queries + query_numbers(block) + own * size;
    const int64_t at = (segment->own + row - first) * slot_bytes(block);
    char *slot = at + (is_key ? segment->keys + (head - heads) * segment->stride
                              : segment->values + (head - heads - kv_heads) * segment->stride);
    float numbers[MOST_HEAD], *to = block->kv_bits == 8 ? numbers : (float *)slot;
    if (is_key)
        place_head(from, of_head(block->k_norm, block), of->rotation, angles + (vectors - 1) * width, block, to);
    else
        place_head(from, block->v_norm, still, 0, block, to);
    if (block->kv_bits == 8)
        store_slot(slot, to, size);
}

/* Multiply a head's output by the sigmoid of its gates. */
static void gate_head(const float *gates, int64_t size, float *output) {
    for (int64_t i = 0; i < size; i += LANES)
        store(output + i, sigmoid_times(load(gates + i), load(output + i)));
}

/* Attend the queries of one item, from the projections of all rows to their places in `mixed`. */
static void attend_item(const void *about, int64_t item, int worker) {
    const Attending *of = about;
    const Block *block = of->block;
    const Segment *segment = of->segments;
    const int64_t heads = block->heads, kv_heads = block->kv_heads, size = block->head_dim, group = heads / kv_heads;
    float *scores = of->own + 2 * of->most * of->longest * worker;
    int32_t *slots = (int32_t *)(scores + of->most * of->longest);
    int64_t row = 0;
    for (int64_t items; item >= (items = kv_heads * items_in(block, segment, of->threads)); segment++) {
        item -= items;
        row += segment->rows;
    }
    const int64_t per_head = items_in(block, segment, of->threads), kv_head = item / per_head;
    const int64_t step = together(block, segment->rows, of->threads), begin = item % per_head * step;
    const int64_t end = begin + step < segment->rows * group ? begin + step : segment->rows * group;
    Query queries[QUERIES];
    int64_t seen = segment->slots;
    for (int64_t i = begin; i < end; i++) {
        const int64_t own = i / group, head = kv_head * group + i % group;
        if (segment->bias && (i == begin || i % group == 0)) {
            slots += i == begin ? 0 : of->longest;
            seen = seen_slots(segment->bias + own * segment->slots, segment->slots, slots);
        }
        queries[i - begin] = (Query){
            .query = of->qkv + (row + own) * columns_of(block) + head * size * (1 + block->gated),
            .seen = segment->bias ? slots : 0,
            .count = seen,
            .scores = scores + (i - begin) * of->longest,
            .to = of->mixed + ((row + own) * heads + head) * size,
            .sink = block->sinks ? block->sinks + head : 0,
        };
    }
    attend(queries, (int)(end - begin), segment->keys + kv_head * segment->stride,
           segment->values + kv_head * segment->stride, block);
    for (int64_t i = 0; block->gated && i < end - begin; i++)
        gate_head(queries[i].query + size, size, queries[i].to);
}

static void attention_on(Threads threads, const Attending *of, const Connection *connection, const float *x, float *outer,
                         float *inner, float *y)
{
    const Block *block = of->block;
    const int64_t n = of->n;
    const Rows rows = prepared(threads, x, norm_of(connection), n, block->qkv[0], outer);
    float *at = of->qkv;
    for (int64_t i = 0; i < block->projections; at += block->qkv[i++]->out)
        project(threads, block->qkv[i], rows, n, 0, at, columns_of(block));
    each(threads, norm_heads_item, of, n, FEW);
    each(threads, place_item, of, n * placed_by(block), FEW * placed_by(block));
    each(threads, attend_item, of, items_of(block, of->segments, n, threads.count), 1);
    project_last(threads, block->output, prepared(threads, of->mixed, 0, n, block->output, inner), n, connection, x, y);
}

/* y [n, hidden] = an attention block's result for x; writes the rows' keys and values into their caches. `memory` holds
 * the queries, keys and values, and the mixed values of all rows; the quantised rows of x and of the mixed values; then,
 * per thread, the scores and slots of the queries that are attended together, `longest` each. That is the largest number
 * of slots plus 16. */
int attention(const Block *block, const Connection *connection, const Segment *segments, int64_t count, const float *cos,
              const float *sin, int64_t bytes, int64_t width, int64_t vectors, const float *x, int64_t x_bytes, int64_t n,
              int64_t longest, float *y, float *memory, int64_t floats, int wanted)
{
    const Rotation rotation = {cos, sin, bytes, width, vectors};
    AGREE(check_block(block));
    AGREE(check_rows(x, x_bytes, n, block->qkv[0]->in, y, memory, wanted));
    AGREE(check_connection(connection, block->qkv[0]->in));
    AGREE(check_segments(segments, count, block, n, longest));
    AGREE(check_rotation(rotation, block, n));
    const int64_t columns = columns_of(block), outer = n * (columns + block->heads * block->head_dim);
    const int64_t inner = outer + floats_of(block->qkv[0], n), own = inner + floats_of(block->output, n);
    const int64_t most = most_together(block, n);
    REQUIRE(MEMORY, floats >= own + 2 * most * longest * (wanted < MOST_THREADS ? wanted : MOST_THREADS));
    const Threads threads = join(wanted, (int)block->output->own_threads);
    const Attending about = {
        .block = block, .segments = segments, .rotation = rotation, .n = n, .longest = longest,
        .most = most, .threads = threads.count, .qkv = memory, .mixed = memory + n * columns, .own = memory + own,
    };
    ON(threads, attention_on(threads, &about, connection, x, memory + outer, memory + inner, y));
    leave(threads);
    return AGREED;
}

/* What rows see in the layers of a kind. */
typedef struct {
    Rotation rotation;
    int64_t longest; /* As `attention` has it. */
} Sight;

/* A part of a run: an attention block, another mixer or both side by side, experts, the ending of a layer, or an MLP where
 * all of these are NULL. */
typedef struct {
    const Block *block;
    const Segment *segments; /* The keys and values of its layer, of all sequences. */
    const Sight *sight;
    const Weight *gate_up, *down;
    const Activation *activation; /* Of gate and up. */
    const Experts *experts;
    const Mixing *mixing;
    const Continuation *continuations; /* The states of its layer, `continued` of them. */
    int64_t continued;
    const Ending *ending;
    const float *inputs; /* [n] vectors for the ending. */
    int64_t input_bytes;
    const Connection *connection;
} SubLayer;

/* The columns of the rows that a part takes; 0 where it lacks a weight. */
static int64_t columns_into(const SubLayer *of) {
    const Weight *const *first = of->block     ? of->block->qkv
                                 : of->mixing  ? of->mixing->inputs
                                 : of->experts ? of->experts->gate_up
                                 : of->down    ? &of->gate_up
                                               : 0;
    return of->ending ? of->ending->hidden : first && first[0] ? first[0]->in : 0;
}

static int check_run(const SubLayer *sublayers, int64_t number, int64_t bytes, int64_t n, int64_t floats) {
    REQUIRE(POINTERS, sublayers);
    REQUIRE(RUN, number >= 1);
    REQUIRE(ROWS, within(n, 0));
    for (int64_t i = 0; i < number; i++) {
        REQUIRE(POINTERS, columns_into(&sublayers[i]));
        REQUIRE(RUN, 4 * n * columns_into(&sublayers[i]) == bytes);
    }
    REQUIRE(MEMORY, floats >= bytes / 2);
    return AGREED;
}

/* y [n, hidden] = the sub-layers on x, one after the other. `memory` holds a state, the result of attention beside a mixer,
 * then what the sub-layer needs that needs most. After a refusal the sub-layers before the one that was refused have written
 * their keys, values and states. */
int run(const SubLayer *sublayers, int64_t number, int64_t count, const float *x, int64_t bytes, int64_t n, float *y,
        float *memory, int64_t floats, int wanted)
{
    AGREE(check_run(sublayers, number, bytes, n, floats));
    float *beside = memory + bytes / 4, *rest = beside + bytes / 4;
    const int64_t left = floats - bytes / 2;
    for (int64_t i = 0; i < number; i++) {
        const SubLayer *each = &sublayers[i];
        float *to = (number - i) % 2 ? y : memory;
        if (each->block) {
            REQUIRE(POINTERS, each->sight);
            const Rotation by = each->sight->rotation;
            AGREE(attention(each->block, each->connection, each->segments, count, by.cos, by.sin, by.bytes, by.width,
                            by.vectors, x, bytes, n, each->sight->longest, each->mixing ? beside : to, rest, left, wanted));
        }
        if (each->mixing) {
            REQUIRE(POINTERS, each->mixing->inputs && each->mixing->inputs[0]);
            REQUIRE(POINTERS, each->mixing->recurrence && each->mixing->output);
            const int64_t needed = mixing_floats(each->mixing, n);
            REQUIRE(MEMORY, left >= needed);
            AGREE(mixer(each->mixing, each->connection, each->continuations, each->continued, x, bytes, n,
                        each->block ? beside : 0, bytes, to, rest, needed, wanted));
        } else if (each->ending) {
            REQUIRE(POINTERS, !each->ending->gate == !each->ending->output);
            const int64_t needed = ending_floats(each->ending, n);
            REQUIRE(MEMORY, left >= needed);
            AGREE(end_layer(each->ending, each->inputs, each->input_bytes, x, bytes, n, to, rest, needed, wanted));
        } else if (each->experts) {
            const Shared *shared = each->experts->shared;
            REQUIRE(POINTERS, each->experts->down && each->experts->down[0]);
            REQUIRE(POINTERS, !shared || (shared->gate_up && shared->down));
            const int64_t needed = experts_floats(each->experts, n);
            REQUIRE(MEMORY, left >= needed);
            AGREE(experts(each->experts, each->connection, x, bytes, n, 0, 0, 0, to, rest, needed, wanted));
        } else if (!each->block) {
            const int64_t needed = mlp_floats(each->gate_up, each->down, n);
            REQUIRE(MEMORY, left >= needed);
            AGREE(mlp(each->gate_up, each->down, each->activation, each->connection, x, bytes, n, to, rest, needed, wanted));
        }
        x = to;
    }
    return AGREED;
}
