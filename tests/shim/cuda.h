// As much of CUDA as the kernels use, on the CPU: one thread block at a time, whose threads are fibers that take turns at
// barriers. If a thread does not reach a barrier that others wait at, the program aborts.
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <math.h>
#include <sys/mman.h>
#include <ucontext.h>

#define __device__
#define __forceinline__ inline
#define __noinline__
// Blocks run one after another, so one copy is enough.
#define __shared__ static
#define PREFETCH(ADDRESS) ((void)*(volatile const char *)(ADDRESS))
#define KERNEL(THREADS, NAME, JOB) extern "C" void NAME(const JOB &job)

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct Index { unsigned x; };
static Index threadIdx, blockIdx;

namespace shim {

enum { MAX_THREADS = 1024, STACK_BYTES = 256 << 10 };
enum State { READY, AT_WARP, AT_BLOCK, DONE };

struct Fiber {
    ucontext_t context;
    jmp_buf here;
    bool started;
    State state;
};

static Fiber fibers[MAX_THREADS];
static uint64_t slots[MAX_THREADS];
static jmp_buf scheduler;
static int count, current;
static void (*kernel)(const void *);
static const void *job;

static void yield(State state)
{
    fibers[current].state = state;
    if (!_setjmp(fibers[current].here)) _longjmp(scheduler, 1);
}

static void body()
{
    kernel(job);
    fibers[current].state = DONE;
    _longjmp(scheduler, 1);
}

static void resume(int number)
{
    current = number;
    threadIdx.x = (unsigned)number;
    if (_setjmp(scheduler)) return;
    Fiber &fiber = fibers[number];
    if (fiber.started) _longjmp(fiber.here, 1);
    fiber.started = true;
    setcontext(&fiber.context);
}

// Releases the threads from `first` to `last` if all of them wait at the same kind of barrier.
static bool release(int first, int last, State state)
{
    int waiting = 0, live = 0;
    for (int i = first; i < last; i++) waiting += fibers[i].state == state, live += fibers[i].state != DONE;
    if (!waiting || waiting < live) return false;
    for (int i = first; i < last; i++)
        if (fibers[i].state == state) fibers[i].state = READY;
    return true;
}

static void run_block(bool backwards)
{
    static char *stacks = (char *)mmap(NULL, (size_t)MAX_THREADS * STACK_BYTES, PROT_READ | PROT_WRITE,
                                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    for (int i = 0; i < count; i++) {
        Fiber &fiber = fibers[i];
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = stacks + (size_t)i * STACK_BYTES;
        fiber.context.uc_stack.ss_size = STACK_BYTES;
        fiber.context.uc_link = NULL;
        makecontext(&fiber.context, body, 0);
        fiber.started = false;
        fiber.state = READY;
    }
    for (;;) {
        bool moved = false, live = false;
        for (int i = 0; i < count; i++) {
            int number = backwards ? count - 1 - i : i;
            if (fibers[number].state == READY) resume(number), moved = true;
            live |= fibers[number].state != DONE;
        }
        if (!live) return;
        for (int warp = 0; warp < count; warp += 32)
            moved |= release(warp, warp + 32 < count ? warp + 32 : count, AT_WARP);
        moved |= release(0, count, AT_BLOCK);
        if (!moved) {
            fprintf(stderr, "shim: threads of block %u wait at different barriers\n", blockIdx.x);
            abort();
        }
    }
}

}  // namespace shim

static inline void __syncthreads() { shim::yield(shim::AT_BLOCK); }

template <class T> static T __shfl_down_sync(unsigned, T value, int step)
{
    static_assert(sizeof(T) <= 8, "a slot has 8 bytes");
    const int lane = shim::current % 32;
    memcpy(&shim::slots[shim::current], &value, sizeof value);
    shim::yield(shim::AT_WARP);
    if (lane + step < 32) memcpy(&value, &shim::slots[shim::current + step], sizeof value);
    shim::yield(shim::AT_WARP);
    return value;
}

static inline float __double2float_rz(double value)
{
    float nearest = (float)value;
    return fabs((double)nearest) > fabs(value) ? nextafterf(nearest, 0) : nearest;
}

static inline void atomicAdd(unsigned *target, unsigned value) { *target += value; }
static inline void atomicAdd(unsigned long long *target, unsigned long long value) { *target += value; }
static inline void atomicMax(unsigned long long *target, unsigned long long value)
{
    if (value > *target) *target = value;
}

extern "C" void shim_launch(void (*kernel)(const void *), const void *job, int blocks, int threads, int backwards)
{
    shim::kernel = kernel, shim::job = job, shim::count = threads;
    for (int i = 0; i < blocks; i++) {
        blockIdx.x = (unsigned)(backwards ? blocks - 1 - i : i);
        shim::run_block(backwards);
    }
}
