#include "harness/closed_forms.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <tuple>

namespace flash {
namespace {

std::map<std::tuple<std::string, Pass>, ClosedForm>& forms() {
  static std::map<std::tuple<std::string, Pass>, ClosedForm> forms;
  return forms;
}

// Calls `visit` with the number of queries in each tile of Br, and the number of keys that its last query sees.
template <class Visit>
void for_each_query_tile(const Problem& p, int Br, Visit visit) {
  for (int query0 = 0; query0 < p.Nq; query0 += Br) {
    const int queries = std::min(Br, p.Nq - query0);
    visit(queries, keys_seen_by(p, query0 + queries - 1));
  }
}

// `keys` rounded up to whole tiles of Bc, but no more than there are.
double whole_tiles(const Problem& p, double keys, int Bc, int ahead) {
  if (keys == 0) return 0;
  const int tiles = (int(keys) + Bc - 1) / Bc + ahead;
  return std::min(double(tiles) * Bc, double(p.Nk));
}

// Calls `visit` for each tile of Bc keys that some query sees, with where its walk over tiles of Br queries begins.
template <class Visit>
void for_each_walk_over_queries(const Problem& p, int Bc, int Br, Visit visit) {
  for (int key0 = 0; key0 < p.Nk; key0 += Bc) {
    int first = 0;
    while (first < p.Nq && keys_seen_by(p, first) <= key0) first++;
    if (first < p.Nq) visit(first / Br * Br);
  }
}

}  // namespace

ClosedFormRegistration::ClosedFormRegistration(const char* file, const char* step, Pass pass, ClosedForm form) {
  const std::string chapter = std::filesystem::path(file).parent_path().filename().string();
  forms()[{chapter + "/" + step, pass}] = form;
}

std::vector<KernelBytes> closed_form(const RegisteredStep& step, Pass pass, const Problem& problem) {
  const auto it = forms().find({step.id, pass});
  return it == forms().end() ? std::vector<KernelBytes>{} : it->second(problem);
}

double keys_seen_by(const Problem& p, int query) {
  return p.causal ? std::clamp(double(query) + 1 + p.Nk - p.Nq, 0.0, double(p.Nk)) : p.Nk;
}

double empty_rows(const Problem& p) {
  double rows = 0;
  for (int i = 0; i < p.Nq; i++) rows += keys_seen_by(p, i) == 0;
  return rows;
}

double rows_of_seen_tiles(const Problem& p, int Br, int Bc) {
  double rows = 0;
  for_each_query_tile(p, Br, [&](int queries, double keys) {
    for (int key0 = 0; key0 < keys; key0 += Bc) rows += queries + std::min(Bc, p.Nk - key0);
  });
  return rows;
}

double seen_elements(const Problem& p) {
  double seen = 0;
  for (int i = 0; i < p.Nq; i++) seen += keys_seen_by(p, i);
  return seen;
}

double keys_walked(const Problem& p, int Br, int Bc, int ahead) {
  double walked = 0;
  for_each_query_tile(p, Br, [&](int, double keys) { walked += whole_tiles(p, keys, Bc, ahead); });
  return walked;
}

double elements_walked(const Problem& p, int Br, int Bc) {
  double walked = 0;
  for_each_query_tile(p, Br, [&](int queries, double keys) { walked += queries * whole_tiles(p, keys, Bc, 0); });
  return walked;
}

double queries_walked(const Problem& p, int Bc, int Br) {
  double walked = 0;
  for_each_walk_over_queries(p, Bc, Br, [&](int first) { walked += p.Nq - first; });
  return walked;
}

double query_tiles_walked(const Problem& p, int Bc, int Br) {
  double walked = 0;
  for_each_walk_over_queries(p, Bc, Br, [&](int first) { walked += (p.Nq - first + Br - 1) / Br; });
  return walked;
}

}  // namespace flash
