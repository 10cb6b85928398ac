// What docs/02_naive_gpu.md counts: bytes of global memory that each kernel asks for.
#include "harness/closed_forms.h"

namespace {
using namespace flash;

std::vector<KernelBytes> forward(const Problem& p) {
  const double heads = double(p.query_heads()), rows = double(p.query_rows()), elements = double(p.scores());
  const double seen = heads * seen_elements(p), D = p.D;
  std::vector<KernelBytes> kernels = {{"scores", 4 * 2 * D * elements, 4 * elements}};
  if (p.causal) kernels.push_back({"mask", 0, 4 * (elements - seen)});
  // Three sweeps over S; the third writes zeros where a row sees nothing, without a look at S.
  kernels.push_back({"softmax", 4 * (3 * elements - heads * empty_rows(p) * p.Nk), 4 * (elements + rows)});
  if (p.dropout > 0) kernels.push_back({"dropout", 4 * (1 - p.dropout) * elements, 4 * elements});
  kernels.push_back({"weighted_sum", 4 * 2 * D * seen, 4 * D * rows});
  return kernels;
}

std::vector<KernelBytes> backward(const Problem& p) {
  const double elements = double(p.scores()), seen = double(p.query_heads()) * seen_elements(p), D = p.D;
  const double queries = D * double(p.query_rows()), keys = D * double(p.key_rows());
  std::vector<KernelBytes> kernels = {{"values_gradient", 4 * 2 * D * seen, 4 * keys},
                                      {"weights_gradient", 4 * 2 * D * elements, 4 * elements}};
  if (p.dropout > 0) kernels.push_back({"dropout_gradient", 4 * (1 - p.dropout) * elements, 4 * elements});
  kernels.push_back({"softmax_gradient", 4 * 4 * seen, 4 * elements});
  kernels.push_back({"queries_gradient", 4 * 2 * D * seen, 4 * queries});
  kernels.push_back({"keys_gradient", 4 * 2 * D * seen, 4 * keys});
  return kernels;
}

const ClosedFormRegistration forms[] = {{__FILE__, "forward", Pass::forward, forward},
                                        {__FILE__, "backward", Pass::backward, backward}};

}  // namespace
