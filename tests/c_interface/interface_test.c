/* The C interface as a C program sees it: the header compiles as C, a pass runs, and what cannot run is refused with a
 * message and without writing. */
#include "flashsteps.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HEADS = 2, N = 5, D = 32, COUNT = HEADS * N * D };

static int failures = 0;

static void check(int good, const char* what) {
  printf("%s %s\n", good ? "ok  " : "FAIL", what);
  if (!good) failures++;
}

static void check_refused(int code, const char* part, const char* what) {
  check(code == FLASHSTEPS_REFUSED && strstr(flashsteps_last_error(), part) != NULL, what);
  printf("     %s\n", flashsteps_last_error());
}

/* Fills an array with one value. */
static void fill(float* x, size_t count, float value) {
  for (size_t i = 0; i < count; i++) x[i] = value;
}

/* With scores of 0 each of the first i + 1 keys weighs 1 / (i + 1): O is the mean of the rows of V seen. */
static void test_means(const char* step) {
  flashsteps_problem p;
  flashsteps_tensors t;
  static float q[COUNT], k[COUNT], v[COUNT], o[COUNT], lse[HEADS * N];
  size_t workspace = 0, saved = 0;
  double worst = 0;
  memset(&p, 0, sizeof p);
  memset(&t, 0, sizeof t);
  p.batch = 1, p.heads = p.kv_heads = HEADS, p.seq_q = p.seq_k = N, p.head_dim = D;
  p.scale = 1, p.causal = 1, p.dtype = FLASHSTEPS_FP32;
  fill(q, COUNT, 0), fill(k, COUNT, 1), fill(o, COUNT, NAN), fill(lse, HEADS * N, NAN);
  for (int i = 0; i < COUNT; i++) v[i] = (float)(i / D % N); /* row j holds j */
  check(flashsteps_memory_needed(step, FLASHSTEPS_FORWARD, FLASHSTEPS_CPU, &p, &workspace, &saved) == FLASHSTEPS_OK,
        "memory needed");
  t.q = q, t.k = k, t.v = v, t.o = o, t.lse = lse, t.saved = malloc(saved + 1);
  check(flashsteps_run(step, FLASHSTEPS_FORWARD, FLASHSTEPS_CPU, &p, &t, NULL) == FLASHSTEPS_OK, step);
  check(flashsteps_last_error()[0] == '\0', "no error is left");
  for (int row = 0; row < HEADS * N; row++) {
    const int i = row % N;
    for (int c = 0; c < D; c++) worst = fmax(worst, fabs(o[row * D + c] - i / 2.0));
    worst = fmax(worst, fabs(lse[row] - log(i + 1.0)));
    if (!isfinite(lse[row]) || !isfinite(o[row * D])) worst = INFINITY;
  }
  check(worst < 1e-6, "O is the mean of V, LSE the logarithm of the count");

  fill(o, COUNT, 7);
  t.lse = NULL;
  check_refused(flashsteps_run(step, FLASHSTEPS_FORWARD, FLASHSTEPS_CPU, &p, &t, NULL), "lse", "a null LSE is refused");
  check(o[0] == 7, "a refused call writes nothing");
  p.heads = 3;
  check_refused(flashsteps_supports(step, FLASHSTEPS_FORWARD, FLASHSTEPS_CPU, &p), "divide",
                "3 heads on 2 are refused");
  p.heads = HEADS;
  p.causal = 2;
  check_refused(flashsteps_supports(step, FLASHSTEPS_FORWARD, FLASHSTEPS_CPU, &p), "causal", "causal 2 is refused");
  free(t.saved);
}

int main(void) {
  flashsteps_step step;
  check(flashsteps_interface() == FLASHSTEPS_INTERFACE, "the library is the header's");
  check(flashsteps_step_count() > 8, "there are steps");
  for (int i = 0; i < flashsteps_step_count(); i++) {
    check(flashsteps_get_step(i, &step) == FLASHSTEPS_OK, "get_step");
    printf("     %s: %s; head dims %d to %d\n", step.id, step.idea, step.head_dims[0],
           step.head_dims[step.head_dim_count - 1]);
    check(step.dtype_count > 0 && step.head_dim_count > 0 && (step.forward || step.backward) && step.on_cpu,
          "its description");
  }
  check_refused(flashsteps_get_step(flashsteps_step_count(), &step), "index", "an index past the end is refused");
  check(flashsteps_find_step("02/back", &step) == FLASHSTEPS_OK && step.saved_by &&
            strcmp(step.saved_by, "02_naive_gpu/forward") == 0,
        "02's backward pass reads what its forward pass saves");
  check_refused(flashsteps_find_step("03", &step), "2 steps", "a name of several steps is refused");
  check_refused(flashsteps_find_step(NULL, &step), "null", "a null name is refused");
  check_refused(flashsteps_supports("05/forward", FLASHSTEPS_FORWARD, FLASHSTEPS_CPU, NULL), "problem",
                "a null problem is refused");
  test_means("01/attention");
  test_means("02/forward");
  test_means("05/forward");
  return failures ? 1 : 0;
}
