/* The C ABI from a C11 program: every operation once with known results, and what happens when a call is wrong.
 * Prints a line per check; exits with 1 if one failed. */
#include <mxflash/mxflash_c.h>

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int g_failed = 0;

static void check(int ok, const char* what) {
  printf("%s %s\n", ok ? "ok    " : "FAILED", what);
  g_failed += !ok;
}

static void check_ok(mxflash_status s, const char* what) {
  check(s.code == MXFLASH_STATUS_OK && s.message[0] == '\0', what);
  if (s.code != MXFLASH_STATUS_OK) printf("       %s: %s\n", mxflash_status_code_name(s.code), s.message);
}

static void check_error(mxflash_status s, int32_t code, const char* message) {
  const int same = s.code == code && strstr(s.message, message) != NULL;
  check(same, message);
  if (!same) printf("       got %s: %s\n", mxflash_status_code_name(s.code), s.message);
}

/* Zeroed and aligned for workspaces. */
static void* allocate(size_t size) {
  const size_t rounded = (size + 63) / 64 * 64 + 64;
  void* p = aligned_alloc(64, rounded);
  if (!p) exit(2);
  return memset(p, 0, rounded);
}

static mxflash_tensor tensor3(void* data, int32_t dtype, int64_t tokens, int64_t heads, int64_t dim) {
  const int64_t shape[3] = {tokens, heads, dim};
  return mxflash_make_tensor(data, dtype, 3, shape);
}
static mxflash_tensor tensor2(void* data, int32_t dtype, int64_t rows, int64_t columns) {
  const int64_t shape[2] = {rows, columns};
  return mxflash_make_tensor(data, dtype, 2, shape);
}

/* ---- queries ---------------------------------------------------------------------------------------------------- */

/* Last task first, and counts calls. */
static void run_backwards(void* calls, int32_t count, mxflash_parallel_task task, void* context) {
  for (int32_t i = count - 1; i >= 0; --i) task(context, i);
  ++*(int*)calls;
}

static void test_executor(void) {
  enum { kTokens = 256, kDim = 64 };
  static float x[kTokens * kDim];
  static uint8_t payload[2][kTokens * kDim], scale[2][16];
  for (int i = 0; i < kTokens * kDim; ++i) x[i] = (float)i;
  int calls = 0;
  const int32_t threads = mxflash_num_threads();
  mxflash_set_num_threads(3);
  for (int i = 0; i < 2; ++i) {
    mxflash_quantize_args a;
    mxflash_quantize_args_init(&a);
    a.in = tensor3(x, MXFLASH_DTYPE_F32, kTokens, 1, kDim);
    a.out = mxflash_make_mx_tensor(payload[i], scale[i], MXFLASH_DTYPE_E4M3, MXFLASH_BLOCK_SQUARE32,
                                   MXFLASH_LAYOUT_LINEAR, kTokens, 1, kDim, NULL);
    a.backend = "ref"; /* whose work is divided however small it is */
    mxflash_set_parallel_for(i == 0 ? NULL : run_backwards, &calls);
    check(mxflash_has_parallel_for() == (i == 1), "an executor is set only if one was");
    check_ok(mxflash_quantize(&a, NULL), "quantize");
    check(i == 1 ? calls > 0 : calls == 0, "the executor is called only if set");
  }
  mxflash_set_parallel_for(NULL, NULL);
  mxflash_set_num_threads(threads);
  check(memcmp(payload[0], payload[1], sizeof payload[0]) == 0 && memcmp(scale[0], scale[1], sizeof scale[0]) == 0,
        "with an executor the bytes are the same");
}

static void test_queries(void) {
  printf("mxflash %s\n", mxflash_version());
  int complete = 1;
  for (int32_t op = 0; op < MXFLASH_NUM_OPERATIONS; ++op) {
    const int32_t count = mxflash_num_backends(op);
    for (int32_t i = 0; i < count; ++i) {
      const mxflash_backend b = mxflash_backend_info(op, i);
      const char* state = b.available.code == MXFLASH_STATUS_OK ? "available" : b.available.message;
      printf("  %-16s %-6s %s, %s\n", mxflash_operation_name(op), b.name, b.target, state);
    }
    const mxflash_backend last = mxflash_backend_info(op, count - 1);
    complete &= count >= 1 && strcmp(last.name, "ref") == 0 && last.available.code == MXFLASH_STATUS_OK;
    complete &= mxflash_backend_info(op, count).name == NULL;
  }
  check(complete, "every operation lists its backends, ref last and available");
  check(strcmp(mxflash_operation_name(MXFLASH_NUM_OPERATIONS), "invalid") == 0, "there are no more operations");
  check(strcmp(mxflash_dtype_name(MXFLASH_DTYPE_E5M2), "e5m2") == 0 && mxflash_dtype_size(MXFLASH_DTYPE_BF16) == 2,
        "dtypes have names and sizes");

  int found = 0;
  for (int32_t i = 0; mxflash_available_cpu_isa(i); ++i) {
    found += strcmp(mxflash_available_cpu_isa(i), mxflash_cpu_isa()) == 0;
  }
  check(found == 1 && mxflash_available_cpu_isa(-1) == NULL, "the instruction set in use is one of those available");
  check(mxflash_default_cpu_math() == MXFLASH_CPU_MATH_EXACT || mxflash_default_cpu_math() == MXFLASH_CPU_MATH_FAST,
        "automatic means exact or fast");

  mxflash_set_num_threads(1);
  check(mxflash_num_threads() == 1, "the number of threads can be set");

  const int32_t cu[3] = {0, 30, 40};
  const mxflash_jagged jagged = {cu, 2, 30};
  int64_t shape[4];
  mxflash_scale_shape(MXFLASH_BLOCK_SQUARE32, MXFLASH_LAYOUT_LINEAR, 40, 2, 64, NULL, shape);
  check(shape[0] == 2 && shape[1] == 4 && shape[2] == 2 && shape[3] == 0, "scale_shape of one sequence");
  check(mxflash_padded_tokens(40, &jagged) == 256, "padded_tokens of a jagged batch");
  check(mxflash_scale_size(MXFLASH_BLOCK_ROW32, MXFLASH_LAYOUT_ATOM128X4, 40, 2, 64, &jagged) == 2 * 2 * 512,
        "scale_size of a jagged batch in atoms");
  check(mxflash_make_tensor(NULL, MXFLASH_DTYPE_F32, 5, shape).rank == 0, "a tensor of rank 5 cannot be made");
}

/* ---- quantize, dequantize, convert_scales ----------------------------------------------------------------------- */

enum { kRows = 4, kDim = 32 };

static void test_quantize(void) {
  float x[kRows * kDim] = {448, 1, -0.5f, -0.0f}; /* row 0; row 1 is zero */
  x[2 * kDim + 5] = NAN;
  x[3 * kDim] = 900;
  uint8_t payload[kRows * kDim], scale[128], atoms[512];
  mxflash_quantize_stats stats;

  mxflash_quantize_args a;
  mxflash_quantize_args_init(&a);
  a.in = tensor3(x, MXFLASH_DTYPE_F32, kRows, 1, kDim);
  a.out = mxflash_make_mx_tensor(payload, scale, MXFLASH_DTYPE_E4M3, MXFLASH_BLOCK_ROW32, MXFLASH_LAYOUT_LINEAR, kRows,
                                 1, kDim, NULL);
  a.stats = &stats;
  check_ok(mxflash_quantize(&a, NULL), "quantize");
  check(scale[0] == 127 && scale[1] == 0 && scale[2] == 255 && scale[3] == 129 && scale[4] == 0, "scale bytes");
  check(payload[0] == 0x7E && payload[1] == 0x38 && payload[2] == 0xB0 && payload[3] == 0x80 && payload[4] == 0,
        "payload bytes");
  check(payload[kDim] == 0 && payload[2 * kDim] == 0x7F && payload[2 * kDim + 31] == 0x7F && payload[3 * kDim] == 0x76,
        "payload bytes of a zero row, a NaN row and 900");
  check(stats.amax == 900 && stats.nonfinite == 1 && stats.saturated == 0 && stats.total == kRows * kDim, "stats");

  float back[kRows * kDim];
  mxflash_dequantize_args d;
  mxflash_dequantize_args_init(&d);
  d.in = a.out;
  d.out = tensor3(back, MXFLASH_DTYPE_F32, kRows, 1, kDim);
  check_ok(mxflash_dequantize(&d, NULL), "dequantize");
  check(back[0] == 448 && back[2] == -0.5f && signbit(back[3]) && isnan(back[2 * kDim]) && back[3 * kDim] == 896,
        "dequantized values");

  mxflash_convert_scales_args c;
  mxflash_convert_scales_args_init(&c);
  c.in = a.out;
  c.out = mxflash_make_mx_tensor(payload, atoms, MXFLASH_DTYPE_E4M3, MXFLASH_BLOCK_ROW32, MXFLASH_LAYOUT_ATOM128X4,
                                 kRows, 1, kDim, NULL);
  check_ok(mxflash_convert_scales(&c, NULL), "convert_scales");
  check(atoms[0] == 127 && atoms[2 * 16] == 255 && atoms[3 * 16] == 129 && atoms[1] == 0, "scale bytes in an atom");

  a.rule = MXFLASH_RULE_FLOOR;
  check_ok(mxflash_quantize(&a, NULL), "quantize with rule floor");
  check(scale[3] == 128 && payload[3 * kDim] == 0x7E && stats.saturated == 1, "900 saturates with rule floor");
}

/* ---- rmsnorm_quantize, rmsnorm_bwd, gemm_quantize
 * ---------------------------------------------------------------------------- */

static void test_fused(void) {
  float twos[2 * kDim], ones[2 * kDim], identity[kDim * kDim] = {0};
  for (int i = 0; i < 2 * kDim; ++i) {
    twos[i] = 2;
    ones[i] = 1;
  }
  for (int i = 0; i < kDim; ++i) identity[i * kDim + i] = 1;
  uint8_t payload[2 * kDim], scale[4];
  const int64_t dim = kDim;
  mxflash_mx_tensor out = mxflash_make_mx_tensor(payload, scale, MXFLASH_DTYPE_E4M3, MXFLASH_BLOCK_SQUARE32,
                                                 MXFLASH_LAYOUT_LINEAR, 2, 1, kDim, NULL);
  out.data = tensor2(payload, MXFLASH_DTYPE_E4M3, 2, kDim);

  mxflash_rmsnorm_quantize_args r;
  mxflash_rmsnorm_quantize_args_init(&r);
  check(r.eps == 1e-6f, "rmsnorm_quantize has the default eps");
  r.in = tensor2(twos, MXFLASH_DTYPE_F32, 2, kDim);
  r.weight = mxflash_make_tensor(ones, MXFLASH_DTYPE_F32, 1, &dim);
  r.eps = 0;
  r.out = out;
  check_ok(mxflash_rmsnorm_quantize(&r, NULL), "rmsnorm_quantize");
  check(scale[0] == 119 && payload[0] == 0x78 && payload[63] == 0x78, "its bytes: 1 = 256 * 2^-8");

  float dx[2 * kDim], dw[kDim], workspace_memory[4096], rstd[2] = {0.5f, 0.5f};
  const int64_t rows = 2;
  mxflash_rmsnorm_bwd_args b;
  mxflash_rmsnorm_bwd_args_init(&b);
  b.h = r.in;
  b.weight = r.weight;
  b.rstd = mxflash_make_tensor(rstd, MXFLASH_DTYPE_F32, 1, &rows);
  b.dy_mx = out;
  b.dh = tensor2(ones, MXFLASH_DTYPE_F32, 2, kDim);
  b.dx = tensor2(dx, MXFLASH_DTYPE_F32, 2, kDim);
  b.dw = mxflash_make_tensor(dw, MXFLASH_DTYPE_F32, 1, &dim);
  b.workspace_size = mxflash_rmsnorm_bwd_workspace(&b);
  check(b.workspace_size > 0 && b.workspace_size + 64 <= sizeof workspace_memory, "rmsnorm_bwd tells its workspace");
  b.workspace = (char*)workspace_memory + (64 - (uintptr_t)workspace_memory % 64) % 64;
  check_ok(mxflash_rmsnorm_bwd(&b, NULL), "rmsnorm_bwd");
  check(dx[0] == 1 && dx[2 * kDim - 1] == 1 && dw[0] == 2 && dw[kDim - 1] == 2, "a constant row has no gradient");

  memset(payload, 0, sizeof payload);
  mxflash_gemm_quantize_args g;
  mxflash_gemm_quantize_args_init(&g);
  g.a = tensor2(ones, MXFLASH_DTYPE_F32, 2, kDim);
  g.b = tensor2(identity, MXFLASH_DTYPE_F32, kDim, kDim);
  g.out = out;
  check_ok(mxflash_gemm_quantize(&g, NULL), "gemm_quantize");
  check(scale[0] == 119 && payload[0] == 0x78 && payload[63] == 0x78, "its bytes are the same");
}

/* ---- attention -------------------------------------------------------------------------------------------------- */

enum { kTokens = 70, kHeadsQ = 4, kHeadsKv = 2, kHeadDim = 64, kHeadDimV = 32, kGroup = kHeadsQ / kHeadsKv };
enum { kSizeQ = kTokens * kHeadsQ * kHeadDim, kSizeK = kTokens * kHeadsKv * kHeadDim };
enum { kSizeV = kTokens * kHeadsKv * kHeadDimV, kSizeOut = kTokens * kHeadsQ * kHeadDimV };

static float g_q[kSizeQ], g_k[kSizeK], g_v[kSizeV], g_out[kSizeOut], g_dout[kSizeOut], g_lse[kHeadsQ * kTokens];
static float g_dq[kSizeQ], g_dk[kSizeK], g_dv[kSizeV];

static void fill(float* x, int n) { /* uniform in [-2, 2) */
  static uint32_t state = 1;
  for (int i = 0; i < n; ++i) {
    state = state * 1664525u + 1013904223u;
    x[i] = (float)(state >> 8) / 4194304.0f - 2.0f;
  }
}
static void fill_with(float* x, int n, float value) {
  for (int i = 0; i < n; ++i) x[i] = value;
}
static int all_equal(const float* x, int n, float value) {
  for (int i = 0; i < n; ++i) {
    if (!(x[i] == value)) return 0;
  }
  return 1;
}

static mxflash_mx_tensor quantized(float* x, int64_t heads, int64_t dim) {
  const int64_t scales = mxflash_scale_size(MXFLASH_BLOCK_SQUARE32, MXFLASH_LAYOUT_LINEAR, kTokens, heads, dim, NULL);
  mxflash_quantize_args a;
  mxflash_quantize_args_init(&a);
  a.in = tensor3(x, MXFLASH_DTYPE_F32, kTokens, heads, dim);
  a.out =
      mxflash_make_mx_tensor(allocate((size_t)(kTokens * heads * dim)), allocate((size_t)scales), MXFLASH_DTYPE_E4M3,
                             MXFLASH_BLOCK_SQUARE32, MXFLASH_LAYOUT_LINEAR, kTokens, heads, dim, NULL);
  check_ok(mxflash_quantize(&a, NULL), "quantize an operand");
  return a.out;
}
static void free_quantized(mxflash_mx_tensor* t) {
  free(t->data.data);
  free(t->scale.data);
}

/* v = 1 gives out = 1 exactly; with dout = 1 then dP = delta, so dq = dk = 0 exactly. */
static void test_attention(void) {
  fill(g_q, kSizeQ);
  fill(g_k, kSizeK);
  fill_with(g_v, kSizeV, 1);
  fill_with(g_dout, kSizeOut, 1);

  mxflash_attention_fwd_args f;
  mxflash_attention_fwd_args_init(&f);
  check(f.mask.causal == 0 && f.mask.window_left == -1 && f.mask.window_right == -1 && f.seq_q.batch == 1,
        "attention_fwd defaults: no mask, one sequence");
  f.q = quantized(g_q, kHeadsQ, kHeadDim);
  f.k = quantized(g_k, kHeadsKv, kHeadDim);
  f.v = quantized(g_v, kHeadsKv, kHeadDimV);
  f.out = tensor3(g_out, MXFLASH_DTYPE_F32, kTokens, kHeadsQ, kHeadDimV);
  f.lse = tensor2(g_lse, MXFLASH_DTYPE_F32, kHeadsQ, kTokens);
  f.mask.causal = 1;
  check_error(mxflash_attention_fwd(&f, NULL), MXFLASH_STATUS_WORKSPACE_TOO_SMALL,
              "attention_fwd: workspace must have");
  f.workspace_size = mxflash_attention_fwd_workspace(&f);
  f.workspace = allocate(f.workspace_size);
  check(f.workspace_size > 0, "attention_fwd_workspace");
  check_ok(mxflash_attention_fwd(&f, NULL), "attention_fwd");
  check(all_equal(g_out, kSizeOut, 1), "v = 1 gives out = 1 exactly");

  mxflash_attention_bwd_args b;
  mxflash_attention_bwd_args_init(&b);
  check(b.ds_dtype == MXFLASH_DTYPE_E4M3 && b.dq_accum == MXFLASH_DTYPE_F32 && b.rotate_seed == 24,
        "attention_bwd defaults");
  b.q = f.q;
  b.k = f.k;
  b.v = f.v;
  b.dout = quantized(g_dout, kHeadsQ, kHeadDimV);
  b.out = f.out;
  b.lse = f.lse;
  b.dq = tensor3(g_dq, MXFLASH_DTYPE_F32, kTokens, kHeadsQ, kHeadDim);
  b.dk = tensor3(g_dk, MXFLASH_DTYPE_F32, kTokens, kHeadsKv, kHeadDim);
  b.dv = tensor3(g_dv, MXFLASH_DTYPE_F32, kTokens, kHeadsKv, kHeadDimV);
  b.mask = f.mask;
  b.workspace_size = mxflash_attention_bwd_workspace(&b);
  b.workspace = allocate(b.workspace_size);
  check(b.workspace_size > 0, "attention_bwd_workspace");
  fill_with(g_dq, kSizeQ, 7);
  fill_with(g_dk, kSizeK, 7);
  check_ok(mxflash_attention_bwd(&b, NULL), "attention_bwd");
  check(all_equal(g_dq, kSizeQ, 0) && all_equal(g_dk, kSizeK, 0), "dP = delta gives dq = dk = 0 exactly");
  double sum = 0;
  for (int i = 0; i < kSizeV; ++i) sum += g_dv[i];
  check(fabs(sum / kSizeOut - 1) < 0.01, "dv sums to the number of elements of out: rows of P sum to 1");

  f.q.data.shape[2] = 20;
  check(mxflash_attention_fwd_workspace(&f) == 0, "attention_fwd_workspace is 0 for a wrong call");
  check_error(mxflash_attention_fwd(&f, NULL), MXFLASH_STATUS_INVALID_ARGUMENT,
              "attention_fwd: q.scale.shape[2] must be 1 (scale_shape), got 2");
  free(f.workspace);
  free(b.workspace);
  free_quantized(&b.q);
  free_quantized(&b.k);
  free_quantized(&b.v);
  free_quantized(&b.dout);
}

/* ---- operator --------------------------------------------------------------------------------------------------- */

/* Causal attention in double: out, and dv for g_dout. */
static void exact_attention(double* out, double* dv) {
  for (int head = 0; head < kHeadsQ; ++head) {
    for (int i = 0; i < kTokens; ++i) {
      const float* q = g_q + (i * kHeadsQ + head) * kHeadDim;
      const int row = (i * kHeadsQ + head) * kHeadDimV;
      double p[kTokens], sum = 0;
      for (int j = 0; j <= i; ++j) {
        const float* k = g_k + (j * kHeadsKv + head / kGroup) * kHeadDim;
        double dot = 0;
        for (int c = 0; c < kHeadDim; ++c) dot += (double)q[c] * k[c];
        sum += p[j] = exp(dot / sqrt(kHeadDim));
      }
      for (int j = 0; j <= i; ++j) {
        const int key = (j * kHeadsKv + head / kGroup) * kHeadDimV;
        for (int c = 0; c < kHeadDimV; ++c) {
          out[row + c] += p[j] / sum * g_v[key + c];
          dv[key + c] += p[j] / sum * g_dout[row + c];
        }
      }
    }
  }
}

static double sqnr_db(const double* want, const float* got, int n) {
  double signal = 0, noise = 0;
  for (int i = 0; i < n; ++i) {
    signal += want[i] * want[i];
    noise += (want[i] - got[i]) * (want[i] - got[i]);
  }
  return 10 * log10(signal / noise);
}

static void test_operator(void) {
  fill(g_v, kSizeV);
  fill(g_dout, kSizeOut);
  mxflash_operator_stats stats;
  mxflash_operator_fwd_args f;
  mxflash_operator_fwd_args_init(&f);
  check(f.recipe.rotate_qk && f.recipe.smooth_k && f.recipe.smooth_v && f.recipe.element == MXFLASH_DTYPE_E4M3,
        "operator_fwd has the default recipe");
  f.q = tensor3(g_q, MXFLASH_DTYPE_F32, kTokens, kHeadsQ, kHeadDim);
  f.k = tensor3(g_k, MXFLASH_DTYPE_F32, kTokens, kHeadsKv, kHeadDim);
  f.v = tensor3(g_v, MXFLASH_DTYPE_F32, kTokens, kHeadsKv, kHeadDimV);
  f.out = tensor3(g_out, MXFLASH_DTYPE_F32, kTokens, kHeadsQ, kHeadDimV);
  f.mask.causal = 1;
  f.stats = &stats;
  f.saved_size = mxflash_operator_saved(&f);
  f.saved = allocate(f.saved_size);
  f.workspace_size = mxflash_operator_fwd_workspace(&f);
  f.workspace = allocate(f.workspace_size);
  check(f.saved_size > 0 && f.workspace_size > 0, "operator_saved, operator_fwd_workspace");
  check_ok(mxflash_operator_fwd(&f, NULL), "operator_fwd");
  check(stats.q.total == kSizeQ && stats.v.total == kSizeV, "operator_fwd writes stats");

  mxflash_operator_bwd_args b;
  mxflash_operator_bwd_args_init(&b);
  check(b.dq_accum == MXFLASH_DTYPE_NONE, "operator_bwd defaults");
  b.fwd = &f;
  b.dout = tensor3(g_dout, MXFLASH_DTYPE_F32, kTokens, kHeadsQ, kHeadDimV);
  b.dq = tensor3(g_dq, MXFLASH_DTYPE_F32, kTokens, kHeadsQ, kHeadDim);
  b.dk = tensor3(g_dk, MXFLASH_DTYPE_F32, kTokens, kHeadsKv, kHeadDim);
  b.dv = tensor3(g_dv, MXFLASH_DTYPE_F32, kTokens, kHeadsKv, kHeadDimV);
  b.workspace_size = mxflash_operator_bwd_workspace(&b);
  b.workspace = allocate(b.workspace_size);
  check(b.workspace_size > 0, "operator_bwd_workspace");
  check_ok(mxflash_operator_bwd(&b, NULL), "operator_bwd");
  check(stats.dout.total == kSizeOut, "operator_bwd writes stats of dout");

  double* out = allocate(kSizeOut * sizeof(double));
  double* dv = allocate(kSizeV * sizeof(double));
  exact_attention(out, dv);
  const double out_db = sqnr_db(out, g_out, kSizeOut), dv_db = sqnr_db(dv, g_dv, kSizeV);
  printf("       SQNR out %.1f dB, dv %.1f dB\n", out_db, dv_db);
  check(out_db >= 20 && dv_db >= 20, "out and dv agree with exact attention");
  check(!all_equal(g_dq, kSizeQ, 0) && isfinite(g_dq[0]) && isfinite(g_dk[0]), "dq and dk are there");

  b.fwd = NULL;
  check_error(mxflash_operator_bwd(&b, NULL), MXFLASH_STATUS_INVALID_ARGUMENT, "operator_bwd: fwd must not be null");
  b.fwd = &f;
  f.struct_size = 8;
  check_error(mxflash_operator_bwd(&b, NULL), MXFLASH_STATUS_INVALID_ARGUMENT, "operator_fwd: struct_size must be");
  check(mxflash_operator_bwd_workspace(&b) == 0 && mxflash_operator_saved(&f) == 0, "sizes are 0 for a wrong struct");
  free(f.saved);
  free(f.workspace);
  free(b.workspace);
  free(out);
  free(dv);
}

/* ---- wrong calls ------------------------------------------------------------------------------------------------ */

#define CHECK_NULL(op) \
  check_error(mxflash_##op(NULL, NULL), MXFLASH_STATUS_INVALID_ARGUMENT, #op ": args must not be null")

static void test_errors(void) {
  CHECK_NULL(quantize);
  CHECK_NULL(dequantize);
  CHECK_NULL(convert_scales);
  CHECK_NULL(write_image);
  CHECK_NULL(attention_fwd);
  CHECK_NULL(attention_bwd);
  CHECK_NULL(rmsnorm_quantize);
  CHECK_NULL(rmsnorm_bwd);
  CHECK_NULL(gemm_quantize);
  CHECK_NULL(operator_fwd);
  CHECK_NULL(operator_bwd);
  check(mxflash_attention_fwd_workspace(NULL) == 0 && mxflash_attention_bwd_workspace(NULL) == 0 &&
            mxflash_operator_saved(NULL) == 0 && mxflash_operator_fwd_workspace(NULL) == 0 &&
            mxflash_operator_bwd_workspace(NULL) == 0 && mxflash_rmsnorm_bwd_workspace(NULL) == 0,
        "sizes are 0 for null args");

  float x[kDim] = {1};
  uint8_t payload[kDim] = {9}, scale[128] = {9};
  mxflash_quantize_args a;
  mxflash_quantize_args_init(&a);
  a.in = tensor3(x, MXFLASH_DTYPE_F32, 1, 1, kDim);
  a.out = mxflash_make_mx_tensor(payload, scale, MXFLASH_DTYPE_E4M3, MXFLASH_BLOCK_ROW32, MXFLASH_LAYOUT_LINEAR, 1, 1,
                                 kDim, NULL);
  char message[200];
  const size_t sizes[3] = {0, sizeof a - 8, sizeof a + 8};
  for (int i = 0; i < 3; ++i) {
    a.struct_size = sizes[i];
    snprintf(message, sizeof message, "quantize: struct_size must be %zu (mxflash_quantize_args_init sets it), got %zu",
             sizeof a, sizes[i]);
    check_error(mxflash_quantize(&a, NULL), MXFLASH_STATUS_INVALID_ARGUMENT, message);
  }
  a.struct_size = sizeof a;
  a.backend = "fastest";
  check_error(mxflash_quantize(&a, NULL), MXFLASH_STATUS_UNAVAILABLE, "quantize: backend must be one of ");
  check_error(mxflash_quantize(&a, NULL), MXFLASH_STATUS_UNAVAILABLE, "ref, got 'fastest'");
  a.backend = "ref";
  a.rule = 9;
  check_error(mxflash_quantize(&a, NULL), MXFLASH_STATUS_INVALID_ARGUMENT,
              "quantize: rule must be rceil or floor, got 9");
  a.rule = MXFLASH_RULE_RCEIL;
  a.in.dtype = 77;
  check_error(mxflash_quantize(&a, NULL), MXFLASH_STATUS_INVALID_ARGUMENT,
              "quantize: in.dtype must be f32, f16 or bf16, got the value 77");
  a.in.dtype = MXFLASH_DTYPE_F32;
  a.in.device_type = a.out.data.device_type = a.out.scale.device_type = MXFLASH_DEVICE_CUDA;
  check_error(mxflash_quantize(&a, NULL), MXFLASH_STATUS_UNSUPPORTED,
              "quantize: ref: tensors must be on cpu, got cuda:0");
  check(payload[0] == 9 && scale[0] == 9, "no error wrote an output");
  a.in.device_type = a.out.data.device_type = a.out.scale.device_type = MXFLASH_DEVICE_CPU;
  check_ok(mxflash_quantize(&a, NULL), "and the call put right succeeds");

  memset(&a, 0x5A, sizeof a);
  mxflash_quantize_args_init_sized(&a, offsetof(mxflash_quantize_args, rotate_seed));
  check(a.struct_size == offsetof(mxflash_quantize_args, rotate_seed) && a.seq.batch == 1 &&
            a.rotate_seed == 0x5A5A5A5A5A5A5A5A,
        "init writes no byte beyond the size it is given");
  mxflash_quantize_args_init_sized(NULL, sizeof a);
}

int main(void) {
  test_queries();
  test_executor();
  test_quantize();
  test_fused();
  test_attention();
  test_operator();
  test_errors();
  printf("%d checks failed\n", g_failed);
  return g_failed != 0;
}
