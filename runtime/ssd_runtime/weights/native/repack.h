/* Orders a file's weights as `formats.h` says, with the file's own levels and scales.
 *
 * A file has an output after the other, as blocks whose layouts are those of ggml's `block_q4_0` and its like. Those of
 * numbers of 16 bits are called blocks of 32 columns here.
 */
#pragma once
#include "formats.h"
#include "lanes.h"
#include <string.h>

#define LONGEST 256 /* Columns of the longest block. */

/* The columns and bytes of a file's block. */
static const struct {
    int columns, bytes;
} stored[] = {
    [Q4_0] = {32, 18}, [Q4_1] = {32, 20}, [Q5_0] = {32, 22}, [Q5_1] = {32, 24}, [Q8_0] = {32, 34}, [IQ4_NL] = {32, 18},
    [MXFP4] = {32, 17}, [Q2_K] = {256, 84}, [Q3_K] = {256, 110}, [Q4_K] = {256, 144}, [Q5_K] = {256, 176},
    [Q6_K] = {256, 210}, [BF16] = {32, 64}, [F16] = {32, 64},
};

/* Bytes that have the levels of columns i and i + half, `count` times `half` of them. */
INLINE void read_nibbles(const uint8_t *restrict from, int half, int count, uint8_t *restrict levels) {
    for (int part = 0; part < count; part++, from += half, levels += 2 * half) {
        for (int i = 0; i < half; i++)
            levels[i] = from[i] & 15;
        for (int i = 0; i < half; i++)
            levels[half + i] = from[i] >> 4;
    }
}

/* Add bits `place`, ... of levels: 64 bytes have two bits each of columns i, i + 32, i + 64 and i + 96 of either half. */
INLINE void add_pairs(const uint8_t *restrict from, int place, uint8_t *restrict levels) {
    for (int half = 0; half < 2; half++, from += GROUP)
        for (int shift = 0; shift < 8; shift += 2, levels += GROUP)
            for (int i = 0; i < GROUP; i++)
                levels[i] |= (from[i] >> shift & 3) << place;
}

/* Add bit `place` of levels: 32 bytes have a bit each of columns i, i + 32, ... */
INLINE void add_bits(const uint8_t *restrict from, int place, uint8_t *restrict levels) {
    for (int shift = 0; shift < 8; shift++, levels += GROUP)
        for (int i = 0; i < GROUP; i++)
            levels[i] |= (from[i] >> shift & 1) << place;
}

/* Read the levels of a block, in the order of its columns. */
static void read_levels(int number, const uint8_t *block, uint8_t *levels) {
    switch (number) {
    case Q4_0: case IQ4_NL:
        return read_nibbles(block + 2, 16, 1, levels);
    case Q4_1:
        return read_nibbles(block + 4, 16, 1, levels);
    case Q5_0: case Q5_1: {
        const uint8_t *fifths = block + (number == Q5_0 ? 2 : 4);
        read_nibbles(fifths + 4, 16, 1, levels);
        for (int i = 0; i < GROUP / 8; i++) { /* Eight bits at once: each to a byte of its own, then to bit 4 of that. */
            const uint64_t each = UINT64_C(0x0101010101010101), apart = fifths[i] * each & UINT64_C(0x8040201008040201);
            uint64_t eight;
            memcpy(&eight, levels + 8 * i, 8);
            eight |= ((apart + 0x7f * each) >> 7 & each) << 4;
            memcpy(levels + 8 * i, &eight, 8);
        }
        return;
    }
    case Q8_0:
        for (int i = 0; i < GROUP; i++)
            levels[i] = block[2 + i] ^ 128;
        return;
    case MXFP4:
        return read_nibbles(block + 1, 16, 1, levels);
    case Q2_K:
        memset(levels, 0, LONGEST);
        return add_pairs(block + 16, 0, levels);
    case Q3_K:
        memset(levels, 0, LONGEST);
        add_pairs(block + 32, 0, levels);
        return add_bits(block, 2, levels);
    case Q4_K:
        return read_nibbles(block + 16, GROUP, 4, levels);
    case Q5_K:
        read_nibbles(block + 48, GROUP, 4, levels);
        return add_bits(block + 16, 4, levels);
    case Q6_K:
        /* Its nibbles are those of columns i and i + 64. */
        read_nibbles(block, 2 * GROUP, 2, levels);
        return add_pairs(block + 128, 4, levels);
    }
}

/* Scale `half` of 16 of a block of Q3_K: its low four bits, then the bits above them, plus 32. */
static uint8_t scale6(const uint8_t *packed, int half) {
    const int low = packed[half % 8] >> half / 8 * 4 & 15, high = packed[8 + half % 4] >> half / 4 * 2 & 3;
    return (uint8_t)((low | high << 4) - 32);
}

/* Write output `o`'s scales of a block: its factors to the header, and the others behind the levels of each group. */
static void put_scales(int number, const uint8_t *block, int o, uint8_t *header, uint8_t *scales, int64_t stride) {
    const uint8_t *factors = block;
    switch (formats[number].scaling) {
    case SCALE_LEAST:
        memcpy(scales + 2 * (TILE + o), block + 2, 2);
        /* fall through */
    case SCALE:
        memcpy(scales + 2 * o, block, 2);
        return;
    case EXPONENT:
        /* Levels are twice the numbers of E2M1, so the exponents of scales are one less. */
        scales[o] = block[0] ? block[0] - 1 : 0;
        return;
    case SIXES: {
        const uint8_t *packed = block + 4;
        uint8_t *low = header + 4 * TILE + o, *high = low + HEADED * TILE;
        for (int i = 0; i < 4; i++) {
            low[i * TILE] = (packed[i] & 15) | (packed[4 + i] & 15) << 4;
            low[(4 + i) * TILE] = packed[8 + i];
            high[i * TILE] = (packed[i] >> 4 & 3) | (packed[4 + i] >> 4 & 3) << 2 | (packed[i] >> 6) << 4 |
                             (packed[4 + i] >> 6) << 6;
        }
        break;
    }
    case SIGNED:
        factors = block + stored[number].bytes - 2;
        for (int half = 0; half < 2 * HEADED; half++)
            scales[half / 2 * stride + half % 2 * TILE + o] =
                number == Q3_K ? scale6(block + 96, half) : block[192 + half];
        break;
    case FOURS:
        factors = block + stored[number].bytes - 4;
        for (int half = 0; half < 2 * HEADED; half++)
            scales[half / 2 * stride + half % 2 * TILE + o] = block[half];
        break;
    default: /* Numbers have none. */
        return;
    }
    memcpy(header + 2 * o, factors, 2);
    if (has_minima(formats[number]))
        memcpy(header + 2 * (TILE + o), factors + 2, 2);
}

/* Write `bits` bits of the levels of a group, from bit `shift` on. `words` have 4 columns of an output. */
INLINE void put_bits(uint32_t (*words)[TILE], int shift, int bits, uint8_t *to) {
    const uint32_t mask = 0x01010101u * ((1 << bits) - 1);
    const int sharing = 8 / bits;
    for (int i = 0; i < bits; i++, to += 4 * TILE) {
        uint32_t bytes[TILE] = {0};
        for (int place = 0; place < sharing; place++)
            for (int o = 0; o < TILE; o++)
                bytes[o] |= (words[i * sharing + place][o] >> shift & mask) << bits * place;
        memcpy(to, bytes, sizeof bytes);
    }
}

/* The same, compiled for each number of bits that a plane has. */
static void put_plane(uint32_t (*words)[TILE], int shift, int bits, uint8_t *to) {
    if (bits == 4)
        put_bits(words, shift, 4, to);
    else if (bits == 2)
        put_bits(words, shift, 2, to);
    else if (bits == 1)
        put_bits(words, shift, 1, to);
}

/* Write the numbers of a group in 16 bits, of which a word has two. */
static void put_numbers(const Format format, uint32_t (*words)[TILE], uint8_t *to) {
    for (int i = 0; i < GROUP / 2; i++, to += 4 * TILE)
        for (int o = 0; o < TILE; o++)
            if (format.scaling == BRAIN) {
                memcpy(to + 4 * o, &words[i][o], 4);
            } else {
                memcpy(to + 2 * o, &words[i][o], 2);
                memcpy(to + 2 * (TILE + o), (const uint8_t *)&words[i][o] + 2, 2);
            }
}

/* Outputs of a file, `bytes` each, and where their tiles begin: of blocks, and of second planes. */
typedef struct {
    int number;
    const uint8_t *from;
    int64_t bytes, out, groups;
    uint8_t *blocks;
    int64_t blocks_bytes;
    uint8_t *seconds;
    int64_t seconds_bytes;
} Repacking;

/* Order the outputs of a tile; those after the last one are 0. */
static void repack_tile(const void *about, int64_t tile, int worker) {
    const Repacking *of = about;
    const Format format = formats[of->number];
    const int columns = stored[of->number].columns, is_number = !has_levels(format);
    const int64_t left = of->out - tile * TILE, present = left < TILE ? left : TILE;
    const uint8_t *from = of->from + tile * TILE * of->bytes;
    uint8_t *first = of->blocks + tile * of->blocks_bytes, *second = of->seconds + tile * of->seconds_bytes;
    uint32_t words[LONGEST / 4][TILE] = {{0}};
    uint8_t levels[LONGEST];
    (void)worker;
    for (int64_t group = 0; group < of->groups; group += columns / GROUP, from += stored[of->number].bytes) {
        uint8_t *header = first;
        first += format.header;
        if (present < TILE)
            memset(header, 0, format.header + columns / GROUP * block_bytes(format));
        for (int o = 0; o < present; o++) {
            const uint8_t *block = from + o * of->bytes;
            if (!is_number)
                read_levels(of->number, block, levels);
            for (int i = 0; i < columns / (is_number ? 2 : 4); i++)
                memcpy(&words[i][o], (is_number ? block : levels) + 4 * i, 4);
            put_scales(of->number, block, o, header, first + 2 * GROUP * format.first, block_bytes(format));
        }
        for (int i = 0; i < columns / GROUP; i++, first += block_bytes(format), second += second_bytes(format))
            if (is_number) {
                put_numbers(format, words, first);
            } else {
                put_plane(words + i * GROUP / 4, format.second, format.first, first);
                put_plane(words + i * GROUP / 4, 0, format.second, second);
            }
    }
}
