/* The vectors of this processor: of 16 floats with AVX-512 VNNI, of 8 with AVX2 or NEON. With NARROW, which tests define,
 * they are of 8 with AVX-512 VNNI too. */
#pragma once
#include <stdint.h>
#include "formats.h"
#include "processor.h"

#define INLINE static inline __attribute__((always_inline))
#define INTEGER 12582912.0f /* 1.5 * 2^23: the bits of this number plus an integer of 22 bits are those of their sum. */
#define INTEGER_BITS 0x4b400000

#if defined(__aarch64__)
#include "neon.h"
#else
/* The bits of the nearest number of fp16, and a number by its bits. */
INLINE uint16_t half_of(float x) { return _cvtss_sh(x, 0); }
INLINE float of_half(uint16_t bits) { return _cvtsh_ss(bits); }
#if defined(__AVX512VNNI__) && !defined(NARROW)
#include "avx512.h"
#else
#include "avx2.h"
#endif
#endif

#ifndef IN_PAIRS
/* Add to `sums` the products of the outputs' levels with those of `count` rows, in 4 times `begin` to `end` columns. */
INLINE void dots(const Levels *levels, const int8_t *columns, const int count, const Format format, const int begin,
                 const int end, Ints *sums)
{
    (void)format;
#pragma GCC unroll 8
    for (int q = begin; q < end; q++)
#pragma GCC unroll 4
        for (int r = 0; r < count; r++)
            sums[r] = add_products(sums[r], levels->of[q], columns + r * GROUP + 4 * q);
}
#endif

#if LANES == 8
/* Write the places of up to LANES biases that are 0, counted from `first`; returns their number. Writes LANES numbers. */
INLINE int64_t open_places(const float *bias, int64_t left, int64_t first, int32_t *to) {
    int64_t count = 0;
    for (int64_t i = 0; i < (left < LANES ? left : LANES); i++) {
        to[count] = (int32_t)(first + i);
        count += bias[i] == 0.0f;
    }
    return count;
}
#endif
