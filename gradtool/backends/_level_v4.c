/* The kernels for x86-64-v4: AVX-512. */
#include "_processor.h"

#ifdef HAS_LEVELS
#pragma GCC target("arch=x86-64-v4,prefer-vector-width=256")
#define LEVEL level_v4
#define LEVEL_NAME "x86-64-v4"
#include "_level.h"
#endif
