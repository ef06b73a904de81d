/* exp of 16 numbers at once. */
#pragma once
#include <immintrin.h>

/* exp(x) for x in [-87, 88], to about one unit in the last place: 2^n times a polynomial in the rest. */
static inline __m512 exponential(__m512 x) {
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 rest = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145751953125f), x);
    rest = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860677e-6f), rest);
    /* Taylor's series: the rest is at most ln 2 / 2, so the first term left out is below 3e-9. */
    __m512 sum = _mm512_set1_ps(1.0f / 5040);
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f / 720));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f / 120));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f / 24));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f / 6));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(0.5f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(sum, n);
}
