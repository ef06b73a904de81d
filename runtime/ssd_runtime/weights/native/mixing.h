/* Mixers other than attention, between their projections.
 *
 * A row's projection is, of a gated delta net, its channels, the gates of all heads' values, and its numbers; of Mamba-2 the
 * gates, the channels and the numbers; of a short convolution B, C and x, whose channels are B * x and whose gates are C.
 */
#pragma once
#include "recurrence.h"

#define MOST_PROJECTIONS 4

typedef struct {
    const Weight *const *inputs; /* `projections` weights, whose outputs together are the projection of a row. */
    const Weight *output;
    const Recurrence *recurrence;
    const Norm *norm; /* Of a delta net's heads before their gates, or of Mamba-2's values after theirs; NULL for none. */
    const int32_t *order; /* The mixed value for each of the output's columns; NULL for one after the other. */
    int64_t order_bytes, projections;
} Mixing;

/* Rows that follow each other, and the state that they continue. */
typedef struct {
    const float *window, *state;
    int64_t window_bytes, state_bytes;
    float *next, *after, *inputs; /* The window and the state after the rows; their inputs, which are kept. */
    int64_t rows;
} Continuation;

/* The mixed values of a row, which are as many as its gates, and the numbers of its projection. */
static int64_t mixed_by(const Mixing *of) {
    return of->recurrence->heads * of->recurrence->value;
}

static int64_t projected_by(const Mixing *of) {
    return mixed_by(of) * (of->recurrence->key ? 1 : 2) + inputs_of(of->recurrence);
}

/* The floats of memory that n rows take: their projections, convolved channels and mixed values, these in order too, and the
 * rows for the first and the last weight. */
static int64_t mixing_floats(const Mixing *of, int64_t n) {
    return n * (projected_by(of) + (of->order ? 2 : 1) * mixed_by(of)) + recurrence_floats(of->recurrence, n) +
           floats_of(of->inputs[0], n) + floats_of(of->output, n);
}

typedef struct {
    const Mixing *mixing;
    const float *projected;
    float *inputs, *mixed, *ordered;
} MixedRows;

/* Read a row's inputs from its projection. */
static void read_inputs(const void *about, int64_t row, int worker) {
    const MixedRows *of = about;
    const Recurrence *recurrence = of->mixing->recurrence;
    const int64_t channels = channels_in(recurrence), gates = mixed_by(of->mixing);
    const float *from = of->projected + row * projected_by(of->mixing);
    float *to = of->inputs + row * inputs_of(recurrence);
    (void)worker;
    if (!recurrence->key) {
        for (int64_t i = 0; i < channels; i += LANES)
            store(to + i, multiply(load(from + i), load(from + 2 * channels + i)));
    } else if (recurrence->direct) {
        memcpy(to, from + gates, sizeof(float) * (size_t)inputs_of(recurrence));
    } else {
        memcpy(to, from, sizeof(float) * (size_t)channels);
        memcpy(to + channels, from + channels + gates, sizeof(float) * (size_t)numbers_of(recurrence));
    }
}

/* Norm and gate a row's mixed values, and bring them into the order of the output's columns. */
static void finish_row(const void *about, int64_t row, int worker) {
    const MixedRows *of = about;
    const Mixing *mixing = of->mixing;
    const Recurrence *recurrence = mixing->recurrence;
    const int64_t size = mixed_by(mixing), value = recurrence->value;
    const float *gates = of->projected + row * projected_by(mixing) + (recurrence->direct ? 0 : channels_in(recurrence));
    float *values = of->mixed + row * size;
    (void)worker;
    for (int64_t head = 0; mixing->norm && !recurrence->direct && head < size; head += value)
        norm_row(values + head, mixing->norm, 1.0f, 0, value, values + head);
    for (int64_t i = 0; i < size; i += LANES) {
        const Floats gate = load(gates + i);
        store(values + i, multiply(load(values + i), recurrence->key ? sigmoid_times(gate, gate) : gate));
    }
    if (mixing->norm && recurrence->direct)
        norm_row(values, mixing->norm, 1.0f, 0, size, values);
    for (int64_t i = 0; mixing->order && i < size; i++)
        of->ordered[row * size + i] = values[mixing->order[i]];
}

static void mixing_on(Threads threads, const Mixing *of, const Connection *connection, const Continuation *continuations,
                      int64_t count, const float *x, int64_t n, const float *residual, float *y, float *memory)
{
    const Recurrence *recurrence = of->recurrence;
    const int64_t size = mixed_by(of), columns = projected_by(of);
    float *mixed = memory + n * columns, *ordered = mixed + n * size, *convolved = ordered + (of->order ? n * size : 0);
    float *outer = convolved + recurrence_floats(recurrence, n), *inner = outer + floats_of(of->inputs[0], n), *at = memory;
    const Rows rows = prepared(threads, x, norm_of(connection), n, of->inputs[0], outer);
    for (int64_t i = 0; i < of->projections; at += of->inputs[i++]->out)
        project(threads, of->inputs[i], rows, n, 0, at, columns);
    for (int64_t i = 0, first = 0; i < count; first += continuations[i++].rows) {
        const Continuation *from = &continuations[i];
        const MixedRows reading = {.mixing = of, .projected = memory + first * columns, .inputs = from->inputs};
        const Recurring recurring = {
            .recurrence = recurrence, .window = from->window, .before = from->state, .inputs = from->inputs, .n = from->rows,
            .next = from->next, .after = from->after, .convolved = convolved, .y = mixed + first * size,
        };
        each(threads, read_inputs, &reading, from->rows, FEW);
        recur_on(threads, &recurring);
    }
    const MixedRows about = {.mixing = of, .projected = memory, .mixed = mixed, .ordered = ordered};
    each(threads, finish_row, &about, n, 1);
    project_last(threads, of->output, prepared(threads, of->order ? ordered : mixed, 0, n, of->output, inner), n, connection,
                 residual, y);
}
