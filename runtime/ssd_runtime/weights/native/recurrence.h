/* The recurrences of gated delta nets and Mamba-2 and short convolutions, for rows of one sequence, one after the other.
 *
 * A row's inputs are the channels of a convolution over it and the rows before, then the numbers of each head. A gated delta
 * net has the channels q, k and v and the numbers b and a; Mamba-2 has v, k and q (x, B and C) and the number dt. Some heads
 * share a q and a k. A short convolution is one head whose keys have no numbers: its channels are the results.
 */
#pragma once
#include "mlp.h"
#include <string.h>

typedef struct {
    const float *taps, *bias;  /* [kernel][channels], the oldest row's first, and [channels]; NULL for no bias. */
    const float *decay, *step; /* [heads]: S decays by exp(decay * softplus(number + step)). */
    const float *direct;       /* [heads]: factors of v in Mamba-2's output; NULL in a gated delta net. */
    int64_t tap_bytes, bias_bytes, decay_bytes, step_bytes, direct_bytes;
    int64_t kernel, heads, groups, key, value; /* `groups` of heads share a q and a k; a key of 0 is a convolution alone. */
    int64_t own_threads;
    float least, most;                         /* Mamba-2 clamps steps to these. */
} Recurrence;

static int64_t keys_of(const Recurrence *of) {
    return of->groups * of->key;
}

static int64_t channels_in(const Recurrence *of) {
    return 2 * keys_of(of) + of->heads * of->value;
}

/* The numbers of a row beside its channels. */
static int64_t numbers_of(const Recurrence *of) {
    return of->key ? of->heads * (of->direct ? 1 : 2) : 0;
}

static int64_t inputs_of(const Recurrence *of) {
    return channels_in(of) + numbers_of(of);
}

/* The floats of memory that n rows take: their convolved channels. */
static int64_t recurrence_floats(const Recurrence *of, int64_t n) {
    return n * channels_in(of);
}

typedef struct {
    const Recurrence *recurrence;
    const float *window, *before, *inputs; /* [kernel - 1][channels], [heads][key][value], [n][inputs] */
    int64_t n;
    float *next, *after, *convolved, *y; /* The window and the state after the rows; [n][channels]; [n][heads][value] */
} Recurring;

/* Row `row` of the window with the rows after it. */
static const float *row_at(const Recurring *of, int64_t row) {
    const int64_t known = of->recurrence->kernel - 1;
    return row < known ? of->window + row * channels_in(of->recurrence)
                       : of->inputs + (row - known) * inputs_of(of->recurrence);
}

static float *queries_of(const Recurring *of, int64_t row) {
    const Recurrence *recurrence = of->recurrence;
    float *channels = of->convolved + row * channels_in(recurrence);
    return recurrence->direct ? channels + recurrence->heads * recurrence->value + keys_of(recurrence) : channels;
}

static float *keys_at(const Recurring *of, int64_t row) {
    const int64_t keys = keys_of(of->recurrence);
    return of->recurrence->direct ? queries_of(of, row) - keys : queries_of(of, row) + keys;
}

static const float *values_of(const Recurring *of, int64_t row) {
    return of->recurrence->direct ? of->convolved + row * channels_in(of->recurrence)
                                  : keys_at(of, row) + keys_of(of->recurrence);
}

/* Give a head of size `size` the length `length`. */
static void scale_head(float *head, int64_t size, float length) {
    Floats sum = zeros();
    for (int64_t i = 0; i < size; i += LANES)
        sum = multiply_add(load(head + i), load(head + i), sum);
    const Floats factor = all(length / sqrtf(sum_of(sum) + 1e-6f));
    for (int64_t i = 0; i < size; i += LANES)
        store(head + i, multiply(load(head + i), factor));
}

/* Convolve the channels of a row, before their SiLU if a recurrence follows; and in a gated delta net give its keys the
 * length 1, its queries the usual factor. */
static void convolve_item(const void *about, int64_t row, int worker) {
    const Recurring *of = about;
    const Recurrence *recurrence = of->recurrence;
    const int64_t channels = channels_in(recurrence);
    float *to = (recurrence->key ? of->convolved : of->y) + row * channels;
    (void)worker;
    for (int64_t i = 0; i < channels; i += LANES) {
        Floats sum = recurrence->bias ? load(recurrence->bias + i) : zeros();
        for (int64_t tap = 0; tap < recurrence->kernel; tap++)
            sum = multiply_add(load(recurrence->taps + tap * channels + i), load(row_at(of, row + tap) + i), sum);
        store(to + i, recurrence->key ? sigmoid_times(sum, sum) : sum);
    }
    for (int64_t group = 0; recurrence->key && !recurrence->direct && group < recurrence->groups; group++) {
        scale_head(queries_of(of, row) + group * recurrence->key, recurrence->key, 1.0f / sqrtf((float)recurrence->key));
        scale_head(keys_at(of, row) + group * recurrence->key, recurrence->key, 1.0f);
    }
}

static float softplus(float x) {
    return x > 20.0f ? x : log1pf(expf(x));
}

/* The rows of a head in TILE columns of its values: S = decay S + k u', and y = S' q + direct v. u is `factor` v, or in a gated
 * delta net what the decayed S is wrong about: factor (v - decay S' k). */
static void recur_columns(const Recurring *of, int64_t head, int64_t column) {
    const Recurrence *recurrence = of->recurrence;
    const int64_t key = recurrence->key, value = recurrence->value, heads = recurrence->heads;
    const int64_t place = head * key * value + column, group = head / (heads / recurrence->groups) * key;
    float *state = of->after + place;
    for (int64_t row = 0; row < of->n; row++) {
        const float *numbers = of->inputs + row * inputs_of(recurrence) + channels_in(recurrence) + head;
        /* The state after the last row goes past the caches: a step of Falcon-H1, of 3 MiB per layer, takes 0.90 so. */
        const int is_last = row == of->n - 1 && (uintptr_t)state % (4 * LANES) == 0;
        const float *from = row ? state : of->before + place, *q = queries_of(of, row) + group, *k = keys_at(of, row) + group;
        float step = softplus(numbers[recurrence->direct ? 0 : heads] + recurrence->step[head]);
        if (recurrence->direct) /* NaN stays, which fmaxf would drop. */
            step = step < recurrence->least ? recurrence->least : step > recurrence->most ? recurrence->most : step;
        const float decay = expf(recurrence->decay[head] * step);
        const float factor = recurrence->direct ? step : 1.0f / (1.0f + expf(-numbers[0]));
        Floats v[PARTS], u[PARTS], out[PARTS];
        for (int p = 0; p < PARTS; p++) {
            v[p] = load(values_of(of, row) + head * value + column + p * LANES);
            u[p] = out[p] = zeros();
        }
        for (int64_t i = 0; !recurrence->direct && i < key; i++)
            for (int p = 0; p < PARTS; p++)
                u[p] = multiply_add(all(k[i]), load(from + i * value + p * LANES), u[p]);
        for (int p = 0; p < PARTS; p++)
            u[p] = multiply(subtract(v[p], multiply(all(decay), u[p])), all(factor));
        for (int64_t i = 0; i < key; i++)
            for (int p = 0; p < PARTS; p++) {
                const Floats decayed = multiply(all(decay), load(from + i * value + p * LANES));
                const Floats next = multiply_add(all(k[i]), u[p], decayed);
                if (is_last)
                    store_past(state + i * value + p * LANES, next);
                else
                    store(state + i * value + p * LANES, next);
                out[p] = multiply_add(all(q[i]), next, out[p]);
            }
        for (int p = 0; p < PARTS; p++) {
            const Floats beside = recurrence->direct ? multiply(all(recurrence->direct[head]), v[p]) : zeros();
            store(of->y + (row * heads + head) * value + column + p * LANES, add(out[p], beside));
        }
    }
}

static void recur_item(const void *about, int64_t head, int worker) {
    const Recurring *of = about;
    (void)worker;
    for (int64_t column = 0; column < of->recurrence->value; column += TILE)
        recur_columns(of, head, column);
    finish_stores();
}

/* The last rows are the next window. It is one item. */
static void shift_item(const void *about, int64_t item, int worker) {
    const Recurring *of = about;
    const int64_t known = of->recurrence->kernel - 1, channels = channels_in(of->recurrence);
    (void)item, (void)worker;
    for (int64_t row = 0; row < known; row++)
        memcpy(of->next + row * channels, row_at(of, of->n + row), sizeof(float) * (size_t)channels);
}

static void recur_on(Threads threads, const Recurring *of) {
    each(threads, shift_item, of, 1, 1);
    each(threads, convolve_item, of, of->n, 1);
    if (of->recurrence->key)
        each(threads, recur_item, of, of->recurrence->heads, 1);
}
