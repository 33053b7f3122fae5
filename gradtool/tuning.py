"""Sizes that trade memory for speed, in one place for tests and experiments; all but two leave every bit as it is."""

# Of a block: large enough that a system call costs nothing beside the bytes it moves, small enough for the cache.
BLOCK_BYTES = 2 << 20
# The blocks that a pass reads in one task if it writes nothing: Python's own work, 25 us a task, is little beside them.
# And the bytes that it reads at a time, of all sides together: they stay in half of a core's L2 cache, and have room
# for a tile of F64.
STREAM_BLOCKS, STREAM_BYTES = 4, 512 << 10
# The most tensors in a block, whatever their size: each takes some bookkeeping.
BLOCK_SPANS = 4096

# Tiles of a buffer that are added to at once: their float64 sums, and the gradients, should stay in a core's cache.
SUM_TILES = 6
# Bytes of gradients that are read before they are added.
BATCH_BYTES = 2 << 20
# Of all gradients whose median is computed, if they were float64: sorted columns should stay in the cache, too.
WINDOW_BYTES = 4 << 20
# Elements of a gradient that is broadcast, read at a time.
WINDOW_ELEMENTS = 1 << 18

# A patch of a layer norm, and its most rows. Sums over rows are taken patch by patch, so these two decide bits.
PATCH_ELEMENTS = 1 << 18
PATCH_ROWS = 1 << 14

# The most bytes of a shard that a task of another process measures: about a second of work, beside some ms of overhead.
PART_BYTES = 1 << 30
# Small shards are measured together: at most this many parts of that size, and files, in a task.
SMALL_PARTS, PART_FILES = 16, 256
# Tasks in flight for each thread of an engine's workers: a task that runs, and the tasks that wait for it.
TASKS_IN_FLIGHT = 4
