/* Where the bytes of tiles come from: a block in memory, or in a file, of which a window is read at a time.
 *
 * What was read is summed while it is in the L2 cache, which a whole block would leave. */
#ifndef GRADTOOL_SOURCE_H
#define GRADTOOL_SOURCE_H

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "_storage.h"

enum { ENDS_EARLY = -1 };

/* Bytes `begin` to `end` of the block are at `data`; of a block in memory these are all. In a file the block has `nbytes`
 * from byte `at` on. `problem` is the error of a read, or ENDS_EARLY. */
struct source {
    char *data;
    int64_t begin, end;
    int fd, problem;
    int64_t at, nbytes, room, read, nanoseconds;
};

static int64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* Reads on, as much as there is room for, until the window ends behind byte `end`. Returns whether it does. */
static int read_on(struct source *source, int64_t end)
{
    int64_t left = source->nbytes - source->begin, stop = source->begin + (left < source->room ? left : source->room);
    while (source->end < end) {
        char *to = source->data + (source->end - source->begin);
        ssize_t count = pread(source->fd, to, (size_t)(stop - source->end), (off_t)(source->at + source->end));
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) {
            source->problem = count ? errno : ENDS_EARLY;
            return 0;
        }
        source->end += count, source->read += count;
    }
    return 1;
}

/* Moves the window to a byte, and reads; bytes that are there already stay. Returns whether it could. */
static int move(struct source *source, int64_t begin, int64_t nbytes)
{
    int64_t overlap = begin >= source->begin && begin < source->end ? source->end - begin : 0, began = now();
    if (overlap) memmove(source->data, source->data + (begin - source->begin), (size_t)overlap);
    source->begin = begin, source->end = begin + overlap;
    int is_there = read_on(source, begin + nbytes);
    source->nanoseconds += now() - began;
    return is_there;
}

/* Bytes of the block, from byte `begin` on; NULL if they cannot be read. */
HELPER char *bytes_of(struct source *source, int64_t begin, int64_t nbytes)
{
    int is_there = source->begin <= begin && begin + nbytes <= source->end;
    return is_there || move(source, begin, nbytes) ? source->data + (begin - source->begin) : NULL;
}

#endif
