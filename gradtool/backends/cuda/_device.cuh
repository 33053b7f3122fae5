// Declarations for all kernels.
//
// A module is this file, _codes.h and the other .cuh files, one after another, compiled by NVRTC for a storage type,
// GRADTOOL_STORAGE; or without it, for layer norms of several types. Contraction must be off (--fmad=false) and
// subnormals on (--ftz=false): every product and every sum is rounded once.
//
// The tests compile the same text for the CPU, and define what NVRTC would.

#ifdef __CUDACC_RTC__
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t, uintptr_t;
// Unused functions: a module for one type does not call the helpers of other types.
#pragma nv_diag_suppress 177
// The argument of a kernel, `job`, is a struct of 8-byte fields, passed by value.
#define KERNEL(THREADS, NAME, JOB) extern "C" __global__ void __launch_bounds__(THREADS) NAME(const JOB job)
// Loads the cache line of an address.
#define PREFETCH(ADDRESS) asm volatile("prefetch.global.L2 [%0];" ::"l"(ADDRESS))
#endif

#define DEVICE static __device__ __forceinline__
#define HELPER DEVICE

