// The built command, driven as a user drives it: exit codes, what is printed where, and what bad input is told.
#include <doctest/doctest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>

#include "cli/npy.h"
#include "cli/plot.h"
#include "command.h"
#include "golden.h"
#include "reference_cpu/error_rule.h"

TEST_SUITE_BEGIN("cli");

namespace {
using namespace flash;
using namespace flash::tests;
using namespace std::string_literals;

// A .npy file with this header dictionary and data, whatever they are.
std::string npy(const std::string& dictionary, const std::string& data, char version = 1) {
  std::string header = dictionary + "\n";
  std::string bytes = "\x93NUMPY";
  bytes += version;
  bytes += '\0';
  for (int i = 0; i < (version == 1 ? 2 : 4); i++) bytes += char(header.size() >> 8 * i & 0xff);
  return bytes + header + data;
}
std::string dictionary(const std::string& type, const std::string& fortran, const std::string& shape) {
  return "{'descr': '" + type + "', 'fortran_order': " + fortran + ", 'shape': " + shape + ", }";
}
template <class T>
std::string raw(const std::vector<double>& values) {
  std::string bytes;
  for (double v : values) {
    const T x = T(v);
    bytes.append(reinterpret_cast<const char*>(&x), sizeof x);
  }
  return bytes;
}

// The golden case's inputs as files in the folder.
void write_inputs(const Folder& folder, const Problem& p, const reference::Inputs& inputs) {
  const auto shape = [&](int H, int N) {
    return "(" + std::to_string(p.B) + ", " + std::to_string(H) + ", " + std::to_string(N) + ", " +
           std::to_string(p.D) + ")";
  };
  const std::string q = dictionary("<f4", "False", shape(p.Hq, p.Nq)),
                    k = dictionary("<f4", "False", shape(p.Hkv, p.Nk));
  write(folder / "q.npy", npy(q, raw<float>(inputs.Q)));
  write(folder / "k.npy", npy(k, raw<float>(inputs.K)));
  write(folder / "v.npy", npy(k, raw<float>(inputs.V)));
  write(folder / "do.npy", npy(q, raw<float>(inputs.dO)));
}
std::string inputs_of(const Folder& folder) {
  return " --q '" + (folder / "q.npy") + "' --k '" + (folder / "k.npy") + "' --v '" + (folder / "v.npy") + "' ";
}

// The float32 numbers of a file that was written row-major with 64-byte alignment.
std::vector<double> numbers_in(const std::string& path) {
  const std::string bytes = contents(path);
  REQUIRE(bytes.size() > 10);
  const size_t begin = 10 + size_t(uint8_t(bytes[8])) + 256 * size_t(uint8_t(bytes[9]));
  CHECK(begin % 64 == 0);
  std::vector<double> values((bytes.size() - begin) / 4);
  for (size_t i = 0; i < values.size(); i++) {
    float x;
    std::memcpy(&x, bytes.data() + begin + 4 * i, 4);
    values[i] = x;
  }
  return values;
}

// Some small valid inputs.
struct Small {
  Folder folder;
  Problem p;
  Small() {
    p.B = 1, p.Hq = p.Hkv = 2, p.Nq = 3, p.Nk = 4, p.D = 8;
    write_inputs(folder, p, inputs());
  }
  reference::Inputs inputs() const {
    reference::Inputs in;
    for (size_t i = 0; i < p.q_elements(); i++)
      in.Q.push_back(std::sin(double(i))), in.dO.push_back(std::cos(double(i)));
    for (size_t i = 0; i < p.kv_elements(); i++) in.K.push_back(std::sin(2.0 * double(i))), in.V.push_back(double(i));
    return in;
  }
  std::string run() const { return "run 02 --device cpu" + inputs_of(folder) + "--out '" + (folder / "out") + "' "; }
};

}  // namespace

TEST_CASE("the tour, also without a subcommand, shows every chapter right and ends with 0") {
  for (const char* arguments : {"--help", "tour --device cpu"}) {
    const Ran ran = flashsteps(arguments);
    CHECK(ran.code == 0);
  }
  const Ran ran = flashsteps("tour --device cpu --format json");
  CHECK(ran.code == 0);
  const auto rows = nlohmann::json::parse(ran.out);
  REQUIRE(rows.size() >= 4);
  CHECK(rows[0]["step"] == "01_cpu_attention/attention");
  for (const auto& row : rows) {
    CHECK(row["ok"] == true);
    CHECK(row["error"].get<double>() <= row["allowed"].get<double>());
  }
  CHECK(flashsteps("").code == 0);
}

TEST_CASE("list: an object for each step, with the fields of the design") {
  const Ran ran = flashsteps("list --format json");
  CHECK(ran.code == 0);
  const auto steps = nlohmann::json::parse(ran.out);
  for (const auto& step : steps) {
    for (const char* field :
         {"id", "idea", "dtypes", "head_dims", "passes", "causal", "dropout", "kv_heads", "min_sm", "devices"})
      CHECK_MESSAGE(step.contains(field), field);
    CHECK(step["head_dims"][0].is_number_integer());
  }
  CHECK(contains(flashsteps("list").out, "02_naive_gpu/forward"));
  CHECK(contains(flashsteps("list 02 --format csv").out, "id,idea,dtypes,head_dims,passes"));
  CHECK(!contains(flashsteps("list 02 --format csv").out, "01_cpu"));
}

TEST_CASE("check: 0 when all pass, rows for programs, a given shape or the grid") {
  const Ran table = flashsteps("check 02 --device cpu --seq 20 --causal");
  CHECK(table.code == 0);
  CHECK(contains(table.out, "02_naive_gpu/forward"));
  CHECK(contains(table.out, "ok"));
  const Ran json = flashsteps("check 02/forward --device cpu --seq 20 --seq-k 9 --head-dim 32 --format json");
  CHECK(json.code == 0);
  const auto rows = nlohmann::json::parse(json.out);
  REQUIRE(rows.size() == 2);
  CHECK(rows[0]["seq_k"] == 9);
  CHECK(rows[0]["output"] == "LSE");
  CHECK(rows[1]["ok"] == true);
  CHECK(flashsteps("check 01 --format csv --dtype fp64").code == 0);
  CHECK(flashsteps("check 02 --device cpu --seq 30 --dropout 0.2 --seed 5 --no-observe").code == 0);
  CHECK(flashsteps("check 02 --device cpu --seq 300 --sample 20").code == 0);
  CHECK(flashsteps("check 02 --device cpu --seq 0").code == 0);
}

TEST_CASE("check: a row for programs can be repeated, what passed and what failed, by the command in its last column") {
  const auto rows_of = [](const std::string& arguments) {
    return nlohmann::ordered_json::parse(flashsteps(arguments + " --format json").out);
  };
  for (const char* arguments :
       {"check 05/forward --device cpu --seq 9 --seq-k 20 --causal --seed 7 --values outliers --dropout 0.1 --sample 4",
        "check 08/fp8 --device cpu --seq 9 --head-dim 64 --from fp32 --tensor-scales --no-rotation --seed 3",
        "check 07/backward --device cpu --seq 9 --head-dim 64 --dtype bf16 --deterministic --scale -0.3 --seed 2",
        "check 05/forward --device cpu --scale 2e38 --seq 9 --seed 4"}) {
    INFO(std::string(arguments));
    const auto rows = rows_of(arguments);
    REQUIRE(rows.size() >= 2);
    const std::string again = rows[0]["again"];
    REQUIRE(again.substr(0, 17) == "flashsteps check ");
    CHECK(rows_of(again.substr(11)) == rows);
  }
  const std::string csv = flashsteps("check 05/forward --device cpu --seq 9 --seed 7 --format csv").out;
  CHECK(contains(csv, ",ok,reason,again\n"));
  CHECK(contains(csv, " --seed 7 --device cpu\n"));
}

TEST_CASE("every bad option is refused in a line that says what is allowed") {
  expect_refused("fly", {"fly"});
  expect_refused("check 77", {"there is no step '77'", "01_cpu_attention/attention"});
  expect_refused("check --seq -3", {"--seq", "at least 0"});
  expect_refused("check --seq many", {"--seq"});
  expect_refused("check --seq 99999999999", {"--seq"});
  expect_refused("check --batch -1", {"--batch"});
  expect_refused("check --heads 3 --kv-heads 2", {"--kv-heads", "does not divide"});
  expect_refused("check --heads 2 --kv-heads 0", {"--kv-heads", "does not divide"});
  CHECK(flashsteps("check 05/forward 06/backward --device cpu --heads 0 --kv-heads 2 --seq 5").code == 0);
  expect_refused("check --head-dim 0", {"--head-dim"});
  expect_refused("check 02 --head-dim 512", {"02_naive_gpu", "head dim 512", "1-256"});
  expect_refused("check 02 --dtype bf16", {"bf16", "supported: fp32"});
  expect_refused("check --dtype fp12", {"--dtype", "fp64, fp32, fp16, bf16, e4m3"});
  expect_refused("check --scale nan", {"--scale"});
  expect_refused("check 02 --scale 1e39 --seq 9", {"--scale", "fp32"});
  expect_refused("check 08/over --scale -2.4e38 --seq 9", {"--scale", "2.35e38"});
  CHECK(flashsteps("check 01 --device cpu --dtype fp64 --scale -1e300 --values zeros --seq 9").code == 0);
  // Scores that fp32 cannot hold fail, and it is said why.
  const Ran past = flashsteps("check 05/forward --device cpu --no-observe --scale 2e38 --seq 9");
  CHECK(past.code == 1);
  CHECK(contains(past.out, "which fp32 cannot hold"));
  // So do gradients of scores that leave no digit of P = exp(S - LSE).
  const Ran huge = flashsteps("check 06/backward --device cpu --no-observe --scale 1e30 --seq 9");
  CHECK(huge.code == 1);
  CHECK(contains(huge.out, "on one side only); with scores of this size P = exp(S - LSE) has no accuracy"));
  // The largest scale that is allowed, with numbers that leave scores of ordinary size.
  CHECK(flashsteps("check 02 03 04 05 06 --device cpu --no-observe --scale 1e18 --values tiny --seq 40").code == 0);
  CHECK(flashsteps("check 02/forward 03 04 05 --device cpu --no-observe --scale 2.3e38 --values zeros --seq 9").code ==
        0);
  CHECK(flashsteps("check 07 08 --device cpu --no-observe --pass forward --dtype bf16 --scale 2.3e38 --values zeros "
                   "--seq 9")
            .code == 0);
  expect_refused("check ''", {"there is no step"});
  expect_refused("check --dropout 1", {"--dropout", "less than 1"});
  expect_refused("check 01 --dropout 0.1 --seq 9", {"01_cpu_attention/attention", "dropout"});
  expect_refused("check 01 02 --dropout 0.1 --seq 9", {"01_cpu_attention/attention", "dropout"});
  expect_refused("check 02 --heads 4 --kv-heads 2", {"grouped"});
  expect_refused("check 02/forward --pass backward", {"02_naive_gpu/forward", "backward"});
  expect_refused("check --pass sideways", {"--pass", "forward, backward, both"});
  expect_refused("check --device abacus", {"--device", "auto, cpu, gpu"});
  expect_refused("check --format xml", {"--format", "csv, json, table"});
  expect_refused("check --sample -1", {"--sample"});
  expect_refused("check --colour red", {"--colour"});
  expect_refused("check 02 --device cpu --seq 2000000000 --head-dim 1", {"at most 2^59 elements"});
  expect_refused("tour check", {"check"});
  expect_refused("list 9", {"9"});
  expect_refused("run", {"STEP"});
  expect_refused("run 02", {"--q"});
}

TEST_CASE("an empty value of an option is refused, never taken for an option that was left out") {
  for (const char* size : {"--batch", "--heads", "--kv-heads", "--seq", "--seq-k", "--head-dim", "--sample"})
    for (const char* command : {"check ", "accuracy "})
      expect_refused(std::string(command) + size + " ''", {size, "'' is no whole number"});
  for (const char* command : {"bench --idle", "check --scale", "check --dropout"})
    expect_refused(command + " ''"s, {"--", "'' is no number"});
  for (const char* command : {"bench --launches", "check --random", "check --seed", "accuracy --seed"})
    expect_refused(command + " ''"s, {"--", "'' is no whole number"});
  for (const char* command : {"check --dtype", "check --from", "bench --from", "check --values", "check --device",
                              "bench --format", "check --pass"})
    for (const char* none : {" ''", "", " --causal"})
      expect_refused(command + std::string(none), {"--", "there is no ''; choose one of"});
  for (const char* command : {"bench --csv", "bench --plot", "profile --plot"})
    expect_refused(command + " ''"s, {"--", "give the name of a file"});
  const Small small;
  expect_refused(small.run() + "--grad-out ''", {"--grad-out", "name of a file"});
  expect_refused("run 02 --q '' --k k.npy --v v.npy --out out", {"--q", "name of a file"});
  expect_refused("run 02 --device cpu" + inputs_of(small.folder) + "--out ''", {"--out", "name of a folder"});
}

TEST_CASE("a number that is none, or is out of bounds, is refused with the bounds") {
  for (const char* idle : {"-1", "-0.001", "61", "nan", "-nan", "inf"})
    expect_refused("bench --idle "s + idle, {"--idle: must be from 0 to 60", idle});
  for (const char* idle : {"1e400", "5x", "0x1", "+-1", "' 1'"})
    expect_refused("bench --idle "s + idle, {"--idle", "is no number"});
  for (const char* launches : {"0", "-1", "10001"})
    expect_refused("bench --launches "s + launches, {"--launches: must be from 1 to 10000", launches});
  for (const char* launches : {"1e3", "5x", "1.5", "99999999999"})
    expect_refused("bench --launches "s + launches, {"--launches", "is no whole number"});
  for (const char* command : {"check", "accuracy"}) {
    for (const char* seed : {"18446744073709551616", "-1", "0x10", "1.0", "seed"})
      expect_refused(std::string(command) + " --seed " + seed, {"--seed", seed, "from 0 to 18446744073709551615"});
    for (const char* sample : {"0", "-1"})
      expect_refused(std::string(command) + " --sample " + sample, {"--sample: must be at least 1", sample});
  }
  for (const char* random : {"0", "-1", "1000001"})
    expect_refused("check --random "s + random, {"--random: must be from 1 to 1000000", random});
  for (const char* scale : {"1e400", "1e-400", "+-1", "0x10", "1,5"})
    expect_refused("check --scale "s + scale, {"--scale", scale, "is no number"});
  // What lies on the bounds is taken.
  CHECK(flashsteps("check 01 --device cpu --seq 3 --seed 18446744073709551615 --sample 2147483647").code == 0);
  CHECK(flashsteps("check 01 --device cpu --seq 3 --seed +5 --scale +0.5 --random 1 --sample 1").code == 0);
  for (const char* bounds : {"--idle 0 --launches 1", "--idle 60 --launches 10000"}) {
    const std::string said = flashsteps("bench 01 "s + bounds).err;  // of a step that no GPU runs
    CHECK(!contains(said, "--idle"));
    CHECK(!contains(said, "--launches"));
  }
}

TEST_CASE("e4m3: what it is quantised from and how, in every command that takes a dtype") {
  const std::string shape = "check 08/fp8 --device cpu --no-observe --seq 40 --seq-k 50 --head-dim 64 --format csv ";
  const std::string tiles = flashsteps(shape).out;
  CHECK(contains(tiles, "e4m3"));
  for (const char* option : {"--from fp32", "--tensor-scales", "--no-rotation", "--from bf16 --no-rotation --seed 3"}) {
    const Ran ran = flashsteps(shape + option);
    CHECK(ran.code == 0);
    // Scales are powers of two: for normal numbers it does not matter whose they are. The rest changes the errors.
    const std::regex again(",flashsteps check .*");  // the last column, which repeats the options
    CHECK((std::regex_replace(ran.out, again, "") == std::regex_replace(tiles, again, "")) ==
          (std::string(option) == "--tensor-scales"));
    CHECK(flashsteps(shape + "--dtype e4m3 " + option).out == ran.out);
  }
  expect_refused("check 08/fp8 --device cpu --seq 9 --head-dim 64 --from fp16", {"--from", "'fp16'", "bf16, fp32"});
  expect_refused("check 08/fp8 --device cpu --seq 9 --head-dim 64 --from e5m2", {"--from", "'e5m2'", "bf16, fp32"});
  expect_refused("check 02 --device cpu --seq 9 --no-rotation", {"02_naive_gpu", "e4m3", "fp32"});
  expect_refused("check 02 --device cpu --seq 9 --dtype fp32 --tensor-scales", {"--tensor-scales", "e4m3"});
  expect_refused("check 08/fp8 --device cpu --seq 9 --dtype bf16", {"08_hopper_async/fp8", "supported: e4m3"});
  CHECK(contains(flashsteps("list 08/fp8 --format json").out, "e4m3"));
}

TEST_CASE("accuracy: a row a way, rotation pays with outliers") {
  const Ran ran = flashsteps("accuracy --device cpu --heads 1 --seq 96 --head-dim 128 --format json");
  REQUIRE(ran.code == 0);
  const auto rows = nlohmann::json::parse(ran.out);
  REQUIRE(rows.size() == 6);
  std::map<std::string, double> rmse;
  for (const auto& row : rows) rmse[row["how"]] = row["rmse"];
  CHECK(rmse.at("fused") < 2 * rmse.at("unfused"));
  CHECK(rmse.at("unfused") < 1e-3);
  CHECK(rmse.at("tile scales and rotation") < 0.9 * rmse.at("tensor scales"));
  CHECK(rmse.at("tile scales and rotation") < 0.9 * rmse.at("without rotation"));
  CHECK(rmse.at("tile scales and rotation") > 10 * rmse.at("fused"));  // eight bits are eight bits
  const Ran table =
      flashsteps("accuracy --device cpu --heads 1 --seq 40 --seq-k 30 --head-dim 64 --causal --sample 10");
  CHECK(table.code == 0);
  CHECK(contains(table.out, "without tile scales"));
  expect_refused("accuracy --device cpu --seq 0", {"accuracy", "queries"});
  expect_refused("accuracy --device cpu --seq 4 --seq-k 0", {"accuracy", "keys"});
  expect_refused("accuracy --device cpu --seq 9 --head-dim 32", {"head dim 32", "64, 128"});
  expect_refused("accuracy --sample 0", {"--sample"});
}

TEST_CASE("without a GPU, what needs one says so and offers the CPU") {
  const Ran ran = flashsteps("check 02 --device gpu --seq 9");
  if (ran.code == 0) return;  // there is one here
  CHECK(ran.code == 2);
  CHECK(contains(ran.err, "--device cpu"));
  expect_refused("bench 02", {"--device cpu"});
  expect_refused("check 01 --device gpu", {});
}

TEST_CASE("run: golden inputs give PyTorch's values, forward and backward") {
  for (const auto& golden : testing::read_golden(FLASHSTEPS_TEST_DATA "/golden.csv")) {
    INFO(golden.name);
    const Folder folder;
    const Problem& p = golden.problem;
    const reference::Inputs inputs = testing::golden_inputs(golden);
    write_inputs(folder, p, inputs);
    char scale[40];
    std::snprintf(scale, sizeof scale, " --scale %.17g", p.scale);
    const Ran ran = flashsteps("run 02 --device cpu" + inputs_of(folder) + "--grad-out '" + (folder / "do.npy") +
                               "' --out '" + (folder / "out") + "'" + (p.causal ? " --causal" : "") + scale);
    INFO(ran.err);
    REQUIRE(ran.code == 0);
    const reference::Oracle oracle(p, inputs);
    const auto read = [&](const char* name) { return numbers_in(folder / (std::string("out/") + name)); };
    const auto O = read("o.npy"), LSE = read("lse.npy"), dQ = read("dq.npy"), dK = read("dk.npy"), dV = read("dv.npy");
    const std::map<std::string, std::pair<std::vector<double>, reference::Verdict>> results = {
        {"O", {O, oracle.judge_O(O)}},
        {"LSE", {LSE, oracle.judge_LSE(LSE)}},
        {"dQ", {dQ, oracle.judge_dQ(dQ)}},
        {"dK", {dK, oracle.judge_dK(dK)}},
        {"dV", {dV, oracle.judge_dV(dV)}}};
    for (const auto& result : results)
      CHECK_MESSAGE(result.second.second.pass, result.first << ": " << result.second.second.reason);
    for (const testing::GoldenValue& value : golden.values) {
      if (value.kind != "at") continue;
      const auto& [tensor, verdict] = results.at(value.tensor);
      INFO(value.tensor << "[" << value.index << "]");
      if (std::isfinite(value.value))
        CHECK(std::fabs(tensor[value.index] - value.value) <= verdict.max_allowed);
      else
        CHECK(tensor[value.index] == value.value);
    }
  }
}

TEST_CASE("run: float64, big-endian and Fortran-ordered files, and later format versions, give the same result") {
  const Small small;
  REQUIRE(flashsteps(small.run()).code == 0);
  const std::string expected = contents(small.folder / "out/o.npy");
  const reference::Inputs in = small.inputs();
  std::vector<double> q;
  for (double x : in.Q) q.push_back(double(float(x)));
  const std::string shape = "(1, 2, 3, 8)";

  SUBCASE("float64") { write(small.folder / "q.npy", npy(dictionary("<f8", "False", shape), raw<double>(q))); }
  SUBCASE("big-endian") {
    std::string data = raw<float>(q);
    for (size_t i = 0; i < data.size(); i += 4) std::reverse(data.begin() + long(i), data.begin() + long(i) + 4);
    write(small.folder / "q.npy", npy(dictionary(">f4", "False", shape), data));
  }
  SUBCASE("Fortran order") {
    std::vector<double> turned(q.size());
    size_t i = 0;
    for (size_t h = 0; h < 2; h++)
      for (size_t n = 0; n < 3; n++)
        for (size_t d = 0; d < 8; d++) turned[h + 2 * (n + 3 * d)] = q[i++];
    write(small.folder / "q.npy", npy(dictionary("<f4", "True", shape), raw<float>(turned)));
  }
  SUBCASE("version 2") { write(small.folder / "q.npy", npy(dictionary("<f4", "False", shape), raw<float>(q), 2)); }
  fs::remove_all(small.folder.path / "out");
  const Ran ran = flashsteps(small.run());
  INFO(ran.err);
  CHECK(ran.code == 0);
  CHECK(contents(small.folder / "out/o.npy") == expected);
}

TEST_CASE("run: files that cannot be used are refused by name, and nothing is written") {
  const Small small;
  const std::string q = small.folder / "q.npy";
  const std::string good = contents(q);
  const std::string data = good.substr(good.size() - 192);
  const auto refused = [&](const std::string& bytes, const std::vector<std::string>& words) {
    write(q, bytes);
    std::vector<std::string> all = words;
    all.push_back("q.npy");
    expect_refused(small.run(), all);
    CHECK(!fs::exists(small.folder.path / "out"));
  };
  refused(good.substr(0, good.size() - 1), {"191 bytes of data", "promises 192"});
  refused(good + "x", {"193 bytes"});
  refused(good.substr(0, 40), {"cut off"});
  refused(good.substr(0, 8), {"no .npy file"});
  refused("", {"no .npy file"});
  refused("hello, world: this is text", {"no .npy file"});
  refused(npy(dictionary("<f2", "False", "(1, 2, 3, 16)"), data), {"<f2", "float32"});
  refused(npy(dictionary("<i4", "False", "(1, 2, 3, 8)"), data), {"<i4"});
  refused(npy(dictionary("<c8", "False", "(1, 2, 3, 4)"), data), {"<c8"});
  refused(npy(dictionary("<f4", "False", "(2, 3, 8)"), data), {"3 dimensions", "4 are needed"});
  refused(npy(dictionary("<f4", "False", "()"), data), {"0 dimensions"});
  refused(npy(dictionary("<f4", "False", "(1, 2, 99999999999, 99999999999)"), data), {"shape"});
  refused(npy(dictionary("<f4", "False", "(1, 2, -3, 8)"), data), {"header"});
  refused(npy("{'descr': '<f4'}", data), {"header"});
  refused(npy("nonsense", data), {"header"});
  refused(npy(dictionary(std::string(60000, 'a'), "False", "(1, 2, 3, 8)"), data), {"only float32"});
  refused(npy(dictionary("<f4", "False", "(" + std::string(60000, '1') + ")"), data), {"header"});
  refused(npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2, 3, 8), 'shape': (1, 2, 3, 8)}", data),
          {"header"});
  refused(npy("{'descr': '<f4', 'fortran_order': Falsehood, 'shape': (1, 2, 3, 8)}", data), {"header"});
  refused(npy(dictionary("<f4", "False", "(1, 2, 3, 8)"), data, 9), {"version 9"});
  fs::remove(q);
  expect_refused(small.run(), {"q.npy", "cannot be opened"});
  fs::create_directory(q);
  expect_refused(small.run(), {"q.npy", "no regular file"});
  if (!fs::exists("/proc/self/mem")) return;  // a file whose first byte cannot be read
  expect_refused("run 02 --device cpu --q /proc/self/mem --k k.npy --v v.npy --out '" + (small.folder / "out") + "'",
                 {"/proc/self/mem: ", ".npy file"});
}

TEST_CASE("run: shapes that do not fit each other, and steps that cannot, are refused") {
  const Small small;
  const auto with = [&](const std::string& file, const std::string& shape, size_t count) {
    const std::string before = contents(small.folder / file);
    write(small.folder / file, npy(dictionary("<f4", "False", shape), std::string(count * 4, '\0')));
    return before;
  };
  const std::string out = " --out '" + (small.folder / "out") + "'";
  std::string before = with("k.npy", "(1, 2, 4, 16)", 128);
  expect_refused(small.run(), {"--k", "[1, 2, 4, 16]"});
  write(small.folder / "k.npy", before);
  before = with("v.npy", "(1, 2, 5, 8)", 80);
  expect_refused(small.run(), {"--v", "[1, 2, 5, 8]"});
  write(small.folder / "v.npy", before);
  expect_refused(small.run() + "--grad-out '" + (small.folder / "k.npy") + "'", {"--grad-out"});
  expect_refused(small.run() + "--dropout 2", {"--dropout"});
  expect_refused(small.run() + "--dtype bf16", {"bf16"});
  expect_refused("run 0 --device cpu" + inputs_of(small.folder) + out, {"several steps", "02_naive_gpu/forward"});
  expect_refused("run 77" + inputs_of(small.folder) + out, {"there is no step"});
  expect_refused("run 02/backward" + inputs_of(small.folder) + out, {"02_naive_gpu/backward", "--grad-out"});
  expect_refused("run 02/forward --grad-out '" + (small.folder / "do.npy") + "'" + inputs_of(small.folder) + out,
                 {"02_naive_gpu/forward", "backward"});
  CHECK(!fs::exists(small.folder.path / "out"));
}

TEST_CASE("run: a folder that cannot be written, a full disk: one line, nothing half-written") {
  const Small small;
  write(small.folder / "file", "");
  expect_refused("run 02 --device cpu" + inputs_of(small.folder) + "--out '" + (small.folder / "file/below") + "'",
                 {"file/below: the folder cannot be made"});
  fs::create_directories(small.folder.path / "taken/lse.npy");
  expect_refused("run 02 --device cpu" + inputs_of(small.folder) + "--out '" + (small.folder / "taken") + "'",
                 {"lse.npy"});
  CHECK(!fs::exists(small.folder.path / "taken/o.npy"));
  // Files may not grow beyond one or two blocks: as if the disk were full.
  for (const char* name : {"q.npy", "k.npy", "v.npy"})
    write(small.folder / name, npy(dictionary("<f4", "False", "(1, 2, 64, 8)"), std::string(4 * 2 * 64 * 8, '\0')));
  fs::create_directory(small.folder.path / "full");
  const Ran ran =
      flashsteps("run 02 --device cpu" + inputs_of(small.folder) + "--out '" + (small.folder / "full") + "'",
                 "trap '' XFSZ; ulimit -f 1; ");
  CHECK(ran.code == 2);
  CHECK(contains(ran.err, "o.npy"));
  CHECK(fs::is_empty(small.folder.path / "full"));
  // Folders that were made for it go again.
  CHECK(flashsteps("run 02 --device cpu" + inputs_of(small.folder) + "--out '" + (small.folder / "made/in") + "'",
                   "trap '' XFSZ; ulimit -f 1; ")
            .code == 2);
  CHECK(!fs::exists(small.folder.path / "made"));
}

TEST_CASE("where results are to go is looked at before the work, and looking leaves nothing behind") {
  const Small small;
  write(small.folder / "file", "");
  const size_t before = size_t(std::distance(fs::directory_iterator(small.folder.path), fs::directory_iterator{}));
  // Work that would take long, if it were begun.
  const std::string shape = "(1, 2, 100000, 8)", zeros(4 * 2 * 100000 * 8, '\0');
  for (const char* name : {"q.npy", "k.npy", "v.npy"})
    write(small.folder / name, npy(dictionary("<f4", "False", shape), zeros));
  const auto run_refused = [&](const std::string& out, const std::vector<std::string>& words) {
    expect_refused("run 02 --device cpu" + inputs_of(small.folder) + "--out '" + out + "'", words);
  };
  run_refused(small.folder / "file", {"file: is no folder; give the name of a folder"});
  run_refused(small.folder / "file/a/b", {"file/a/b: the folder cannot be made: Not a directory; choose another one"});
  run_refused("/proc/a/b", {"/proc/a/b: the folder cannot be made"});
  run_refused(small.folder / std::string(300, 'x'), {"the folder cannot be made: File name too long"});
  fs::create_directories(small.folder.path / "taken/lse.npy");
  run_refused(small.folder / "taken", {"lse.npy' is no file"});
  CHECK(fs::is_empty(small.folder.path / "taken/lse.npy"));
  fs::remove_all(small.folder.path / "taken");
  for (const char* option : {"profile 02/forward --seq 100000 --plot", "bench --csv", "bench --plot"}) {
    const auto refused = [&](const std::string& path, const std::vector<std::string>& words) {
      expect_refused(option + " '"s + path + "'", words);
    };
    for (const std::string path : {"none/x.svg", "file/x.svg"})
      refused(small.folder / path, {path + ": cannot be written; check that its folder exists"});
    refused(small.folder / std::string(300, 'x'), {"xxx: cannot be written"});
    refused(small.folder.path.string(), {"is no file that could be written"});
    refused(small.folder / "new/", {"is no file that could be written"});
  }
  CHECK(size_t(std::distance(fs::directory_iterator(small.folder.path), fs::directory_iterator{})) == before);
}

TEST_CASE("profile: the table is printed, whatever becomes of the plot") {
  const Folder folder;
  const std::string line = "(ulimit -f 1; '" FLASHSTEPS_COMMAND "' profile 02 03 04 05 06 --seq 8 --plot '" +
                           (folder / "x.svg") + "' 2>'" + (folder / "err") + "') | cat >'" + (folder / "out") + "'";
  CHECK(std::system(line.c_str()) == 0);  // cat's
  CHECK(contains(contents(folder / "err"), "x.svg: cannot be written"));
  CHECK(contains(contents(folder / "out"), "06_recompute_backward/backward"));
  CHECK(!fs::exists(folder.path / "x.svg"));
}

TEST_CASE("check: seeds past 64 bits, no rows and one step named twice") {
  for (const char* seed : {"-1", "18446744073709551616", "1.5", "x"})
    expect_refused(std::string("check 02 --device cpu --seq 8 --seed=") + seed, {"--seed", "18446744073709551615"});
  CHECK(flashsteps("check 02 --device cpu --seq 8 --seed 18446744073709551615").code == 0);
  expect_refused("check 02 --device cpu --seq 8 --sample 0", {"--sample", "at least 1"});
  const std::string once = flashsteps("check 05/forward --device cpu --seq 8 --format csv").out;
  CHECK(flashsteps("check 05/forward 05/for --device cpu --seq 8 --format csv").out == once);
}

TEST_CASE("an output file takes the place of nothing but a file, and nobody's other file is lost") {
  const Folder folder;
  write(folder / "y.svg.part", "precious");
  CHECK(flashsteps("profile 05/forward --seq 8 --plot '" + (folder / "y.svg") + "'").code == 0);
  CHECK(contents(folder / "y.svg.part") == "precious");
  fs::create_symlink(folder.path / "y.svg", folder.path / "link.svg");
  CHECK(flashsteps("profile 05/forward --seq 8 --plot '" + (folder / "link.svg") + "'").code == 0);
  CHECK(fs::is_symlink(folder.path / "link.svg"));
  fs::create_directory(folder.path / "other");
  fs::create_symlink("other/later.svg", folder.path / "dangling.svg");
  CHECK(flashsteps("profile 05/forward --seq 8 --plot '" + (folder / "dangling.svg") + "'").code == 0);
  CHECK(fs::is_symlink(folder.path / "dangling.svg"));
  CHECK(contents(folder / "other/later.svg") == contents(folder / "y.svg"));
  fs::create_symlink("ring.svg", folder.path / "ring.svg");
  expect_refused("profile 05/forward --seq 8 --plot '" + (folder / "ring.svg") + "'", {"ring.svg", "no file"});
  expect_refused("bench 05/forward --csv '" + (folder / "y.svg") + "' --plot '" + (folder / "link.svg") + "'",
                 {"link.svg", "same file"});
  REQUIRE(mkfifo((folder / "fifo").c_str(), 0600) == 0);
  expect_refused("profile 05/forward --seq 8 --plot '" + (folder / "fifo") + "'", {"fifo", "no file"});
  CHECK(fs::is_fifo(folder.path / "fifo"));
}

TEST_CASE("a line plot: measured points have dots, a bound is dashed, a long name finds room") {
  const std::string name = "07_warp_partitioning/pipelined forward, bf16 <D 64>";
  const std::string svg =
      cli::line_plot_svg("title", "x", "y", {{name, {{512, 1}, {1024, 2}}}, {"bound", {{512, 3}, {1024, 3}}, true}});
  const auto count = [&](const std::string& part) {
    size_t found = 0;
    for (size_t at = svg.find(part); at != std::string::npos; at = svg.find(part, at + 1)) found++;
    return found;
  };
  CHECK(count("<circle") == 2);
  CHECK(count("<polyline") == 2);
  CHECK(count("stroke-dasharray") == 2);  // the line, and its sample in the legend
  CHECK(count("&lt;D 64&gt;") == 1);
  const double width = std::stod(svg.substr(svg.find("viewBox=\"0 0 ") + 13));
  CHECK(width > 720);
}

TEST_CASE("run: empty tensors are answered with empty or zero results") {
  const Small small;
  write(small.folder / "k.npy", npy(dictionary("<f4", "False", "(1, 2, 0, 8)"), ""));
  write(small.folder / "v.npy", npy(dictionary("<f4", "False", "(1, 2, 0, 8)"), ""));
  CHECK(flashsteps(small.run() + "--grad-out '" + (small.folder / "do.npy") + "'").code == 0);
  CHECK(numbers_in(small.folder / "out/o.npy") == std::vector<double>(48, 0.0));
  CHECK(numbers_in(small.folder / "out/lse.npy") == std::vector<double>(6, -INFINITY));
  CHECK(numbers_in(small.folder / "out/dk.npy").empty());
  CHECK(numbers_in(small.folder / "out/dq.npy") == std::vector<double>(48, 0.0));
  // No query heads: no group of them reads the key heads, which have no gradient.
  const std::string none = dictionary("<f4", "False", "(1, 0, 3, 32)"),
                    two = dictionary("<f4", "False", "(1, 2, 4, 32)");
  for (const char* name : {"q.npy", "do.npy"}) write(small.folder / name, npy(none, ""));
  for (const char* name : {"k.npy", "v.npy"}) write(small.folder / name, npy(two, raw<float>(std::vector(256, 1.0))));
  CHECK(flashsteps("run 06/backward --device cpu" + inputs_of(small.folder) + "--grad-out '" +
                   (small.folder / "do.npy") + "' --out '" + (small.folder / "none") + "'")
            .code == 0);
  CHECK(numbers_in(small.folder / "none/o.npy").empty());
  CHECK(numbers_in(small.folder / "none/dk.npy") == std::vector<double>(256, 0.0));
}

TEST_CASE("output that cannot be written is an error, not a success") {
  if (!fs::exists("/dev/full")) return;
  const int status = std::system((std::string("'") + FLASHSTEPS_COMMAND + "' list >/dev/full 2>/dev/null").c_str());
  CHECK(WEXITSTATUS(status) == 2);
}

TEST_SUITE_END();
