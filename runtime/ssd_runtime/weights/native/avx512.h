/* Vectors of 16 floats, for processors with AVX-512 VNNI. */
#pragma once

#define LANES 16
#define INSTRUCTIONS "vnni"
typedef __m512 Floats;
/* The levels of 16 outputs in a group of columns: of 8 times 4 columns, [16 outputs][4 columns] each. */
typedef struct {
    __m512i of[GROUP / 4];
} Levels;

INLINE Floats load(const float *x) { return _mm512_loadu_ps(x); }
INLINE void store(float *to, Floats x) { _mm512_storeu_ps(to, x); }
/* Store past the caches, without reading lines before, what is read late and after `finish_stores`; `to` is aligned. */
INLINE void store_past(float *to, Floats x) { _mm512_stream_ps(to, x); }
INLINE Floats all(float x) { return _mm512_set1_ps(x); }
INLINE Floats zeros(void) { return _mm512_setzero_ps(); }
INLINE Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
INLINE Floats subtract(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
INLINE Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
INLINE Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
/* a * b + c, and c - a * b, rounded once. */
INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Floats subtract_product(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
INLINE Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
INLINE Floats smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }
INLINE Floats magnitude(Floats x) { return _mm512_abs_ps(x); }
INLINE Floats rounded(Floats x) { return _mm512_roundscale_ps(x, 0); }
/* x * 2^n, for whole n in [-126, 127]. */
INLINE Floats scaled(Floats x, Floats n) { return _mm512_scalef_ps(x, n); }
INLINE float sum_of(Floats x) { return _mm512_reduce_add_ps(x); }
INLINE float peak_of(Floats x) { return _mm512_reduce_max_ps(x); }
INLINE int are_numbers(Floats x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) == 0; }
INLINE Floats halves(const uint8_t *at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at)); }

/* Write LANES floats as integers of 8 bits; returns the sum of these. */
INLINE int32_t store_levels(int8_t *to, Floats x) {
    const __m512i levels = _mm512_cvtps_epi32(x);
    _mm_storeu_si128((__m128i *)to, _mm512_cvtsepi32_epi8(levels));
    return _mm512_reduce_add_epi32(levels);
}

INLINE __mmask16 inside(int64_t left) {
    return left < LANES ? (__mmask16)((1u << left) - 1) : 0xffff;
}

/* a, and in its first `left` lanes the larger of a and b, or the sum of both. */
INLINE Floats larger_inside(Floats a, Floats b, int64_t left) { return _mm512_mask_max_ps(a, inside(left), a, b); }
INLINE Floats add_inside(Floats a, Floats b, int64_t left) { return _mm512_mask_add_ps(a, inside(left), a, b); }

/* Write the places of up to LANES biases that are 0, counted from `first`; returns their number. Writes LANES numbers. */
INLINE int64_t open_places(const float *bias, int64_t left, int64_t first, int32_t *to) {
    const __m512i places = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __mmask16 within = inside(left);
    const __mmask16 open = _mm512_mask_cmpeq_ps_mask(within, _mm512_maskz_loadu_ps(within, bias), _mm512_setzero_ps());
    _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(open, _mm512_add_epi32(places, _mm512_set1_epi32((int32_t)first))));
    return __builtin_popcount(open);
}

/* The sums of 16 vectors each, in order. Vectors are folded in pairs, to a half, a quarter, an eighth and one number each,
 * so that all sums take 15 additions, where they take 64 one by one. */
INLINE Floats sums_of(Floats *v) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        const __m512 low = _mm512_shuffle_f32x4(v[i], v[i + 8], 0x44), high = _mm512_shuffle_f32x4(v[i], v[i + 8], 0xee);
        v[i] = _mm512_add_ps(low, high);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512 low = _mm512_shuffle_f32x4(v[i], v[i + 4], 0x88), high = _mm512_shuffle_f32x4(v[i], v[i + 4], 0xdd);
        v[i] = _mm512_add_ps(low, high);
    }
    /* The four lanes of v[i] hold vectors i, i + 8, i + 4 and i + 12, in four numbers each. */
    const __m512 first = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
    const __m512 second = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
    const __m512 sums = _mm512_add_ps(_mm512_shuffle_ps(first, second, 0x44), _mm512_shuffle_ps(first, second, 0xee));
    return _mm512_shuffle_f32x4(sums, sums, 0xd8);
}

typedef __m512i Ints;
INLINE Ints all_ints(int32_t x) { return _mm512_set1_epi32(x); }
INLINE Ints plus(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
INLINE Ints bytes(const uint8_t *at) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)at)); }
INLINE Ints signed_bytes(const uint8_t *at) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at)); }
INLINE Ints shorts(const uint8_t *at) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)at)); }
INLINE Ints ints(const uint8_t *at) { return _mm512_loadu_si512(at); }
INLINE Ints high_halves(Ints x) { return _mm512_and_si512(x, _mm512_set1_epi32((int32_t)0xffff0000)); }
INLINE Ints low_bits(Ints x, const int bits) { return _mm512_and_si512(x, _mm512_set1_epi32((1 << bits) - 1)); }
INLINE Ints shifted_right(Ints x, const int bits) { return _mm512_srli_epi32(x, bits); }
INLINE Ints shifted_left(Ints x, const int bits) { return _mm512_slli_epi32(x, bits); }
INLINE Floats floats(Ints x) { return _mm512_cvtepi32_ps(x); }
INLINE Floats as_floats(Ints x) { return _mm512_castsi512_ps(x); }

/* The q-th 4 columns' numbers in a plane of `bits` bits, times 2^up. */
INLINE __m512i in_plane(const uint8_t *plane, int part, const int bits, const int q, const int up) {
    const int per_byte = 8 / bits, down = q % per_byte * bits - up;
    const __m512i packed = _mm512_loadu_si512(plane + 64 * (q / per_byte));
    (void)part; /* A tile has as many outputs as a vector. */
    if (bits == 8)
        return packed;
    return _mm512_and_si512(down > 0 ? _mm512_srli_epi16(packed, down) : _mm512_slli_epi16(packed, -down),
                            _mm512_set1_epi8((char)(((1 << bits) - 1) << up)));
}

#define SIGNED_BYTES 0 /* Whether levels that fill their bytes are less by 128 here. */

/* The levels of the `part`-th LANES outputs of a block. */
INLINE Levels levels_of(const uint8_t *block, const uint8_t *second, int part, const Format format) {
    const int low = reads_second(format) ? format.second : 0;
    Levels levels;
#pragma GCC unroll 8
    for (int q = 0; q < GROUP / 4; q++) {
        levels.of[q] = in_plane(block, part, format.first, q, low);
        if (low)
            levels.of[q] = _mm512_or_si512(levels.of[q], in_plane(second, part, low, q, 0));
        if (format.table)
            levels.of[q] = _mm512_shuffle_epi8(
                _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)tables[format.table])), levels.of[q]);
    }
    return levels;
}

/* Rows whose products are computed side by side, which leaves fewer instructions waiting for those before them. */
#define ABREAST 2
INLINE int abreast(const Format format, const int count) {
    (void)format;
    (void)count;
    return ABREAST;
}

/* sum + the products of levels with a row's 4 columns, which the instruction itself broadcasts. GCC would do that in one more
 * for each, with which 16 rows of Q4_K take 1.04 of the time. */
INLINE Ints add_products(Ints sum, __m512i levels, const int8_t *columns) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(levels), "m"(*(const int32_t *)columns));
    return sum;
}
