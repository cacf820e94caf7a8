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
    for (int64_t i = 0; i < count; i++)
        if (index[i] < 0 || index[i] >= places)
            return 0;
    return 1;
}

/* Write rows of so many bytes to these places. Return -2 for places that aren't there. */
int put_rows(char *target, int64_t places, int64_t bytes, const int64_t *index, const char *rows,
             int64_t count)
{
    if (!are_places(index, count, places))
        return -2;
    for (int64_t i = 0; i < count; i++)
        memcpy(target + index[i] * bytes, rows + i * bytes, bytes);
    return 0;
}

/* Write rows to these places, and add the mean absolute difference and the mean absolute value
 * before to the two sums of each row's patch: that of its place in `table`, counted from the first
 * of its request, which has so many rows; none if that is -1. Return -2 for places or patches that
 * aren't there, before anything is written. */
int replace_rows(float *target, int64_t places, int64_t width, const int64_t *index,
                 const float *rows, int64_t count, const int64_t *table, const int64_t *sizes,
                 const int64_t *firsts, int64_t requests, float *sums, int64_t patches)
{
    int64_t i = 0;
    if (!are_places(index, count, places))
        return -2;
    for (int64_t q = 0; q < requests; q++)
        for (int64_t stop = i + sizes[q]; i < stop; i++) {
            if (i >= count)
                return -2;
            int64_t patch = firsts[q] + table[index[i]];
            if (firsts[q] >= 0 && (patch < 0 || patch >= patches))
                return -2;
        }
    if (i != count)
        return -2;
    i = 0;
    for (int64_t q = 0; q < requests; q++)
        for (int64_t stop = i + sizes[q]; i < stop; i++, rows += width) {
            float *old = target + index[i] * width, change = 0, before = 0;
            for (int64_t c = 0; c < width; c++) {
                change += fabsf(rows[c] - old[c]);
                before += fabsf(old[c]);
                old[c] = rows[c];
            }
            if (firsts[q] < 0)
                continue;
            float *sum = sums + 2 * (firsts[q] + table[index[i]]);
            sum[0] += change / width;
            sum[1] += before / width;
        }
    return 0;
}
