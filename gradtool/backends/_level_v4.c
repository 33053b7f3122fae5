/* The kernels for x86-64-v4: AVX-512. */
#include "_processor.h"

#ifdef HAS_LEVELS
/* Its instructions, on vectors of 256 bits: those of 512 measure slower or the same (Zen 4), or slow the clock. */
#pragma GCC target("arch=x86-64-v4,prefer-vector-width=256")
#define LEVEL level_v4
#define LEVEL_NAME "x86-64-v4"
#include "_level.h"
#endif
