/* Projections: the products of rows with all outputs of a weight, on all threads. */
#pragma once
#include "exponential.h"
#include "products.h"
#include "sixteen.h"

/* Most and least bytes of a weight that a thread takes at a time. Memory is a tenth slower where two threads read turns of
 * the least all the time; at the end these balance their work. */
#define MOST_BYTES 1048576
#define LEAST_BYTES 65536
/* Bytes of the tiles that a chunk of rows meets at once, so that it comes from farther caches once for all of these; and
 * groups of weights of 16 bits: 16 rows of so many are 128 KiB of numbers, and a processor's second cache often has 512. */
#define NEAR_BYTES 262144
#define MOST_GROUPS 64

/* Adds the products of a chunk of rows with a tile in a span of groups to `sums`. Only weights of 16 bits have several. */
static void products(const Weight *weight, int64_t tile, Rows rows, int64_t first, int count, Span span, Floats *sums) {
    static void (*const of_format[FORMATS])(const Weight *, int64_t, Rows, int64_t, int, Span, Floats *) = {
        [Q4_0] = products_Q4_0, [Q4_1] = products_Q4_1, [Q5_0] = products_Q5_0, [Q5_1] = products_Q5_1,
        [Q8_0] = products_Q8_0, [Q2_K] = products_Q2_K, [Q3_K] = products_Q3_K, [Q4_K] = products_Q4_K,
        [Q5_K] = products_Q5_K, [Q6_K] = products_Q6_K, [IQ4_NL] = products_IQ4_NL, [MXFP4] = products_MXFP4,
        [Q8_0_DRAFT] = products_Q8_0_DRAFT, [Q6_K_DRAFT] = products_Q6_K_DRAFT,
        [BF16] = products_BF16, [F16] = products_F16,
    };
    of_format[weight->format](weight, tile, rows, first, count, span, sums);
}

/* The sums of `count` rows with a tile before any product: its bias. */
static void begin_sums(const Weight *weight, int64_t tile, int count, Floats *sums) {
    for (int r = 0; r < count * PARTS; r++)
        sums[r] = weight->bias ? load(weight->bias + tile * TILE + r % PARTS * LANES) : zeros();
}

/* Groups of columns in which the chunks of n rows meet tiles, one chunk after the other. */
static int64_t groups_at_once(const Weight *weight, int64_t n) {
    const int64_t groups = weight->in / GROUP, fitting = MOST_GROUPS * CHUNK / (n < 1 ? 1 : n < CHUNK ? n : CHUNK);
    return has_levels(formats[weight->format]) || groups < fitting ? groups : fitting;
}

/* How tiles come to threads, one item after the other: each time a share of those that are left, from `most` tiles at first
 * to `least` at the end. So threads read long runs, and end together. A chunk of rows meets `near` tiles, one after the
 * other, before the next chunk does. */
typedef struct {
    int64_t tiles, most, least, shares, near;
} Items;

/* The items of `tiles` tiles of `bytes` each for a product of n rows; torch's threads have fixed shares of single tiles. */
static Items items_of_tiles(const Weight *weight, int64_t tiles, int64_t bytes, int64_t n, Threads threads) {
    const int64_t most = (MOST_BYTES + bytes - 1) / bytes, least = LEAST_BYTES / (bytes * (n < 1 ? 1 : n));
    const int64_t met = bytes * groups_at_once(weight, n) / (weight->in / GROUP);
    const int64_t near = NEAR_BYTES / met;
    if (!threads.own)
        return (Items){tiles, 1, 1, 1, 1};
    return (Items){tiles, most, least > 1 ? least : 1, 2 * threads.count, near > 1 ? near : 1};
}

/* The number of tiles of the item that begins with tile `begin`. */
static int64_t tiles_from(const Items *items, int64_t begin) {
    const int64_t left = items->tiles - begin, share = left / items->shares;
    const int64_t size = share > items->most ? items->most : share < items->least ? items->least : share;
    return size < left ? size : left;
}

static int64_t number_of(const Items *items) {
    int64_t number = 0;
    if (items->most == 1)
        return items->tiles;
    for (int64_t begin = 0; begin < items->tiles; begin += tiles_from(items, begin))
        number++;
    return number;
}

static int64_t first_tile(const Items *items, int64_t item) {
    int64_t begin = 0;
    if (items->most == 1)
        return item;
    while (item-- > 0)
        begin += tiles_from(items, begin);
    return begin;
}

typedef struct {
    const Weight *weight;
    Rows rows;
    int64_t n;
    Items items;
    const float *residual;
    float *y;
    int64_t width; /* Of y's rows. */
    float cap;     /* Of products (`capped`); 0 for none. */
} Projecting;

/* A chunk of rows with the tiles from place `from` to `to`, in a span of groups; sums of earlier spans are in y. */
static void project_span(const Projecting *of, int64_t from, int64_t to, int64_t first, Span span) {
    const Weight *weight = of->weight;
    const int count = chunk(of->n, first);
    const int is_last = span.end == weight->in / GROUP;
    const float *residual = is_last ? of->residual : 0;
    const float cap = is_last ? of->cap : 0.0f;
    for (int64_t place = from; place < to; place++) {
        const int64_t tile = weight->chosen ? weight->chosen[place] : place;
        float *y = of->y + first * of->width + tile * TILE;
        Floats sums[CHUNK * PARTS];
        begin_sums(weight, tile, count, sums);
        for (int r = 0; span.begin && r < count * PARTS; r++)
            sums[r] = load(y + r / PARTS * of->width + r % PARTS * LANES);
        products(weight, tile, of->rows, first, count, span, sums);
        for (int r = 0; r < count * PARTS; r++) {
            const int64_t at = r / PARTS * of->width + r % PARTS * LANES;
            const Floats sum = residual ? add(sums[r], load(residual + (y - of->y) + at)) : sums[r];
            store(y + at, cap == 0.0f ? sum : capped(sum, cap));
        }
    }
}

/* The products with the tiles from place `begin` to `end`. */
static void project_tiles(const Projecting *of, int64_t begin, int64_t end) {
    for (int64_t from = begin; from < end; from += of->items.near) {
        const int64_t to = from + of->items.near < end ? from + of->items.near : end;
        const int64_t groups = of->weight->in / GROUP, at_once = groups_at_once(of->weight, of->n);
        for (Span span = {0, at_once}; span.begin < groups; span.begin = span.end, span.end += at_once) {
            span.end = span.end < groups ? span.end : groups;
            for (int64_t first = 0; first < of->n; first += CHUNK)
                project_span(of, from, to, first, span);
        }
    }
}

static void project_item(const void *about, int64_t item, int worker) {
    const Projecting *of = about;
    const int64_t begin = first_tile(&of->items, item);
    (void)worker;
    project_tiles(of, begin, begin + tiles_from(&of->items, begin));
}

/* y = products of the rows, plus the residual unless it is NULL, capped unless `cap` is 0. Rows of both are `width` floats
 * apart. Outputs of tiles that are not chosen stay as they are. */
static void project_capped(Threads threads, const Weight *weight, Rows rows, int64_t n, const float *residual, float *y,
                           int64_t width, float cap)
{
    const int64_t tiles = weight->chosen ? weight->number : weight->out / TILE;
    const int64_t bytes = tile_bytes(formats[weight->format], weight->in / GROUP);
    const Projecting about = {weight, rows, n, items_of_tiles(weight, tiles, bytes, n, threads), residual, y, width, cap};
    each(threads, project_item, &about, number_of(&about.items), 1);
}

static void project(Threads threads, const Weight *weight, Rows rows, int64_t n, const float *residual, float *y,
                    int64_t width)
{
    project_capped(threads, weight, rows, n, residual, y, width, 0.0f);
}

typedef struct {
    const Connection *connection;
    const float *x;
    float *y;
    int64_t width;
} Joining;

static void join_item(const void *about, int64_t row, int worker) {
    const Joining *of = about;
    (void)worker;
    connect_row(of->connection, of->x + row * of->width, of->width, of->y + row * of->width);
}

static const Norm *norm_of(const Connection *connection) {
    return connection ? connection->norm : 0;
}

/* Whether a block's output is added to the residual stream as it is. */
static int is_plain(const Connection *connection) {
    return connection && !connection->after && connection->factor == 1.0f;
}

/* y = a block's result, of which the last weight makes the output of `rows`; without a connection, that output itself. */
static void project_last(Threads threads, const Weight *weight, Rows rows, int64_t n, const Connection *connection,
                         const float *x, float *y)
{
    const int plain = is_plain(connection);
    const Joining about = {connection, x, y, weight->out};
    project(threads, weight, rows, n, plain ? x : 0, y, weight->out);
    if (connection && !plain)
        each(threads, join_item, &about, n, FEW);
}
