/* Projections: the products of rows with all outputs of a weight, on all threads. */
#pragma once
#include "products.h"
#include "sixteen.h"

/* Most and least bytes of a weight that a thread takes at a time. Memory is a tenth slower where two threads read turns of
 * the least all the time; at the end these balance their work. */
#define MOST_BYTES 1048576
#define LEAST_BYTES 65536
#define NEAR_BYTES 262144 /* Half of a processor's second cache, which is left to rows. */

static void products(const Weight *weight, int64_t tile, Rows rows, int64_t first, int count, Floats *sums) {
    static void (*const of_format[FORMATS])(const Weight *, int64_t, Rows, int64_t, int, Floats *) = {
        [Q4_0] = products_Q4_0, [Q4_1] = products_Q4_1, [Q5_0] = products_Q5_0, [Q5_1] = products_Q5_1,
        [Q8_0] = products_Q8_0, [Q2_K] = products_Q2_K, [Q3_K] = products_Q3_K, [Q4_K] = products_Q4_K,
        [Q5_K] = products_Q5_K, [Q6_K] = products_Q6_K, [IQ4_NL] = products_IQ4_NL, [MXFP4] = products_MXFP4,
        [Q8_0_DRAFT] = products_Q8_0_DRAFT, [Q6_K_DRAFT] = products_Q6_K_DRAFT,
        [BF16] = products_BF16, [F16] = products_F16,
    };
    of_format[weight->format](weight, tile, rows, first, count, sums);
}

/* How tiles come to threads, one item after the other: each time a share of those that are left, from `most` tiles at first
 * to `least` at the end. So threads read long runs, and end together. A chunk of rows meets `near` tiles, one after the
 * other, before the next chunk does. */
typedef struct {
    int64_t tiles, most, least, shares, near;
} Items;

/* The items of `tiles` tiles of `bytes` each for a product of n rows; torch's threads have fixed shares of single tiles. */
static Items items_of_tiles(int64_t tiles, int64_t bytes, int64_t n, Threads threads) {
    const int64_t most = (MOST_BYTES + bytes - 1) / bytes, least = LEAST_BYTES / (bytes * n), near = NEAR_BYTES / bytes;
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
} Projecting;

static void project_item(const void *about, int64_t item, int worker) {
    const Projecting *of = about;
    const int64_t begin = first_tile(&of->items, item), end = begin + tiles_from(&of->items, begin);
    (void)worker;
    for (int64_t from = begin; from < end; from += of->items.near)
        for (int64_t first = 0; first < of->n; first += CHUNK)
            for (int64_t place = from; place < end && place < from + of->items.near; place++) {
                const int64_t tile = of->weight->chosen ? of->weight->chosen[place] : place;
                const int count = chunk(of->n, first);
                Floats sums[CHUNK * PARTS];
                products(of->weight, tile, of->rows, first, count, sums);
                for (int r = 0; r < count * PARTS; r++) {
                    const int64_t at = (first + r / PARTS) * of->width + tile * TILE + r % PARTS * LANES;
                    store(of->y + at, of->residual ? add(sums[r], load(of->residual + at)) : sums[r]);
                }
            }
}

/* y = products of the rows, plus the residual unless it is NULL. Rows of both are `width` floats apart. Outputs of tiles
 * that are not chosen stay as they are. */
static void project(Threads threads, const Weight *weight, Rows rows, int64_t n, const float *residual, float *y,
                    int64_t width)
{
    const int64_t tiles = weight->chosen ? weight->number : weight->out / TILE;
    const int64_t bytes = tile_bytes(formats[weight->format], weight->in / GROUP);
    const Projecting about = {weight, rows, n, items_of_tiles(tiles, bytes, n, threads), residual, y, width};
    each(threads, project_item, &about, number_of(&about.items), 1);
}
