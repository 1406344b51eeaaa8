/* The C ABI of mxflash: the same calls over the same structs, for C and for every language that can call C.
 *
 * The C++ header named at each struct is the long form: shapes, formulas and units are said there once, and members
 * have the same names and the same meaning here. What is different in C:
 *   - Enums and flags are int32_t (MXFLASH_* constants; a flag is 0 or not 0).
 *   - C has no default members. Call mxflash_<op>_args_init(&args) before setting members: it sets struct_size and the
 *     defaults of the C++ struct (one sequence, no mask, rule rceil, ...). A call whose struct_size is not that of its
 *     struct is refused, so a program and a library that disagree about a struct never misread it.
 *   - A tensor is "not given" if its data is NULL; an all-zero struct is such a tensor.
 * No call prints, aborts, throws or keeps memory; outputs and workspaces are the caller's. On an error no output has
 * been written (except after MXFLASH_STATUS_DEVICE_ERROR), and the message has the rule and the value. */
#ifndef MXFLASH_MXFLASH_C_H
#define MXFLASH_MXFLASH_C_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define MXFLASH_API __attribute__((visibility("default")))
#else
#define MXFLASH_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- types.h ---------------------------------------------------------------------------------------------------- */

/* A cudaStream_t, or NULL. CPU backends ignore it. */
typedef struct CUstream_st* mxflash_stream;

enum { /* Dtype */
       MXFLASH_DTYPE_NONE = 0,
       MXFLASH_DTYPE_F32 = 1,
       MXFLASH_DTYPE_F16 = 2,
       MXFLASH_DTYPE_BF16 = 3,
       MXFLASH_DTYPE_E4M3 = 4,
       MXFLASH_DTYPE_E5M2 = 5,
       MXFLASH_DTYPE_E8M0 = 6,
       MXFLASH_DTYPE_U8 = 7
};

enum { /* DeviceType */
       MXFLASH_DEVICE_CPU = 0,
       MXFLASH_DEVICE_CUDA = 1
};

enum { /* StatusCode */
       MXFLASH_STATUS_OK = 0,
       MXFLASH_STATUS_INVALID_ARGUMENT = 1,
       MXFLASH_STATUS_UNSUPPORTED = 2,
       MXFLASH_STATUS_UNAVAILABLE = 3,
       MXFLASH_STATUS_WORKSPACE_TOO_SMALL = 4,
       MXFLASH_STATUS_DEVICE_ERROR = 5
};

typedef struct mxflash_status {
  int32_t code;      /* MXFLASH_STATUS_* */
  char message[252]; /* one zero-terminated line of ASCII; empty if ok */
} mxflash_status;

/* shape and stride count elements; the stride of the last dimension must be 1. */
typedef struct mxflash_tensor {
  void* data;
  int32_t dtype;       /* MXFLASH_DTYPE_* */
  int32_t device_type; /* MXFLASH_DEVICE_* */
  int32_t device_index;
  int32_t rank; /* 1..4 */
  int64_t shape[4];
  int64_t stride[4];
} mxflash_tensor;

/* How [total, heads, dim] divides into sequences: equal lengths without cu_seqlens (int32 [batch + 1], on the operands'
 * device). All zero is not valid: one sequence of all tokens is MXFLASH_ONE_SEQUENCE, which args_init sets. */
typedef struct mxflash_jagged {
  const int32_t* cu_seqlens;
  int32_t batch;
  int32_t max_seqlen; /* an upper bound on the lengths; required with cu_seqlens */
} mxflash_jagged;
#define MXFLASH_ONE_SEQUENCE \
  { NULL, 1, 0 }

MXFLASH_API const char* mxflash_status_code_name(int32_t code); /* "ok"; "invalid" outside the enum */
MXFLASH_API const char* mxflash_dtype_name(int32_t dtype);      /* "bf16"; "invalid" outside the enum */
MXFLASH_API int64_t mxflash_dtype_size(int32_t dtype);          /* bytes; 0 for none and outside the enum */

/* A contiguous tensor in host memory; all zero ("not given") if rank is not 1..4. */
MXFLASH_API mxflash_tensor mxflash_make_tensor(void* data, int32_t dtype, int32_t rank, const int64_t* shape);

/* ---- mx.h ------------------------------------------------------------------------------------------------------- */

enum { /* MxBlock */
       MXFLASH_BLOCK_SQUARE32 = 0,
       MXFLASH_BLOCK_ROW32 = 1,
       MXFLASH_BLOCK_COL32 = 2
};

enum { /* MxRule */
       MXFLASH_RULE_RCEIL = 0,
       MXFLASH_RULE_FLOOR = 1
};

enum { /* ScaleLayout */
       MXFLASH_LAYOUT_LINEAR = 0,
       MXFLASH_LAYOUT_ATOM128X4 = 1
};

enum { /* ImageRole */
       MXFLASH_IMAGE_QUERY = 0,
       MXFLASH_IMAGE_KEY = 1,
       MXFLASH_IMAGE_VALUE = 2
};

typedef struct mxflash_mx_tensor {
  mxflash_tensor data;  /* [tokens, heads, dim] e4m3 or e5m2 */
  mxflash_tensor scale; /* e8m0 or u8, contiguous, shape of mxflash_scale_shape */
  int32_t block;        /* MXFLASH_BLOCK_* */
  int32_t layout;       /* MXFLASH_LAYOUT_* */
} mxflash_mx_tensor;

/* Here and below seq == NULL means one sequence of all tokens. shape gets 4 numbers, all 0 for invalid arguments. */
MXFLASH_API void mxflash_scale_shape(int32_t block, int32_t layout, int64_t tokens, int64_t heads, int64_t dim,
                                     const mxflash_jagged* seq, int64_t shape[4]);
MXFLASH_API int64_t mxflash_scale_size(int32_t block, int32_t layout, int64_t tokens, int64_t heads, int64_t dim,
                                       const mxflash_jagged* seq);
MXFLASH_API int64_t mxflash_image_size(int32_t role, int64_t tokens, int64_t heads, int64_t dim,
                                       const mxflash_jagged* seq);
MXFLASH_API int64_t mxflash_padded_tokens(int64_t tokens, const mxflash_jagged* seq);

/* An MX tensor over contiguous host memory: tokens * heads * dim payload and mxflash_scale_size(...) scale bytes. */
MXFLASH_API mxflash_mx_tensor mxflash_make_mx_tensor(void* data, void* scale, int32_t dtype, int32_t block,
                                                     int32_t layout, int64_t tokens, int64_t heads, int64_t dim,
                                                     const mxflash_jagged* seq);

/* ---- backend.h -------------------------------------------------------------------------------------------------- */

enum { /* Operation */
       MXFLASH_OP_QUANTIZE = 0,
       MXFLASH_OP_DEQUANTIZE = 1,
       MXFLASH_OP_CONVERT_SCALES = 2,
       MXFLASH_OP_ATTENTION_FWD = 3,
       MXFLASH_OP_ATTENTION_BWD = 4,
       MXFLASH_OP_RMSNORM_QUANTIZE = 5,
       MXFLASH_OP_GEMM_QUANTIZE = 6,
       MXFLASH_OP_WRITE_IMAGE = 7,
       MXFLASH_OP_RMSNORM_BWD = 8,
       MXFLASH_NUM_OPERATIONS = 9
};

typedef struct mxflash_backend {
  const char* name;         /* "ref"; NULL if the index is out of range */
  const char* target;       /* what it runs on, for people */
  mxflash_status available; /* ok, or why it cannot run on this machine */
} mxflash_backend;

MXFLASH_API const char* mxflash_operation_name(int32_t op); /* "attention_fwd"; "invalid" outside the enum */
MXFLASH_API int32_t mxflash_num_backends(int32_t op);
MXFLASH_API mxflash_backend mxflash_backend_info(int32_t op, int32_t index); /* index 0 is the first choice */
MXFLASH_API const char* mxflash_cpu_isa(void);                               /* what backend cpu uses: "avx512" */
MXFLASH_API const char* mxflash_available_cpu_isa(int32_t index);            /* best first; NULL if out of range */
MXFLASH_API void mxflash_set_num_threads(int32_t n);                         /* 0: all of the process */
MXFLASH_API int32_t mxflash_num_threads(void);

/* An executor in place of the library's own threads: calls task(context, i) once for every i in [0, count), on any
 * threads, and returns when all are done. NULL gives the own threads back. To be set while no call is running. */
typedef void (*mxflash_parallel_task)(void* context, int32_t index);
typedef void (*mxflash_parallel_for)(void* executor, int32_t count, mxflash_parallel_task task, void* context);
MXFLASH_API void mxflash_set_parallel_for(mxflash_parallel_for run, void* executor);
MXFLASH_API int32_t mxflash_has_parallel_for(void); /* flag: an executor is set */

MXFLASH_API const char* mxflash_version(void); /* "0.1.0" */

/* ---- operations: what they share -------------------------------------------------------------------------------- */

/* Declares for `TYPE`: void TYPE_init(TYPE* args), which sets struct_size and the defaults. The exported function takes
 * the size of the caller's own struct (FFI: of the struct as you declared it) and writes no byte beyond it. */
#define MXFLASH_DECLARE_INIT(TYPE)                                    \
  MXFLASH_API void TYPE##_init_sized(TYPE* args, size_t struct_size); \
  static inline void TYPE##_init(TYPE* args) { TYPE##_init_sized(args, sizeof *args); }

/* In every struct below: `backend` forces a backend by name (NULL: MXFLASH_BACKEND, else the first that can), and
 * workspace is workspace_size bytes, aligned to 64, as many as the op's _workspace function says. Those functions give
 * 0 for arguments that the call would refuse; the call says why. */

/* ---- quantize.h ------------------------------------------------------------------------------------------------- */

typedef struct mxflash_quantize_stats {
  float amax;
  int64_t saturated, flushed, nonfinite, total; /* counts of elements */
} mxflash_quantize_stats;

/* out = MX(rotate(in - mean)) */
typedef struct mxflash_quantize_args {
  size_t struct_size;
  mxflash_tensor in;         /* [tokens, heads, dim] or [rows, dim] f32, f16 or bf16 */
  mxflash_mx_tensor out;     /* same shape */
  mxflash_mx_tensor out_col; /* optional second copy */
  mxflash_jagged seq;
  int32_t rule;        /* MXFLASH_RULE_* */
  int32_t smooth;      /* flag: subtract the mean over each sequence */
  mxflash_tensor mean; /* f32 [batch, heads, dim], written; required with smooth */
  int32_t rotate;      /* flag: random-sign Hadamard */
  uint64_t rotate_seed;
  mxflash_tensor image;          /* optional: u8 [mxflash_image_size(...)]; out may then be without data */
  int32_t image_role;            /* MXFLASH_IMAGE_* */
  mxflash_quantize_stats* stats; /* optional, of out */
  const char* backend;
} mxflash_quantize_args;
MXFLASH_DECLARE_INIT(mxflash_quantize_args)
MXFLASH_API mxflash_status mxflash_quantize(const mxflash_quantize_args* args, mxflash_stream stream);

/* out = payload * 2^(scale - 127) */
typedef struct mxflash_dequantize_args {
  size_t struct_size;
  mxflash_mx_tensor in;
  mxflash_tensor out; /* same shape; f32, f16 or bf16 */
  mxflash_jagged seq;
  const char* backend;
} mxflash_dequantize_args;
MXFLASH_DECLARE_INIT(mxflash_dequantize_args)
MXFLASH_API mxflash_status mxflash_dequantize(const mxflash_dequantize_args* args, mxflash_stream stream);

/* Scales of in to those of out: another layout, or square32 to row32 or col32. Payloads are not touched. */
typedef struct mxflash_convert_scales_args {
  size_t struct_size;
  mxflash_mx_tensor in;
  mxflash_mx_tensor out;
  mxflash_jagged seq;
  const char* backend;
} mxflash_convert_scales_args;
MXFLASH_DECLARE_INIT(mxflash_convert_scales_args)
MXFLASH_API mxflash_status mxflash_convert_scales(const mxflash_convert_scales_args* args, mxflash_stream stream);

typedef struct mxflash_image_stats {
  int64_t rounded, total; /* counts of elements */
} mxflash_image_stats;

/* The operand image of in, for attention_fwd. */
typedef struct mxflash_write_image_args {
  size_t struct_size;
  mxflash_mx_tensor in; /* [tokens, heads, dim] */
  mxflash_tensor image; /* u8 [mxflash_image_size(...)] */
  int32_t role;         /* MXFLASH_IMAGE_* */
  mxflash_jagged seq;
  mxflash_image_stats* stats; /* optional: what the image rounds */
  const char* backend;
} mxflash_write_image_args;
MXFLASH_DECLARE_INIT(mxflash_write_image_args)
MXFLASH_API mxflash_status mxflash_write_image(const mxflash_write_image_args* args, mxflash_stream stream);

/* ---- attention.h ------------------------------------------------------------------------------------------------ */

/* Ends inclusive, negative = open. All zero is a window of one key: no mask is MXFLASH_NO_MASK, which args_init sets.
 */
typedef struct mxflash_mask {
  int32_t causal; /* flag; bottom-right aligned */
  int32_t window_left;
  int32_t window_right;
} mxflash_mask;
#define MXFLASH_NO_MASK \
  { 0, -1, -1 }

enum { /* CpuMath: arithmetic of backend cpu, others ignore it */
       MXFLASH_CPU_MATH_AUTOMATIC = 0,
       MXFLASH_CPU_MATH_EXACT = 1,
       MXFLASH_CPU_MATH_FAST = 2
};

MXFLASH_API const char* mxflash_cpu_math_name(int32_t cpu_math); /* "exact"; "invalid" outside the enum */
MXFLASH_API int32_t mxflash_default_cpu_math(void);              /* what AUTOMATIC means in this process */

/* total_out = total_q, with shared_q batch * total_q. */
typedef struct mxflash_attention_fwd_args {
  size_t struct_size;
  mxflash_mx_tensor q;         /* [total_q, num_heads_q, head_dim] */
  mxflash_mx_tensor k;         /* [total_k, num_heads_kv, head_dim] */
  mxflash_mx_tensor v;         /* [total_k, num_heads_kv, head_dim_v] */
  mxflash_tensor out;          /* [total_out, num_heads_q, head_dim_v] f32, f16 or bf16; optional beside out_mx */
  mxflash_mx_tensor out_mx;    /* optional: out quantized */
  mxflash_tensor lse;          /* optional: f32 [num_heads_q, total_out], natural logarithm */
  mxflash_tensor row_exponent; /* optional: u8 [num_heads_q, total_out], for the backward */
  mxflash_tensor v_mean;       /* optional input: f32 [batch, num_heads_kv, head_dim_v] */
  mxflash_tensor q_image, k_image,
      v_image; /* optional: as mxflash_quantize wrote them; the operand may be without data */
  mxflash_jagged seq_q, seq_k;
  mxflash_mask mask;
  float softmax_scale; /* 0: 1 / sqrt(head_dim) */
  int32_t shared_q;    /* flag: one query sequence attends to every key sequence */
  int32_t cpu_math;    /* MXFLASH_CPU_MATH_* */
  const char* backend;
  void* workspace;
  size_t workspace_size;
} mxflash_attention_fwd_args;
MXFLASH_DECLARE_INIT(mxflash_attention_fwd_args)
MXFLASH_API size_t mxflash_attention_fwd_workspace(const mxflash_attention_fwd_args* args);
MXFLASH_API mxflash_status mxflash_attention_fwd(const mxflash_attention_fwd_args* args, mxflash_stream stream);

typedef struct mxflash_attention_bwd_args {
  size_t struct_size;
  mxflash_mx_tensor q, k, v;                /* as in the forward */
  mxflash_mx_tensor dout;                   /* [total_out, num_heads_q, head_dim_v] */
  mxflash_mx_tensor q_col, k_col, dout_col; /* optional: for contractions over tokens */
  mxflash_tensor out, lse;                  /* as written by the forward */
  mxflash_tensor row_exponent;              /* optional: likewise */
  mxflash_tensor v_mean;                    /* optional: as given to the forward */
  mxflash_tensor k_mean;                    /* optional: f32 [batch, num_heads_kv, head_dim], with dlse */
  mxflash_tensor dlse;                      /* optional: f32 [num_heads_q, total_out] */
  mxflash_tensor dq;                        /* [total_q, num_heads_q, head_dim] f32, f16 or bf16 */
  mxflash_tensor dk, dv;                    /* like k, v; each optional if its _mx is given */
  mxflash_mx_tensor dk_mx, dv_mx;           /* optional */
  int32_t ds_dtype;                         /* MXFLASH_DTYPE_E4M3 or _E5M2 */
  int32_t dq_accum;                         /* MXFLASH_DTYPE_F32 or _F16 */
  int32_t rotate_qk;                        /* flag: q and k were rotated with rotate_seed; rotate dq and dk back */
  int32_t deterministic;                    /* flag: dq the same bits in every run on sm90, too */
  uint64_t rotate_seed;
  mxflash_jagged seq_q, seq_k;
  mxflash_mask mask;
  float softmax_scale;
  int32_t shared_q;
  int32_t cpu_math; /* MXFLASH_CPU_MATH_* */
  const char* backend;
  void* workspace;
  size_t workspace_size;
} mxflash_attention_bwd_args;
MXFLASH_DECLARE_INIT(mxflash_attention_bwd_args)
MXFLASH_API size_t mxflash_attention_bwd_workspace(const mxflash_attention_bwd_args* args);
MXFLASH_API mxflash_status mxflash_attention_bwd(const mxflash_attention_bwd_args* args, mxflash_stream stream);

/* ---- rmsnorm.h -------------------------------------------------------------------------------------------------- */

/* out = MX(BF16(h / sqrt(mean(h^2) + eps) * weight)), h = in + residual */
typedef struct mxflash_rmsnorm_quantize_args {
  size_t struct_size;
  mxflash_tensor in;       /* [rows, dim] f32, f16 or bf16 */
  mxflash_tensor weight;   /* [dim] */
  mxflash_tensor residual; /* optional, in and out: [rows, dim] */
  float eps;
  mxflash_mx_tensor out; /* [rows, dim] */
  mxflash_tensor y;      /* optional: bf16 [rows, dim] */
  mxflash_tensor rstd;   /* optional: f32 [rows] */
  mxflash_jagged seq;
  int32_t rule; /* MXFLASH_RULE_* */
  const char* backend;
} mxflash_rmsnorm_quantize_args;
MXFLASH_DECLARE_INIT(mxflash_rmsnorm_quantize_args)
MXFLASH_API mxflash_status mxflash_rmsnorm_quantize(const mxflash_rmsnorm_quantize_args* args, mxflash_stream stream);

/* dx = rstd (g - xhat mean(g xhat)) + dh, dw = sum over rows of dy xhat; xhat = h rstd, g = dy weight */
typedef struct mxflash_rmsnorm_bwd_args {
  size_t struct_size;
  mxflash_tensor h;        /* [rows, dim] f32, f16 or bf16 */
  mxflash_tensor weight;   /* [dim] */
  mxflash_tensor rstd;     /* f32 [rows] */
  mxflash_tensor dy;       /* [rows, dim] f32, f16 or bf16: this ... */
  mxflash_mx_tensor dy_mx; /* ... or this */
  mxflash_tensor dh;       /* optional: [rows, dim] */
  mxflash_tensor dx;       /* [rows, dim]; may be dh */
  mxflash_tensor dw;       /* [dim] f32 or weight's dtype */
  mxflash_jagged seq;
  const char* backend;
  void* workspace;
  size_t workspace_size;
} mxflash_rmsnorm_bwd_args;
MXFLASH_DECLARE_INIT(mxflash_rmsnorm_bwd_args)
MXFLASH_API size_t mxflash_rmsnorm_bwd_workspace(const mxflash_rmsnorm_bwd_args* args);
MXFLASH_API mxflash_status mxflash_rmsnorm_bwd(const mxflash_rmsnorm_bwd_args* args, mxflash_stream stream);

/* ---- gemm.h ----------------------------------------------------------------------------------------------------- */

/* c = a b^T; out = MX(c) */
typedef struct mxflash_gemm_quantize_args {
  size_t struct_size;
  mxflash_tensor a;      /* [m, k] f32, f16 or bf16 */
  mxflash_tensor b;      /* [n, k] */
  mxflash_mx_tensor out; /* [m, n], or [m, heads, dim] with heads * dim == n */
  mxflash_tensor c;      /* optional: the shape of out */
  mxflash_jagged seq;
  int32_t rule; /* MXFLASH_RULE_* */
  const char* backend;
} mxflash_gemm_quantize_args;
MXFLASH_DECLARE_INIT(mxflash_gemm_quantize_args)
MXFLASH_API mxflash_status mxflash_gemm_quantize(const mxflash_gemm_quantize_args* args, mxflash_stream stream);

/* ---- operator.h ------------------------------------------------------------------------------------------------- */

typedef struct mxflash_recipe {
  int32_t element;                       /* of q, k, v: MXFLASH_DTYPE_E4M3 or _E5M2 */
  int32_t grad_element;                  /* of dout */
  int32_t rule;                          /* MXFLASH_RULE_* */
  int32_t block, block_col;              /* of operands contracted over channels, over tokens */
  int32_t rotate_qk, smooth_k, smooth_v; /* flags, on by default */
  uint64_t rotate_seed;
} mxflash_recipe;

typedef struct mxflash_operator_stats {
  mxflash_quantize_stats q, k, v, dout;
} mxflash_operator_stats;

typedef struct mxflash_operator_fwd_args {
  size_t struct_size;
  mxflash_tensor q, k, v; /* shapes as in attention; f32, f16 or bf16 */
  mxflash_tensor out;
  mxflash_tensor lse; /* optional: f32 [num_heads_q, total_out] */
  mxflash_recipe recipe;
  mxflash_jagged seq_q, seq_k;
  mxflash_mask mask;
  float softmax_scale;
  int32_t shared_q;
  mxflash_operator_stats* stats; /* optional: q, k, v are written */
  int32_t cpu_math;              /* MXFLASH_CPU_MATH_*; for the backward too, like backend */
  const char* backend;
  void* saved;       /* what the backward needs beside out; kept by the caller, aligned to 64 */
  size_t saved_size; /* at least mxflash_operator_saved(args) */
  void* workspace;
  size_t workspace_size;
} mxflash_operator_fwd_args;
MXFLASH_DECLARE_INIT(mxflash_operator_fwd_args)
MXFLASH_API size_t mxflash_operator_saved(const mxflash_operator_fwd_args* args);
MXFLASH_API size_t mxflash_operator_fwd_workspace(const mxflash_operator_fwd_args* args);
MXFLASH_API mxflash_status mxflash_operator_fwd(const mxflash_operator_fwd_args* args, mxflash_stream stream);

typedef struct mxflash_operator_bwd_args {
  size_t struct_size;
  const mxflash_operator_fwd_args* fwd; /* the arguments of the forward call */
  mxflash_tensor dout;                  /* [total_out, num_heads_q, head_dim_v]; any strides, zero too */
  mxflash_tensor dlse;                  /* optional: f32 [num_heads_q, total_out] */
  mxflash_tensor dq, dk, dv;
  mxflash_mx_tensor dk_mx, dv_mx; /* optional */
  int32_t dq_accum;               /* MXFLASH_DTYPE_F32, _F16, or _NONE, the default: chosen as operator.h says */
  int32_t deterministic;          /* flag, as in mxflash_attention_bwd_args */
  void* workspace;
  size_t workspace_size;
} mxflash_operator_bwd_args;
MXFLASH_DECLARE_INIT(mxflash_operator_bwd_args)
MXFLASH_API size_t mxflash_operator_bwd_workspace(const mxflash_operator_bwd_args* args);
MXFLASH_API mxflash_status mxflash_operator_bwd(const mxflash_operator_bwd_args* args, mxflash_stream stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* MXFLASH_MXFLASH_C_H */
