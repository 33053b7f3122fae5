// What the kernels are written in, beside CUDA itself.
//
// A module is this file, _codes.h, and the other .cuh files, one after another, compiled by NVRTC for one storage type,
// GRADTOOL_STORAGE; or without it, for layer norms whose tensors differ in theirs. Contraction must be off
// (--fmad=false) and subnormals on (--ftz=false): every product and every sum is rounded by itself, once.
//
// The same text is compiled for the processor by the tests, which then define what NVRTC would.

#ifdef __CUDACC_RTC__
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t, uintptr_t;
// A module for one type leaves the helpers of the others alone.
#pragma nv_diag_suppress 177
// A kernel's one argument, `job`, is a struct of fields of 8 bytes each, passed by value.
#define KERNEL(THREADS, NAME, JOB) extern "C" __global__ void __launch_bounds__(THREADS) NAME(const JOB job)
// Brings what is near an address from the device's memory into its cache.
#define PREFETCH(ADDRESS) asm volatile("prefetch.global.L2 [%0];" ::"l"(ADDRESS))
#endif

#define DEVICE static __device__ __forceinline__
#define HELPER DEVICE

