/* The vectors of this processor: of 16 floats with AVX-512 VNNI, of 8 with AVX2. */
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include "formats.h"

#define INLINE static inline __attribute__((always_inline))
#define INTEGER 12582912.0f /* 1.5 * 2^23: the bits of this number plus an integer of 22 bits are those of their sum. */
#define INTEGER_BITS 0x4b400000

#ifdef __AVX512VNNI__
#include "avx512.h"
#else
#include "avx2.h"
#endif
