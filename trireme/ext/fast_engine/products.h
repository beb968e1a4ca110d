/* What the compiled parts share: exp, the factor of RMSNorm, and products by packed matrices.
   Arithmetic is float32; with -DBF16 matrices are bfloat16, each number widened as it is read.
   Included by each of them, so that loops over it become vectors there. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef BF16
typedef uint16_t real;
static inline float load(real x) {
    uint32_t bits = (uint32_t)x << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}
static inline real store(float x) { /* to the nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return x == x ? (real)rounded : (real)0x7fc0;
}
#else
typedef float real;
static inline float load(real x) { return x; }
static inline real store(float x) { return x; }
#endif

/* exp for x <= 88, to 2 units in the last place, and NaN of NaN; written so that loops over it
   become vectors. */
static inline float exponential(float given) {
    float x = given > -87.0f ? given : -87.0f;
    x = x < 88.0f ? x : 88.0f;
    float whole = rintf(x * 1.44269504088896341f);
    float rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    float poly = 1.9875691500e-4f;
    poly = poly * rest + 1.3981999507e-3f;
    poly = poly * rest + 8.3334519073e-3f;
    poly = poly * rest + 4.1665795894e-2f;
    poly = poly * rest + 1.6666665459e-1f;
    poly = poly * rest + 5.0000001201e-1f;
    poly = poly * rest * rest + rest + 1.0f;
    int32_t bits = ((int32_t)whole + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return given == given ? poly * power : given;
}

static inline float norm_factor(const float *x, int64_t n, float eps) {
    float sum = 0.0f;
    for (int64_t i = 0; i < n; i++) sum += x[i] * x[i];
    return 1.0f / sqrtf(sum / (float)n + eps);
}

/* TALL rows of two vectors each, the sums of a tile, and what they are made of, fill the registers.
   What a chunk of rows reads and writes is to stay in the nearest cache. */
#ifdef __AVX512F__
enum { LANES = 16, TALL = 12, CHUNK = 36 };
#elif defined(__AVX__)
enum { LANES = 8, TALL = 6, CHUNK = 24 };
#elif defined(__ARM_NEON)
enum { LANES = 4, TALL = 8, CHUNK = 32 };
#else
enum { LANES = 4, TALL = 6, CHUNK = 24 };
#endif
enum { PANEL = 2 * LANES, LINE = 64 /* bytes of a cache line */ };
typedef float Lanes __attribute__((vector_size(LANES * 4), aligned(4)));

#ifdef BF16
typedef uint16_t Halves __attribute__((vector_size(LANES * 2), aligned(2)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
static inline Lanes lanes(const real *x) {
    return (Lanes)(__builtin_convertvector(*(const Halves *)x, Words) << 16);
}
#else
static inline Lanes lanes(const real *x) { return *(const Lanes *)x; }
#endif

typedef struct {
    const real *packed; /* [panels, in, PANEL]: the transposed matrix, zeros behind the last */
    const real *bias;   /* [out], or NULL */
    int64_t in, out;
} Matrix;

/* y [rows, PANEL] = x [rows, K] times a panel + bias, each sum in the order of K; rows of y are
   `stride` apart. Meanwhile `share` bytes for each k, from `ahead` on, are brought into the cache. */
static inline __attribute__((always_inline)) void tile(const float *x, const real *panel,
                                                       const real *bias, int64_t K, float *y,
                                                       int64_t stride, const char *ahead,
                                                       int64_t share, const int rows) {
    Lanes sums[TALL][2] = {};
    for (int64_t k = 0; k < K; k++) {
        if (share) __builtin_prefetch(ahead + k * share);
        if (share > LINE) __builtin_prefetch(ahead + k * share + LINE);
        const Lanes a = lanes(panel + k * PANEL), b = lanes(panel + k * PANEL + LANES);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            sums[r][0] += x[r * K + k] * a;
            sums[r][1] += x[r * K + k] * b;
        }
    }
    const Lanes a = bias ? lanes(bias) : (Lanes){}, b = bias ? lanes(bias + LANES) : (Lanes){};
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        *(Lanes *)(y + r * stride) = sums[r][0] + a;
        *(Lanes *)(y + r * stride + LANES) = sums[r][1] + b;
    }
}

/* Columns n .. n + PANEL - 1 of x [rows, in] W', plus bias, into y, whose rows are `stride` apart.
   With `streams` the matrix comes from memory: the first tiles, four at most, each bring a part of
   the next panel into the cache. One alone would wait for all of it. */
static inline __attribute__((always_inline)) void by_panel(const Matrix *m, const float *x, float *y,
                                                           int64_t stride, int64_t rows, int64_t n,
                                                           const int streams) {
    float part[TALL * PANEL];
    real end[PANEL] = {0};
    const int64_t K = m->in, last = rows % TALL;
    const int64_t tiles = rows / TALL + last / 4 + last % 4 / 2 + last % 2;
    const int64_t fetchers = tiles < 4 ? tiles : 4, bytes = PANEL * (int64_t)sizeof(real);
    const int64_t share = streams && fetchers ? bytes / fetchers : 0;
    const real *panel = m->packed + n * K, *bias = m->bias ? m->bias + n : NULL;
    const char *ahead = (const char *)(panel + PANEL * K);
    const int64_t width = m->out - n < PANEL ? m->out - n : PANEL, whole = width == PANEL;
    if (bias && !whole) bias = memcpy(end, bias, (size_t)width * sizeof(real));
    for (int64_t r = 0, tall, t = 0; r < rows; r += tall, t++) {
        const float *from = x + r * K;
        float *to = whole ? y + r * stride : part;
        const int64_t apart = whole ? stride : PANEL, left = rows - r, now = t < 4 ? share : 0;
        tall = left >= TALL ? TALL : left >= 4 ? 4 : left >= 2 ? 2 : 1;
        if (tall == TALL) tile(from, panel, bias, K, to, apart, ahead, now, TALL);
        else if (tall == 4) tile(from, panel, bias, K, to, apart, ahead, now, 4);
        else if (tall == 2) tile(from, panel, bias, K, to, apart, ahead, now, 2);
        else tile(from, panel, bias, K, to, apart, ahead, now, 1);
        ahead += K * now;
        for (int64_t i = 0; !whole && i < tall; i++)
            memcpy(y + (r + i) * stride, part + i * PANEL, (size_t)width * sizeof(float));
    }
}

/* y [rows, out] = x [rows, in] W' + bias */
static inline void multiply(const Matrix *m, const float *x, float *y, int64_t rows) {
    for (int64_t n = 0; n < m->out; n += PANEL) by_panel(m, x, y + n, m->out, rows, n, 0);
}
