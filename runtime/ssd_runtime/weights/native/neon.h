/* Vectors of 8 floats, for Arm processors of 64 bits with dot products: two of NEON's own. Every sum runs in AVX2's order. */
#pragma once
#include <arm_neon.h>

#define LANES 8
#define INSTRUCTIONS "neon"
typedef struct {
    float32x4_t of[2];
} Floats;
typedef struct {
    int32x4_t of[2];
} Ints;
/* The levels of 8 outputs in a group of columns: of 8 times 4 columns, [8 outputs][4 columns] each. */
typedef struct {
    uint8x16_t of[GROUP / 4][2];
} Levels;

/* What an expression is for either half h of vectors. */
#define HALF_OF(half, ...) ({const int h = half; (void)h; __VA_ARGS__; })
#define HALVES(type, ...) ((type){{HALF_OF(0, __VA_ARGS__), HALF_OF(1, __VA_ARGS__)}})

INLINE Floats load(const float *x) { return HALVES(Floats, vld1q_f32(x + 4 * h)); }
INLINE void store(float *to, Floats x) {
    vst1q_f32(to, x.of[0]);
    vst1q_f32(to + 4, x.of[1]);
}
INLINE void store_past(float *to, Floats x) { store(to, x); }
INLINE Floats all(float x) { return HALVES(Floats, vdupq_n_f32(x)); }
INLINE Floats zeros(void) { return all(0.0f); }
INLINE Floats add(Floats a, Floats b) { return HALVES(Floats, vaddq_f32(a.of[h], b.of[h])); }
INLINE Floats subtract(Floats a, Floats b) { return HALVES(Floats, vsubq_f32(a.of[h], b.of[h])); }
INLINE Floats multiply(Floats a, Floats b) { return HALVES(Floats, vmulq_f32(a.of[h], b.of[h])); }
INLINE Floats divide(Floats a, Floats b) { return HALVES(Floats, vdivq_f32(a.of[h], b.of[h])); }
/* a * b + c, and c - a * b, rounded once. */
INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return HALVES(Floats, vfmaq_f32(c.of[h], a.of[h], b.of[h])); }
INLINE Floats subtract_product(Floats a, Floats b, Floats c) { return HALVES(Floats, vfmsq_f32(c.of[h], a.of[h], b.of[h])); }
/* The second unless the first is larger or smaller, so that a second that is no number stays. */
INLINE Floats larger(Floats a, Floats b) {
    return HALVES(Floats, vbslq_f32(vcgtq_f32(a.of[h], b.of[h]), a.of[h], b.of[h]));
}
INLINE Floats smaller(Floats a, Floats b) {
    return HALVES(Floats, vbslq_f32(vcltq_f32(a.of[h], b.of[h]), a.of[h], b.of[h]));
}
INLINE Floats magnitude(Floats x) { return HALVES(Floats, vabsq_f32(x.of[h])); }
INLINE Floats rounded(Floats x) { return HALVES(Floats, vrndnq_f32(x.of[h])); }
/* x * 2^n, for whole n in [-126, 127]. */
INLINE Floats scaled(Floats x, Floats n) {
    return HALVES(Floats, const int32x4_t exponents = vaddq_s32(vcvtnq_s32_f32(n.of[h]), vdupq_n_s32(127));
                  vmulq_f32(x.of[h], vreinterpretq_f32_s32(vshlq_n_s32(exponents, 23))));
}
INLINE float sum_of(Floats x) {
    const float32x4_t half = vaddq_f32(x.of[0], x.of[1]);
    const float32x2_t quarter = vadd_f32(vget_low_f32(half), vget_high_f32(half));
    return vget_lane_f32(quarter, 0) + vget_lane_f32(quarter, 1);
}
INLINE float peak_of(Floats x) {
    const Floats half = larger((Floats){{x.of[0], x.of[0]}}, (Floats){{x.of[1], x.of[1]}});
    const Floats quarter = larger(half, HALVES(Floats, vextq_f32(half.of[h], half.of[h], 2)));
    const float first = vgetq_lane_f32(quarter.of[0], 0), second = vgetq_lane_f32(quarter.of[0], 1);
    return first > second ? first : second;
}
INLINE int are_numbers(Floats x) {
    return vminvq_u32(vandq_u32(vceqq_f32(x.of[0], x.of[0]), vceqq_f32(x.of[1], x.of[1]))) != 0;
}
INLINE Floats halves(const uint8_t *at) {
    return HALVES(Floats, vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(at + 8 * h))));
}
/* The bits of the nearest number of fp16, and a number by its bits. */
INLINE uint16_t half_of(float x) { return vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(x))), 0); }
INLINE float of_half(uint16_t bits) { return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(bits))), 0); }

/* Write LANES floats as integers of 8 bits; returns the sum of these. */
INLINE int32_t store_levels(int8_t *to, Floats x) {
    const Ints levels = HALVES(Ints, vcvtnq_s32_f32(x.of[h]));
    vst1_s8(to, vqmovn_s16(vcombine_s16(vqmovn_s32(levels.of[0]), vqmovn_s32(levels.of[1]))));
    return vaddvq_s32(vaddq_s32(levels.of[0], levels.of[1]));
}

/* In the first `left` lanes the second vector, else the first. */
INLINE Floats chosen_inside(Floats a, Floats b, int64_t left) {
    static const int32_t places[LANES] = {0, 1, 2, 3, 4, 5, 6, 7};
    const int32x4_t within = vdupq_n_s32(left < LANES ? (int32_t)left : LANES);
    return HALVES(Floats, vbslq_f32(vcgtq_s32(within, vld1q_s32(places + 4 * h)), b.of[h], a.of[h]));
}
/* a, and in its first `left` lanes the larger of a and b, or the sum of both. */
INLINE Floats larger_inside(Floats a, Floats b, int64_t left) { return chosen_inside(a, larger(a, b), left); }
INLINE Floats add_inside(Floats a, Floats b, int64_t left) { return chosen_inside(a, add(a, b), left); }

/* The sums of 8 vectors each, in order. */
INLINE Floats sums_of(Floats *v) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        v[i] = HALVES(Floats, vpaddq_f32(v[2 * i].of[h], v[2 * i + 1].of[h]));
    const Floats first = HALVES(Floats, vpaddq_f32(v[0].of[h], v[1].of[h]));
    const Floats second = HALVES(Floats, vpaddq_f32(v[2].of[h], v[3].of[h]));
    return (Floats){{vaddq_f32(first.of[0], first.of[1]), vaddq_f32(second.of[0], second.of[1])}};
}

INLINE Ints all_ints(int32_t x) { return HALVES(Ints, vdupq_n_s32(x)); }
INLINE Ints plus(Ints a, Ints b) { return HALVES(Ints, vaddq_s32(a.of[h], b.of[h])); }
INLINE Ints shorts(const uint8_t *at) {
    return HALVES(Ints, vreinterpretq_s32_u32(vmovl_u16(vreinterpret_u16_u8(vld1_u8(at + 8 * h)))));
}
INLINE Ints bytes(const uint8_t *at) {
    const uint16x8_t all_of_them = vmovl_u8(vld1_u8(at));
    return (Ints){{vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(all_of_them))),
                   vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(all_of_them)))}};
}
INLINE Ints signed_bytes(const uint8_t *at) {
    const int16x8_t all_of_them = vmovl_s8(vld1_s8((const int8_t *)at));
    return (Ints){{vmovl_s16(vget_low_s16(all_of_them)), vmovl_s16(vget_high_s16(all_of_them))}};
}
INLINE Ints ints(const uint8_t *at) { return HALVES(Ints, vreinterpretq_s32_u8(vld1q_u8(at + 16 * h))); }
INLINE Ints high_halves(Ints x) { return HALVES(Ints, vandq_s32(x.of[h], vdupq_n_s32((int32_t)0xffff0000))); }
INLINE Ints low_bits(Ints x, const int bits) { return HALVES(Ints, vandq_s32(x.of[h], vdupq_n_s32((1 << bits) - 1))); }
INLINE Ints shifted_right(Ints x, const int bits) { return HALVES(Ints, (int32x4_t)((uint32x4_t)x.of[h] >> bits)); }
INLINE Ints shifted_left(Ints x, const int bits) { return HALVES(Ints, x.of[h] << bits); }
INLINE Floats floats(Ints x) { return HALVES(Floats, vcvtq_f32_s32(x.of[h])); }
INLINE Floats as_floats(Ints x) { return HALVES(Floats, vreinterpretq_f32_s32(x.of[h])); }

/* Half of the q-th 4 columns' numbers in a plane of `bits` bits, times 2^up. */
INLINE uint8x16_t in_plane(const uint8_t *plane, int part, const int bits, const int q, const int up, const int h) {
    const int per_byte = 8 / bits, down = q % per_byte * bits - up;
    const uint8x16_t packed = vld1q_u8(plane + 64 * (q / per_byte) + 32 * part + 16 * h);
    if (bits == 8)
        return packed;
    return (down > 0 ? packed >> down : packed << -down) & (uint8_t)(((1 << bits) - 1) << up);
}

#define SIGNED_BYTES 1 /* Whether levels that fill their bytes are less by 128 here. */

/* The levels of the `part`-th LANES outputs of a block. */
INLINE Levels levels_of(const uint8_t *block, const uint8_t *second, int part, const Format format) {
    const int low = reads_second(format) ? format.second : 0;
    Levels levels;
#pragma GCC unroll 16
    for (int i = 0; i < GROUP / 4 * 2; i++) {
        const int q = i / 2, h = i % 2;
        uint8x16_t level = in_plane(block, part, format.first, q, low, h);
        if (low)
            level |= in_plane(second, part, low, q, 0, h);
        if (format.table)
            level = vqtbl1q_u8(vld1q_u8(tables[format.table]), level);
        levels.of[q][h] = fills_bytes(format) ? level ^ 128 : level;
    }
    return levels;
}

/* Rows whose products are computed side by side: their sums fit into registers beside the levels. */
#define ABREAST 4
INLINE int abreast(const Format format, const int count) {
    (void)count;
    return has_halves(format) ? 1 : ABREAST;
}

/* sum + the products of levels, which are all below 128 here, with a row's 4 columns. */
INLINE Ints add_products(Ints sum, const uint8x16_t *levels, const int8_t *columns) {
    const int8x16_t row = vreinterpretq_s8_s32(vdupq_n_s32(*(const int32_t *)columns));
    return HALVES(Ints, vdotq_s32(sum.of[h], vreinterpretq_s8_u8(levels[h]), row));
}
