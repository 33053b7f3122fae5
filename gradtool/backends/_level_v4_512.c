/* The kernels for x86-64-v4 on vectors of 512 bits, for processors that work on a whole vector without a slower clock. */
#include "_processor.h"

#ifdef HAS_LEVELS
#pragma GCC target("arch=x86-64-v4,prefer-vector-width=512")
/* _half.h asks, because no macro of the compiler tells. */
#define HAS_512
#define LEVEL level_v4_512
#define LEVEL_NAME "x86-64-v4-512"
#include "_level.h"
#endif
