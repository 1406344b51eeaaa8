/* Attention forward and backward from C: float tensors in and out, MXFP8 inside.
 *
 * The pattern of every call: <op>_args_init, set members, ask for sizes, give memory, call, look at the status. */
#include <mxflash/mxflash_c.h>

#include <stdio.h>
#include <stdlib.h>

enum { kTokens = 128, kHeads = 2, kDim = 64, kSize = kTokens * kHeads * kDim };

static float q[kSize], k[kSize], v[kSize], dout[kSize]; /* [tokens, heads, dim] */
static float out[kSize], dq[kSize], dk[kSize], dv[kSize];

static void make_up(float* x, uint32_t seed) {
  for (int i = 0; i < kSize; ++i) {
    seed = seed * 1664525u + 1013904223u;
    x[i] = (float)(seed >> 8) / 8388608.0f - 1.0f;
  }
}

static mxflash_tensor view(float* x) {
  const int64_t shape[3] = {kTokens, kHeads, kDim};
  return mxflash_make_tensor(x, MXFLASH_DTYPE_F32, 3, shape);
}

/* Workspaces are yours, aligned to 64 bytes. */
static void* allocate(size_t size) { return aligned_alloc(64, (size + 63) / 64 * 64); }

/* A message has the rule that was broken and the value that broke it. */
static int failed(mxflash_status status) {
  if (status.code != MXFLASH_STATUS_OK) fprintf(stderr, "%s\n", status.message);
  return status.code != MXFLASH_STATUS_OK;
}

int main(void) {
  make_up(q, 1);
  make_up(k, 2);
  make_up(v, 3);
  make_up(dout, 4);

  mxflash_operator_fwd_args fwd;
  mxflash_operator_fwd_args_init(&fwd); /* defaults: one sequence, no mask, the default recipe */
  fwd.q = view(q);
  fwd.k = view(k);
  fwd.v = view(v);
  fwd.out = view(out);
  fwd.mask.causal = 1;
  fwd.saved_size = mxflash_operator_saved(&fwd);
  fwd.saved = allocate(fwd.saved_size);
  fwd.workspace_size = mxflash_operator_fwd_workspace(&fwd);
  fwd.workspace = allocate(fwd.workspace_size);
  if (failed(mxflash_operator_fwd(&fwd, NULL))) return 1;

  mxflash_operator_bwd_args bwd;
  mxflash_operator_bwd_args_init(&bwd);
  bwd.fwd = &fwd;
  bwd.dout = view(dout);
  bwd.dq = view(dq);
  bwd.dk = view(dk);
  bwd.dv = view(dv);
  bwd.workspace_size = mxflash_operator_bwd_workspace(&bwd);
  bwd.workspace = allocate(bwd.workspace_size);
  if (failed(mxflash_operator_bwd(&bwd, NULL))) return 1;
  printf("mxflash %s: out[0] %.4f (v[0] %.4f), dq[last] %.5f, dk[0] %.5f, dv[0] %.5f\n", mxflash_version(), out[0],
         v[0], dq[kSize - 1], dk[0], dv[0]);

  /* What an error looks like: nothing is written, nothing aborts. */
  bwd.dout.shape[2] = 60;
  const mxflash_status status = mxflash_operator_bwd(&bwd, NULL);
  printf("%s: %s\n", mxflash_status_code_name(status.code), status.message);

  free(fwd.saved);
  free(fwd.workspace);
  free(bwd.workspace);
  return status.code == MXFLASH_STATUS_INVALID_ARGUMENT ? 0 : 1;
}
