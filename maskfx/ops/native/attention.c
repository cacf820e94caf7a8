/* Attention of each request's rows over its keys, in single precision, with AVX-512.
 *
 * Queries lie in the lanes of vectors: a number of a key is multiplied with a tile of queries at
 * once, whatever the depth of a head. Keys come in blocks, whose scores, softmax and sums of values
 * stay in the first cache; several tiles take a block in turn. What a request gets doesn't depend
 * on the others. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Addresses and sizes. A row is (heads, depth); its depth is contiguous. */
typedef struct {
    int64_t q, k, v, rest_k, rest_v;                /* addresses */
    int64_t rows[3];                                /* of queries, fresh keys and cached ones */
    int64_t strides[5][2];                          /* of q, k, v, rest_k, rest_v: rows and heads */
    int64_t heads, key_heads, depth, depth_v;
    int64_t requests, spans[3], pairs[3];           /* addresses and ranges of each: see `rows` */
    int64_t out, weights;                           /* addresses; weights: log-sum-exps, or 0 */
    int64_t threads;
} Call;

#ifndef __AVX512F__

/* Whether functions in vectors of 512 bits run here: 1 on one thread, 2 on several. */
int wide(void) { return 0; }

int attend(const int64_t *given, double scale) { return -1; }

#else

#include <immintrin.h>
#include <math.h>

#define LANES 16
#define VECTORS 2              /* of a tile; a last one of few queries has 1 */
#define TILE (LANES * VECTORS) /* queries */
#define GROUP 8                /* tiles at most that take a block of keys in turn */
#define BLOCK 64               /* keys */
#define STEP 8                 /* keys, or numbers of values, that are summed at once */
#define LOG_2 0.6931471805599453

typedef __m512 vec;

/* A tile's greatest scores so far, and the sums of its weights. */
typedef struct {
    vec highest[VECTORS], total[VECTORS];
} Softmax;

int wide(void)
{
#ifdef _OPENMP
    return 2;
#else
    return 1;
#endif
}

/* 2 to the power of numbers that are at most 0. */
static inline vec power(vec x)
{
    x = _mm512_max_ps(_mm512_set1_ps(-126.0f), x); /* in this order NaN stays */
    vec whole = _mm512_roundscale_ps(x, 0), part = x - whole;
    vec found = part * 1.5403530e-4f + 1.3333558e-3f; /* the Taylor series */
    found = found * part + 9.6181291e-3f;
    found = found * part + 5.5504109e-2f;
    found = found * part + 2.4022651e-1f;
    found = found * part + 6.9314718e-1f;
    found = found * part + 1.0f;
    return _mm512_scalef_ps(found, whole);
}

/* The products of `count` keys, STEP at most, with a tile's queries, (depth, vectors). */
static inline __attribute__((always_inline)) void score(const int vectors, const int count,
                                                        const float *key, int64_t row,
                                                        const vec *query, int64_t depth, vec *out)
{
    vec sum[STEP][VECTORS];
    for (int k = 0; k < count; k++)
        for (int v = 0; v < vectors; v++)
            sum[k][v] = _mm512_setzero_ps();
    for (int64_t d = 0; d < depth; d++) {
#pragma GCC unroll 8
        for (int k = 0; k < count; k++) {
            vec one = _mm512_set1_ps(key[k * row + d]);
            for (int v = 0; v < vectors; v++)
                sum[k][v] += one * query[d * vectors + v];
        }
    }
    for (int k = 0; k < count; k++)
        for (int v = 0; v < vectors; v++)
            out[k * vectors + v] = sum[k][v];
}

/* Add values, times a tile's weights, to its sums: `count` numbers of each value, STEP at most. */
static inline __attribute__((always_inline)) void mix(const int vectors, const int count,
                                                      const float *value, int64_t row,
                                                      const vec *weight, int64_t keys, vec *sums)
{
    vec sum[STEP][VECTORS];
    for (int d = 0; d < count; d++)
        for (int v = 0; v < vectors; v++)
            sum[d][v] = sums[d * vectors + v];
    for (int64_t k = 0; k < keys; k++) {
#pragma GCC unroll 8
        for (int d = 0; d < count; d++) {
            vec one = _mm512_set1_ps(value[k * row + d]);
            for (int v = 0; v < vectors; v++)
                sum[d][v] += one * weight[k * vectors + v];
        }
    }
    for (int d = 0; d < count; d++)
        for (int v = 0; v < vectors; v++)
            sums[d * vectors + v] = sum[d][v];
}

/* Let a tile attend to a block of keys. */
static inline __attribute__((always_inline)) void attend_block(
    const int vectors, const float *key, int64_t key_row, const float *value, int64_t value_row,
    int64_t keys, int64_t depth, int64_t depth_v, const vec *query, Softmax *soft, vec *sums)
{
    vec weight[BLOCK * VECTORS];
    int64_t k = 0, d = 0;
    for (; k + STEP <= keys; k += STEP)
        score(vectors, STEP, key + k * key_row, key_row, query, depth, weight + k * vectors);
    for (; k < keys; k++)
        score(vectors, 1, key + k * key_row, key_row, query, depth, weight + k * vectors);
    for (int v = 0; v < vectors; v++) {
        vec high = soft->highest[v];
        for (k = 0; k < keys; k++)
            high = _mm512_max_ps(high, weight[k * vectors + v]);
        vec fade = power(soft->highest[v] - high), total = soft->total[v] * fade;
        for (k = 0; k < keys; k++)
            total += weight[k * vectors + v] = power(weight[k * vectors + v] - high);
        soft->highest[v] = high;
        soft->total[v] = total;
        for (d = 0; d < depth_v; d++)
            sums[d * vectors + v] *= fade;
    }
    for (d = 0; d + STEP <= depth_v; d += STEP)
        mix(vectors, STEP, value + d, value_row, weight, keys, sums + d * vectors);
    for (; d + STEP / 2 <= depth_v; d += STEP / 2)
        mix(vectors, STEP / 2, value + d, value_row, weight, keys, sums + d * vectors);
    for (; d < depth_v; d++)
        mix(vectors, 1, value + d, value_row, weight, keys, sums + d * vectors);
}

/* The n-th row of ranges of rows. */
static int64_t row_of(const int64_t *span, int64_t n)
{
    for (; n >= span[1] - span[0]; span += 2)
        n -= span[1] - span[0];
    return span[0] + n;
}

/* Attend for one head of a request: `count` queries from `first` on, GROUP tiles at most. */
static void attend_tiles(const Call *call, int64_t request, int64_t head, int64_t first,
                         int64_t count, float scale, vec *space)
{
    int64_t depth = call->depth, depth_v = call->depth_v, heads = call->heads;
    int64_t tiles = (count + TILE - 1) / TILE, key_head = head * call->key_heads / heads;
    int64_t narrow = tiles * TILE - count >= LANES ? tiles - 1 : -1; /* the tile of one vector */
    const int64_t *span = (const int64_t *)call->spans[0] + 2 * request * call->pairs[0];
    vec *query = space, *sums = space + GROUP * depth * VECTORS;
    Softmax soft[GROUP];
    memset(query, 0, tiles * depth * VECTORS * sizeof(vec));
    memset(sums, 0, tiles * depth_v * VECTORS * sizeof(vec));
    for (int64_t t = 0; t < tiles; t++)
        for (int v = 0; v < VECTORS; v++) {
            soft[t].highest[v] = _mm512_set1_ps(-INFINITY);
            soft[t].total[v] = _mm512_setzero_ps();
        }
    for (int64_t n = 0; n < count; n++) {
        const float *row = (const float *)call->q + row_of(span, first + n) * call->strides[0][0] +
                           head * call->strides[0][1];
        float *lane = (float *)(query + n / TILE * depth * VECTORS) + n % TILE;
        int64_t step = n / TILE == narrow ? LANES : TILE;
        for (int64_t d = 0; d < depth; d++)
            lane[d * step] = row[d] * scale;
    }
    for (int side = 0; side < 2; side++) { /* fresh keys, then cached ones */
        const int64_t *key_stride = call->strides[side ? 3 : 1];
        const int64_t *value_stride = call->strides[side ? 4 : 2];
        const float *keys = (const float *)(side ? call->rest_k : call->k);
        const float *values = (const float *)(side ? call->rest_v : call->v);
        keys += key_head * key_stride[1];
        values += key_head * value_stride[1];
        int64_t pairs = call->pairs[1 + side];
        const int64_t *ranges = (const int64_t *)call->spans[1 + side] + 2 * request * pairs;
        for (int64_t p = 0; p < pairs; p++)
            for (int64_t at = ranges[2 * p], stop = ranges[2 * p + 1]; at < stop; at += BLOCK)
                for (int64_t t = 0; t < tiles; t++) {
                    const float *key = keys + at * key_stride[0];
                    const float *value = values + at * value_stride[0];
                    int64_t size = stop - at < BLOCK ? stop - at : BLOCK;
                    const vec *own = query + t * depth * VECTORS;
                    vec *sum = sums + t * depth_v * VECTORS;
                    if (t == narrow)
                        attend_block(1, key, key_stride[0], value, value_stride[0], size, depth,
                                     depth_v, own, soft + t, sum);
                    else
                        attend_block(VECTORS, key, key_stride[0], value, value_stride[0], size,
                                     depth, depth_v, own, soft + t, sum);
                }
    }
    for (int64_t n = 0; n < count; n++) {
        int64_t t = n / TILE, lane = n % TILE, place = row_of(span, first + n) * heads + head;
        float total = ((float *)soft[t].total)[lane], *row = (float *)call->out + place * depth_v;
        float share = total > 0 ? 1 / total : 0;
        const float *own = (const float *)(sums + t * depth_v * VECTORS) + lane;
        int64_t step = t == narrow ? LANES : TILE;
        for (int64_t d = 0; d < depth_v; d++)
            row[d] = own[d * step] * share;
        if (call->weights)
            ((float *)call->weights)[place] =
                (((float *)soft[t].highest)[lane] + log2f(total)) * (float)LOG_2;
    }
}

/* The number of rows in ranges of rows; -1 for a range of rows that aren't there. */
static int64_t count_rows(const int64_t *span, int64_t pairs, int64_t rows)
{
    int64_t count = 0;
    for (int64_t p = 0; p < pairs; p++, span += 2) {
        if (span[0] < 0 || span[0] > span[1] || span[1] > rows)
            return -1;
        count += span[1] - span[0];
    }
    return count;
}

/* Divide the work for the threads: units of one head and `size` queries at most; return the size.
 * `begins` gets the first unit of each request, and the number of all. */
static int64_t divide(const Call *call, const int64_t *queries, int64_t *begins)
{
    for (int64_t size = GROUP * TILE;; size /= 2) {
        begins[0] = 0;
        for (int64_t r = 0; r < call->requests; r++)
            begins[r + 1] = begins[r] + call->heads * ((queries[r] + size - 1) / size);
        if (size == TILE || call->threads == 1 || begins[call->requests] >= 4 * call->threads)
            return size;
    }
}

/* Attend for all requests. Queries without keys get zeros, and a log-sum-exp of minus infinity.
 * Return -1 if memory is short, -2 for spans of rows that aren't there. */
int attend(const int64_t *given, double scale)
{
    const Call *call = (const Call *)given;
    int64_t requests = call->requests, heads = call->heads, failed = 0;
    int64_t *queries = malloc((2 * requests + 1) * sizeof(int64_t));
    if (!queries)
        return -1;
    int64_t *begins = queries + requests;
    for (int64_t r = 0; r < requests; r++) {
        for (int kind = 2; kind >= 0; kind--) {
            int64_t pairs = call->pairs[kind];
            const int64_t *span = (const int64_t *)call->spans[kind] + 2 * r * pairs;
            queries[r] = count_rows(span, pairs, call->rows[kind]);
            if (queries[r] < 0) {
                free(queries);
                return -2;
            }
        }
    }
    int64_t size = divide(call, queries, begins);
#pragma omp parallel num_threads(call->threads) if (call->threads > 1 && begins[requests] > 1)
    {
        int64_t numbers = call->depth + call->depth_v; /* of each query of the tiles */
        vec *space = aligned_alloc(sizeof(vec), GROUP * VECTORS * numbers * sizeof(vec));
        if (!space) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic)
        for (int64_t unit = 0; unit < begins[requests]; unit++) {
            int64_t r = 0;
            while (begins[r + 1] <= unit)
                r++;
            int64_t groups = (begins[r + 1] - begins[r]) / heads, own = unit - begins[r];
            int64_t first = own % groups * size, left = queries[r] - first;
            if (space)
                attend_tiles(call, r, own / groups, first, left < size ? left : size,
                             (float)(scale / LOG_2), space);
        }
        free(space);
    }
    free(queries);
    return failed ? -1 : 0;
}

#endif
