/* The steps of this course for programs in C, and in every language that calls C: which there are, what each supports,
 * and one call that runs one pass of one of them on the caller's own tensors. The library is libflashsteps.so.
 *
 *     flashsteps_problem p = {.batch = 1, .heads = 8, .kv_heads = 8, .seq_q = 1000, .seq_k = 1000, .head_dim = 64,
 *                             .scale = 0.125, .causal = 1, .dtype = FLASHSTEPS_BF16};
 *     flashsteps_tensors t = {.q = q, .k = k, .v = v, .o = o, .lse = lse};
 *     if (flashsteps_run("07/pipelined", FLASHSTEPS_FORWARD, FLASHSTEPS_GPU, &p, &t, stream) != FLASHSTEPS_OK)
 *       puts(flashsteps_last_error());
 *
 * What attention is here: S = scale * Q K^T; P = softmax(S) over the keys that a query sees; O = dropout(P) V; LSE is
 * the natural logarithm of the sum of exp(S) over those keys. Query head h reads key/value head h / (heads / kv_heads).
 * With `causal`, query i sees the keys j <= i + (seq_k - seq_q). A query that sees no key has O = 0, LSE = -infinity
 * and no gradient. Sizes may be 0.
 *
 * Tensors are row-major and contiguous, of the problem's dtype (for e4m3, whose products alone are in eight bits, q, k,
 * v and o are bf16):
 *
 *     q, o, d_o, dq    [batch, heads, seq_q, head_dim]
 *     k, v, dk, dv     [batch, kv_heads, seq_k, head_dim]
 *     lse              [batch, heads, seq_q], fp32; fp64 where the dtype is fp64
 *
 * All memory is the caller's, and nothing of it is kept after a call. Inputs are only read; every element of an output
 * is written. Strings and numbers that the library gives out belong to it and live as long as it is loaded, the text of
 * flashsteps_last_error() until the thread's next call.
 *
 * Every function that can fail returns one of FLASHSTEPS_OK, _FAULT, _REFUSED; after one of the last two
 * flashsteps_last_error() says in one line what was wrong, what is allowed and what to do (sizes go by the names of the
 * command's options there). A call that is refused has written nothing. Functions may be called from several threads;
 * on the CPU they take turns.
 */
#ifndef FLASHSTEPS_H
#define FLASHSTEPS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Grows when a function or structure below changes so that callers must be compiled anew. */
#define FLASHSTEPS_INTERFACE 1
int flashsteps_interface(void); /* of the library; compare it with the header's */

enum {
  FLASHSTEPS_OK = 0,
  FLASHSTEPS_FAULT = 1, /* a kernel or the GPU failed, or a step asked for a launch that cannot be */
  FLASHSTEPS_REFUSED =
      2 /* cannot be run as asked: unknown step, unsupported problem, no GPU, no memory, a null pointer */
};

/* Of q, k, v, o and their gradients. e4m3 is the 8-bit format with 4 exponent bits and largest value 448. */
enum { FLASHSTEPS_FP64 = 0, FLASHSTEPS_FP32 = 1, FLASHSTEPS_FP16 = 2, FLASHSTEPS_BF16 = 3, FLASHSTEPS_E4M3 = 4 };

/* The forward pass reads q, k, v and writes o, lse. The backward pass reads q, k, v, o, lse, d_o, and writes dq, dk,
 * dv. */
enum { FLASHSTEPS_FORWARD = 0, FLASHSTEPS_BACKWARD = 1 };

/* The CPU runs the same kernels thread by thread: to learn and to test, not to be fast. Tensors are then in host
 * memory. */
enum { FLASHSTEPS_CPU = 0, FLASHSTEPS_GPU = 1 };

/* One step: a kernel file of a chapter. */
typedef struct flashsteps_step {
  const char* id;    /* "07_warp_partitioning/pipelined" */
  const char* idea;  /* one line, UTF-8 */
  const int* dtypes; /* FLASHSTEPS_FP32, ... */
  int dtype_count;
  const int* head_dims; /* each that it takes, ascending */
  int head_dim_count;
  int forward, backward;         /* 1: it has this pass */
  int causal, dropout, kv_heads; /* 1: it takes a causal mask; dropout > 0; kv_heads < heads */
  int min_sm;                    /* the oldest GPU it can run on, compute capability times ten; 0: it has no GPU code */
  int on_cpu, on_gpu;            /* 1: this build of the library has it for this device */
  const char* saved_by; /* the step whose forward pass leaves in `saved` what this one's backward pass reads, or NULL:
                           any forward pass will do, since o and lse are enough */
} flashsteps_step;

int flashsteps_step_count(void);

/* Step number `index`, 0 <= index < flashsteps_step_count(), in the order of the course. */
int flashsteps_get_step(int index, flashsteps_step* step);

/* The step that a name means: its id, or a prefix of chapter and kernel that fits no other: "05/forward", "08/ping". */
int flashsteps_find_step(const char* name, flashsteps_step* step);

/* What is to be computed. Begin with all zero bytes, so that members of later versions are off. */
typedef struct flashsteps_problem {
  int batch, heads, kv_heads; /* heads is a multiple of kv_heads */
  int seq_q, seq_k, head_dim;
  double scale;      /* usually 1 / sqrt(head_dim); any finite number, at most 2.35e38 unless FP64 */
  int causal;        /* 0 or 1 */
  double dropout;    /* the probability that a weight is dropped, 0 <= dropout < 1; kept ones grow by 1/(1 - dropout) */
  uint64_t seed;     /* of the dropout mask; forward and backward pass must be given the same seed and offset */
  uint32_t offset;   /* which of the seed's masks; another number, another mask */
  int dtype;         /* FLASHSTEPS_FP32, ... */
  int deterministic; /* 1: gradients have the same bits in every run, at some cost where a step uses atomics */
} flashsteps_problem;

typedef struct flashsteps_tensors {
  const void *q, *k, *v;
  void *o, *lse; /* outputs of the forward pass, inputs of the backward pass */
  const void* d_o;
  void *dq, *dk, *dv;
  void* workspace; /* see flashsteps_memory_needed; contents do not matter before, and mean nothing after a call */
  void* saved;     /* written by the forward pass, read by the backward pass */
} flashsteps_tensors;

/* Whether a step can run: FLASHSTEPS_OK, or FLASHSTEPS_REFUSED with the reason. */
int flashsteps_supports(const char* step, int pass, int device, const flashsteps_problem* problem);

/* Bytes that a pass needs besides its tensors. `workspace`: for the time of the call. `saved`: from the forward pass to
 * the backward pass; only where the chapter's backward pass reads more than o and lse (chapters 01 and 02: all of P).
 * A caller who wants no gradient has to give `saved` too. Both may be 0, and the pointers then NULL. */
int flashsteps_memory_needed(const char* step, int pass, int device, const flashsteps_problem* problem,
                             size_t* workspace, size_t* saved);

/* Runs one pass of one step.
 *
 * On the GPU: pointers are to memory of one GPU, tensors aligned to 16 bytes, `workspace` and `saved` to 256. `stream`
 * is a cudaStream_t of that GPU (NULL: its default stream). The call returns when the work is in the stream; an error
 * in a kernel shows at the program's next synchronisation, as with every CUDA kernel. On the CPU: `stream` and
 * `workspace` are not used. The call returns when the work is done. */
int flashsteps_run(const char* step, int pass, int device, const flashsteps_problem* problem,
                   const flashsteps_tensors* tensors, void* stream);

/* Why the last call of this thread failed; an empty string if it did not. */
const char* flashsteps_last_error(void);

#ifdef __cplusplus
}
#endif
#endif
