/* Products of few rows with a matrix, in single precision, with AVX-512.
 *
 * Rows lie in the lanes of vectors, so that the matrix is read once, as it is stored: a number of
 * it is multiplied with up to 48 rows at once. Libraries bring the matrix into another layout first,
 * which takes as long as the product if rows are few. */

#include <stdint.h>
#include <stdlib.h>

/* Addresses and sizes. */
typedef struct {
    int64_t rows, count, depth; /* rows: (count, depth) */
    int64_t weight, outputs;    /* weight: (outputs, depth) */
    int64_t bias, out;          /* bias: (outputs) or 0; out: (count, outputs) */
    int64_t threads;
} Product;

#ifndef __AVX512F__

int few_rows_linear(const int64_t *given) { return -1; }

#else

#include <immintrin.h>

#define LANES 16
#define VECTORS 3   /* of a tile of rows, at most */
#define TILES 64    /* at most */
#define STEP 8      /* outputs that are summed at once, in registers */
#define OUTPUTS 32  /* that a thread takes at once */
#define DEPTH 1024  /* of a part of the rows that stays in the second cache */
#define LINE 16     /* numbers of a cache line */

typedef __m512 vec;

/* Transpose 16 vectors: afterwards the n-th has the n-th numbers of all. */
static inline void transpose(vec *rows)
{
    vec part[LANES];
    for (int i = 0; i < LANES; i += 2) {
        part[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
        part[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4)
        for (int j = 0; j < 2; j++) {
            __m512d a = _mm512_castps_pd(part[i + j]), b = _mm512_castps_pd(part[i + j + 2]);
            rows[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            rows[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
    for (int i = 0; i < LANES; i += 8)
        for (int j = 0; j < 4; j++) {
            part[i + j] = _mm512_shuffle_f32x4(rows[i + j], rows[i + j + 4], 0x88);
            part[i + j + 4] = _mm512_shuffle_f32x4(rows[i + j], rows[i + j + 4], 0xdd);
        }
    for (int j = 0; j < 8; j++) {
        rows[j] = _mm512_shuffle_f32x4(part[j], part[j + 8], 0x88);
        rows[j + 8] = _mm512_shuffle_f32x4(part[j], part[j + 8], 0xdd);
    }
}

/* The lanes of a vector that are there, of `left` numbers. */
static inline __mmask16 lanes(int64_t left) { return left < LANES ? (1 << left) - 1 : 0xffff; }

/* Add the products of `count` outputs' weights with a tile of rows, (depth, vectors), to its sums.
 * The weights of the next outputs are fetched meanwhile. */
static inline __attribute__((always_inline)) void add(const int vectors, const int count,
                                                      const float *weight, int64_t stride,
                                                      const vec *rows, int64_t depth, vec *sums)
{
    vec sum[STEP][VECTORS];
    for (int n = 0; n < count; n++)
        for (int v = 0; v < vectors; v++)
            sum[n][v] = sums[n * vectors + v];
    for (int64_t d = 0; d < depth; d++) {
        if (d % LINE == 0)
            for (int n = 0; n < count; n++)
                _mm_prefetch((const char *)(weight + (n + STEP) * stride + d), _MM_HINT_T0);
#pragma GCC unroll 8
        for (int n = 0; n < count; n++) {
            vec one = _mm512_set1_ps(weight[n * stride + d]);
            for (int v = 0; v < vectors; v++)
                sum[n][v] += one * rows[d * vectors + v];
        }
    }
    for (int n = 0; n < count; n++)
        for (int v = 0; v < vectors; v++)
            sums[n * vectors + v] = sum[n][v];
}

/* The same for any number of outputs, STEP at most. */
static void add_outputs(int64_t vectors, int64_t count, const float *weight, int64_t stride,
                        const vec *rows, int64_t depth, vec *sums)
{
    if (count == STEP && vectors == 1)
        add(1, STEP, weight, stride, rows, depth, sums);
    else if (count == STEP && vectors == 2)
        add(2, STEP, weight, stride, rows, depth, sums);
    else if (count == STEP)
        add(3, STEP, weight, stride, rows, depth, sums);
    else
        for (int64_t n = 0; n < count; n++, weight += stride, sums += vectors)
            if (vectors == 1)
                add(1, 1, weight, stride, rows, depth, sums);
            else if (vectors == 2)
                add(2, 1, weight, stride, rows, depth, sums);
            else
                add(3, 1, weight, stride, rows, depth, sums);
}

/* Bring 16 numbers of a tile's rows, from `d` on, into (depth, vectors). */
static void load_rows(const Product *given, int64_t first, int64_t vectors, int64_t d, vec *tile)
{
    int64_t left = given->depth - d;
    for (int64_t v = 0; v < vectors; v++) {
        vec part[LANES];
        for (int64_t n = 0, row = (first + v) * LANES; n < LANES; n++, row++)
            part[n] = row < given->count
                          ? _mm512_maskz_loadu_ps(lanes(left), (const float *)given->rows +
                                                                   row * given->depth + d)
                          : _mm512_setzero_ps();
        transpose(part);
        for (int64_t n = 0; n < LANES && n < left; n++)
            tile[(d + n) * vectors + v] = part[n];
    }
}

/* Write the sums of a tile, (OUTPUTS, vectors), to the rows' outputs from `from` on. */
static void store_sums(const Product *given, int64_t first, int64_t vectors, int64_t from,
                       const vec *sums)
{
    int64_t size = given->outputs - from < OUTPUTS ? given->outputs - from : OUTPUTS;
    for (int64_t v = 0; v < vectors; v++)
        for (int64_t n = 0; n < size; n += LANES) {
            vec part[LANES];
            for (int64_t k = 0; k < LANES; k++)
                part[k] = sums[(n + k) * vectors + v];
            transpose(part);
            float *out = (float *)given->out + (first + v) * LANES * given->outputs + from + n;
            int64_t left = given->count - (first + v) * LANES;
            for (int64_t k = 0; k < LANES && k < left; k++)
                _mm512_mask_storeu_ps(out + k * given->outputs, lanes(size - n), part[k]);
        }
}

/* Return -1 if memory is short or rows are too many. */
int few_rows_linear(const int64_t *given_numbers)
{
    const Product *given = (const Product *)given_numbers;
    int64_t depth = given->depth, outputs = given->outputs;
    int64_t all = (given->count + LANES - 1) / LANES, tiles = (all + VECTORS - 1) / VECTORS;
    int64_t first[TILES + 1], failed = 0; /* the vector where a tile begins */
    if (tiles > TILES)
        return -1;
    for (int64_t t = 0; t <= tiles; t++)
        first[t] = tiles ? all * t / tiles : 0;
    vec *rows = aligned_alloc(sizeof(vec), (all * depth + 1) * sizeof(vec));
    if (!rows)
        return -1;
#pragma omp parallel num_threads(given->threads) if (given->threads > 1)
    {
        vec *sums = aligned_alloc(sizeof(vec), (all * OUTPUTS + 1) * sizeof(vec));
        if (!sums) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(static)
        for (int64_t d = 0; d < depth; d += LANES)
            for (int64_t t = 0; t < tiles; t++)
                load_rows(given, first[t], first[t + 1] - first[t], d, rows + first[t] * depth);
#pragma omp for schedule(dynamic)
        for (int64_t from = 0; from < outputs; from += OUTPUTS) {
            int64_t size = outputs - from < OUTPUTS ? outputs - from : OUTPUTS;
            if (!sums)
                continue;
            for (int64_t t = 0; t < tiles; t++)
                for (int64_t n = 0, vectors = first[t + 1] - first[t]; n < size * vectors; n++)
                    sums[first[t] * OUTPUTS + n] = _mm512_set1_ps(
                        given->bias ? ((const float *)given->bias)[from + n / vectors] : 0);
            for (int64_t d = 0; d < depth; d += DEPTH)
                for (int64_t n = 0; n < size; n += STEP)
                    for (int64_t t = 0; t < tiles; t++) {
                        int64_t vectors = first[t + 1] - first[t];
                        add_outputs(vectors, size - n < STEP ? size - n : STEP,
                                    (const float *)given->weight + (from + n) * depth + d, depth,
                                    rows + first[t] * depth + d * vectors,
                                    depth - d < DEPTH ? depth - d : DEPTH,
                                    sums + first[t] * OUTPUTS + n * vectors);
                    }
            for (int64_t t = 0; t < tiles; t++)
                store_sums(given, first[t], first[t + 1] - first[t], from,
                           sums + first[t] * OUTPUTS);
        }
        free(sums);
    }
    free(rows);
    return failed ? -1 : 0;
}

#endif
