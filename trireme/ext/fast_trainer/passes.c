/* The forward and the backward pass of a small decoder over the flat tokens of a micro-batch.

   Rows of an array are flat tokens; all is float32. Work is split by tokens, by tries and heads, or
   by rows of a gradient, each of which one thread computes in one order: the number of threads
   changes no bit. A forward pass stores what products and attention have made; norms, rotations and
   gates are computed again. */

#include <stdlib.h>

#include "products.h"

enum { TOGETHER = 256, TILES = 4 }; /* of a weight's gradient: tokens, and tiles, in the cache */

typedef struct {
    const float *norm, *q_norm, *k_norm, *mlp_norm;        /* q_norm, k_norm: NULL without */
    Matrix qkv, o, gate_up, down;
    Matrix qkv_back, o_back, gate_up_back, down_back;      /* their transposes */
    float *x, *qkv_out, *log_sums, *heads, *middle, *both; /* see `forward` */
    float *d_norm, *d_q_norm, *d_k_norm, *d_mlp_norm;
    float *d_qkv, *d_o, *d_gate_up, *d_down;               /* [out, in] */
    float *b_qkv, *b_o, *b_gate_up, *b_down;               /* of biases; NULL without */
} Block;

typedef struct {
    const Block *blocks;
    const float *norm, *cosines, *sines; /* [W]; [T, D / 2] */
    const int64_t *tries;  /* [R + 1] the first span of each trie, and the end */
    const int64_t *spans;  /* [S, 3] first query, number of queries, number of keys */
    const int64_t *starts; /* [S] of each span's keys in `keys` */
    const int64_t *keys;   /* flat tokens; a span's queries are its last keys */
    float *x, *out;        /* [T, W] before the last norm, and after it */
    float *rotated;        /* [T, (H + K) D] */
    float *d_norm, *dx, *dx_next, *d_middle, *d_heads, *d_qkv, *d_both; /* as what they are of */
    float *hidden, *mlp_hidden, *act;                                   /* [T, W], [T, W], [T, I] */
    float *parts; /* [chunks, 2 W + 2 D] gradients of norms by tokens of a chunk */
    int64_t num_blocks, T, R, longest, H, K, D, W, I, threads;
    float eps, scale;
} Pass;

static void norm_rows(const float *x, const float *weight, float *out, int64_t rows, int64_t n,
                      float eps) {
    for (int64_t r = 0; r < rows; r++, x += n, out += n) {
        float factor = norm_factor(x, n, eps);
        for (int64_t i = 0; i < n; i++) out[i] = x[i] * factor * weight[i];
    }
}

/* dx += the gradient by x of RMSNorm(x) * weight, whose own is dy; d_weight += that by weight. */
static void norm_back(const float *x, const float *weight, const float *dy, float *dx,
                      float *d_weight, int64_t n, float eps) {
    float factor = norm_factor(x, n, eps), sum = 0;
    for (int64_t i = 0; i < n; i++) sum += weight[i] * dy[i] * x[i];
    float share = factor * factor * factor * sum / (float)n;
    for (int64_t i = 0; i < n; i++) {
        dx[i] += factor * weight[i] * dy[i] - share * x[i];
        d_weight[i] += dy[i] * x[i] * factor;
    }
}

/* c [rows, PANEL or LANES] (+)= a [R, rows]' b [R, the same]; rows are lda, ldb and ldc apart. */
static inline __attribute__((always_inline)) void cross_tile(const float *a, int64_t lda,
                                                             const float *b, int64_t ldb, int64_t R,
                                                             float *c, int64_t ldc, int add,
                                                             const int rows, const int wide) {
    Lanes sums[TALL][2] = {};
    for (int64_t r = 0; r < R; r++, a += lda, b += ldb) {
        const Lanes first = *(const Lanes *)b, second = wide ? *(const Lanes *)(b + LANES) : first;
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            sums[i][0] += a[i] * first;
            if (wide) sums[i][1] += a[i] * second;
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++) {
        Lanes *to = (Lanes *)(c + i * ldc), *more = (Lanes *)(c + i * ldc + LANES);
        *to = add ? *to + sums[i][0] : sums[i][0];
        if (wide) *more = add ? *more + sums[i][1] : sums[i][1];
    }
}

/* c [m, n] (+)= a [R, m]' b [R, n], each sum in the order of R. */
static void cross(const float *a, int64_t lda, const float *b, int64_t ldb, int64_t R, int64_t m,
                  int64_t n, float *c, int64_t ldc, int add) {
    for (int64_t i = 0, tall; i < m; i += tall) {
        const int64_t left = m - i;
        tall = left >= TALL ? TALL : left >= 4 ? 4 : left >= 2 ? 2 : 1;
        int64_t j = 0;
        for (; j + LANES <= n; j += n - j >= PANEL ? PANEL : LANES) {
            const float *from = a + i, *by = b + j;
            float *to = c + i * ldc + j;
            const int wide = n - j >= PANEL;
#define CROSS(ROWS)                                                                                \
    (wide ? cross_tile(from, lda, by, ldb, R, to, ldc, add, ROWS, 1)                               \
          : cross_tile(from, lda, by, ldb, R, to, ldc, add, ROWS, 0))
            if (tall == TALL) CROSS(TALL);
            else if (tall == 4) CROSS(4);
            else if (tall == 2) CROSS(2);
            else CROSS(1);
#undef CROSS
        }
        for (; j < n; j++)
            for (int64_t k = i; k < i + tall; k++) {
                float sum = 0;
                for (int64_t r = 0; r < R; r++) sum += a[r * lda + k] * b[r * ldb + j];
                c[k * ldc + j] = add ? c[k * ldc + j] + sum : sum;
            }
    }
}

/* Queries and keys of some tokens: normed where there are weights, and rotated. */
static void rotate(const Pass *p, const Block *b, int64_t first, int64_t rows) {
    const int64_t D = p->D, half = D / 2, heads = p->H + p->K, all = heads + p->K;
    for (int64_t t = first; t < first + rows; t++)
        for (int64_t h = 0; h < heads; h++) {
            const float *from = b->qkv_out + (t * all + h) * D;
            const float *c = p->cosines + t * half, *s = p->sines + t * half;
            const float *weight = h < p->H ? b->q_norm : b->k_norm;
            float *to = p->rotated + (t * heads + h) * D;
            if (weight) {
                norm_rows(from, weight, to, 1, D, p->eps);
                from = to;
            }
            for (int64_t i = 0; i < half; i++) {
                float x = from[i], y = from[half + i];
                to[i] = x * c[i] - y * s[i];
                to[half + i] = y * c[i] + x * s[i];
            }
        }
}

/* Its backward pass, in place; `d_q_norm` and `d_k_norm` are added to. */
static void rotate_back(const Pass *p, const Block *b, int64_t first, int64_t rows, float *d_q_norm,
                        float *d_k_norm, float *buffer) {
    const int64_t D = p->D, half = D / 2, heads = p->H + p->K, all = heads + p->K;
    for (int64_t t = first; t < first + rows; t++)
        for (int64_t h = 0; h < heads; h++) {
            float *at = p->d_qkv + (t * all + h) * D;
            const float *c = p->cosines + t * half, *s = p->sines + t * half;
            for (int64_t i = 0; i < half; i++) {
                float x = at[i], y = at[half + i];
                at[i] = x * c[i] + y * s[i];
                at[half + i] = y * c[i] - x * s[i];
            }
            const float *weight = h < p->H ? b->q_norm : b->k_norm;
            if (!weight) continue;
            memcpy(buffer, at, (size_t)D * sizeof(float));
            memset(at, 0, (size_t)D * sizeof(float));
            norm_back(b->qkv_out + (t * all + h) * D, weight, buffer, at,
                      h < p->H ? d_q_norm : d_k_norm, D, p->eps);
        }
}

/* Memory of one thread for the attention of a span by a head. */
typedef struct {
    float *keys, *values, *d_keys, *d_values, *more; /* [longest, D] */
    float *p, *dp;                                   /* [longest, PANEL] */
    float *queries, *grads, *by_query, *by_grad;     /* [D, PANEL], [PANEL, D] in panels */
} Room;

static int64_t panels(int64_t n) { return (n + PANEL - 1) / PANEL * PANEL; }

static int64_t room_size(const Pass *p) {
    return p->longest * (5 * p->D + 2 * PANEL) + 4 * panels(p->D) * PANEL;
}

static Room room_of(const Pass *p, float *memory) {
    const int64_t by_key = p->longest * p->D, by_pair = p->longest * PANEL;
    Room r;
    r.keys = memory, r.values = r.keys + by_key, r.d_keys = r.values + by_key;
    r.d_values = r.d_keys + by_key, r.more = r.d_values + by_key;
    r.p = r.more + by_key, r.dp = r.p + by_pair, r.queries = r.dp + by_pair;
    r.grads = r.queries + panels(p->D) * PANEL, r.by_query = r.grads + panels(p->D) * PANEL;
    r.by_grad = r.by_query + panels(p->D) * PANEL;
    return r;
}

/* A span's keys and values by one head of keys. */
static void collect(const Pass *p, const Block *b, int64_t span, int64_t k, Room *r) {
    const int64_t D = p->D, *keys = p->keys + p->starts[span];
    const size_t bytes = (size_t)D * sizeof(float);
    for (int64_t l = 0; l < p->spans[3 * span + 2]; l++) {
        const int64_t t = keys[l];
        memcpy(r->keys + l * D, p->rotated + (t * (p->H + p->K) + p->H + k) * D, bytes);
        const float *value = b->qkv_out + (t * (p->H + 2 * p->K) + p->H + p->K + k) * D;
        memcpy(r->values + l * D, value, bytes);
    }
}

/* Rows of x [n, D], `stride` apart and times `scale`, as columns of a panel [D, PANEL], zeros
   behind the last; unless `rows` is NULL also as they are, in panels [D / PANEL, PANEL, PANEL]. */
static void columns(const float *x, int64_t stride, int64_t n, int64_t D, float scale, float *panel,
                    float *rows) {
    memset(panel, 0, (size_t)(D * PANEL) * sizeof(float));
    for (int64_t j = 0; j < n; j++)
        for (int64_t d = 0; d < D; d++) panel[d * PANEL + j] = x[j * stride + d] * scale;
    if (!rows) return;
    memset(rows, 0, (size_t)(panels(D) * PANEL) * sizeof(float));
    for (int64_t j = 0; j < n; j++)
        for (int64_t d = 0; d < D; d++)
            rows[(d / PANEL * PANEL + j) * PANEL + d % PANEL] = x[j * stride + d] * scale;
}

/* p [count, PANEL] becomes exp(p - less [PANEL]) where query j sees key l: l <= before + j. */
static inline void weights_of(float *p, int64_t count, int64_t before, const float *less) {
    for (int64_t l = 0; l < count; l++) {
        float *at = p + l * PANEL;
        for (int64_t j = 0; j < PANEL; j++) at[j] = exponential(at[j] - less[j]);
        for (int64_t j = 0; j < l - before && j < PANEL; j++) at[j] = 0;
    }
}

/* The attention of a trie by one head of keys, and the logarithms of its sums. */
static void attend(const Pass *p, const Block *b, int64_t trie, int64_t k, Room *r) {
    const int64_t D = p->D, group = p->H / p->K, wide = (p->H + p->K) * D;
    for (int64_t s = p->tries[trie]; s < p->tries[trie + 1]; s++) {
        const int64_t first = p->spans[3 * s], n = p->spans[3 * s + 1];
        const int64_t start = p->spans[3 * s + 2] - n;
        collect(p, b, s, k, r);
        for (int64_t h = k * group; h < (k + 1) * group; h++)
            for (int64_t i = 0; i < n; i += PANEL) {
                const int64_t num = n - i < PANEL ? n - i : PANEL, before = start + i;
                const int64_t count = before + num;
                columns(p->rotated + (first + i) * wide + h * D, wide, num, D, p->scale, r->queries,
                        NULL);
                const Matrix queries = {r->queries, NULL, D, PANEL};
                multiply(&queries, r->keys, r->p, count);
                float most[PANEL], total[PANEL] = {0};
                for (int64_t j = 0; j < PANEL; j++) most[j] = r->p[j];
                for (int64_t l = 1; l < count; l++)
                    for (int64_t j = l > before ? l - before : 0; j < PANEL; j++) {
                        const float one = r->p[l * PANEL + j];
                        most[j] = one > most[j] ? one : most[j];
                    }
                weights_of(r->p, count, before, most);
                for (int64_t l = 0; l < count; l++)
                    for (int64_t j = 0; j < PANEL; j++) total[j] += r->p[l * PANEL + j];
                float *to = b->heads + ((first + i) * p->H + h) * D;
                cross(r->p, PANEL, r->values, D, count, num, D, to, p->H * D, 0);
                for (int64_t j = 0; j < num; j++) {
                    const float share = 1.0f / total[j];
                    for (int64_t d = 0; d < D; d++) to[j * p->H * D + d] *= share;
                    b->log_sums[(first + i + j) * p->H + h] = most[j] + logf(total[j]);
                }
            }
    }
}

static void add(float *to, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] += x[i];
}

/* Its backward pass: from d_heads to queries, keys (both rotated) and values in d_qkv. */
static void attend_back(const Pass *p, const Block *b, int64_t trie, int64_t k, Room *r) {
    const int64_t D = p->D, group = p->H / p->K, wide = (p->H + p->K) * D, all = wide + p->K * D;
    const size_t bytes = (size_t)D * sizeof(float);
    for (int64_t s = p->tries[trie]; s < p->tries[trie + 1]; s++)
        for (int64_t t = p->spans[3 * s]; t < p->spans[3 * s] + p->spans[3 * s + 1]; t++) {
            memset(p->d_qkv + t * all + (p->H + k) * D, 0, bytes);
            memset(p->d_qkv + t * all + (p->H + p->K + k) * D, 0, bytes);
        }
    for (int64_t s = p->tries[trie]; s < p->tries[trie + 1]; s++) {
        const int64_t first = p->spans[3 * s], n = p->spans[3 * s + 1], len = p->spans[3 * s + 2];
        collect(p, b, s, k, r);
        memset(r->d_keys, 0, (size_t)len * bytes);
        memset(r->d_values, 0, (size_t)len * bytes);
        for (int64_t h = k * group; h < (k + 1) * group; h++)
            for (int64_t i = 0; i < n; i += PANEL) {
                const int64_t num = n - i < PANEL ? n - i : PANEL, before = len - n + i;
                const int64_t count = before + num, at = ((first + i) * p->H + h) * D;
                columns(p->rotated + (first + i) * wide + h * D, wide, num, D, p->scale, r->queries,
                        r->by_query);
                columns(p->d_heads + at, p->H * D, num, D, 1.0f, r->grads, r->by_grad);
                const Matrix queries = {r->queries, NULL, D, PANEL};
                const Matrix grads = {r->grads, NULL, D, PANEL};
                const Matrix by_query = {r->by_query, NULL, PANEL, D};
                const Matrix by_grad = {r->by_grad, NULL, PANEL, D};
                float sums[PANEL] = {0}, means[PANEL] = {0};
                for (int64_t j = 0; j < num; j++) {
                    sums[j] = b->log_sums[(first + i + j) * p->H + h];
                    const float *dy = p->d_heads + at + j * p->H * D;
                    const float *y = b->heads + at + j * p->H * D;
                    for (int64_t d = 0; d < D; d++) means[j] += dy[d] * y[d];
                }
                multiply(&queries, r->keys, r->p, count);
                weights_of(r->p, count, before, sums);
                multiply(&grads, r->values, r->dp, count);
                for (int64_t l = 0; l < count; l++) {
                    float *dp = r->dp + l * PANEL;
                    for (int64_t j = 0; j < PANEL; j++)
                        dp[j] = r->p[l * PANEL + j] * (dp[j] - means[j]);
                }
                multiply(&by_grad, r->p, r->more, count);
                add(r->d_values, r->more, count * D);
                multiply(&by_query, r->dp, r->more, count);
                add(r->d_keys, r->more, count * D);
                float *to = p->d_qkv + (first + i) * all + h * D;
                cross(r->dp, PANEL, r->keys, D, count, num, D, to, all, 0);
                for (int64_t j = 0; j < num; j++)
                    for (int64_t d = 0; d < D; d++) to[j * all + d] *= p->scale;
            }
        const int64_t *keys = p->keys + p->starts[s];
        for (int64_t l = 0; l < len; l++) {
            float *to = p->d_qkv + keys[l] * all + (p->H + k) * D;
            add(to, r->d_keys + l * D, D);
            add(to + p->K * D, r->d_values + l * D, D);
        }
    }
}

/* out [n] = silu(gate [n]) * up [n] */
static void silu_times(const float *gate, const float *up, float *out, int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] = gate[i] / (1.0f + exponential(-gate[i])) * up[i];
}

static void silu_back(const float *gate, const float *up, const float *dy, float *d_gate,
                      float *d_up, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        const float share = 1.0f / (1.0f + exponential(-gate[i]));
        d_up[i] = dy[i] * gate[i] * share;
        d_gate[i] = dy[i] * up[i] * share * (1.0f + gate[i] * (1.0f - share));
    }
}

/* Tokens of a chunk. */
int chunk(void) { return CHUNK; }

/* Numbers of float32 that each thread needs. */
static int64_t size_of(const Pass *p) {
    const int64_t chunk = CHUNK * (p->W + p->I) + p->D, room = room_size(p);
    return chunk > room ? chunk : room;
}

/* Of each block: x [T, W] before it (given for the first), qkv_out [T, (H + 2 K) D] before norms
   and rotation, log_sums [T, H] of attention, heads [T, H D] after it, middle [T, W] between it and
   the MLP, both [T, 2 I] the results of gate_up. Without gradients blocks may share them.
   Returns 1 without memory. */
int forward(const Pass *p) {
    const int64_t T = p->T, W = p->W, I = p->I, QKV = (p->H + 2 * p->K) * p->D;
    int failed = 0;
#pragma omp parallel num_threads(p->threads) if (p->threads > 1)
    {
        float *memory = malloc((size_t)size_of(p) * sizeof(float)), *hidden = memory;
        if (!memory) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp barrier
        for (int64_t n = 0; n < p->num_blocks && !failed; n++) {
            const Block *b = p->blocks + n;
            float *next = n + 1 < p->num_blocks ? b[1].x : p->x;
#pragma omp for schedule(dynamic, 1)
            for (int64_t t = 0; t < T; t += CHUNK) {
                const int64_t rows = T - t < CHUNK ? T - t : CHUNK;
                norm_rows(b->x + t * W, b->norm, hidden, rows, W, p->eps);
                multiply(&b->qkv, hidden, b->qkv_out + t * QKV, rows);
                rotate(p, b, t, rows);
            }
            Room room = room_of(p, memory);
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < p->R * p->K; i++) attend(p, b, i / p->K, i % p->K, &room);
#pragma omp for schedule(dynamic, 1)
            for (int64_t t = 0; t < T; t += CHUNK) {
                const int64_t rows = T - t < CHUNK ? T - t : CHUNK;
                float *middle = b->middle + t * W, *both = b->both + t * 2 * I;
                float *act = memory + CHUNK * W;
                multiply(&b->o, b->heads + t * p->H * p->D, middle, rows);
                add(middle, b->x + t * W, rows * W);
                norm_rows(middle, b->mlp_norm, hidden, rows, W, p->eps);
                multiply(&b->gate_up, hidden, both, rows);
                for (int64_t i = 0; i < rows; i++)
                    silu_times(both + i * 2 * I, both + (i * 2 + 1) * I, act + i * I, I);
                multiply(&b->down, act, hidden, rows);
                for (int64_t i = 0; i < rows * W; i++) next[t * W + i] = middle[i] + hidden[i];
                if (n + 1 == p->num_blocks)
                    norm_rows(next + t * W, p->norm, p->out + t * W, rows, W, p->eps);
            }
        }
        free(memory);
    }
    return failed;
}

/* The gradient of one weight [m, n], and of its bias [m] unless NULL. */
typedef struct {
    const float *dy, *x; /* [T, m], [T, n] */
    float *weight, *bias;
    int64_t m, n;
} Product;

/* Rows from `first` on, at most TILES * TALL, of a weight's gradient: TOGETHER tokens at a time, so
   that theirs stay in the cache. */
static void weigh(const Product *g, int64_t first, int64_t T) {
    const int64_t m = g->m - first < TILES * TALL ? g->m - first : TILES * TALL;
    if (m <= 0) return;
    for (int64_t t = 0; t < T; t += TOGETHER)
        cross(g->dy + t * g->m + first, g->m, g->x + t * g->n, g->n,
              T - t < TOGETHER ? T - t : TOGETHER, m, g->n, g->weight + first * g->n, g->n, t > 0);
    if (!g->bias) return;
    memset(g->bias + first, 0, (size_t)m * sizeof(float));
    for (int64_t t = 0; t < T; t++) add(g->bias + first, g->dy + t * g->m + first, m);
}

/* to [n] = the sums over chunks of the numbers from `at` on, in their order. */
static void gather(const Pass *p, int64_t chunks, int64_t at, int64_t n, float *to) {
    if (!to) return;
    memset(to, 0, (size_t)n * sizeof(float));
    for (int64_t c = 0; c < chunks; c++) add(to, p->parts + c * 2 * (p->W + p->D) + at, n);
}

/* From the gradient by p->out, which is in p->dx, to those by every weight and by the first x. The
   last one is in p->dx again if the number of blocks is even, else in p->dx_next. Returns 1 without
   memory. */
int backward(const Pass *p) {
    const int64_t T = p->T, W = p->W, I = p->I, D = p->D, HD = p->H * D;
    const int64_t QKV = (p->H + 2 * p->K) * D, chunks = (T + CHUNK - 1) / CHUNK;
    const int64_t size = 2 * (W + D), unit = TILES * TALL;
    int failed = 0;
#pragma omp parallel num_threads(p->threads) if (p->threads > 1)
    {
        float *memory = malloc((size_t)size_of(p) * sizeof(float)), *hidden = memory;
        float *dx = p->dx, *dx_next = p->dx_next;
        if (!memory) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp barrier
        if (!failed) {
#pragma omp for schedule(dynamic, 1)
            for (int64_t c = 0; c < chunks; c++) {
                const int64_t end = (c + 1) * CHUNK < T ? (c + 1) * CHUNK : T;
                float *part = p->parts + c * size;
                memset(part, 0, (size_t)W * sizeof(float));
                for (int64_t t = c * CHUNK; t < end; t++) {
                    memcpy(hidden, dx + t * W, (size_t)W * sizeof(float));
                    memset(dx + t * W, 0, (size_t)W * sizeof(float));
                    norm_back(p->x + t * W, p->norm, hidden, dx + t * W, part, W, p->eps);
                }
            }
#pragma omp single
            gather(p, chunks, 0, W, p->d_norm);
        }
        for (int64_t n = p->num_blocks - 1; n >= 0 && !failed; n--) {
            const Block *b = p->blocks + n;
#pragma omp for schedule(dynamic, 1)
            for (int64_t c = 0; c < chunks; c++) {
                const int64_t t = c * CHUNK, rows = T - t < CHUNK ? T - t : CHUNK;
                float *part = p->parts + c * size, *d_act = memory + CHUNK * W;
                const float *both = b->both + t * 2 * I, *middle = b->middle + t * W;
                float *d_both = p->d_both + t * 2 * I, *d_middle = p->d_middle + t * W;
                memset(part, 0, (size_t)size * sizeof(float));
                norm_rows(b->x + t * W, b->norm, p->hidden + t * W, rows, W, p->eps);
                rotate(p, b, t, rows);
                norm_rows(middle, b->mlp_norm, p->mlp_hidden + t * W, rows, W, p->eps);
                multiply(&b->down_back, dx + t * W, d_act, rows);
                for (int64_t i = 0; i < rows; i++) {
                    const float *gate = both + i * 2 * I;
                    silu_times(gate, gate + I, p->act + (t + i) * I, I);
                    silu_back(gate, gate + I, d_act + i * I, d_both + i * 2 * I,
                              d_both + (i * 2 + 1) * I, I);
                }
                multiply(&b->gate_up_back, d_both, hidden, rows);
                memcpy(d_middle, dx + t * W, (size_t)(rows * W) * sizeof(float));
                for (int64_t i = 0; i < rows; i++)
                    norm_back(middle + i * W, b->mlp_norm, hidden + i * W, d_middle + i * W,
                              part + W, W, p->eps);
                multiply(&b->o_back, d_middle, p->d_heads + t * HD, rows);
            }
            Room room = room_of(p, memory);
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < p->R * p->K; i++) attend_back(p, b, i / p->K, i % p->K, &room);
#pragma omp for schedule(dynamic, 1)
            for (int64_t c = 0; c < chunks; c++) {
                const int64_t t = c * CHUNK, rows = T - t < CHUNK ? T - t : CHUNK;
                float *part = p->parts + c * size;
                rotate_back(p, b, t, rows, part + 2 * W, part + 2 * W + D, memory + CHUNK * W);
                multiply(&b->qkv_back, p->d_qkv + t * QKV, hidden, rows);
                memcpy(dx_next + t * W, p->d_middle + t * W, (size_t)(rows * W) * sizeof(float));
                for (int64_t i = 0; i < rows; i++)
                    norm_back(b->x + (t + i) * W, b->norm, hidden + i * W, dx_next + (t + i) * W,
                              part, W, p->eps);
            }
            const Product products[] = {
                {p->d_both, p->mlp_hidden, b->d_gate_up, b->b_gate_up, 2 * I, W},
                {dx, p->act, b->d_down, b->b_down, W, I},
                {p->d_qkv, p->hidden, b->d_qkv, b->b_qkv, QKV, W},
                {p->d_middle, b->heads, b->d_o, b->b_o, W, HD},
            };
            int64_t tasks[5] = {0};
            for (int i = 0; i < 4; i++) tasks[i + 1] = tasks[i] + (products[i].m + unit - 1) / unit;
#pragma omp single nowait
            {
                gather(p, chunks, 0, W, b->d_norm);
                gather(p, chunks, W, W, b->d_mlp_norm);
                gather(p, chunks, 2 * W, D, b->d_q_norm);
                gather(p, chunks, 2 * W + D, D, b->d_k_norm);
            }
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < tasks[4]; i++) {
                int which = 0;
                while (i >= tasks[which + 1]) which++;
                weigh(products + which, (i - tasks[which]) * unit, T);
            }
            float *done = dx;
            dx = dx_next, dx_next = done;
        }
        free(memory);
    }
    return failed;
}
