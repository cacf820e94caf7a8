/* Operators over rows on a CPU. Rows lie one after the other; all sizes are in numbers, not bytes. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define CHUNK 64 /* rows that are summed in single precision */

/* Add the channels of a request's rows, less `centre`, or the squares of these; return the rows. */
static int64_t add_rows(const float *rows, int64_t channels, const int64_t *span, int64_t pairs,
                        const float *centre, int squares, float *part, double *sums)
{
    int64_t count = 0;
    memset(sums, 0, channels * sizeof(double));
    for (int64_t p = 0; p < pairs; p++) {
        int64_t start = span[2 * p], stop = span[2 * p + 1];
        count += stop - start;
        for (int64_t from = start; from < stop; from += CHUNK) {
            int64_t to = from + CHUNK < stop ? from + CHUNK : stop;
            memset(part, 0, channels * sizeof(float));
            for (int64_t r = from; r < to; r++) {
                const float *row = rows + r * channels;
                if (squares)
                    for (int64_t c = 0; c < channels; c++) {
                        float apart = row[c] - centre[c];
                        part[c] += apart * apart;
                    }
                else
                    for (int64_t c = 0; c < channels; c++)
                        part[c] += row[c];
            }
            for (int64_t c = 0; c < channels; c++)
                sums[c] += part[c];
        }
    }
    return count;
}

/* Group norm: the scale and shift of each request's channels, (requests, 2, channels).
 * `rest`: count, mean and sum of squared differences of the rows that aren't there, for each
 * request and group. Return -1 if memory is short, -2 for spans of rows that aren't there. */
int group_scale(const float *rows, int64_t count, int64_t channels, const float *rest, const int64_t *spans,
                int64_t requests, int64_t pairs, int64_t groups, const float *weight,
                const float *bias, double eps, float *out)
{
    int64_t size = channels / groups;
    for (int64_t i = 0; i < requests * pairs; i++)
        if (spans[2 * i] < 0 || spans[2 * i] > spans[2 * i + 1] || spans[2 * i + 1] > count)
            return -2;
    double *sums = malloc(channels * sizeof(double));
    float *part = malloc(2 * channels * sizeof(float)), *centre = part + channels;
    if (!sums || !part) {
        free(sums);
        free(part);
        return -1;
    }
    for (int64_t q = 0; q < requests; q++, out += 2 * channels, rest += 3 * groups) {
        const int64_t *span = spans + 2 * pairs * q;
        double own = (double)size * add_rows(rows, channels, span, pairs, NULL, 0, part, sums);
        for (int64_t g = 0; g < groups; g++) {
            double sum = 0;
            for (int64_t c = g * size; c < (g + 1) * size; c++)
                sum += sums[c];
            for (int64_t c = g * size; c < (g + 1) * size; c++)
                centre[c] = own ? sum / own : 0;
        }
        add_rows(rows, channels, span, pairs, centre, 1, part, sums);
        for (int64_t g = 0; g < groups; g++) {
            /* the mean as the squares were taken around it: rounded to single precision */
            double spread = 0, mean = centre[g * size], other = rest[3 * g + 1];
            for (int64_t c = g * size; c < (g + 1) * size; c++)
                spread += sums[c];
            double total = own + rest[3 * g] > 0 ? own + rest[3 * g] : 1;
            double share = own / total, apart = mean - other;
            double variance = (rest[3 * g + 2] + spread) / total + share * (1 - share) * apart * apart;
            double scale = 1 / sqrt(variance + eps), shift = -(other + share * apart) * scale;
            for (int64_t c = g * size; c < (g + 1) * size; c++) {
                double by = weight ? weight[c] : 1;
                out[c] = scale * by;
                out[channels + c] = shift * by + (bias ? bias[c] : 0);
            }
        }
    }
    free(sums);
    free(part);
    return 0;
}

/* Multiply and add the scale and shift of each row's owner. Return -1 for an owner that isn't. */
int scale_shift(const float *rows, int64_t count, int64_t channels, const float *scales,
                int64_t owners, const int64_t *owner, float *out)
{
    for (int64_t r = 0; r < count; r++, rows += channels, out += channels) {
        int64_t own = owners == 1 ? 0 : owner[r];
        if (own < 0 || own >= owners)
            return -1;
        const float *scale = scales + 2 * channels * own, *shift = scale + channels;
        for (int64_t c = 0; c < channels; c++)
            out[c] = rows[c] * scale[c] + shift[c];
    }
    return 0;
}

/* Whether all places are among so many. */
static int are_places(const int64_t *index, int64_t count, int64_t places)
{
    int beyond = 0; /* the whole list is read, several places at once */
    for (int64_t i = 0; i < count; i++)
        beyond |= (uint64_t)index[i] >= (uint64_t)places;
    return !beyond;
}

/* Rows that are written to places of a buffer. */
struct put {
    char *target;
    int64_t places, bytes; /* of the buffer, and of a row */
    const int64_t *index;
    const char *rows;
    int64_t count;
};

/* Copy rows of a size that is known here: the compiler copies small ones in a register. */
#define COPY_ROWS(size)                                                                            \
    for (int64_t i = 0; i < put->count; i++)                                                       \
        memcpy(put->target + put->index[i] * (size), put->rows + i * (size), (size))

/* Write the rows of several buffers. Return -2 for places that aren't there, before anything is
 * written. */
int put_all(const struct put *puts, int64_t buffers)
{
    const struct put *end = puts + buffers;
    for (const struct put *put = puts; put < end; put++) {
        const struct put *last = put - 1; /* adjacent buffers often share their places */
        int same = put > puts && put->index == last->index && put->count == last->count &&
                   put->places == last->places;
        if (!same && !are_places(put->index, put->count, put->places))
            return -2;
    }
    for (const struct put *put = puts; put < end; put++)
        switch (put->bytes) {
        case 1:
            COPY_ROWS(1);
            break;
        case 2:
            COPY_ROWS(2);
            break;
        case 4:
            COPY_ROWS(4);
            break;
        case 8:
            COPY_ROWS(8);
            break;
        default:
            COPY_ROWS(put->bytes);
        }
    return 0;
}

/* The rows of a buffer that one list of flags has and another one lacks, and the same rows, one
 * after another. */
struct chosen {
    char *buffer;
    int64_t rows, bytes; /* of the buffer, and of a row */
    const char *wanted, *without;
    char *each;
    int64_t count;
};

/* Find the places of the rows that are chosen; return how many there are. */
static int64_t find_chosen(const struct chosen *own, const int64_t *places, int64_t flags,
                           int64_t *found)
{
    int64_t count = 0;
    for (int64_t f = 0; f < flags; f++) {
        found[count] = places[f];
        count += own->wanted[f] & ~own->without[f];
    }
    return count;
}

/* Copy rows of a size that is known here: the compiler copies small ones in a register. */
#define COPY_CHOSEN(size)                                                                          \
    for (int64_t i = 0; i < own->count; i++) {                                                     \
        char *there = own->buffer + found[i] * (size), *here = own->each + i * (size);             \
        if (writes)                                                                                \
            memcpy(there, here, (size));                                                           \
        else                                                                                       \
            memcpy(here, there, (size));                                                           \
    }

/* Write or read the chosen rows of several buffers; flags are 0 or 1, and `places` has the place of
 * each. Return -1 without memory, -2 for places that aren't there, or other numbers of rows. */
int copy_chosen(const struct chosen *chosen, int64_t buffers, const int64_t *places, int64_t flags,
                int writes)
{
    const struct chosen *end = chosen + buffers;
    int64_t *found = malloc((flags + 1) * sizeof(int64_t));
    int failed = found ? 0 : -1;
    for (const struct chosen *own = chosen; own < end && !failed; own++) {
        const struct chosen *last = own - 1;
        if ((own == chosen || own->rows != last->rows) && !are_places(places, flags, own->rows)) {
            failed = -2;
            break;
        }
        int same = own > chosen && own->wanted == last->wanted && own->without == last->without;
        int64_t count = same ? last->count : find_chosen(own, places, flags, found);
        if (count != own->count) {
            failed = -2;
            break;
        }
        switch (own->bytes) {
        case 2:
            COPY_CHOSEN(2);
            break;
        case 4:
            COPY_CHOSEN(4);
            break;
        case 8:
            COPY_CHOSEN(8);
            break;
        default:
            COPY_CHOSEN(own->bytes);
        }
    }
    free(found);
    return failed;
}

/* Rows that replace those at places of a buffer. The mean absolute difference and the mean absolute
 * value before are added to the two sums of each row's patch: that of its place in `table`, counted
 * from the first of its request, which has so many rows; none if that is -1. */
struct replace {
    float *target;
    int64_t places, bytes; /* of the buffer, and of a row */
    const int64_t *index;
    const float *rows;
    int64_t count;
    const int64_t *table, *sizes, *firsts;
    int64_t requests;
    float *sums;
    int64_t patches;
};

/* Whether all places and patches are there, and the requests have all of the rows. */
static int can_replace(const struct replace *own)
{
    int64_t i = 0;
    if (!are_places(own->index, own->count, own->places))
        return 0;
    for (int64_t q = 0; q < own->requests; q++)
        for (int64_t stop = i + own->sizes[q]; i < stop; i++) {
            if (i >= own->count)
                return 0;
            int64_t patch = own->firsts[q] + own->table[own->index[i]];
            if (own->firsts[q] >= 0 && (patch < 0 || patch >= own->patches))
                return 0;
        }
    return i == own->count;
}

/* Replace the rows of several buffers. Return -2 for places or patches that aren't there, before
 * anything is written. */
int replace_all(const struct replace *each, int64_t buffers)
{
    const struct replace *end = each + buffers;
    for (const struct replace *own = each; own < end; own++)
        if (!can_replace(own))
            return -2;
    for (const struct replace *own = each; own < end; own++) {
        const float *rows = own->rows;
        int64_t width = own->bytes / sizeof(float), i = 0;
        for (int64_t q = 0; q < own->requests; q++)
            for (int64_t stop = i + own->sizes[q]; i < stop; i++, rows += width) {
                float *old = own->target + own->index[i] * width, change = 0, before = 0;
                for (int64_t c = 0; c < width; c++) {
                    change += fabsf(rows[c] - old[c]);
                    before += fabsf(old[c]);
                    old[c] = rows[c];
                }
                if (own->firsts[q] < 0)
                    continue;
                float *sum = own->sums + 2 * (own->firsts[q] + own->table[own->index[i]]);
                sum[0] += change / width;
                sum[1] += before / width;
            }
    }
    return 0;
}
