/* How weights are stored: the bytes of a file's formats, ordered for the products.
 *
 * A weight is scale * (level - centre), or scale * level + least. Its level has its high `first` bits in one plane of bytes
 * and its low `second` bits in another. Columns come in groups of GROUP, outputs in tiles of TILE. A block holds the first
 * plane of a tile's group, then `scales` bytes. The second planes come after all blocks of all tiles, so that a draft reads
 * the blocks in one run. A plane has the levels of 8 times 4 columns, [TILE][4 columns] each; as many of these as fit into 8 bits
 * share their bytes. Eight groups of some formats have a header before them, of a factor or two for all their scales, and
 * of the scales themselves where these share bytes.
 */
#pragma once
#include <stdint.h>

#define GROUP 32 /* Columns of a weight and of a row that share a scale. */
#define TILE 16
#define HEADED 8 /* Groups under a header. */

/* Where a level's number comes from: itself, or a table of 16 bytes. */
typedef enum { ITSELF, NL, FP4 } Table;
/* What a block's scales are:
 * SCALE: [TILE] scales in fp16. SCALE_LEAST: then [TILE] leasts. EXPONENT: [TILE] exponents of 2 in 8 bits.
 * SIXES: none, since the header has the scales and minima of 6 bits of all its groups after the factors of both: bytes of
 * the low four bits of a scale and of its minimum, [HEADED][TILE], then bytes of the high two bits of both, of groups i and
 * i + 4, [HEADED / 2][TILE].
 * SIGNED: scales of 8 bits for either half of the columns, [2][TILE]; the header has their factor.
 * FOURS: scales and minima of 4 bits for either half, [2][TILE]; the header has the factors of both.
 * BRAIN, HALF: none, since a weight is a number of 16 bits, in bf16 or fp16, and not a level. A block has 16 pairs of
 * columns, [TILE outputs][2 columns] each in bf16, [2 columns][TILE outputs] in fp16. */
typedef enum { SCALE, SCALE_LEAST, EXPONENT, SIXES, SIGNED, FOURS, BRAIN, HALF } Scaling;

typedef struct {
    int first, second, scales, header, centre;
    Scaling scaling;
    Table table;
    int draft; /* Whether only the first planes are read; the low bits count as their mean. */
} Format;

/* The numbers of formats are those of `kernels/formats.py`. Centres are powers of 2. */
enum {
    Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, MXFP4, BF16, F16, Q8_0_DRAFT, Q6_K_DRAFT,
    FORMATS
};
static const Format formats[FORMATS] = {
    [Q4_0] = {4, 0, 32, 0, 8, SCALE, ITSELF},
    [Q4_1] = {4, 0, 64, 0, 0, SCALE_LEAST, ITSELF},
    [Q5_0] = {4, 1, 32, 0, 16, SCALE, ITSELF},
    [Q5_1] = {4, 1, 64, 0, 0, SCALE_LEAST, ITSELF},
    [Q8_0] = {4, 4, 32, 0, 128, SCALE, ITSELF},
    [Q2_K] = {2, 0, 32, 64, 0, FOURS, ITSELF},
    [Q3_K] = {2, 1, 32, 32, 4, SIGNED, ITSELF},
    [Q4_K] = {4, 0, 0, 256, 0, SIXES, ITSELF},
    [Q5_K] = {4, 1, 0, 256, 0, SIXES, ITSELF},
    [Q6_K] = {4, 2, 32, 32, 32, SIGNED, ITSELF},
    [IQ4_NL] = {4, 0, 32, 0, 128, SCALE, NL},
    [MXFP4] = {4, 0, 16, 0, 16, EXPONENT, FP4},
    [BF16] = {16, 0, 0, 0, 0, BRAIN, ITSELF},
    [F16] = {16, 0, 0, 0, 0, HALF, ITSELF},
    [Q8_0_DRAFT] = {4, 4, 32, 0, 128, SCALE, ITSELF, 1},
    [Q6_K_DRAFT] = {4, 2, 32, 32, 32, SIGNED, ITSELF, 1},
};

/* Bytes of a block, of a group's second plane, of the blocks of `groups` groups, and of a tile of these. */
static inline int64_t block_bytes(const Format format) {
    return 2 * GROUP * format.first + format.scales;
}
static inline int64_t second_bytes(const Format format) {
    return 2 * GROUP * format.second;
}
static inline int64_t blocks_bytes(const Format format, int64_t groups) {
    return groups * block_bytes(format) + groups / HEADED * format.header;
}
static inline int64_t tile_bytes(const Format format, int64_t groups) {
    return blocks_bytes(format, groups) + groups * second_bytes(format);
}

/* Whether a weight is quantised, so that rows are too. */
static inline int has_levels(const Format format) {
    return format.scaling != BRAIN && format.scaling != HALF;
}

/* Whether a product reads the second planes, and whether its levels, around 128, fill their bytes. */
static inline int reads_second(const Format format) {
    return format.second && !format.draft;
}
static inline int fills_bytes(const Format format) {
    return format.centre == 128 && !format.draft;
}

/* Whether either half of a group's columns has a scale of its own, and whether leasts are minima, to be subtracted. */
static inline int has_halves(const Format format) {
    return format.scaling == SIGNED || format.scaling == FOURS;
}
static inline int has_minima(const Format format) {
    return format.scaling == SIXES || format.scaling == FOURS;
}

/* Whether a product adds leasts. Drafts, whose low bits count as their mean, take the centre so. */
static inline int has_leasts(const Format format) {
    return has_minima(format) || format.scaling == SCALE_LEAST || format.draft;
}

/* The largest level, for sums that must not overflow. */
static inline int largest_level(const Format format) {
    return format.table == FP4 ? 28 : (1 << (format.first + (reads_second(format) ? format.second : 0))) - 1;
}

/* Levels of the tables, plus the centre. Those of NL are ggml's `kvalues_iq4nl`, those of FP4 twice the numbers of E2M1. */
static const uint8_t tables[3][16] = {
    {0},
    {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241},
    {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4},
};
