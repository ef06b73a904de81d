/* Sizes that do not agree: entry points refuse them before they read or write anything but the numbers of a call.
 *
 * Every pointer comes with the size of what it points to, but for results, which callers make as weights are.
 */
#pragma once
#include "attention.h"
#include "ending.h"
#include "experts.h"
#include "mixing.h"
#include "repack.h"
#include "round.h"

#define LARGEST (INT64_C(1) << 28) /* Most rows, columns, outputs or slots, so that no product overflows. */

/* The rules by the codes that calls return, from 1; 0 is no refusal. */
#define RULES(RULE)                                                                                        \
    RULE(POINTERS, "weights, rows, results and memory are given")                                          \
    RULE(FORMAT, "a weight is stored in a known format")                                                   \
    RULE(WEIGHT, "a weight has whole tiles of 16 outputs and whole groups of 32 columns, and not too many")\
    RULE(BLOCKS, "a weight's blocks are as large as its bits, outputs and columns say")                    \
    RULE(STORED, "a file's blocks fill whole rows, and there are tiles for all of these")                  \
    RULE(ROUNDED, "numbers of 16 or 32 bits are rounded to blocks of 4 or 8, and there are two sums for a row") \
    RULE(CHOSEN, "chosen tiles are the weight's, and only of a weight that is multiplied by itself")       \
    RULE(BIAS, "a bias has a number for each output")                                                      \
    RULE(ROWS, "the number of rows is from 0 to 2^28")                                                     \
    RULE(INPUT, "x is n rows of the weight's columns in fp32")                                             \
    RULE(RESIDUAL, "a residual is n rows of the weight's outputs in fp32")                                 \
    RULE(NORM, "a norm has a number in fp32 for each column")                                              \
    RULE(MEMORY, "memory is as large as rows and weights need it")                                         \
    RULE(THREADS, "there is a thread at least")                                                            \
    RULE(ACTIVATION, "gate and up are joined by a known function")                                         \
    RULE(INNER, "down has half as many columns as gate and up have outputs together")                      \
    RULE(STREAM, "a block's last weight has as many outputs as its first has columns")                     \
    RULE(HEADS, "heads are a multiple of key-value heads")                                                 \
    RULE(HEAD_DIM, "a head's size is 16, 32, 64, 80, 96, 128, 256 or 512")                                 \
    RULE(KV_BITS, "a number of keys and values has 8 or 32 bits")                                          \
    RULE(FORM, "queries have gates or none; a rotation turns pairs of neighbours or of halves, before norms or after them")        \
    RULE(HEAD_NORMS, "norms of queries and keys have a number for each of a head, or of all heads together")\
    RULE(MADE, "a key-value head has a key and a value, a key that is both and is normed by head, or another layer's")\
    RULE(SINKS, "sinks have a score for each head")                                                        \
    RULE(PROJECTIONS, "a few weights of the same columns, on the same rows, make what attention or a mixer takes")\
    RULE(OUTPUTS, "the outputs of these weights are all that it takes: queries, keys and values, or channels and gates")\
    RULE(MIXED, "the last weight has a column for each value of all heads")                                \
    RULE(ORDER, "an order of mixed values has a place for each column of the last weight, among these")    \
    RULE(ROTATION, "a rotation has n rows in fp32, of cos and of sin")                                     \
    RULE(ANGLES, "a rotation's row has an even number of angles for queries and keys, at most a head's size") \
    RULE(SEGMENTS, "each sequence has a row or more, and all together have n")                             \
    RULE(SLOTS, "rows see slots of the pool alone, one or more")                                           \
    RULE(OWN, "rows write their keys and values to slots of the pool alone")                               \
    RULE(STRIDE, "the pool holds the slots of all key-value heads one after the other")                    \
    RULE(VISIBLE, "a bias has a row for each row, of as many numbers as it sees slots")                    \
    RULE(LONGEST, "scores have room for the largest number of slots, and for 16 more")                     \
    RULE(EXPERTS, "experts have the same sizes and formats, and a row goes to one or more of them, at most all")\
    RULE(ROUTER, "a router has a row in fp32 for each expert, and a number of its bias if it has one")     \
    RULE(SHARED, "an expert of all rows is a gated MLP of the stream, with a number in fp32 for each column of its gate") \
    RULE(CHOICE, "n rows come with the experts and the weights of each, unless the router chooses them")   \
    RULE(RECURRENCE, "a recurrence has heads in whole groups, and keys and values of whole tiles of 16")   \
    RULE(TAPS, "a convolution has two rows of factors or more, and they and its bias one for each channel")\
    RULE(STEPS, "every head has a decay and a step, and a direct factor if any has")                       \
    RULE(STATE, "a state is the window of the rows before, and a matrix for each head with keys, in fp32") \
    RULE(INPUTS, "the ending of a layer has a vector for each row, of as many numbers as its gate has outputs") \
    RULE(RUN, "there is a sub-layer or more, all of x's width")

#define CODE(name, text) REFUSED_##name,
enum { AGREED, RULES(CODE) CODES };
#undef CODE

/* The rule that a code says is broken; NULL for none. */
const char *rule(int code) {
#define TEXT(name, text) text,
    static const char *const texts[] = {0, RULES(TEXT)};
#undef TEXT
    return code > AGREED && code < CODES ? texts[code] : 0;
}

#define REQUIRE(name, condition)       \
    do {                               \
        if (!(condition))              \
            return REFUSED_##name;     \
    } while (0)
#define AGREE(call)                    \
    do {                               \
        const int refused = (call);    \
        if (refused)                   \
            return refused;            \
    } while (0)

static int within(int64_t number, int64_t least) {
    return number >= least && number <= LARGEST;
}

/* A weight of which some tiles may be chosen. */
static int check_tiles(const Weight *weight) {
    REQUIRE(POINTERS, weight && weight->blocks);
    REQUIRE(FORMAT, weight->format >= 0 && weight->format < FORMATS);
    REQUIRE(WEIGHT, within(weight->out, TILE) && weight->out % TILE == 0);
    REQUIRE(WEIGHT, within(weight->in, GROUP) && weight->in % GROUP == 0);
    const Format format = formats[weight->format];
    REQUIRE(WEIGHT, !format.header || weight->in % (HEADED * GROUP) == 0);
    REQUIRE(BLOCKS, weight->bytes == weight->out / TILE * tile_bytes(format, weight->in / GROUP));
    REQUIRE(BIAS, !weight->bias || weight->bias_bytes == 4 * weight->out);
    REQUIRE(CHOSEN, !weight->chosen || within(weight->number, 1));
    for (int64_t i = 0; weight->chosen && i < weight->number; i++)
        REQUIRE(CHOSEN, weight->chosen[i] >= 0 && weight->chosen[i] < weight->out / TILE);
    return AGREED;
}

static int check_stored(int64_t format, const uint8_t *from, int64_t bytes, int64_t out, int64_t in, const uint8_t *to,
                        int64_t to_bytes, int64_t begin, int threads)
{
    REQUIRE(POINTERS, from && to);
    REQUIRE(THREADS, threads >= 1);
    REQUIRE(FORMAT, format >= 0 && format < Q8_0_DRAFT);
    REQUIRE(WEIGHT, within(out, 1) && within(in, GROUP));
    REQUIRE(STORED, in % stored[format].columns == 0 && bytes == out * (in / stored[format].columns * stored[format].bytes));
    const int64_t size = tile_bytes(formats[format], in / GROUP);
    REQUIRE(STORED, to_bytes % size == 0 && within(begin, 0) && begin + (out + TILE - 1) / TILE <= to_bytes / size);
    return AGREED;
}

static int check_rounding(const Rounding *of, int64_t bytes, int64_t out, int64_t blocks_bytes, int64_t sums_bytes, int threads) {
    REQUIRE(POINTERS, of->numbers && of->blocks && of->sums);
    REQUIRE(THREADS, threads >= 1);
    REQUIRE(WEIGHT, within(out, 1) && within(of->in, GROUP) && of->in % GROUP == 0);
    REQUIRE(ROUNDED, (of->size == 2 || of->size == 4) && (of->bits == 4 || of->bits == 8));
    REQUIRE(ROUNDED, bytes == out * of->in * of->size && sums_bytes == out * 2 * (int64_t)sizeof(double));
    REQUIRE(ROUNDED, blocks_bytes == out * (of->in / GROUP) * rounded_bytes(of));
    return AGREED;
}

static int check_weight(const Weight *weight) {
    AGREE(check_tiles(weight));
    REQUIRE(WEIGHT, !weight->padding);
    REQUIRE(CHOSEN, !weight->chosen);
    return AGREED;
}

static int fits(const Norm *norm, int64_t columns) {
    return !norm || (norm->weight && norm->bytes == 4 * columns);
}

/* The rows [n, columns] of a call, and the threads that serve it. */
static int check_rows(const float *x, int64_t bytes, int64_t n, int64_t columns, const float *y, const float *memory,
                      int threads)
{
    REQUIRE(POINTERS, x && y && memory);
    REQUIRE(ROWS, within(n, 0));
    REQUIRE(INPUT, bytes == 4 * n * columns);
    REQUIRE(THREADS, threads >= 1);
    return AGREED;
}

/* The norms of rows [n, columns] before and after a block. */
static int check_connection(const Connection *connection, int64_t columns) {
    REQUIRE(NORM, !connection || (fits(connection->norm, columns) && fits(connection->after, columns)));
    return AGREED;
}

static int check_activation(const Activation *activation) {
    REQUIRE(POINTERS, activation);
    REQUIRE(ACTIVATION, activation->function >= 0 && activation->function < FUNCTIONS);
    return AGREED;
}

static int check_linear(const Weight *weight, const Norm *norm, const float *x, int64_t bytes, int64_t n,
                        const float *residual, int64_t residual_bytes, const float *y, const float *memory,
                        int64_t floats, int threads)
{
    AGREE(check_tiles(weight));
    AGREE(check_rows(x, bytes, n, weight->in, y, memory, threads));
    REQUIRE(NORM, fits(norm, weight->in));
    REQUIRE(RESIDUAL, !residual || residual_bytes == 4 * n * weight->out);
    REQUIRE(MEMORY, floats == floats_of(weight, n));
    return AGREED;
}

static int check_mlp(const Weight *gate_up, const Weight *down, const Activation *activation, const Connection *connection,
                     const float *x, int64_t bytes, int64_t n, const float *y, const float *memory, int64_t floats,
                     int threads)
{
    AGREE(check_weight(gate_up));
    AGREE(check_weight(down));
    REQUIRE(INNER, gate_up->out == 2 * down->in);
    REQUIRE(STREAM, down->out == gate_up->in);
    AGREE(check_activation(activation));
    AGREE(check_rows(x, bytes, n, gate_up->in, y, memory, threads));
    AGREE(check_connection(connection, gate_up->in));
    REQUIRE(MEMORY, floats == mlp_floats(gate_up, down, n));
    return AGREED;
}

static int check_ending(const Ending *of, const float *inputs, int64_t input_bytes, const float *x, int64_t bytes, int64_t n,
                        const float *y, const float *memory, int64_t floats, int threads)
{
    REQUIRE(POINTERS, of && !of->gate == !of->output);
    REQUIRE(WEIGHT, within(of->hidden, GROUP) && of->hidden % GROUP == 0);
    AGREE(check_rows(x, bytes, n, of->hidden, y, memory, threads));
    if (of->gate) {
        AGREE(check_weight(of->gate));
        AGREE(check_weight(of->output));
        AGREE(check_activation(of->activation));
        REQUIRE(STREAM, of->gate->in == of->hidden && of->output->out == of->hidden);
        REQUIRE(INPUTS, of->output->in == of->gate->out && inputs && input_bytes == 4 * n * of->gate->out);
        REQUIRE(NORM, fits(of->norm, of->hidden));
    }
    REQUIRE(MEMORY, floats == ending_floats(of, n));
    return AGREED;
}

static int has_kernel(int64_t head_dim) {
#define CASE(size) head_dim == size ||
    return HEAD_DIMS(CASE) 0;
#undef CASE
}

/* Whether a norm is of each of these heads, or of all together; those of gated queries do not lie together. */
static int fits_heads(const Norm *norm, const Block *block, int64_t heads) {
    return fits(norm, block->head_dim) || (!block->gated && fits(norm, heads * block->head_dim));
}

/* The weights, at most so many, that make `needed` numbers of each row. */
static int check_projections(const Weight *const *weights, int64_t number, int64_t most, int64_t needed) {
    int64_t outputs = 0;
    REQUIRE(PROJECTIONS, number >= 1 && number <= most);
    for (int64_t i = 0; i < number; outputs += weights[i++]->out) {
        REQUIRE(OUTPUTS, outputs < needed); /* There may be no further weight. */
        AGREE(check_weight(weights[i]));
        REQUIRE(PROJECTIONS, weights[i]->in == weights[0]->in);
        REQUIRE(PROJECTIONS, has_levels(formats[weights[i]->format]) == has_levels(formats[weights[0]->format]));
    }
    REQUIRE(OUTPUTS, outputs == needed);
    return AGREED;
}

static int is_flag(int64_t number) {
    return number == 0 || number == 1;
}

static int check_block(const Block *block) {
    REQUIRE(POINTERS, block && block->qkv);
    REQUIRE(HEADS, within(block->kv_heads, 1) && within(block->heads, 1) && block->heads % block->kv_heads == 0);
    REQUIRE(HEAD_DIM, has_kernel(block->head_dim));
    REQUIRE(KV_BITS, block->kv_bits == 8 || block->kv_bits == 32);
    REQUIRE(SINKS, !block->sinks || block->sink_bytes == 4 * block->heads);
    REQUIRE(FORM, is_flag(block->gated) && is_flag(block->alternate) && is_flag(block->norms_last));
    REQUIRE(HEAD_NORMS, fits_heads(block->q_norm, block, block->heads) && fits_heads(block->k_norm, block, block->kv_heads));
    REQUIRE(HEAD_NORMS, fits(block->v_norm, block->head_dim));
    REQUIRE(MADE, block->made >= 0 && block->made <= 2);
    REQUIRE(MADE, block->made == 2 || !block->k_norm || of_head(block->k_norm, block));
    REQUIRE(HEAD_NORMS, !block->norms_last || !block->q_norm || of_head(block->q_norm, block));
    REQUIRE(HEAD_NORMS, !block->norms_last || !block->k_norm || of_head(block->k_norm, block));
    AGREE(check_projections(block->qkv, block->projections, 3, columns_of(block)));
    AGREE(check_weight(block->output));
    REQUIRE(MIXED, block->output->in == block->heads * block->head_dim);
    REQUIRE(STREAM, block->output->out == block->qkv[0]->in);
    return AGREED;
}

static int check_segment(const Segment *segment, const Block *block) {
    const int64_t size = slot_bytes(block), room = segment->room, rows = segment->rows;
    REQUIRE(POINTERS, segment->keys && segment->values);
    REQUIRE(SLOTS, within(room, 1) && segment->slots >= 1 && segment->slots <= room);
    REQUIRE(OWN, segment->own >= 0 && segment->own <= room - rows);
    REQUIRE(STRIDE, segment->stride >= room * size && segment->stride / size <= LARGEST);
    REQUIRE(STRIDE, (block->kv_heads - 1) * segment->stride + room * size == segment->bytes);
    REQUIRE(VISIBLE, segment->bias_stride == (segment->bias ? segment->slots : 0));
    REQUIRE(VISIBLE, !segment->bias || segment->bias_bytes >= 4 * rows * segment->slots);
    return AGREED;
}

static int check_segments(const Segment *segments, int64_t count, const Block *block, int64_t n, int64_t longest) {
    int64_t rows = 0, most = 0;
    REQUIRE(POINTERS, segments);
    for (int64_t i = 0; i < count; rows += segments[i++].rows) {
        REQUIRE(SEGMENTS, rows < n); /* There may be no further segment. */
        REQUIRE(SEGMENTS, segments[i].rows >= 1 && segments[i].rows <= n - rows);
        AGREE(check_segment(&segments[i], block));
        most = segments[i].slots > most ? segments[i].slots : most;
    }
    REQUIRE(SEGMENTS, rows == n);
    REQUIRE(LONGEST, longest == most + TILE);
    return AGREED;
}

static int check_rotation(Rotation rotation, const Block *block, int64_t n) {
    if (!rotation.cos && !rotation.sin && !rotation.width && !rotation.vectors)
        return AGREED;
    REQUIRE(ROTATION, rotation.cos && rotation.sin);
    REQUIRE(ANGLES, rotation.width >= 2 && rotation.width <= block->head_dim && rotation.width % 2 == 0);
    REQUIRE(ANGLES, rotation.vectors == 1 || rotation.vectors == 2);
    REQUIRE(ROTATION, rotation.bytes == 4 * n * rotation.vectors * rotation.width);
    return AGREED;
}

/* The experts of a mixture, whose router may be the caller. */
static int check_mixture(const Experts *of) {
    REQUIRE(POINTERS, of && of->gate_up && of->down);
    REQUIRE(EXPERTS, within(of->number, 1) && of->each >= 1 && of->each <= of->number);
    REQUIRE(EXPERTS, of->bytes == of->number * (int64_t)sizeof(Weight *));
    for (int64_t i = 0; i < of->number; i++) {
        const Weight *gate_up = of->gate_up[i], *down = of->down[i];
        AGREE(check_weight(gate_up));
        AGREE(check_weight(down));
        REQUIRE(EXPERTS, gate_up->in == of->gate_up[0]->in && gate_up->out == of->gate_up[0]->out);
        REQUIRE(EXPERTS, down->in == of->down[0]->in && down->out == of->down[0]->out);
        REQUIRE(EXPERTS, gate_up->format == of->gate_up[0]->format && down->format == of->down[0]->format);
    }
    AGREE(check_activation(of->activation));
    REQUIRE(INNER, of->gate_up[0]->out == 2 * of->down[0]->in);
    REQUIRE(STREAM, of->down[0]->out == of->gate_up[0]->in);
    REQUIRE(ROUTER, of->routing >= GIVEN && of->routing <= SIGMOIDS && !of->router == (of->routing == GIVEN));
    REQUIRE(ROUTER, !of->router || of->router_bytes == 4 * of->number * of->gate_up[0]->in);
    REQUIRE(ROUTER, !of->bias || (of->router && of->bias_bytes == 4 * of->number));
    REQUIRE(ROUTER, !of->factors || (of->router && of->factor_bytes == 4 * of->number));
    const int64_t in = of->gate_up[0]->in;
    REQUIRE(NORM, fits(of->norm, in) && fits(of->router_norm, in) && fits(of->after, in));
    if (of->shared) {
        const Weight *gate_up = of->shared->gate_up, *down = of->shared->down;
        AGREE(check_weight(gate_up));
        AGREE(check_weight(down));
        REQUIRE(SHARED, gate_up->in == in && down->out == in && gate_up->out == 2 * down->in);
        REQUIRE(SHARED, !of->shared->gate || of->shared->gate_bytes == 4 * in);
        REQUIRE(NORM, fits(of->shared->after, in));
    }
    return AGREED;
}

static int check_experts(const Experts *of, const Connection *connection, const float *x, int64_t bytes, int64_t n,
                         const int32_t *chosen, const float *weights, int64_t choice_bytes, const float *y,
                         const float *memory, int64_t floats, int threads)
{
    AGREE(check_mixture(of));
    AGREE(check_rows(x, bytes, n, of->gate_up[0]->in, y, memory, threads));
    AGREE(check_connection(connection, of->gate_up[0]->in));
    REQUIRE(ROWS, within(n * of->each, 0));
    REQUIRE(CHOICE, !chosen == (of->routing != GIVEN) && !weights == !chosen);
    REQUIRE(CHOICE, !chosen || choice_bytes == 4 * n * of->each);
    for (int64_t i = 0; chosen && i < n * of->each; i++)
        REQUIRE(CHOICE, chosen[i] >= 0 && chosen[i] < of->number);
    REQUIRE(MEMORY, floats == experts_floats(of, n));
    return AGREED;
}

static int check_recurrence(const Recurrence *of) {
    REQUIRE(POINTERS, of && of->taps && (!of->key || (of->decay && of->step)));
    REQUIRE(RECURRENCE, within(of->groups, 1) && within(of->heads, 1) && of->heads % of->groups == 0);
    REQUIRE(RECURRENCE, within(of->key, 0) && of->key % TILE == 0 && within(of->value, TILE) && of->value % TILE == 0);
    REQUIRE(RECURRENCE, within(of->groups * of->key, 0) && within(of->heads * of->value, TILE));
    REQUIRE(TAPS, of->kernel >= 2 && of->kernel <= LARGEST / channels_in(of));
    REQUIRE(TAPS, of->tap_bytes == 4 * of->kernel * channels_in(of));
    REQUIRE(TAPS, !of->bias || of->bias_bytes == 4 * channels_in(of));
    REQUIRE(STEPS, !of->key || (of->decay_bytes == 4 * of->heads && of->step_bytes == 4 * of->heads));
    REQUIRE(STEPS, !of->direct || of->direct_bytes == 4 * of->heads);
    return AGREED;
}

/* The states before and after rows. */
static int check_continuation(const Recurrence *of, const Continuation *from) {
    REQUIRE(POINTERS, from->window && from->next && from->inputs && (!of->key || (from->state && from->after)));
    REQUIRE(STATE, from->window_bytes == 4 * (of->kernel - 1) * channels_in(of));
    REQUIRE(STATE, from->state_bytes / of->value == 4 * of->heads * of->key && from->state_bytes % of->value == 0);
    return AGREED;
}

static int check_recur(const Recurrence *of, const float *window, int64_t window_bytes, const float *state,
                       int64_t state_bytes, const float *next, const float *after, const float *inputs, int64_t bytes,
                       int64_t n, const float *y, const float *memory, int64_t floats, int threads)
{
    AGREE(check_recurrence(of));
    AGREE(check_rows(inputs, bytes, n, inputs_of(of), y, memory, threads));
    REQUIRE(SEGMENTS, n >= 1);
    const Continuation from = {window, state, window_bytes, state_bytes, (float *)next, (float *)after, (float *)inputs, n};
    AGREE(check_continuation(of, &from));
    REQUIRE(MEMORY, floats == recurrence_floats(of, n));
    return AGREED;
}

static int check_mixing(const Mixing *of, const Continuation *continuations, int64_t count, int64_t n) {
    int64_t rows = 0;
    REQUIRE(POINTERS, of && of->inputs && continuations);
    AGREE(check_recurrence(of->recurrence));
    const int64_t width = mixed_by(of);
    AGREE(check_projections(of->inputs, of->projections, MOST_PROJECTIONS, projected_by(of)));
    AGREE(check_weight(of->output));
    REQUIRE(MIXED, of->output->in == width);
    REQUIRE(STREAM, of->output->out == of->inputs[0]->in);
    REQUIRE(NORM, fits(of->norm, of->recurrence->direct ? width : of->recurrence->value));
    REQUIRE(ORDER, !of->order || of->order_bytes == 4 * width);
    for (int64_t i = 0; of->order && i < width; i++)
        REQUIRE(ORDER, of->order[i] >= 0 && of->order[i] < width);
    for (int64_t i = 0; i < count; rows += continuations[i++].rows) {
        REQUIRE(SEGMENTS, rows < n); /* There may be no further rows. */
        REQUIRE(SEGMENTS, continuations[i].rows >= 1 && continuations[i].rows <= n - rows);
        AGREE(check_continuation(of->recurrence, &continuations[i]));
    }
    REQUIRE(SEGMENTS, rows == n);
    return AGREED;
}
