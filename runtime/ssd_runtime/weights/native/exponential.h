/* exp and sigmoid of vectors of numbers. */
#pragma once
#include "lanes.h"

/* exp(x) for x in [-87, 88], to about one unit in the last place: 2^n times a polynomial in the rest. */
INLINE Floats exponential(Floats x) {
    const Floats n = rounded(multiply(x, all(1.44269504f)));
    Floats rest = subtract_product(n, all(0.693145751953125f), x);
    rest = subtract_product(n, all(1.42860677e-6f), rest);
    /* Taylor's series: the rest is at most ln 2 / 2, so the first term left out is below 3e-9. */
    Floats sum = all(1.0f / 5040);
    sum = multiply_add(sum, rest, all(1.0f / 720));
    sum = multiply_add(sum, rest, all(1.0f / 120));
    sum = multiply_add(sum, rest, all(1.0f / 24));
    sum = multiply_add(sum, rest, all(1.0f / 6));
    sum = multiply_add(sum, rest, all(0.5f));
    sum = multiply_add(sum, rest, all(1.0f));
    sum = multiply_add(sum, rest, all(1.0f));
    return scaled(sum, n);
}

/* x * sigmoid(by). */
INLINE Floats sigmoid_times(Floats by, Floats x) {
    const Floats bounded = larger(all(-87.0f), smaller(all(87.0f), by)); /* NaN stays: the second is taken. */
    return divide(x, add(all(1.0f), exponential(subtract(zeros(), bounded))));
}

/* Squeezed smoothly into (-cap, cap): cap * tanh(x / cap), where tanh(x) is 2 sigmoid(2 x) - 1. */
INLINE Floats capped(Floats x, float cap) {
    return subtract(sigmoid_times(multiply(x, all(2.0f / cap)), all(2.0f * cap)), all(cap));
}
