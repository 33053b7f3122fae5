// The backward pass of layer norms: float64 throughout, in the order of the reference.
//
// A thread block takes a few rows at a time: its warps sum the chunks of those rows, then its threads compute their
// gradients column by column. The second half reads what the first has brought into the cache.

enum { TEAM = 512, TEAM_WARPS = TEAM / 32 };
// Columns of a thread, whose sums over rows stay in registers, and of a thread block.
enum { COLUMNS = 16, SLICE = TEAM * COLUMNS };
// Of the rows at a time: at most so many chunks, and so many rows.
enum { MAX_CHUNKS = 256, MAX_ROWS = TEAM_WARPS };
// Columns that a thread loads before it uses the first, to hide the latency of memory.
enum { AHEAD = 4, BESIDE = 4 };
// Bytes of the next rows that stay in the cache until they are used, and bytes of a cache line.
enum { PREFETCH_BYTES = 64 << 10, LINE = 128 };

struct PatchJob {
    const char *x, *y_grad;
    char *x_grad;
    // (rows,); weighted and projected are the means over the columns if they are known, or room for the sums.
    const double *mean, *inv_std_dev;
    double *weighted, *projected;
    // (columns,)
    const double *scale, *bias;
    // (2, groups, columns): the sums over rows of the gradients of scale and bias.
    double *grads;
    long long x_dtype, y_grad_dtype, x_grad_dtype;
    long long rows, columns, height, rms, has_means;
};

// The parameters of a row.
struct Row {
    long long start;
    double mean, inv_std_dev;
};

DEVICE Row row_of(const PatchJob &job, long long row)
{
    return {row * job.columns, job.mean ? job.mean[row] : 0, job.inv_std_dev ? job.inv_std_dev[row] : 0};
}

// The normalized input.
template <bool INVERTED> DEVICE double normalized(const Row &row, double x, double scale, double bias)
{
    if (INVERTED) return (x - bias) / scale;
    return (x - row.mean) * row.inv_std_dev;
}

// The two sums over a row.
template <class X, bool INVERTED> struct Projections {
    double x, y_grad;
    DEVICE Projections read(const PatchJob &job, const Row &row, int column)
    {
        const long long at = row.start + column;
        return {X::get(job.x_dtype, job.x, at), X::get(job.y_grad_dtype, job.y_grad, at)};
    }
    DEVICE void add(const PatchJob &job, const Row &row, const Projections &of, int column, double (&lane)[2])
    {
        const double scale = job.scale[column], weighted = of.y_grad * scale;
        lane[0] += weighted;
        lane[1] += weighted * normalized<INVERTED>(row, of.x, scale, INVERTED ? job.bias[column] : 0);
    }
};

// The sum of x, or of its squared distances from the mean if that is given.
template <class X> struct Moments {
    double x;
    DEVICE Moments read(const PatchJob &job, const Row &row, int column)
    { return {X::get(job.x_dtype, job.x, row.start + column)}; }
    DEVICE void add(const PatchJob &job, const Row &row, const Moments &of, int, double (&lane)[2])
    {
        double away = of.x - row.mean;
        lane[0] += job.mean ? away * away : of.x;
    }
};

DEVICE long long chunks_of(long long columns) { return (columns + CHUNK - 1) / CHUNK; }

// The number of rows that have as many chunks as a thread block has warps.
DEVICE long long rows_at_once(long long columns)
{
    long long rows = TEAM_WARPS / (chunks_of(columns) ? chunks_of(columns) : 1);
    return rows > 1 ? rows : 1;
}

// Adds every 32nd column from `column` on, AHEAD of them; ALL if none is after the last.
template <class Terms, bool ALL> DEVICE void add_columns(const PatchJob &job, const Row &row, int column, double (&lane)[2])
{
    Terms terms[AHEAD];
    #pragma unroll
    for (int k = 0; k < AHEAD; k++)
        if (ALL || column + k * ROW_LANES < job.columns) terms[k] = Terms::read(job, row, column + k * ROW_LANES);
    #pragma unroll
    for (int k = 0; k < AHEAD; k++)
        if (ALL || column + k * ROW_LANES < job.columns) Terms::add(job, row, terms[k], column + k * ROW_LANES, lane);
}

// The two sums of each chunk of rows, from `row` on, a warp for each chunk: sums[chunk][which].
template <class Terms> DEVICE void sum_chunks(const PatchJob &job, long long row, int rows, double (*sums)[2])
{
    const int chunks = (int)chunks_of(job.columns), lane_number = (int)threadIdx.x % 32;
    for (int unit = (int)threadIdx.x / 32; unit < rows * chunks; unit += TEAM_WARPS) {
        const int number = unit / chunks, begin = (unit - number * chunks) * CHUNK, columns = (int)job.columns;
        const Row data = row_of(job, row + number);
        double lane[2] = {0, 0};
        #pragma unroll 1
        for (int i = begin; i < begin + CHUNK && i < columns; i += AHEAD * ROW_LANES) {
            if (i + AHEAD * ROW_LANES <= columns) add_columns<Terms, true>(job, data, i + lane_number, lane);
            else add_columns<Terms, false>(job, data, i + lane_number, lane);
        }
        for (int which = 0; which < 2; which++) {
            double sum = fold_warp(lane[which]);
            if (lane_number == 0) sums[unit][which] = sum;
        }
    }
}

// The sum of the chunks of a row, in order.
DEVICE double sum_of(const PatchJob &job, int row, int which, double (*sums)[2])
{
    const int chunks = (int)chunks_of(job.columns);
    double sum = 0;
    for (int i = 0; i < chunks; i++) sum += sums[row * chunks + i][which];
    return sum;
}

template <class Terms> DEVICE void sum_rows(const PatchJob &job)
{
    __shared__ double sums[MAX_CHUNKS][2];
    const long long at_once = rows_at_once(job.columns), row = blockIdx.x * at_once;
    const int rows = (int)(job.rows - row < at_once ? job.rows - row : at_once);
    sum_chunks<Terms>(job, row, rows, sums);
    __syncthreads();
    if ((int)threadIdx.x >= rows) return;
    job.weighted[row + threadIdx.x] = sum_of(job, (int)threadIdx.x, 0, sums);
    if (job.projected) job.projected[row + threadIdx.x] = sum_of(job, (int)threadIdx.x, 1, sums);
}

// The gradients of columns of a row, from `column` on, TEAM apart.
template <class X, bool INVERTED>
DEVICE void differentiate_columns(const PatchJob &job, const Row &row, const double *means, int column,
                                  double *scale_grad, double *bias_grad)
{
    const double mean = means[0], projection = means[1];
    Projections<X, INVERTED> of[BESIDE];
    #pragma unroll
    for (int k = 0; k < BESIDE; k++)
        if (column + k * TEAM < job.columns) of[k] = Projections<X, INVERTED>::read(job, row, column + k * TEAM);
    #pragma unroll
    for (int k = 0; k < BESIDE; k++) {
        if (column + k * TEAM >= job.columns) break;
        const double scale = job.scale[column + k * TEAM], bias = INVERTED ? job.bias[column + k * TEAM] : 0;
        const double y_grad = of[k].y_grad;
        const double xh = normalized<INVERTED>(row, of[k].x, scale, bias);
        scale_grad[k] += xh * y_grad;
        bias_grad[k] += y_grad;
        const double grad = ((y_grad * scale - mean) - xh * projection) * row.inv_std_dev;
        X::put(job.x_grad_dtype, job.x_grad, row.start + column + k * TEAM, grad);
    }
}

// Prefetches the rows of the next step, if they are few enough to stay in the cache.
DEVICE void prefetch_rows(const PatchJob &job, const char *data, long long itemsize, long long row, long long last)
{
    const long long at_once = rows_at_once(job.columns), rows = last - row < at_once ? last - row : at_once;
    const long long begin = row * job.columns * itemsize, nbytes = rows * job.columns * itemsize;
    if (nbytes > PREFETCH_BYTES) return;
    #pragma unroll 1
    for (long long at = (long long)threadIdx.x * LINE; at < nbytes; at += TEAM * LINE) PREFETCH(data + begin + at);
}

template <class X, bool INVERTED> DEVICE void differentiate(const PatchJob &job)
{
    __shared__ double sums[MAX_CHUNKS][2], means[MAX_ROWS][2];
    const long long slices = (job.columns + SLICE - 1) / SLICE;
    const long long group = blockIdx.x / slices, slice = blockIdx.x % slices * SLICE;
    const long long groups = (job.rows + job.height - 1) / job.height;
    const long long first = group * job.height;
    const long long last = first + job.height < job.rows ? first + job.height : job.rows;
    double scale_grad[COLUMNS] = {}, bias_grad[COLUMNS] = {};
    const int at_once = (int)rows_at_once(job.columns);
    for (long long row = first; row < last; row += at_once) {
        const int rows = (int)(last - row < at_once ? last - row : at_once);
        if (!job.has_means) sum_chunks<Projections<X, INVERTED> >(job, row, rows, sums);
        __syncthreads();
        if ((int)threadIdx.x < 2 * rows) {
            const int number = (int)threadIdx.x / 2, which = (int)threadIdx.x % 2;
            if (job.has_means) means[number][which] = (which ? job.projected : job.weighted)[row + number];
            else means[number][which] = job.rms && !which ? 0 : sum_of(job, number, which, sums) / (double)job.columns;
        }
        __syncthreads();
        prefetch_rows(job, job.x, X::itemsize(job.x_dtype), row + at_once, last);
        prefetch_rows(job, job.y_grad, X::itemsize(job.y_grad_dtype), row + at_once, last);
        #pragma unroll 1
        for (int i = 0; i < rows; i++) {
            const Row data = row_of(job, row + i);
            #pragma unroll
            for (int k = 0; k < COLUMNS; k += BESIDE) {
                const int column = (int)slice + k * TEAM + (int)threadIdx.x;
                differentiate_columns<X, INVERTED>(job, data, means[i], column, scale_grad + k, bias_grad + k);
            }
        }
    }
    #pragma unroll
    for (int k = 0; k < COLUMNS; k++) {
        const long long column = slice + k * TEAM + (long long)threadIdx.x;
        if (column >= job.columns) break;
        job.grads[group * job.columns + column] = scale_grad[k];
        job.grads[(groups + group) * job.columns + column] = bias_grad[k];
    }
}

enum { GROUPS_TEAM = 256 };

// Adds the gradients of each group to totals (2, columns), in order.
struct GroupsJob {
    double *totals;
    const double *grads;
    long long groups, columns;
};

#ifdef GRADTOOL_STORAGE
typedef Typed<GRADTOOL_STORAGE> Values;
#else
typedef Untyped Values;
#endif

KERNEL(TEAM, row_sums, PatchJob) { sum_rows<Moments<Values> >(job); }
KERNEL(TEAM, layer_norm_sums, PatchJob)
{
    if (job.bias) sum_rows<Projections<Values, true> >(job);
    else sum_rows<Projections<Values, false> >(job);
}
KERNEL(TEAM, layer_norm_grads, PatchJob)
{
    if (job.bias) differentiate<Values, true>(job);
    else differentiate<Values, false>(job);
}

KERNEL(GROUPS_TEAM, add_groups, GroupsJob)
{
    const long long at = (long long)blockIdx.x * GROUPS_TEAM + threadIdx.x;
    if (at >= 2 * job.columns) return;
    const long long which = at / job.columns, column = at % job.columns;
    double total = job.totals[at];
    #pragma unroll 16
    for (long long group = 0; group < job.groups; group++)
        total += job.grads[(which * job.groups + group) * job.columns + column];
    job.totals[at] = total;
}
