/* The kernels for x86-64-v3: AVX2, FMA and F16C. */
#include "_processor.h"

#ifdef HAS_LEVELS
#pragma GCC target("arch=x86-64-v3")
#define LEVEL level_v3
#define LEVEL_NAME "x86-64-v3"
#include "_level.h"
#endif
