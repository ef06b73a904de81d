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
/* Let other threads see what was stored past the caches. */
static inline void finish_stores(void) { _mm_sfence(); }

/* The family of a processor of AMD: 25 of Zen 3 and 4, 26 of Zen 5. That of others is 0. */
static unsigned int amd_family;

__attribute__((constructor)) static void look_at_processor(void) {
    unsigned int most, vendor, signature, other;
    if (__get_cpuid(0, &most, &vendor, &other, &other) && __get_cpuid(1, &signature, &most, &other, &other))
        amd_family = vendor == signature_AMD_ebx ? (signature >> 8 & 15) + (signature >> 20 & 255) : 0;
}
#else
static inline RoundingMode rounding_mode(void) {
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
static inline void set_rounding_mode(RoundingMode mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
static inline void pause_thread(void) { __asm__ volatile("isb"); }
static inline void finish_stores(void) {}

static const unsigned int amd_family = 0;
#endif
