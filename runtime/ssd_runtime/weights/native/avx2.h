/* Vectors of 8 floats, for processors with AVX2, FMA and F16C, some of which have AVX-VNNI. */
#pragma once

#define LANES 8
#if defined(__AVXVNNI__) || defined(__AVX512VNNI__)
#define INSTRUCTIONS "avxvnni"
#ifdef __AVXVNNI__
#define VPDPBUSD "%{vex%} vpdpbusd"
#else
#define VPDPBUSD "vpdpbusd"
#endif
#define SIGNED_BYTES 0 /* Whether levels that fill their bytes are less by 128 here. */
#else
#define INSTRUCTIONS "avx2-"
#define SIGNED_BYTES 1
#define IN_PAIRS /* Products are added in pairs of 16 bits first. */
#endif
typedef __m256 Floats;
/* The levels of 8 outputs in a group of columns: of 8 times 4 columns, [8 outputs][4 columns] each. */
typedef struct {
    __m256i of[GROUP / 4];
} Levels;

INLINE Floats load(const float *x) { return _mm256_loadu_ps(x); }
INLINE void store(float *to, Floats x) { _mm256_storeu_ps(to, x); }
/* Store past the caches, without reading lines before, what is read late and after `finish_stores`; `to` is aligned. */
INLINE void store_past(float *to, Floats x) { _mm256_stream_ps(to, x); }
INLINE Floats all(float x) { return _mm256_set1_ps(x); }
INLINE Floats zeros(void) { return _mm256_setzero_ps(); }
INLINE Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
INLINE Floats subtract(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
INLINE Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
INLINE Floats divide(Floats a, Floats b) { return _mm256_div_ps(a, b); }
/* a * b + c, and c - a * b, rounded once. */
INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Floats subtract_product(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }
INLINE Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
INLINE Floats smaller(Floats a, Floats b) { return _mm256_min_ps(a, b); }
INLINE Floats magnitude(Floats x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
INLINE Floats rounded(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
/* x * 2^n, for whole n in [-126, 127]. */
INLINE Floats scaled(Floats x, Floats n) {
    const __m256i exponents = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(exponents, 23)));
}
INLINE float sum_of(Floats x) {
    __m128 part = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    part = _mm_add_ps(part, _mm_movehl_ps(part, part));
    return _mm_cvtss_f32(_mm_add_ss(part, _mm_movehdup_ps(part)));
}
INLINE float peak_of(Floats x) {
    __m128 part = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    part = _mm_max_ps(part, _mm_movehl_ps(part, part));
    return _mm_cvtss_f32(_mm_max_ss(part, _mm_movehdup_ps(part)));
}
INLINE int are_numbers(Floats x) { return _mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)) == 0; }
INLINE Floats halves(const uint8_t *at) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at)); }

/* Write LANES floats as integers of 8 bits; returns the sum of these. */
INLINE int32_t store_levels(int8_t *to, Floats x) {
    const __m256i levels = _mm256_cvtps_epi32(x);
    const __m128i low = _mm256_castsi256_si128(levels), high = _mm256_extracti128_si256(levels, 1);
    const __m128i shorts = _mm_packs_epi32(low, high);
    _mm_storel_epi64((__m128i *)to, _mm_packs_epi16(shorts, shorts));
    __m128i sum = _mm_add_epi32(low, high);
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}

/* All ones in the first `left` lanes. */
INLINE Floats inside(int64_t left) {
    const __m256i places = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const int32_t within = left < LANES ? (int32_t)left : LANES;
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(within), places));
}

/* a, and in its first `left` lanes the larger of a and b, or the sum of both. */
INLINE Floats larger_inside(Floats a, Floats b, int64_t left) {
    return _mm256_blendv_ps(a, _mm256_max_ps(a, b), inside(left));
}
INLINE Floats add_inside(Floats a, Floats b, int64_t left) {
    return _mm256_blendv_ps(a, _mm256_add_ps(a, b), inside(left));
}

/* The sums of 8 vectors each, in order. */
INLINE Floats sums_of(Floats *v) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        v[i] = _mm256_hadd_ps(v[2 * i], v[2 * i + 1]);
    const __m256 first = _mm256_hadd_ps(v[0], v[1]), second = _mm256_hadd_ps(v[2], v[3]);
    return _mm256_add_ps(_mm256_permute2f128_ps(first, second, 0x20), _mm256_permute2f128_ps(first, second, 0x31));
}

typedef __m256i Ints;
INLINE Ints all_ints(int32_t x) { return _mm256_set1_epi32(x); }
INLINE Ints plus(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
INLINE Ints bytes(const uint8_t *at) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)at)); }
INLINE Ints signed_bytes(const uint8_t *at) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at)); }
INLINE Ints shorts(const uint8_t *at) { return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)at)); }
INLINE Ints ints(const uint8_t *at) { return _mm256_loadu_si256((const __m256i *)at); }
INLINE Ints high_halves(Ints x) { return _mm256_and_si256(x, _mm256_set1_epi32((int32_t)0xffff0000)); }
INLINE Ints low_bits(Ints x, const int bits) { return _mm256_and_si256(x, _mm256_set1_epi32((1 << bits) - 1)); }
INLINE Ints shifted_right(Ints x, const int bits) { return _mm256_srli_epi32(x, bits); }
INLINE Ints shifted_left(Ints x, const int bits) { return _mm256_slli_epi32(x, bits); }
INLINE Floats floats(Ints x) { return _mm256_cvtepi32_ps(x); }
INLINE Floats as_floats(Ints x) { return _mm256_castsi256_ps(x); }

/* The q-th 4 columns' numbers in a plane of `bits` bits, times 2^up. */
INLINE __m256i in_plane(const uint8_t *plane, int part, const int bits, const int q, const int up) {
    const int per_byte = 8 / bits, down = q % per_byte * bits - up;
    const __m256i packed = _mm256_loadu_si256((const __m256i *)(plane + 64 * (q / per_byte) + 32 * part));
    if (bits == 8)
        return packed;
    return _mm256_and_si256(down > 0 ? _mm256_srli_epi16(packed, down) : _mm256_slli_epi16(packed, -down),
                            _mm256_set1_epi8((char)(((1 << bits) - 1) << up)));
}

/* The levels of the `part`-th LANES outputs of a block. */
INLINE Levels levels_of(const uint8_t *block, const uint8_t *second, int part, const Format format) {
    const int low = reads_second(format) ? format.second : 0;
    Levels levels;
#pragma GCC unroll 8
    for (int q = 0; q < GROUP / 4; q++) {
        levels.of[q] = in_plane(block, part, format.first, q, low);
        if (low)
            levels.of[q] = _mm256_or_si256(levels.of[q], in_plane(second, part, low, q, 0));
        if (format.table)
            levels.of[q] = _mm256_shuffle_epi8(
                _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)tables[format.table])), levels.of[q]);
        if (SIGNED_BYTES && fills_bytes(format))
            levels.of[q] = _mm256_xor_si256(levels.of[q], _mm256_set1_epi8(-128));
    }
    return levels;
}

#define ABREAST 4
#ifdef IN_PAIRS
/* Most pairs of columns whose products a sum of 16 bits holds. Signed levels are at most 128: 2 * 128 * 127 = 32,512. */
INLINE int pairs_at_once(const Format format) {
    return 32767 / (2 * 127 * (fills_bytes(format) ? 128 : largest_level(format)));
}

/* Rows whose products are computed side by side. Each addition to a row's sum waits for the one before. Many rows of formats
 * with two scales take turns, since their sums would leave too few registers for the levels; with levels that fill their
 * bytes all rows do. */
INLINE int abreast(const Format format, const int count) {
    return fills_bytes(format) || (has_halves(format) && count > ABREAST) ? 1 : ABREAST;
}

/* The products of levels with a row's 4 columns, in pairs of 16 bits; `add_products` adds them to a sum. GCC itself would
 * multiply for all rows before it adds, which takes more registers than there are. */
INLINE __m256i first_products(__m256i levels, const int8_t *columns) {
    __m256i products;
    __asm__("vpbroadcastd %2, %0\n\tvpmaddubsw %0, %1, %0"
            : "=&x"(products) : "x"(levels), "m"(*(const int32_t *)columns));
    return products;
}
INLINE __m256i add_products(__m256i sum, __m256i levels, const int8_t *columns) {
    __m256i products;
    __asm__("vpbroadcastd %3, %1\n\tvpmaddubsw %1, %2, %1\n\tvpaddw %1, %0, %0"
            : "+x"(sum), "=&x"(products) : "x"(levels), "m"(*(const int32_t *)columns));
    return sum;
}

/* Add to `sums` the products of the outputs' levels with those of `count` rows, in 4 times `begin` to `end` columns. */
INLINE void dots(const Levels *levels, const int8_t *columns, const int count, const Format format, const int begin,
                 const int end, Ints *sums)
{
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i pairs[ABREAST];
#pragma GCC unroll 8
    for (int q = begin; q < end; q++) {
        const int place = (q - begin) % pairs_at_once(format), last = place == pairs_at_once(format) - 1 || q == end - 1;
        const __m256i level = levels->of[q];
#pragma GCC unroll 4
        for (int r = 0; r < count; r++) {
            const int8_t *at = columns + r * GROUP + 4 * q;
            if (fills_bytes(format)) {
                const __m256i row = _mm256_set1_epi32(*(const int32_t *)at);
                pairs[r] = _mm256_maddubs_epi16(_mm256_abs_epi8(level), _mm256_sign_epi8(row, level));
            } else
                pairs[r] = place ? add_products(pairs[r], level, at) : first_products(level, at);
            if (last)
                sums[r] = _mm256_add_epi32(sums[r], _mm256_madd_epi16(pairs[r], ones));
        }
    }
}
#else
INLINE int abreast(const Format format, const int count) {
    (void)format;
    (void)count;
    return ABREAST;
}

/* sum + the products of levels with a row's 4 columns. */
INLINE Ints add_products(Ints sum, __m256i levels, const int8_t *columns) {
    __m256i row;
    __asm__("vpbroadcastd %3, %1\n\t" VPDPBUSD " %1, %2, %0"
            : "+x"(sum), "=&x"(row) : "x"(levels), "m"(*(const int32_t *)columns));
    return sum;
}
#endif
