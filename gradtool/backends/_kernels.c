/* The Python module of the compiled kernels. The headers beside this file have the arithmetic.
 *
 * Every kernel has a reference in numpy (cpu.py, tiles.py) that defines the bits, and needs one pass over memory where
 * numpy needs several. Nothing is fused that is not written so (-ffp-contract=off), lanes are added in order, and a
 * written NaN is the quiet NaN of its type.
 *
 * The loops work on a row at a time, which stays in the L1 cache, and are simple enough for the compiler to vectorize.
 * One build has them for several levels of a processor, and uses the best that it runs on.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <string.h>

#define LEVEL level_any
#define LEVEL_NAME "any"
#include "_level.h"
#include "_processor.h"

/* The kernels in use. */
static const struct level *kernels = &level_any;

#ifdef HAS_LEVELS
extern const struct level level_v3, level_v4, level_v4_512;

/* Whether vectors of 512 bits are faster: on Zen 5 they are, by up to a half. Of AMD's processors that have AVX-512, it
 * is the first that has AVX-VNNI, too. */
static int is_fast_with_512(void)
{
    return __builtin_cpu_is("amd") && __builtin_cpu_supports("x86-64-v4") && __builtin_cpu_supports("avxvnni");
}

/* The levels that this processor runs, the best first. */
static const struct level *level_at(int i)
{
    const struct level *all[5] = {NULL};
    int count = 0;
    if (is_fast_with_512()) all[count++] = &level_v4_512;
    if (__builtin_cpu_supports("x86-64-v4")) all[count++] = &level_v4;
    if (__builtin_cpu_supports("x86-64-v3")) all[count++] = &level_v3;
    all[count] = &level_any;
    return i <= count ? all[i] : NULL;
}
#else
static const struct level *level_at(int i) { return i ? NULL : &level_any; }
#endif

/* Checks a row of a table of pieces. Returns what is wrong with it, or NULL; so do the next functions. */
static const char *check_piece(const Py_buffer *block, const int64_t *piece)
{
    if (piece[0] < 0 || piece[0] >= DTYPES) return "no such storage type";
    if (piece[1] < 0 || piece[1] > block->len || piece[2] < 0) return "a piece lies outside its block";
    if (piece[2] > (block->len - piece[1]) / ITEMSIZE[piece[0]]) return "a piece lies outside its block";
    return NULL;
}

/* A block that is only read may be in memory, or in a file. Of that, `memory` has no bytes and `room` what is read at a
 * time; `report` says how the reading went. */
struct block { struct source source; Py_buffer memory, room, report; };

/* Converts an argument: a buffer, or as FileBlock (fd, begin, nbytes, room, report). Called without one to clean up. */
static int to_block(PyObject *object, void *address)
{
    struct block *block = address;
    if (object) {
        memset(block, 0, sizeof *block);
        if (PyTuple_Check(object)) {
            struct source *source = &block->source;
            block->memory.readonly = 1;
            if (!PyArg_ParseTuple(object, "iLnw*w*", &source->fd, &source->at, &block->memory.len, &block->room,
                                  &block->report))
                return 0;
            source->data = block->room.buf, source->room = block->room.len, source->nbytes = block->memory.len;
        } else {
            if (PyObject_GetBuffer(object, &block->memory, PyBUF_SIMPLE)) return 0;
            block->source.data = block->memory.buf, block->source.end = block->memory.len;
        }
        return Py_CLEANUP_SUPPORTED;
    }
    Py_buffer *const all[] = {&block->memory, &block->room, &block->report};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) PyBuffer_Release(all[i]);
    return 1;
}

/* Checks a block and its pieces. Of a file, the room must take each tile. */
static const char *check_block(const struct block *block, const int64_t *piece, Py_ssize_t k)
{
    const struct source *source = &block->source;
    if (block->report.buf && block->report.len != 24) return "a report of three numbers is needed";
    if (block->report.buf && (source->nbytes < 0 || source->at < 0 || source->at > INT64_MAX - source->nbytes))
        return "a block of a file is needed";
    for (Py_ssize_t i = 0; i < k; i++, piece += 3) {
        const char *problem = check_piece(&block->memory, piece);
        if (problem) return problem;
        int64_t tile = (piece[2] < TILE ? piece[2] : TILE) * ITEMSIZE[piece[0]];
        if (block->report.buf && block->room.len < tile) return "room for a tile is needed";
    }
    return NULL;
}

/* Reports how a file was read: how many bytes, the nanoseconds that it took, and what went wrong. */
static void report(const struct block *block)
{
    int64_t *to = block->report.buf;
    if (to) to[0] = block->source.read, to[1] = block->source.nanoseconds, to[2] = block->source.problem;
}

static PyObject *done(const char *problem)
{
    if (!problem) Py_RETURN_NONE;
    PyErr_SetString(PyExc_ValueError, problem);
    return NULL;
}

/* Checks that results have as many entries as there are tiles and bins, and wide values as there are elements. */
static const char *check_results(const int64_t *piece, Py_ssize_t k, const Py_buffer *sums, const Py_buffer *exponents,
                                 const Py_buffer *wide, const Py_buffer *bins)
{
    Py_ssize_t tiles = 0, elements = 0, count = 0;
    for (Py_ssize_t i = 0; i < k; i++, piece += 3) {
        tiles += (Py_ssize_t)((piece[2] + TILE - 1) / TILE);
        elements += (Py_ssize_t)piece[2];
        count += piece[0] == F64 ? BINS64 : BINS32;
    }
    if (wide->buf && wide->len != 8 * elements) return "one wide value per element is needed";
    if (bins->buf && bins->len != 8 * count) return "one count per bin is needed";
    return sums->len == 8 * tiles && exponents->len == 4 * tiles ? NULL : "one sum and one exponent per tile are needed";
}

/* run(block, pieces, factors, wide, limit, term, drops, sums, exponents, statistics, bins, largest): pieces is int64 (k, 3)
 * of dtype code, byte offset and elements; factors float64 (k,), or None to multiply nothing; wide float64, one per element,
 * to be rounded into the block first, or None; sums float64 and exponents int32, one per tile; statistics zeros, k times
 * struct statistics. bins int64, added to, are BINS64 for each piece of F64 and BINS32 for any other piece, and largest
 * float64 (k,) the largest finite magnitudes; or both are None. Only the bounds are checked. */
static PyObject *run(PyObject *self, PyObject *args)
{
    struct block block;
    Py_buffer pieces, factors, wide, sums, exponents, statistics, bins, largest;
    struct job job = {SQUARE, 0, 0, 1, INFINITY, NULL, NULL};
    int term;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&y*z*z*dipw*w*w*z*z*", to_block, &block, &pieces, &factors, &wide, &job.limit, &term,
                          &job.drops, &sums, &exponents, &statistics, &bins, &largest))
        return NULL;

    job.term = (enum term)term;
    job.writes = factors.buf != NULL;
    job.wide = wide.buf;
    Py_ssize_t k = pieces.len / 24;
    const char *problem = check_block(&block, pieces.buf, k);
    if (!problem) problem = check_results(pieces.buf, k, &sums, &exponents, &wide, &bins);
    if (job.writes && factors.len != 8 * k) problem = "one factor per piece is needed";
    if ((job.writes || job.wide) && block.memory.readonly) problem = "a writable block is needed";
    if (statistics.len != (Py_ssize_t)sizeof(struct statistics) * k) problem = "one entry per piece is needed";
    if (bins.buf && (largest.len != 8 * k || bins.readonly || largest.readonly)) problem = "writable bins are needed";
    if (!problem) {
        struct histogram to = {bins.buf, largest.buf};
        Py_BEGIN_ALLOW_THREADS
        kernels->run_pieces(job, &block.source, pieces.buf, k, factors.buf, sums.buf, exponents.buf, statistics.buf,
                            to);
        Py_END_ALLOW_THREADS
        report(&block);
    }

    Py_buffer *const all[] = {&pieces, &factors, &wide, &sums, &exponents, &statistics, &bins, &largest};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) PyBuffer_Release(all[i]);
    to_block(NULL, &block);
    return done(problem);
}

/* unit_factors(grads, dtype, params, dtype, size, ratio, eps, unscale, factors): factors float64, one per unit of
 * `size` elements. Returns how many are clipped, change values, or have parameters whose norm is not finite, and which is
 * the first that is out of range, or -1; or None, where a sum is out of range and the factors are not to be used. */
static PyObject *unit_factors(PyObject *self, PyObject *args)
{
    Py_buffer view[2], factors;
    struct unit_limits limits;
    struct side side[2];
    int dtype[2];
    int64_t size;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*iy*iLdddw*", &view[0], &dtype[0], &view[1], &dtype[1], &size, &limits.ratio, &limits.eps,
                          &limits.unscale, &factors))
        return NULL;
    int64_t units = factors.len / 8;
    struct unit_counts counts = {0};
    const char *problem = size < 1 || size > INT64_MAX / 8 / (units + 1) ? "no such unit" : NULL;
    for (int i = 0; i < 2 && !problem; i++) {
        if (dtype[i] < 0 || dtype[i] >= DTYPES) problem = "no such storage type";
        else if (view[i].len != units * size * ITEMSIZE[dtype[i]]) problem = "as many elements as units have are needed";
        else side[i] = (struct side){view[i].buf, (enum dtype)dtype[i]};
    }
    if (!problem) {
        Py_BEGIN_ALLOW_THREADS
        counts = kernels->compute_factors(side, units, size, limits, factors.buf);
        Py_END_ALLOW_THREADS
    }

    Py_buffer *const all[] = {&view[0], &view[1], &factors};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) PyBuffer_Release(all[i]);
    if (problem || counts.out_of_range) return done(problem);
    return Py_BuildValue("LLLL", (long long)counts.clipped, (long long)counts.changed, (long long)counts.nonfinite,
                         (long long)counts.beyond);
}

/* The unit of the last element of a piece, counted from that of its first. */
static int64_t last_unit(const struct units *piece)
{
    int64_t last = piece->elements - 1;
    return last / piece->columns + (last % piece->columns >= piece->columns - piece->phase);
}

/* scale_units(block, pieces, factors, losses): pieces is int64 (k, 6) of dtype code, byte offset, elements, the number of
 * the first element in its unit, elements of a unit, and the index of its factor; factors float64; losses int64 (k, 2),
 * added to, of new zeros and of new subnormal values. */
static PyObject *scale_units_of(PyObject *self, PyObject *args)
{
    Py_buffer block, pieces, factors, losses;
    (void)self;
    if (!PyArg_ParseTuple(args, "w*y*y*w*", &block, &pieces, &factors, &losses)) return NULL;

    const struct units *piece = pieces.buf;
    Py_ssize_t k = pieces.len / (Py_ssize_t)sizeof *piece;
    const char *problem = losses.len == 16 * k ? NULL : "two losses per piece are needed";
    for (Py_ssize_t i = 0; i < k && !problem; i++) {
        problem = check_piece(&block, &piece[i].dtype);
        if (problem || !piece[i].elements) continue;
        if (piece[i].columns < 1 || piece[i].phase < 0 || piece[i].phase >= piece[i].columns) problem = "no such unit";
        else if (piece[i].first < 0 || piece[i].first >= factors.len / 8) problem = "one factor per unit is needed";
        else if (last_unit(piece + i) >= factors.len / 8 - piece[i].first) problem = "one factor per unit is needed";
    }
    if (!problem) {
        Py_BEGIN_ALLOW_THREADS
        kernels->scale_units(block.buf, piece, factors.buf, k, losses.buf);
        Py_END_ALLOW_THREADS
    }

    Py_buffer *const all[] = {&block, &pieces, &factors, &losses};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) PyBuffer_Release(all[i]);
    return done(problem);
}

/* Checks that addends lie inside their source and the sums. */
static const char *check_addends(const Py_buffer *sums, const Py_buffer *source, const Py_buffer *addends,
                                 const Py_buffer *weights)
{
    Py_ssize_t k = addends->len / 32;
    const char *problem = weights->len == 8 * k ? NULL : "one weight per addend is needed";
    const int64_t *addend = addends->buf;
    for (Py_ssize_t i = 0; i < k && !problem; i++) {
        problem = check_piece(source, addend + 4 * i);
        int64_t at = addend[4 * i + 3];
        if (at < 0 || at > sums->len / 8 || addend[4 * i + 2] > sums->len / 8 - at) problem = "an addend lies outside the sums";
    }
    return problem;
}

/* add(sums, source, addends, weights, fresh): addends is int64 (k, 4) of dtype code, byte offset in the source, elements,
 * and index into the sums; weights float64 (k,). Fresh sums are set instead of added to. */
static PyObject *add(PyObject *self, PyObject *args)
{
    Py_buffer sums, source, addends, weights;
    (void)self;
    int fresh;
    if (!PyArg_ParseTuple(args, "w*y*y*y*p", &sums, &source, &addends, &weights, &fresh)) return NULL;

    const char *problem = check_addends(&sums, &source, &addends, &weights);
    if (!problem) {
        Py_BEGIN_ALLOW_THREADS
        kernels->add_all(sums.buf, source.buf, addends.buf, weights.buf, addends.len / 32, fresh);
        Py_END_ALLOW_THREADS
    }

    Py_buffer *const all[] = {&sums, &source, &addends, &weights};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) PyBuffer_Release(all[i]);
    return done(problem);
}

/* extremes(block, pieces, bounds, counts): pieces is int64 (k, 3) as for `run`; bounds uint64 (k, 2), the codes of the
 * smallest normal value and of the largest finite value; counts int64 (k, 2) of subnormal and saturated values, added to. */
static PyObject *extremes(PyObject *self, PyObject *args)
{
    Py_buffer block, pieces, bounds, counts;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*y*y*w*", &block, &pieces, &bounds, &counts)) return NULL;

    Py_ssize_t k = pieces.len / 24;
    const char *problem = bounds.len == 16 * k && counts.len == 16 * k ? NULL : "one entry per piece is needed";
    const int64_t *piece = pieces.buf;
    for (Py_ssize_t i = 0; i < k && !problem; i++) problem = check_piece(&block, piece + 3 * i);
    if (!problem) {
        const uint64_t *bound = bounds.buf;
        int64_t *count = counts.buf;
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < k; i++, piece += 3, bound += 2, count += 2)
            kernels->count_extremes((const char *)block.buf + piece[1], ITEMSIZE[piece[0]], piece[2], bound, count);
        Py_END_ALLOW_THREADS
    }

    Py_buffer *const all[] = {&block, &pieces, &bounds, &counts};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) PyBuffer_Release(all[i]);
    return done(problem);
}

/* differences(a, a_pieces, b, b_pieces, tolerances, sums, exponents, max_abs, max_rel, ulps, places, counts): pieces as in
 * `run`, of a and of b as many and as long, with tolerances float64 (3,); then per tile: sums float64 (4,), exponents int32
 * (3,), max_abs and max_rel float64, ulps uint64, places int64 (4,), counts int64 (7,). */
static PyObject *differences(PyObject *self, PyObject *args)
{
    struct block a, b;
    Py_buffer in[3], out[7];
    (void)self;
    if (!PyArg_ParseTuple(args, "O&y*O&y*y*w*w*w*w*w*w*w*", to_block, &a, &in[0], to_block, &b, &in[1], &in[2], &out[0],
                          &out[1], &out[2], &out[3], &out[4], &out[5], &out[6]))
        return NULL;

    static const Py_ssize_t bytes[7] = {8 * SUMS, 12, 8, 8, 8, 8 * PLACES, 8 * COUNTS};
    const int64_t *a_piece = in[0].buf, *b_piece = in[1].buf;
    Py_ssize_t k = in[0].len / 24, tiles = 0;
    const char *problem = in[0].len == in[1].len ? NULL : "as many pieces of each side are needed";
    if (!problem && in[2].len != (Py_ssize_t)sizeof(struct tolerance) * k) problem = "one tolerance per piece is needed";
    if (!problem) problem = check_block(&a, a_piece, k);
    if (!problem) problem = check_block(&b, b_piece, k);
    for (Py_ssize_t i = 0; i < k && !problem; i++) {
        if (a_piece[3 * i + 2] != b_piece[3 * i + 2]) problem = "pieces must be as long as each other";
        tiles += (Py_ssize_t)((a_piece[3 * i + 2] + TILE - 1) / TILE);
    }
    for (int i = 0; i < 7 && !problem; i++)
        if (out[i].len != bytes[i] * tiles) problem = "one entry per tile is needed";
    if (!problem) {
        struct results to = {out[0].buf, out[2].buf, out[3].buf, out[1].buf, out[4].buf, out[5].buf, out[6].buf};
        struct source sources[2] = {a.source, b.source};
        Py_BEGIN_ALLOW_THREADS
        kernels->compare_pieces(sources, a_piece, b_piece, k, in[2].buf, to);
        Py_END_ALLOW_THREADS
        a.source = sources[0], b.source = sources[1];
        report(&a);
        report(&b);
    }
    for (int i = 0; i < 3; i++) PyBuffer_Release(&in[i]);
    for (int i = 0; i < 7; i++) PyBuffer_Release(&out[i]);
    to_block(NULL, &a);
    to_block(NULL, &b);
    return done(problem);
}

/* Whether a network, and groups of addends of the same columns, are what `trim` needs. */
static const char *check_trim(const struct trim *trim, const struct addend *addend, Py_ssize_t k)
{
    if (trim->count < 1 || trim->dropped < 0 || trim->dropped > (trim->count - 1) / 2) return "nothing is left";
    if (k % trim->count) return "groups of as many addends are needed";
    for (int64_t i = 0; i < 2 * trim->pairs; i++)
        if (trim->pair[i] < 0 || trim->pair[i] >= trim->count) return "a pair lies outside its column";
    for (Py_ssize_t i = 0; i < k; i++) {
        const struct addend *first = addend + i / trim->count * trim->count;
        if (addend[i].at != first->at || addend[i].elements != first->elements) return "a group is of other columns";
    }
    return NULL;
}

/* trimmed_means(values, source, addends, weights, count, dropped, finite, network, scratch): addends and weights as
 * of `add`, each `count` of them for the same values, which are set; network int32 (n, 2); scratch float64, aligned to 64
 * bytes here, which costs up to 7 of them. */
static PyObject *trimmed_means(PyObject *self, PyObject *args)
{
    Py_buffer values, source, addends, weights, network, scratch;
    struct trim trim = {0};
    (void)self;
    if (!PyArg_ParseTuple(args, "w*y*y*y*LLpy*w*", &values, &source, &addends, &weights, &trim.count, &trim.dropped,
                          &trim.finite, &network, &scratch))
        return NULL;

    Py_ssize_t k = addends.len / 32;
    trim.pair = network.buf, trim.pairs = network.len / 8;
    trim.scratch = (double *)(((uintptr_t)scratch.buf + 63) / 64 * 64);
    const char *problem = check_addends(&values, &source, &addends, &weights);
    if (!problem) problem = check_trim(&trim, addends.buf, k);
    if (!problem && scratch.len / (8 * COLUMNS) <= trim.count) problem = "more room is needed";
    if (!problem) {
        Py_BEGIN_ALLOW_THREADS
        kernels->trim_all(&trim, values.buf, source.buf, addends.buf, weights.buf, k / trim.count);
        Py_END_ALLOW_THREADS
    }

    Py_buffer *const all[] = {&values, &source, &addends, &weights, &network, &scratch};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) PyBuffer_Release(all[i]);
    return done(problem);
}

/* Fills a patch from its buffers, and checks their sizes. */
static const char *patch_of(struct patch *patch, const Py_buffer *x, int x_dtype, const Py_buffer *y_grad,
                            int y_grad_dtype, const Py_buffer *rows, const Py_buffer *columns)
{
    if (x_dtype < 0 || x_dtype >= DTYPES || y_grad_dtype < 0 || y_grad_dtype >= DTYPES) return "no such storage type";
    if (patch->rows < 0 || patch->columns < 0) return "a number of rows and of columns is needed";
    if (patch->columns && patch->rows > x->len / patch->columns) return "the input does not fit";
    int64_t elements = patch->rows * patch->columns;
    if (x->len != elements * ITEMSIZE[x_dtype]) return "the input does not fit";
    if (y_grad->len != elements * ITEMSIZE[y_grad_dtype]) return "the gradient does not fit";
    for (int i = 0; i < 2; i++) {
        if (rows[i].buf && rows[i].len != 8 * patch->rows) return "one value per row is needed";
        if (columns[i].buf && columns[i].len != 8 * patch->columns) return "one value per column is needed";
    }
    patch->x = x->buf, patch->x_dtype = (enum dtype)x_dtype;
    patch->y_grad = y_grad->buf, patch->y_grad_dtype = (enum dtype)y_grad_dtype;
    patch->mean = rows[0].buf, patch->inv_std_dev = rows[1].buf;
    patch->scale = columns[0].buf, patch->bias = columns[1].buf;
    return NULL;
}

/* row_sums(x, dtype, rows, columns, center, sums): center and sums float64 (rows,); without a center the plain sums. */
static PyObject *row_sums(PyObject *self, PyObject *args)
{
    Py_buffer x, center, sums;
    struct patch patch = {0};
    int dtype;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*iLLz*w*", &x, &dtype, &patch.rows, &patch.columns, &center, &sums)) return NULL;
    Py_buffer rows[2] = {center, sums}, none[2] = {{0}, {0}};
    const char *problem = patch_of(&patch, &x, dtype, &x, dtype, rows, none);
    if (!problem) {
        Py_BEGIN_ALLOW_THREADS
        kernels->sum_rows(&patch, sums.buf);
        Py_END_ALLOW_THREADS
    }
    Py_buffer *const all[] = {&x, &center, &sums};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) PyBuffer_Release(all[i]);
    return done(problem);
}

/* layer_norm(x, x_dtype, y_grad, y_grad_dtype, rows, columns, mean, inv_std_dev, scale, bias, first, second, rms, x_grad,
 * dtype, height, scale_grad, bias_grad): without x_grad, the row sums go to first and second; with it they are the row
 * means, or None to compute these (of an RMS norm, if `rms`), and the gradients are written and, those of scale and bias
 * for each group of `height` rows, added to. */
static PyObject *layer_norm(PyObject *self, PyObject *args)
{
    Py_buffer x, y_grad, rows[2], columns[2], sums[2], x_grad, grads[2];
    struct patch patch = {0};
    struct gradients to = {0};
    int x_dtype, y_grad_dtype, dtype, is_rms;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*iy*iLLz*y*y*z*z*z*pz*iLz*z*", &x, &x_dtype, &y_grad, &y_grad_dtype, &patch.rows,
                          &patch.columns, &rows[0], &rows[1], &columns[0], &columns[1], &sums[0], &sums[1], &is_rms,
                          &x_grad, &dtype, &to.height, &grads[0], &grads[1]))
        return NULL;
    const char *problem = patch_of(&patch, &x, x_dtype, &y_grad, y_grad_dtype, rows, columns);
    if (!problem && !patch.mean && !patch.bias) problem = "a mean or a bias is needed";
    if (!problem && to.height < 1) problem = "groups of a row or more are needed";
    int64_t groups = problem ? 0 : patch.rows / to.height + (patch.rows % to.height != 0);
    int has_sums = sums[0].buf && sums[1].buf, has_none = !sums[0].buf && !sums[1].buf && x_grad.buf;
    if (!problem && !has_sums && !has_none) problem = "two sums per row are needed";
    for (int i = 0; i < 2 && !problem; i++) {
        if (has_sums && sums[i].len != 8 * patch.rows) problem = "one sum per row is needed";
        if (!x_grad.buf && sums[i].readonly) problem = "writable sums are needed";
        if (x_grad.buf && grads[i].len != 8 * groups * patch.columns) problem = "one gradient per column is needed";
        if (x_grad.buf && (grads[i].readonly || x_grad.readonly)) problem = "writable gradients are needed";
    }
    if (!problem && (dtype < 0 || dtype >= DTYPES)) problem = "no such storage type";
    if (!problem && x_grad.buf && x_grad.len != patch.rows * patch.columns * ITEMSIZE[dtype])
        problem = "room for the result is needed";
    if (!problem) {
        to.dtype = (enum dtype)dtype, to.x = x_grad.buf, to.scale = grads[0].buf, to.bias = grads[1].buf;
        Py_BEGIN_ALLOW_THREADS
        if (to.x) kernels->differentiate(&patch, sums[0].buf, sums[1].buf, is_rms, &to);
        else kernels->sum_gradients(&patch, 0, patch.rows, sums[0].buf, sums[1].buf);
        Py_END_ALLOW_THREADS
    }
    Py_buffer *const all[] = {&x,       &y_grad,  &rows[0], &rows[1], &columns[0], &columns[1],
                              &sums[0], &sums[1], &x_grad,  &grads[0], &grads[1]};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) PyBuffer_Release(all[i]);
    return done(problem);
}

/* levels(): the names of the levels that this processor runs, the best first. */
static PyObject *levels(PyObject *self, PyObject *args)
{
    (void)self, (void)args;
    PyObject *names = PyList_New(0);
    for (int i = 0; names && level_at(i); i++) {
        PyObject *name = PyUnicode_FromString(level_at(i)->name);
        if (!name || PyList_Append(names, name)) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

/* use(name): use the kernels of a level from now on, for tests. */
static PyObject *use(PyObject *self, PyObject *args)
{
    const char *name;
    (void)self;
    if (!PyArg_ParseTuple(args, "s", &name)) return NULL;
    for (int i = 0; level_at(i); i++) {
        if (strcmp(level_at(i)->name, name)) continue;
        kernels = level_at(i);
        Py_RETURN_NONE;
    }
    PyErr_Format(PyExc_ValueError, "this processor does not run the level %s", name);
    return NULL;
}

static PyMethodDef methods[] = {
    {"levels", levels, METH_NOARGS, "List the levels that this processor runs, the best first."},
    {"use", use, METH_VARARGS, "Use the kernels of a level."},
    {"run", run, METH_VARARGS, "Sum, scale or round the pieces of a block."},
    {"add", add, METH_VARARGS, "Add weighted values to float64 sums."},
    {"differences", differences, METH_VARARGS, "Compare two blocks."},
    {"extremes", extremes, METH_VARARGS, "Count subnormal and saturated values."},
    {"trimmed_means", trimmed_means, METH_VARARGS, "Compute the means of the middle values of columns."},
    {"unit_factors", unit_factors, METH_VARARGS, "Compute the factors of units."},
    {"scale_units", scale_units_of, METH_VARARGS, "Multiply each unit by its factor."},
    {"row_sums", row_sums, METH_VARARGS, "Sum rows, or their squares about a center."},
    {"layer_norm", layer_norm, METH_VARARGS, "Compute the row sums of a layer norm's backward pass, or its gradients."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kernels", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernels(void)
{
    kernels = level_at(0);
    return PyModule_Create(&module);
}
