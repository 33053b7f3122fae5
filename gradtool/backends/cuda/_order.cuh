// Means of the middle values of columns, which a sorting network puts in order.

// Addends of the same elements: the first is number `first` of all elements, and its mean is number `at`.
struct Group {
    long long first, at, first_addend;
};

// `count` addends a group. The scratch has a column of `count` values for each of `threads` threads, rows apart.
struct TrimJob {
    const char *source;
    double *means, *scratch;
    const Group *group;
    const Addend *addend;
    const int *pair;
    long long groups, elements, pairs, count, dropped, finite, threads;
};

#ifndef GRADTOOL_STORAGE

// The trimmed mean of the values of `addend` and those that follow it, for element `i`; `column` is room for them.
DEVICE double trimmed_mean(const TrimJob &job, const Addend *addend, long long i, double *column)
{
    bool bad = false;
    for (long long k = 0; k < job.count; k++) {
        // Adding zero makes -0 the same as 0.
        const double value = addend[k].weight * load_one(addend[k].dtype, job.source + addend[k].offset, i) + 0.0;
        bad |= !(job.finite ? fabs(value) <= 0x1.fffffffffffffp1023 : value == value);
        column[k * job.threads] = value;
    }
    for (long long k = 0; k < job.pairs; k++) {
        double *low = column + job.pair[2 * k] * job.threads, *high = column + job.pair[2 * k + 1] * job.threads;
        const double a = *low, b = *high;
        *low = a < b ? a : b;
        *high = a < b ? b : a;
    }
    double total = column[job.dropped * job.threads];
    for (long long k = job.dropped + 1; k < job.count - job.dropped; k++) total += column[k * job.threads];
    // What underflows to -0 becomes 0.
    return bad ? as_double(0x7ff8000000000000u) : total / (double)(job.count - 2 * job.dropped) + 0.0;
}

KERNEL(THREADS, trimmed_means, TrimJob)
{
    const long long thread = (long long)blockIdx.x * THREADS + threadIdx.x;
    for (long long at = thread; at < job.elements; at += job.threads) {
        long long low = 0;
        for (long long high = job.groups; high - low > 1;) {
            const long long middle = (low + high) / 2;
            if (job.group[middle].first <= at) low = middle;
            else high = middle;
        }
        const Group group = job.group[low];
        const long long i = at - group.first;
        job.means[group.at + i] = trimmed_mean(job, job.addend + group.first_addend, i, job.scratch + thread);
    }
}

#endif
