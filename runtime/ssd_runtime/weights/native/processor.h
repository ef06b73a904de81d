/* What threads ask of the processor that they run on. */
#pragma once
#include <stdint.h>

/* How a thread rounds, and whether it flushes the smallest numbers to zero. */
typedef uint64_t RoundingMode;
#ifdef __x86_64__
#include <cpuid.h>
#include <immintrin.h>

static inline RoundingMode rounding_mode(void) { return _mm_getcsr(); }
static inline void set_rounding_mode(RoundingMode mode) { _mm_setcsr((unsigned int)mode); }
/* Let the other thread of this core run, while this one waits. */
static inline void pause_thread(void) { _mm_pause(); }

/* Whether this is a Zen 5 of AMD or a later one. */
static int is_zen5;

__attribute__((constructor)) static void look_at_processor(void) {
    unsigned int most, vendor, signature, other;
    if (__get_cpuid(0, &most, &vendor, &other, &other) && __get_cpuid(1, &signature, &most, &other, &other))
        is_zen5 = vendor == signature_AMD_ebx && (signature >> 8 & 15) + (signature >> 20 & 255) >= 26;
}
#else
static inline RoundingMode rounding_mode(void) {
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
static inline void set_rounding_mode(RoundingMode mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
static inline void pause_thread(void) { __asm__ volatile("isb"); }

static const int is_zen5 = 0;
#endif
