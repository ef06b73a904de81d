/* What follows the MLP of a layer: a vector that each row's token gives to the layer, and a factor of the layer's result. */
#pragma once
#include "mlp.h"

typedef struct {
    const Weight *gate, *output;  /* NULL where there is a factor alone. */
    const Activation *activation; /* Joins the gate with the vector. */
    const Norm *norm;
    const float *factor; /* NULL for 1. */
    int64_t hidden;
} Ending;

/* The floats of memory that n rows take; without weights one each, since calls are given some. */
static int64_t ending_floats(const Ending *of, int64_t n) {
    return of->gate ? n * of->gate->out + floats_of(of->gate, n) + floats_of(of->output, n) : n;
}

typedef struct {
    const Ending *ending;
    const float *x, *inputs;
    float *gates, *y;
} Endings;

static void join_inputs_item(const void *about, int64_t row, int worker) {
    const Endings *of = about;
    const int64_t width = of->ending->gate->out;
    (void)worker;
    for (int64_t i = row * width; i < (row + 1) * width; i += LANES)
        store(of->gates + i, activated(load(of->gates + i), load(of->inputs + i), of->ending->activation));
}

static void end_item(const void *about, int64_t row, int worker) {
    const Endings *of = about;
    const int64_t hidden = of->ending->hidden;
    const Floats factor = all(of->ending->factor ? *of->ending->factor : 1.0f);
    const float *x = of->x + row * hidden;
    float *y = of->y + row * hidden;
    (void)worker;
    if (of->ending->gate)
        norm_row(y, of->ending->norm, 1.0f, x, hidden, y);
    for (int64_t i = 0; i < hidden; i += LANES)
        store(y + i, multiply(load((of->ending->gate ? y : x) + i), factor));
}

/* y = factor * (x + norm(W_output (activation(W_gate x) joined with inputs))), or factor * x without weights. */
static void end_on(Threads threads, const Ending *of, const float *inputs, const float *x, int64_t n, float *y, float *memory) {
    const Weight *gate = of->gate, *output = of->output;
    const Endings about = {of, x, inputs, memory, y};
    if (gate) {
        float *outer = memory + n * gate->out, *inner = outer + floats_of(gate, n);
        project(threads, gate, prepared(threads, x, 0, n, gate, outer), n, 0, memory, gate->out);
        each(threads, join_inputs_item, &about, n, FEW);
        project(threads, output, prepared(threads, memory, 0, n, output, inner), n, 0, y, output->out);
    }
    each(threads, end_item, &about, n, FEW);
}
