"""docs/results/measure.sh, whose parts need a GPU: with stand-ins for the command, the driver and PyTorch, each part becomes
the file that it should, what fails leaves the file before as it was, and what a long run finds is told.

    python3 tests/long/measure_test.py"""
import os
import re
import subprocess
import tempfile
import unittest
from unittest import mock

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../docs/results/measure.sh")
COLUMNS = "step,dtype,head_dim,causal,seq,batch,heads,pass,ms,ms_p10,ms_p90,tflops,bound_fraction,scratch_bytes"
STEPS = ("02_naive_gpu/forward", "05_kernel_fusion/forward", "08_hopper_async/backward", "20_mine/forward")
COMMAND = """#!/bin/sh
echo "$@" >> {folder}/log
case "$*" in
  {cases}
  list*) echo id,idea; for step in {steps}; do echo "$step,what"; done;;
  *"--heads 1 --seq 64") echo "GPU: X, measured: 65.1 TFLOP/s fp32, copy 4233 GB/s";;
  bench*) echo {columns}; echo "$2,row";;
  check*--random*) echo "$2  forward  fp32  2000  0  O  1e-7  2e-7  ok";;
esac
"""
SOAKED = ("30 kernels, 188 rounds, 225600 launches in 5.03 minutes; results that differed: {}; memory grew by 0.00 MB on the device, "
          "-0.1 MB on the host (754 MB resident): {}")


class Measure(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        os.makedirs(os.path.join(self.folder, "tests"))
        self.write("nvidia-smi", "#!/bin/sh\necho 'NVIDIA H200, 580'\necho 'NVIDIA H200, 580'\n")

    def write(self, name, text):
        with open(os.path.join(self.folder, name), "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(file.name, 0o755)
        return file.name

    def measure(self, *parts, cases="nothing) ;;", steps=STEPS):
        command = self.write("flashsteps", COMMAND.format(folder=self.folder, cases=cases, columns=COLUMNS, steps=" ".join(steps)))
        path = self.folder + os.pathsep + os.environ["PATH"]
        return subprocess.run(["bash", SCRIPT, os.path.join(self.folder, "out"), command, *parts], capture_output=True, text=True,
                              env={**os.environ, "PATH": path})

    def out(self, name):
        with open(os.path.join(self.folder, "out", name), encoding="utf-8") as file:
            return file.read().splitlines()

    def test_a_part_is_a_file(self):
        ran = self.measure("08_backward_deterministic")
        self.assertEqual((ran.returncode, ran.stderr), (0, ""))
        self.assertEqual(os.listdir(os.path.join(self.folder, "out")), ["h200_bench_08_backward_deterministic.csv"])
        comment, columns, *rows = self.out("h200_bench_08_backward_deterministic.csv")
        self.assertRegex(comment, r"^# date \d{4}-\d\d-\d\d; GPU NVIDIA H200, driver 580; measured 65.1 TFLOP/s fp32, copy 4233 GB/s; command: "
                         r"docs/results/measure.sh FOLDER build/flashsteps 08_backward_deterministic, which runs flashsteps bench 08/backward ")
        self.assertEqual((columns, rows), (COLUMNS, ["08/backward,row"] * 4))
        with open(os.path.join(self.folder, "log"), encoding="utf-8") as log:
            benches = [line for line in log.read().splitlines() if line.startswith("bench 08")]
        self.assertEqual(benches, [f"bench 08/backward --dtype bf16 --head-dim {d} --deterministic{mask} --format csv"
                                   for d in (64, 128) for mask in ("", " --causal")])

    def test_what_fails_leaves_the_file_before(self):
        self.measure("07_backward")
        before = self.out("h200_bench_07_backward.csv")
        for cases in ("*'--head-dim 128'*) exit 2;;", f"'bench 07'*) echo {COLUMNS};;"):  # in the middle; no row at all
            self.assertNotEqual(self.measure("07_backward", "02_naive_gpu", cases=cases).returncode, 0)
            self.assertEqual(self.out("h200_bench_07_backward.csv"), before)

    def test_refused_before_anything_is_measured(self):
        for parts, said in ((("07_backward", "foo"), "no part 'foo'; there are 02_naive_gpu "), (("ideas",), "without 'reference_that_stays'")):
            ran = self.measure(*parts)
            self.assertEqual((ran.returncode, ran.stdout, ran.stderr.count("\n")), (2, "", 1))
            self.assertIn(said, ran.stderr)
            self.assertFalse(os.path.exists(os.path.join(self.folder, "out")))
        ran = self.measure("07_backward", cases="*'--seq 64') echo hello;;")
        self.assertEqual((ran.returncode, ran.stderr), (2, "measure.sh: bench does not say what it measured of the GPU\n"))
        self.assertEqual(subprocess.run(["bash", SCRIPT], capture_output=True).returncode, 2)
        self.assertEqual(subprocess.run(["bash", SCRIPT, self.folder, "/no/flashsteps"], capture_output=True).returncode, 2)

    def test_random(self):
        ran = self.measure("random")
        self.assertEqual(ran.returncode, 0, ran.stderr)
        expected = [f"{step},forward,fp32,2000,0" for step in STEPS if step < "2"]  # not the reader's own
        self.assertEqual(self.out("h200_long_random.csv")[1:], ["step,pass,dtype,cases,failed", *expected])
        ran = self.measure("random", cases="'check 05'*) echo '05_kernel_fusion/forward  forward  fp32  2000  3  O'; exit 1;;\n'check 08'*) exit 2;;")
        self.assertEqual(ran.returncode, 1)
        self.assertEqual(self.out("h200_long_random.csv")[2:], [expected[0], "05_kernel_fusion/forward,forward,fp32,2000,3",
                                                                "08_hopper_async/backward,,,,did not run"])

    def test_soak(self):
        self.write("tests/soak", f"#!/bin/sh\necho \"$@\" >> {self.folder}/soaks\necho begun\necho '{SOAKED.format(0, 'ok')}'\n")
        self.assertEqual(self.measure("soak").returncode, 0)
        self.assertIn("which runs tests/soak 5 02 03", self.out("h200_long_soak.csv")[0])
        with mock.patch.dict(os.environ, SOAK_MINUTES="0.5"):
            self.assertEqual(self.measure("soak").returncode, 0)
        self.assertIn("which runs tests/soak 0.5 02 03", self.out("h200_long_soak.csv")[0])
        with open(os.path.join(self.folder, "soaks"), encoding="utf-8") as soaks:
            self.assertEqual([line.split()[0] for line in soaks], ["5", "0.5"])
        self.assertEqual(self.out("h200_long_soak.csv")[2:], ["30,188,225600,5.03,0,0.00,-0.1,ok"])
        self.write("tests/soak", f"#!/bin/sh\necho '{SOAKED.format(2, 'FAILED')}'\nexit 1\n")
        self.assertEqual(self.measure("soak").returncode, 1)
        self.assertEqual(self.out("h200_long_soak.csv")[2:], ["30,188,225600,5.03,2,0.00,-0.1,FAILED"])
        os.remove(os.path.join(self.folder, "tests/soak"))
        ran = self.measure("soak")
        self.assertEqual((ran.returncode, ran.stderr), (2, "measure.sh: soak: no row came of it\n"))

    def test_big(self):
        commands = []
        for group in ("grid", "lengths", "queries", "keys"):
            self.assertEqual(self.measure(f"big_{group}").returncode, 0)
            comment, columns, *rows = self.out(f"h200_long_big_{group}.csv")
            self.assertTrue(comment.endswith(f" which runs tests/long/big.sh build/flashsteps {group}"), comment)
            self.assertEqual(columns, "exit_code,seconds,command")
            self.assertTrue(all(re.fullmatch(r"0,\d+,check \d\d.*", row) for row in rows), rows)
            commands += [row.split(",")[2] for row in rows]
        self.assertGreater(len(commands), 10)
        self.assertEqual(len(commands), len(set(commands)))
        ran = self.measure("big_lengths", cases="*1048576*causal*) echo 'FAILED it'; exit 1;;\n*4092*) exit 7;;")
        self.assertEqual(ran.returncode, 1)
        failed = [re.sub(r",\d+,", ",", row) for row in self.out("h200_long_big_lengths.csv")[2:] if not row.startswith("0,")]
        self.assertEqual(failed, ["7,check 02 03 04 05 06 --heads 24 --seq 4092 --head-dim 32 --sample 300",
                                  "7,check 07 08 --heads 24 --seq 4092 --head-dim 64 --sample 300",
                                  "1,check 07 08 --pass forward --heads 1 --seq 1048576 --head-dim 64 --sample 40 --dtype bf16 --causal"])
        self.assertTrue(any("FAILED it" in line for line in self.out("big_lengths.txt")))


if __name__ == "__main__":
    unittest.main()
