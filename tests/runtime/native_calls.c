/* Calls the entry points of our C code on the same numbers, and prints the results, a line each: a name, and floats. */
#include "checks.h"
#include <stdio.h>
#include <stdlib.h>

int repack(int64_t, const uint8_t *, int64_t, int64_t, int64_t, uint8_t *, int64_t, int64_t, int);
int round_rows(const uint8_t *, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, uint8_t *, int64_t, double *, int64_t,
               int);
int linear(const Weight *, const Norm *, const float *, int64_t, int64_t, const float *, int64_t, float, float *, float *,
           int64_t, int);
int end_layer(const Ending *, const float *, int64_t, const float *, int64_t, int64_t, float *, float *, int64_t, int);
int mlp(const Weight *, const Weight *, const Activation *, const Connection *, const float *, int64_t, int64_t, float *,
        float *, int64_t, int);
int experts(const Experts *, const Connection *, const float *, int64_t, int64_t, const int32_t *, const float *, int64_t,
            float *, float *, int64_t, int);
int attention(const Block *, const Connection *, const Segment *, int64_t, const float *, const float *, int64_t, int64_t,
              int64_t, const float *, int64_t, int64_t, int64_t, float *, float *, int64_t, int);
int recur(const Recurrence *, const float *, int64_t, const float *, int64_t, float *, float *, const float *, int64_t,
          int64_t, float *, float *, int64_t, int);
int mixer(const Mixing *, const Connection *, const Continuation *, int64_t, const float *, int64_t, int64_t, const float *,
          int64_t, float *, float *, int64_t, int);

enum { HIDDEN = 512, INNER = 256, THREADS_USED = 2 };

/* Seeds are told, since compilers call functions among arguments in orders of their own. */
static uint32_t next_bits(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static void *room(int64_t bytes) {
    return calloc(1, (size_t)bytes + 64);
}

/* Numbers in [-1, 1]. */
static float *drawn(uint32_t seed, int64_t count) {
    float *to = room(4 * count);
    for (int64_t i = 0; i < count; i++)
        to[i] = (float)(next_bits(&seed) & 0xffff) / 32768.0f - 1.0f;
    return to;
}

/* Bytes of which any two are a number of fp16 below 2, and any a scale of MXFP4 of at most 1. */
static uint8_t *drawn_bytes(uint32_t seed, int64_t count, int64_t format) {
    uint8_t *to = room(count);
    for (int64_t i = 0; i < count; i++)
        to[i] = (uint8_t)(next_bits(&seed) & (format == MXFP4 ? 0x7f : i % 2 ? 0xbf : 0xff));
    return to;
}

static void print(const char *name, int64_t number, int refused, const float *y, int64_t count) {
    printf("%s-%d", name, (int)number);
    if (refused)
        printf(" refused: %s", rule(refused));
    for (int64_t i = 0; !refused && i < count; i++)
        printf(" %a", (double)y[i]);
    printf("\n");
}

static void print_bytes(const char *name, int64_t number, int refused, const uint8_t *bytes, int64_t count) {
    float *y = room(4 * count);
    for (int64_t i = 0; i < count; i++)
        y[i] = bytes[i];
    print(name, number, refused, y, count);
}

static Weight *weight_of(uint32_t seed, int64_t format, int64_t out, int64_t in) {
    const int64_t bytes = out / TILE * tile_bytes(formats[format], in / GROUP);
    Weight *weight = room(sizeof *weight);
    *weight = (Weight){format, out, in, 1, bytes, 4 * out, drawn_bytes(seed, bytes, format), drawn(seed, out), 0, 0, 0};
    return weight;
}

static void linears(void) {
    static const int64_t rows[] = {1, 3, 4, 8, 9, 17};
    for (int64_t format = 0; format < FORMATS; format++) {
        const Weight *weight = weight_of(1, format, 48, HIDDEN);
        const Norm norm = {drawn(2, HIDDEN), 4 * HIDDEN, 1e-5f};
        for (int i = 0; i < (int)(sizeof rows / sizeof *rows); i++) {
            const int64_t n = rows[i], floats = floats_of(weight, n);
            float *y = room(4 * n * 48);
            const int refused = linear(weight, i % 2 ? &norm : 0, drawn(3, n * HIDDEN), 4 * n * HIDDEN, n,
                                       i % 2 ? drawn(4, n * 48) : 0, 4 * n * 48, i % 2 ? 0.0f : 1.5f, y, room(4 * floats), floats,
                                       THREADS_USED);
            print("linear", 100 * format + n, refused, y, n * 48);
        }
        float *x = drawn(5, 3 * HIDDEN), *y = room(4 * 3 * 48);
        x[40] = NAN, x[HIDDEN + 50] = INFINITY;
        const int64_t floats = floats_of(weight, 3);
        const int refused = linear(weight, 0, x, 12 * HIDDEN, 3, 0, 0, 0.0f, y, room(4 * floats), floats, THREADS_USED);
        print("odd", format, refused, y, 3 * 48);
    }
}

static void orders(void) {
    for (int64_t format = 0; format < Q8_0_DRAFT; format++) {
        const int64_t out = 20, size = tile_bytes(formats[format], HIDDEN / GROUP);
        const int64_t bytes = out * (HIDDEN / stored[format].columns * stored[format].bytes);
        uint8_t *to = room(2 * size);
        const int refused = repack(format, drawn_bytes(5, bytes, format), bytes, out, HIDDEN, to, 2 * size, 0, THREADS_USED);
        print_bytes("repack", format, refused, to, 2 * size);
    }
    for (int64_t bits = 4; bits <= 8; bits += 4)
        for (int64_t kind = 0; kind < 3; kind++) { /* fp32, bf16 and fp16 */
            const int64_t size = kind ? 2 : 4, bytes = 4 * HIDDEN * size;
            const uint8_t *numbers = kind ? drawn_bytes(6, bytes, F16) : (const uint8_t *)drawn(7, 4 * HIDDEN);
            const int64_t blocks_bytes = 4 * (HIDDEN / GROUP) * stored[bits == 4 ? Q4_1 : Q8_0].bytes;
            uint8_t *blocks = room(blocks_bytes);
            double sums[8];
            const int refused = round_rows(numbers, bytes, size, kind == 1, 4, HIDDEN, bits, blocks, blocks_bytes, sums,
                                           sizeof sums, THREADS_USED);
            float rounded_sums[8];
            for (int i = 0; i < 8; i++)
                rounded_sums[i] = (float)sums[i];
            print_bytes("round", 10 * bits + kind, refused, blocks, blocks_bytes);
            print("sums", 10 * bits + kind, refused, rounded_sums, 8);
        }
}

static void mixtures(void) {
    const int64_t n = 5;
    const Norm norm = {drawn(8, HIDDEN), 4 * HIDDEN, 1e-5f};
    const Connection connection = {&norm, &norm, 0.5f};
    for (int64_t function = 0; function < FUNCTIONS; function++) {
        const Activation activation = {function, 1.702f, 7.0f};
        const Weight *gate_up[3], *down[3];
        for (int i = 0; i < 3; i++) {
            gate_up[i] = weight_of(100 + i, Q4_K, 2 * INNER, HIDDEN);
            down[i] = weight_of(200 + i, Q6_K, HIDDEN, INNER);
        }
        float *y = room(4 * n * HIDDEN);
        int64_t floats = mlp_floats(gate_up[0], down[0], n);
        int refused = mlp(gate_up[0], down[0], &activation, &connection, drawn(11, n * HIDDEN), 4 * n * HIDDEN, n, y,
                          room(4 * floats), floats, THREADS_USED);
        print("mlp", function, refused, y, n * HIDDEN);
        const Shared shared = {gate_up[1], down[1], drawn(43, HIDDEN), 4 * HIDDEN, &norm};
        const Experts of = {gate_up, down, drawn(12, 3 * HIDDEN), drawn(13, 3), drawn(44, 3), &activation,
                            function ? &shared : 0, &norm, 0, function ? &norm : 0, 4 * 3 * HIDDEN, 4 * 3, 4 * 3,
                            (int64_t)sizeof gate_up, 3, 2, function ? SIGMOIDS : SHARES};
        floats = experts_floats(&of, n);
        refused = experts(&of, &connection, drawn(14, n * HIDDEN), 4 * n * HIDDEN, n, 0, 0, 0, y, room(4 * floats), floats,
                          THREADS_USED);
        print("experts", function, refused, y, n * HIDDEN);
        const float factor = 0.5f;
        const Ending ending = {weight_of(300, Q4_K, INNER, HIDDEN), down[0], &activation, &norm, &factor, HIDDEN};
        floats = ending_floats(&ending, n);
        refused = end_layer(&ending, drawn(41, n * INNER), 4 * n * INNER, drawn(42, n * HIDDEN), 4 * n * HIDDEN, n, y,
                            room(4 * floats), floats, THREADS_USED);
        print("ending", function, refused, y, n * HIDDEN);
    }
}

static void attentions(void) {
    enum { HEADS = 4, KV = 2, SIZE = 64, SLOTS = 150, N = 5, WIDTH = 64 };
    for (int kind = 0; kind < 6; kind++) { /* 8-bit keys from 2 on, two not made at 4; with sinks, a cap and a bias where odd */
        const int64_t kv_bits = kind < 2 ? 32 : 8, made = kind == 4 ? 0 : kind == 5 ? 1 : 2;
        const int64_t slot = kv_bits == 8 ? SIZE + 4 : 4 * SIZE, odd = kind % 2;
        const Weight *qkv[] = {weight_of(15, Q8_0, (HEADS + made * KV) * SIZE, HIDDEN)};
        const Norm norm = {drawn(16, HIDDEN), 4 * HIDDEN, 1e-5f}, head_norm = {drawn(17, SIZE), 4 * SIZE, 1e-5f};
        const Connection connection = {&norm, 0, 1.0f};
        const Block block = {qkv, weight_of(18, BF16, HIDDEN, HEADS * SIZE), &head_norm, &head_norm,
                             made == 1 ? &head_norm : 0, odd ? drawn(19, HEADS) : 0, 4 * HEADS, 0.125f, odd ? 20.0f : 0.0f, 1,
                             HEADS, KV, SIZE, made, 0, made == 1, odd, kv_bits};
        uint32_t seed = 1;
        float *bias = drawn(20, N * SLOTS);
        for (int64_t i = 0; i < N * SLOTS; i++)
            bias[i] = i % SLOTS > 0 && bias[i] < 0 ? -INFINITY : 0;
        char *keys = kv_bits == 8 ? room(KV * SLOTS * slot) : (char *)drawn(21, KV * SLOTS * SIZE);
        char *values = kv_bits == 8 ? room(KV * SLOTS * slot) : (char *)drawn(22, KV * SLOTS * SIZE);
        for (int64_t i = 0; kv_bits == 8 && i < KV * SLOTS * slot; i++) {
            const int is_scale = i % slot >= SIZE; /* Four bytes that are 0.015625. */
            keys[i] = is_scale ? (char)(0x3c800000 >> 8 * (i % slot - SIZE)) : (char)next_bits(&seed);
            values[i] = is_scale ? keys[i] : (char)next_bits(&seed);
        }
        const Segment segment = {keys, values, KV * SLOTS * slot, SLOTS, SLOTS * slot, N, SLOTS, SLOTS - N, odd ? bias : 0,
                                 odd ? SLOTS : 0, odd ? 4 * N * SLOTS : 0};
        const int64_t angles = 2 * WIDTH, columns = (HEADS + made * KV) * SIZE, longest = SLOTS + 16;
        const int64_t floats = N * (columns + HEADS * SIZE) + floats_of(qkv[0], N) + floats_of(block.output, N)
                               + 2 * N * HEADS / KV * longest * THREADS_USED;
        float *y = room(4 * N * HIDDEN);
        const float *cos = drawn(23, N * angles), *sin = drawn(24, N * angles), *x = drawn(25, N * HIDDEN);
        const int refused = attention(&block, &connection, &segment, 1, cos, sin, 4 * N * angles, WIDTH, 2, x,
                                      4 * N * HIDDEN, N, longest, y, room(4 * floats), floats, THREADS_USED);
        print("attention", kind, refused, y, N * HIDDEN);
        print_bytes("slots", kind, refused, (uint8_t *)keys, KV * SLOTS * slot);
    }
}

static void recurrences(void) {
    enum { HEADS = 16, GROUPS = 2, KEY = 32, VALUE = 32, KERNEL = 4, N = 3, MIXED = HEADS * VALUE };
    for (int kind = 0; kind < 3; kind++) { /* A gated delta net, Mamba-2 and a convolution */
        const int64_t key = kind < 2 ? KEY : 0, channels = 2 * GROUPS * key + MIXED;
        const int64_t inputs = channels + (kind < 2 ? HEADS * (2 - kind) : 0), state = HEADS * key * VALUE;
        float *decay = drawn(28, HEADS);
        for (int i = 0; i < HEADS; i++)
            decay[i] = -fabsf(decay[i]);
        const Recurrence of = {drawn(26, KERNEL * channels), drawn(27, channels), decay, drawn(29, HEADS),
                               kind == 1 ? drawn(30, HEADS) : 0, 4 * KERNEL * channels, 4 * channels, 4 * HEADS, 4 * HEADS,
                               4 * HEADS, KERNEL, HEADS, GROUPS, key, VALUE, 0, 0.0f, 1e30f};
        const int64_t window = (KERNEL - 1) * channels;
        float *y = room(4 * N * (MIXED + HIDDEN)), *after = room(4 * state);
        int64_t floats = recurrence_floats(&of, N);
        int refused = recur(&of, drawn(31, window), 4 * window, drawn(32, state), 4 * state, room(4 * window), after,
                            drawn(33, N * inputs), 4 * N * inputs, N, y, room(4 * floats), floats, THREADS_USED);
        print("recur", kind, refused, y, N * MIXED);
        if (state)
            print("after", kind, refused, after, state);

        const Norm norm = {drawn(34, HIDDEN), 4 * HIDDEN, 1e-5f};
        const Norm inner = {drawn(35, MIXED), 4 * (kind ? MIXED : VALUE), 1e-5f};
        const Connection connection = {&norm, 0, 1.0f};
        const int64_t gates = kind < 2 ? MIXED : 2 * MIXED;
        const Weight *projections[] = {weight_of(36, Q4_K, inputs + gates, HIDDEN)};
        int32_t order[MIXED];
        for (int i = 0; i < MIXED; i++)
            order[i] = MIXED - 1 - i;
        const Mixing mixing = {projections, weight_of(37, BF16, HIDDEN, MIXED), &of, kind < 2 ? &inner : 0, order,
                               sizeof order, 1};
        const Continuation from = {drawn(38, window), drawn(39, state), 4 * window, 4 * state, room(4 * window), after,
                                   room(4 * N * inputs), N};
        floats = mixing_floats(&mixing, N);
        refused = mixer(&mixing, &connection, &from, 1, drawn(40, N * HIDDEN), 4 * N * HIDDEN, N, 0, 0, y, room(4 * floats),
                        floats, THREADS_USED);
        print("mixer", kind, refused, y, N * HIDDEN);
    }
}

int main(void) {
    linears();
    orders();
    mixtures();
    attentions();
    recurrences();
    return 0;
}
