/* What the C kernels need of a compiler, and codes at any address. The headers of the kernels build on this. */
#ifndef GRADTOOL_BASE_H
#define GRADTOOL_BASE_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if FLT_EVAL_METHOD != 0
#error "these kernels need float and double arithmetic without excess precision"
#endif

/* A row on the stack begins at a cache line. Elsewhere its vectors cross lines, which costs up to a fifth of the speed. */
#define ALIGNED _Alignas(64)

/* Not a plain `inline`, so that the compiler can vectorize every loop over them. */
#if defined(__GNUC__)
#define HELPER static inline __attribute__((always_inline))
#else
#define HELPER static inline
#endif

/* Whether fmaf is an instruction; elsewhere it is slow. */
#if defined(__FMA__) || defined(__FP_FAST_FMAF)
enum { HAS_FMA = 1 };
#else
enum { HAS_FMA = 0 };
#endif

/* Codes, whatever their size, that are compared in a stretch; a whole number of vectors. */
enum { SIDE_BY_SIDE = 64 };

/* A tensor can have any address. */
HELPER uint8_t load8(const char *at) { return (uint8_t)*at; }
HELPER uint16_t load16(const char *at) { uint16_t code; memcpy(&code, at, sizeof code); return code; }
HELPER uint32_t load32(const char *at) { uint32_t code; memcpy(&code, at, sizeof code); return code; }
HELPER uint64_t load64(const char *at) { uint64_t code; memcpy(&code, at, sizeof code); return code; }
HELPER void store8(char *at, uint8_t code) { *at = (char)code; }
HELPER void store16(char *at, uint16_t code) { memcpy(at, &code, sizeof code); }
HELPER void store32(char *at, uint32_t code) { memcpy(at, &code, sizeof code); }
HELPER void store64(char *at, uint64_t code) { memcpy(at, &code, sizeof code); }

#endif
