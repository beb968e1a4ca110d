/* The parts of a decode step for rows of unequal length, and whole steps of small models.

   Compiled by native.py for the machine that it runs on, once for each dtype (-DBF16). Arithmetic is
   float32 in both, and so is the residual; bfloat16 rounds where autocast does in the trainer. Every
   row is computed alone and in one order, so that neither the other rows nor the number of threads
   change a bit of it. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "products.h"

static inline float rounded(float x) { return load(store(x)); }

static void norm_row(const float *x, const real *weight, float *out, int64_t n, float eps) {
    float factor = norm_factor(x, n, eps);
    for (int64_t i = 0; i < n; i++) out[i] = x[i] * factor * load(weight[i]);
}

/* x [rows, n] += delta, unless that is NULL; out = RMSNorm(x) * weight. */
int add_norm(float *x, const real *delta, const real *weight, real *out, int64_t rows, int64_t n,
             float eps) {
    float *normed = malloc((size_t)n * sizeof(float));
    if (!normed) return 1;
    for (int64_t r = 0; r < rows; r++) {
        float *at = x + r * n;
        if (delta) {
            const real *more = delta + r * n;
            for (int64_t i = 0; i < n; i++) at[i] += load(more[i]);
        }
        norm_row(at, weight, normed, n, eps);
        for (int64_t i = 0; i < n; i++) out[r * n + i] = store(normed[i]);
    }
    free(normed);
    return 0;
}

/* Rotary embedding of x [rows, heads, D] in place, after RMSNorm with `weight` [D] unless NULL.
   cosines and sines [positions, D / 2]. */
int rotate(real *x, const real *weight, const float *cosines, const float *sines,
           const int64_t *positions, int64_t rows, int64_t heads, int64_t D, float eps) {
    float *head = malloc((size_t)D * sizeof(float));
    if (!head) return 1;
    int64_t half = D / 2;
    for (int64_t r = 0; r < rows; r++) {
        const float *c = cosines + positions[r] * half, *s = sines + positions[r] * half;
        for (int64_t h = 0; h < heads; h++) {
            real *at = x + (r * heads + h) * D;
            for (int64_t i = 0; i < D; i++) head[i] = load(at[i]);
            if (weight) { /* a projection's output is normed to its own dtype, then weighed */
                float factor = norm_factor(head, D, eps);
                for (int64_t i = 0; i < D; i++)
                    head[i] = rounded(head[i] * factor) * load(weight[i]);
            }
            for (int64_t i = 0; i < half; i++) {
                float a = head[i], b = head[half + i];
                at[i] = store(a * c[i] - b * s[i]);
                at[half + i] = store(b * c[i] + a * s[i]);
            }
        }
    }
    free(head);
    return 0;
}

/* out = silu(gate) * up */
int silu_times(const real *gate, const real *up, real *out, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        float g = load(gate[i]);
        out[i] = store(rounded(g / (1.0f + exponential(-g))) * load(up[i]));
    }
    return 0;
}

/* exp in float64, for x <= 0; 0 below -700. */
static inline double exponential64(double x) {
    double bounded = x > -700.0 ? x : -700.0;
    double whole = rint(bounded * 1.4426950408889634);
    double rest = bounded - whole * 6.93147180369123816490e-01;
    rest = rest - whole * 1.90821492927058770002e-10;
    double poly = 1.6059043836821613e-10; /* 1 / 13!, and so on */
    poly = poly * rest + 2.0876756987868099e-09;
    poly = poly * rest + 2.5052108385441719e-08;
    poly = poly * rest + 2.7557319223985893e-07;
    poly = poly * rest + 2.7557319223985891e-06;
    poly = poly * rest + 2.4801587301587302e-05;
    poly = poly * rest + 1.9841269841269841e-04;
    poly = poly * rest + 1.3888888888888889e-03;
    poly = poly * rest + 8.3333333333333333e-03;
    poly = poly * rest + 4.1666666666666667e-02;
    poly = poly * rest + 1.6666666666666667e-01;
    poly = poly * rest + 0.5;
    poly = poly * rest * rest + rest + 1.0;
    int64_t bits = ((int64_t)(int32_t)whole + 1023) << 52;
    double power;
    memcpy(&power, &bits, 8);
    return x > -700.0 ? poly * power : 0.0;
}

/* x [n] becomes log softmax(x / temperature), the sum in float64; all NaN where one is. */
static void normalise(float *x, int64_t n, float temperature) {
    if (temperature != 1.0f)
        for (int64_t i = 0; i < n; i++) x[i] /= temperature;
    float most = x[0];
    for (int64_t i = 1; i < n; i++) most = x[i] > most ? x[i] : most;
    double sum = 0, odd = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += exponential64((double)x[i] - (double)most);
        odd += x[i] == x[i] ? 0.0 : 1.0;
    }
    double whole = odd > 0 ? (double)NAN : (double)most + log(sum);
    for (int64_t i = 0; i < n; i++) x[i] = (float)((double)x[i] - whole);
}

enum { MANY = 1 << 15 }; /* numbers from which on rows are shared among threads */

/* Each of the rows [rows, n] becomes log softmax of itself. */
int log_probabilities(float *x, int64_t rows, int64_t n, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * n >= MANY)
    for (int64_t r = 0; r < rows; r++) normalise(x + r * n, n, 1.0f);
    return 0;
}

#define BLOCK 64
/* The token at which the running sum of p [n] passes uniform times all of it. `sums` has room for
   one number per block. */
static int64_t passed(const float *x, double uniform, int64_t n, double *sums) {
    int64_t blocks = (n + BLOCK - 1) / BLOCK;
    double total = 0;
    for (int64_t b = 0; b < blocks; b++) {
        int64_t end = (b + 1) * BLOCK < n ? (b + 1) * BLOCK : n;
        double sum = 0;
        for (int64_t i = b * BLOCK; i < end; i++) sum += exponential64(x[i]);
        sums[b] = sum;
        total += sum;
    }
    double target = uniform * total, before = 0;
    int64_t b = 0;
    while (b < blocks - 1 && before + sums[b] <= target) before += sums[b++];
    int64_t token = b * BLOCK;
    while (token < n && (before += exponential64(x[token])) <= target) token++;
    if (token >= n) /* rounding reached past the last that has any probability */
        for (token = n - 1; token > 0 && x[token] == -INFINITY;) token--;
    return token;
}

/* `passed` for each row of logprobs [rows, n], with its number of uniform [rows]. */
int inverse_cdf(const float *logprobs, const double *uniform, int64_t *tokens, int64_t rows,
                int64_t n, int64_t threads) {
    int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1 && rows * n >= MANY)
    {
        double *sums = malloc((size_t)(n / BLOCK + 1) * sizeof(double));
        if (!sums) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for
        for (int64_t r = 0; r < rows; r++)
            if (sums) tokens[r] = passed(logprobs + r * n, uniform[r], n, sums);
        free(sums);
    }
    return failed;
}

typedef struct {
    real *keys, *values;             /* [rows, K, room, D]: what each row holds of its own */
    const real *prompt_keys, *prompt_values; /* [slots, K, prompt_room, D] */
    const int64_t *lengths;          /* [B] tokens of its own, the new one included */
    const int64_t *slots, *shared;   /* [B] whose first tokens come before them, and how many */
    int64_t room, prompt_room, B, H, K, D, threads;
    float scale;
} Work;

static inline __attribute__((always_inline)) void scores(const float *restrict q,
                                                         const real *restrict keys, int64_t n,
                                                         int64_t D, float *restrict out) {
    int64_t t = 0;
    for (; t + 4 <= n; t += 4) {
        const real *k = keys + t * D;
        float a = 0, b = 0, c = 0, d = 0;
        for (int64_t i = 0; i < D; i++) {
            a += q[i] * load(k[i]);
            b += q[i] * load(k[D + i]);
            c += q[i] * load(k[2 * D + i]);
            d += q[i] * load(k[3 * D + i]);
        }
        out[t] = a, out[t + 1] = b, out[t + 2] = c, out[t + 3] = d;
    }
    for (; t < n; t++) {
        float a = 0;
        for (int64_t i = 0; i < D; i++) a += q[i] * load(keys[t * D + i]);
        out[t] = a;
    }
}

static inline __attribute__((always_inline)) void weigh(const float *restrict p,
                                                        const real *restrict values, int64_t n,
                                                        int64_t D, float *restrict out) {
    int64_t t = 0;
    for (; t + 4 <= n; t += 4) {
        const real *v = values + t * D;
        for (int64_t i = 0; i < D; i++)
            out[i] += p[t] * load(v[i]) + p[t + 1] * load(v[D + i]) +
                      p[t + 2] * load(v[2 * D + i]) + p[t + 3] * load(v[3 * D + i]);
    }
    for (; t < n; t++)
        for (int64_t i = 0; i < D; i++) out[i] += p[t] * load(values[t * D + i]);
}

/* One row's query heads of one key head: q and out [H, D] of this row. `buffer` has room for its
   scores, and 2 D more. */
static inline __attribute__((always_inline)) void attend_head(const Work *w, const real *q,
                                                              real *out, int64_t row, int64_t k,
                                                              int64_t D, float *buffer) {
    int64_t group = w->H / w->K, own = w->lengths[row], first = w->shared[row];
    const int64_t at = (row * w->K + k) * w->room * D;
    const int64_t prompt = (w->slots[row] * w->K + k) * w->prompt_room * D;
    float *query = buffer, *sum = buffer + D, *p = buffer + 2 * D;
    for (int64_t g = 0; g < group; g++) {
        const int64_t head = (k * group + g) * D;
        for (int64_t i = 0; i < D; i++) query[i] = load(q[head + i]) * w->scale;
        if (first) scores(query, w->prompt_keys + prompt, first, D, p);
        scores(query, w->keys + at, own, D, p + first);
        float most = p[0], total = 0;
        for (int64_t t = 1; t < first + own; t++) most = p[t] > most ? p[t] : most;
        for (int64_t t = 0; t < first + own; t++) {
            float share = exponential(p[t] - most);
            total += share;
            p[t] = rounded(share); /* the values are weighed in their own dtype */
        }
        for (int64_t i = 0; i < D; i++) sum[i] = 0;
        if (first) weigh(p, w->prompt_values + prompt, first, D, sum);
        weigh(p + first, w->values + at, own, D, sum);
        for (int64_t i = 0; i < D; i++) out[head + i] = store(sum[i] / total);
    }
}

/* Appends k and v [K, D] to a row, then lets q [H, D] attend over all that it holds. */
static void attend_row(const Work *w, const real *q, const real *k, const real *v, real *out,
                       int64_t row, float *buffer) {
    for (int64_t h = 0; h < w->K; h++) {
        int64_t to = ((row * w->K + h) * w->room + w->lengths[row] - 1) * w->D;
        memcpy(w->keys + to, k + h * w->D, (size_t)w->D * sizeof(real));
        memcpy(w->values + to, v + h * w->D, (size_t)w->D * sizeof(real));
        switch (w->D) {
        case 32: attend_head(w, q, out, row, h, 32, buffer); break;
        case 64: attend_head(w, q, out, row, h, 64, buffer); break;
        case 128: attend_head(w, q, out, row, h, 128, buffer); break;
        default: attend_head(w, q, out, row, h, w->D, buffer);
        }
    }
}

/* How many numbers attend_row's buffer holds. */
static int64_t buffer_size(const Work *w) {
    int64_t longest = 0;
    for (int64_t row = 0; row < w->B; row++) {
        int64_t n = w->lengths[row] + w->shared[row];
        longest = n > longest ? n : longest;
    }
    return longest + 2 * w->D;
}

/* Appends k and v [B, K, D] to the rows, then lets q [B, H, D] attend over all that they hold. */
int attend(const Work *w, const real *q, const real *k, const real *v, real *out) {
    int64_t size = buffer_size(w), failed = 0;
#pragma omp parallel num_threads(w->threads) if (w->threads > 1)
    {
        float *buffer = malloc((size_t)size * sizeof(float));
        if (!buffer) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(static, 1)
        for (int64_t row = 0; row < w->B; row++) {
            const int64_t key = row * w->K * w->D, query = row * w->H * w->D;
            if (buffer) attend_row(w, q + query, k + key, v + key, out + query, row, buffer);
        }
        free(buffer);
    }
    return (int)failed;
}

/* Columns of a panel. */
int panel_width(void) { return PANEL; }

#ifdef BF16
/* y [rows, out] = x [rows, in] W' + bias of a large matrix, its columns shared among threads. Sums
   are float32, each rounded once. */
int product(const Matrix *m, const real *x, real *y, int64_t rows, int64_t threads) {
    const int64_t K = m->in;
    float *wide = malloc((size_t)(rows * K) * sizeof(float));
    if (!wide) return 1;
    for (int64_t i = 0; i < rows * K; i++) wide[i] = load(x[i]);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n < m->out; n += PANEL) {
        float sums[CHUNK * PANEL];
        const int64_t width = m->out - n < PANEL ? m->out - n : PANEL;
        for (int64_t first = 0; first < rows; first += CHUNK) {
            const int64_t some = rows - first < CHUNK ? rows - first : CHUNK;
            by_panel(m, wide + first * K, sums, PANEL, some, n, first == 0);
            for (int64_t r = 0; r < some; r++)
                for (int64_t i = 0; i < width; i++)
                    y[(first + r) * m->out + n + i] = store(sums[r * PANEL + i]);
        }
    }
    free(wide);
    return 0;
}
#else
/* y [rows, out] = x [rows, in] W' + bias of a large matrix, its columns shared among threads. */
int product(const Matrix *m, const float *x, float *y, int64_t rows, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n < m->out; n += PANEL) by_panel(m, x, y + n, m->out, rows, n, 1);
    return 0;
}

/* A whole decode step. A row's results do not depend on the other rows: a chunk of them goes
   through all layers on one thread, and threads do not wait for each other. */

typedef struct {
    const float *norm, *q_norm, *k_norm, *mlp_norm;
    Matrix q, k, v, o, gate, up, down;
    float *keys, *values;
    const float *prompt_keys, *prompt_values;
} Block;

typedef struct {
    Work work; /* its keys and values are those of each block in turn */
    const Block *blocks;
    const float *norm, *cosines, *sines;
    const int64_t *positions;
    float *x, *logits; /* [B, width] the tokens' embeddings, overwritten; [B, V] */
    Matrix head;
    int64_t num_blocks, width;
    float eps;
} Step;

/* Rows first .. first + rows - 1 through all layers. `room` is the memory of the chunk. */
static int advance(const Step *s, int64_t first, int64_t rows, float *room, float *buffer) {
    Work w = s->work;
    const int64_t W = s->width, queries = w.H * w.D, keys = w.K * w.D;
    const int64_t *positions = s->positions + first;
    float *x = s->x + first * W, *hidden = room, *sum = hidden + CHUNK * W, *delta = NULL;
    float *q = sum + CHUNK * W, *k = q + CHUNK * queries, *v = k + CHUNK * keys;
    float *out = v + CHUNK * keys, *gate = out + CHUNK * queries;
    int failed = 0;
    for (const Block *b = s->blocks; b < s->blocks + s->num_blocks; b++, delta = sum) {
        float *up = gate + CHUNK * b->gate.out;
        w.keys = b->keys, w.values = b->values;
        w.prompt_keys = b->prompt_keys, w.prompt_values = b->prompt_values;
        failed |= add_norm(x, delta, b->norm, hidden, rows, W, s->eps);
        multiply(&b->q, hidden, q, rows);
        multiply(&b->k, hidden, k, rows);
        multiply(&b->v, hidden, v, rows);
        failed |= rotate(q, b->q_norm, s->cosines, s->sines, positions, rows, w.H, w.D, s->eps);
        failed |= rotate(k, b->k_norm, s->cosines, s->sines, positions, rows, w.K, w.D, s->eps);
        for (int64_t r = 0; r < rows; r++)
            attend_row(&w, q + r * queries, k + r * keys, v + r * keys, out + r * queries,
                       first + r, buffer);
        multiply(&b->o, out, sum, rows);
        failed |= add_norm(x, sum, b->mlp_norm, hidden, rows, W, s->eps);
        multiply(&b->gate, hidden, gate, rows);
        multiply(&b->up, hidden, up, rows);
        silu_times(gate, up, gate, rows * b->gate.out);
        multiply(&b->down, gate, sum, rows);
    }
    failed |= add_norm(x, delta, s->norm, hidden, rows, W, s->eps);
    multiply(&s->head, hidden, s->logits + first * s->head.out, rows);
    return failed;
}

/* How tokens are drawn from logits [B, V], which become log-probabilities. */
typedef struct {
    const int64_t *streams;   /* [B] of random numbers: see `uniforms` of sampling.py */
    const int64_t *places;    /* [B] tokens of each reply before the first drawn one */
    const int64_t *left;      /* [B] tokens that each reply may still get */
    const int64_t *least;     /* [B] tokens of each reply before it may end; NULL: none lacks any */
    const float *temperature; /* [B], 0: the most probable token */
    const uint8_t *ends;      /* [V] not 0: a token that ends a reply */
    const float *embeddings;  /* [V, width] */
    int64_t *tokens;          /* [steps, B] */
    float *logprobs;          /* [steps, B] */
    float *sampler;           /* [steps, B] with which each was drawn; not written without least */
    int64_t steps;
} Draws;

/* SplitMix64 by its counter, as `uniforms` of sampling.py. */
static double uniform(int64_t stream, int64_t place) {
    uint64_t bits = (uint64_t)stream + ((uint64_t)place + 1) * 0x9E3779B97F4A7C15u;
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
    bits = bits ^ (bits >> 31);
    return (double)(bits >> 11) * 0x1p-53;
}

/* Numbers of float64 that `draw` needs for n tokens: the sums of their blocks, and n of float32. */
static size_t draw_size(int64_t n) { return (size_t)(n / BLOCK + 1 + (n + 1) / 2); }

/* Draws the token of a row from its logits; returns whether it ends the row. */
static int draw(const Step *s, const Draws *d, int64_t step, int64_t row, double *sums) {
    const int64_t n = s->head.out, at = step * s->work.B + row, place = d->places[row] + step;
    const float heat = d->temperature[row], scale = heat > 0 ? heat : 1.0f;
    float *x = s->logits + row * n, *from = x;
    if (d->least && place < d->least[row]) { /* too early to end */
        from = (float *)(sums + n / BLOCK + 1);
        for (int64_t i = 0; i < n; i++) from[i] = d->ends[i] ? -INFINITY : x[i];
        normalise(from, n, scale);
    }
    normalise(x, n, scale);
    int64_t token = 0;
    if (heat > 0)
        token = passed(from, uniform(d->streams[row], place), n, sums);
    else
        for (int64_t i = 1; i < n; i++) token = from[i] > from[token] ? i : token;
    d->tokens[at] = token;
    d->logprobs[at] = x[token];
    if (d->least) d->sampler[at] = from[token];
    memcpy(s->x + row * s->width, d->embeddings + token * s->width,
           (size_t)s->width * sizeof(float));
    return d->ends[token] || step + 1 >= d->left[row];
}

/* Logits [B, V] after one more token in each of rows 0 .. B - 1; with `d` they are drawn from, as
   the given step. Returns -1 without memory, 1 if a row has ended, and else 0. */
static int one_step(const Step *s, const Draws *d, int64_t step) {
    int64_t size = buffer_size(&s->work), inner = 0, failed = 0, ended = 0;
    for (int64_t b = 0; b < s->num_blocks; b++)
        inner = s->blocks[b].gate.out > inner ? s->blocks[b].gate.out : inner;
    int64_t row = 2 * s->width + 2 * (s->work.H + s->work.K) * s->work.D + 2 * inner;
    int64_t B = s->work.B, threads = s->work.threads;
    /* as many chunks for each thread, of whole tiles where there are many */
    int64_t unit = B >= 4 * TALL * threads ? TALL : 4, units = (B + unit - 1) / unit;
    int64_t most = CHUNK / unit * threads, parts = (units + most - 1) / most * threads;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        float *room = malloc((size_t)(CHUNK * row + size) * sizeof(float));
        double *sums = malloc(draw_size(s->head.out) * sizeof(double));
        int any = 0;
        if (!room || !sums) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t part = 0; part < parts; part++) {
            int64_t first = units * part / parts * unit, end = units * (part + 1) / parts * unit;
            int64_t rows = (end < B ? end : B) - first;
            if (!room || !sums || rows <= 0) continue;
            if (advance(s, first, rows, room, room + CHUNK * row)) {
#pragma omp atomic write
                failed = 1;
            }
            for (int64_t r = first; d && r < first + rows; r++) any |= draw(s, d, step, r, sums);
        }
        if (any) {
#pragma omp atomic write
            ended = 1;
        }
        free(room);
        free(sums);
    }
    return failed ? -1 : (int)ended;
}

/* Logits [B, V] after one more token in each of rows 0 .. B - 1. */
int decode_step(const Step *s) { return one_step(s, NULL, 0); }

/* Decodes and draws up to `steps` tokens for each row, until one of them ends. Returns how many,
   -1 without memory. */
int decode_steps(const Step *given, const Draws *d) {
    const int64_t B = given->work.B;
    int64_t *counts = malloc((size_t)(2 * B) * sizeof(int64_t));
    if (!counts) return -1;
    memcpy(counts, given->work.lengths, (size_t)B * sizeof(int64_t));
    memcpy(counts + B, given->positions, (size_t)B * sizeof(int64_t));
    Step s = *given;
    s.work.lengths = counts, s.positions = counts + B;
    int64_t done = 0;
    int state = 0;
    while (done < d->steps && !state) {
        state = one_step(&s, d, done);
        for (int64_t i = 0; i < 2 * B; i++) counts[i]++;
        done++;
    }
    free(counts);
    return state < 0 ? -1 : (int)done;
}
#endif
