#!/usr/bin/env python3
"""Tests of benches/gpu.sh: what goes wrong is named, and what was measured before survives. About a minute.

    python3 tests/kernels/emulate/device.py -- python3 benches/gpu/test.py target/release/kvsieve

Faults are put between the script and the real binary, which runs on the emulated device.
"""

import json
import lzma
import os
import stat
import subprocess
import sys
import tarfile
import tempfile
import time
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)

import check
import main
import plan
import steps
import table
from records import Records

BINARY = os.path.abspath(sys.argv[1]) if len(sys.argv) > 1 else None
FIXTURES = os.path.join(HERE, "fixtures")

# Stands before the binary, which may be none: a fault for each call whose arguments (or experiment) contain a text of
# faults.json, an object {text: fault}. Without a binary `doctor` answers what fixtures/doctor.json says, until a pass crashed.
WRAPPER = """#!{python}
import json, os, signal, struct, subprocess, sys
folder, binary, fixtures = {folder!r}, {binary!r}, {fixtures!r}
words = " ".join(sys.argv[1:])
if os.path.exists("cells.toml"):
    with open("cells.toml") as file:
        words += file.read()
with open(folder + "/log", "a") as file:
    file.write(words + "\\n")
with open(folder + "/faults.json") as file:
    fault = next((fault for text, fault in json.load(file).items() if text in words), None)
if fault == "hang":
    # A child of its own has to be killed too.
    subprocess.run(["sh", "-c", "sleep 1; touch " + folder + "/alive; sleep 1000"])
if fault == "crash":
    open(folder + "/crashed", "w").close()
    os.kill(os.getpid(), signal.SIGSEGV)
if binary is None:
    with open(fixtures + "/doctor.json") as file:
        doctor = json.load(file)
    if os.path.exists(folder + "/crashed"):
        doctor["cuda"]["device"] = {{"error": "CUDA: the device is lost"}}
    sys.exit(print(json.dumps(doctor)))
status = subprocess.run([binary, *sys.argv[1:]]).returncode
if fault == "wrong" and status == 0:
    path = sys.argv[sys.argv.index("--output") + 1]
    with open(path, "rb") as file:
        data = bytearray(file.read())
    start = 8 + struct.unpack("<Q", data[:8])[0]
    # The first number of o, a bf16, becomes another, no larger one.
    data[start + json.loads(data[8:start])["o"]["data_offsets"][0] + 1] ^= 0x80
    with open(path, "wb") as file:
        file.write(data)
sys.exit(status)
"""


class Visit:
    """A folder with a wrapped binary, and what gpu.sh says of it."""

    def __init__(self, folder, faults, binary=BINARY):
        self.folder, self.out, self.binary = folder, f"{folder}/out", f"{folder}/kvsieve"
        with open(f"{folder}/faults.json", "w", encoding="utf-8") as file:
            json.dump(faults, file)
        write(self.binary, WRAPPER.format(python=sys.executable, folder=folder, binary=binary, fixtures=FIXTURES))

    def command(self, *words, out=None):
        return [
            os.path.join(HERE, "..", "gpu.sh"),
            out or self.out,
            "--tiny",
            "--binary",
            self.binary,
            "--minutes",
            "30",
            *words,
        ]

    def call(self, *words, out=None, **more):
        return subprocess.run(self.command(*words, out=out), capture_output=True, text=True, env=os.environ | more)

    def ended(self):
        """How each step ended."""
        return {record["step"]: record["status"] for record in Records(f"{self.out}/records.jsonl").lines}

    def calls(self):
        """Arguments of every call but those of `doctor`."""
        with open(f"{self.folder}/log", encoding="utf-8") as file:
            return [line for line in file if "doctor" not in line]


def write(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(path, os.stat(path).st_mode | stat.S_IXUSR)


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name


class Faults(Case):
    """With the real binary on the emulated device."""

    def test_what_goes_wrong_is_named_and_the_rest_is_measured(self):
        on_gpu = "--device cuda --kernel"
        faults = {f"{on_gpu} hopper": "crash", f"{on_gpu} tiled": "hang", f"{on_gpu} naive": "wrong", "page_tokens = 16": "crash"}
        visit = Visit(self.folder, faults)
        # A peer that raises: a PyTorch that cannot do anything.
        write(f"{self.folder}/site/torch/__init__.py", FAKE_TORCH)
        write(f"{self.folder}/site/torch/nn/attention/__init__.py", "SDPBackend = sdpa_kernel = None")
        write(f"{self.folder}/site/torch/nn/__init__.py", "")
        words = ["--part", "smoke", "--part", "times", "--part", "ceilings"]
        done = visit.call(*words, PYTHONPATH=f"{self.folder}/site")
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        last = done.stdout.splitlines()[-1]
        for text in [
            "hopper crashed in smoke/hopper (killed by signal 11)", "tiled hung in smoke/tiled (killed after",
            "naive wrong in smoke/naive (", "flash failed in times/forward causal/flash/1 (RuntimeError: CUDA error: an illegal",
            "decode paged crashed in times/decode/decode paged/1 (killed by SIGSEGV)",
        ]:  # fmt: skip
            self.assertIn(text, last)
        ended = visit.ended()
        expected = {
            "smoke/decode": "ok", "smoke/tiled backward": "dropped", "times/forward causal/hopper/1": "dropped",
            "times/forward causal/naive/1": "dropped", "times/forward causal/flash/2": "dropped", "times/decode/decode/2": "ok",
            "times/decode/decode paged/1": "crashed", "times/decode/decode paged/2": "dropped",
            "times/evict/evict/1": "dropped", "ceilings/ceilings": "ok",
        }  # fmt: skip
        self.assertEqual({step: ended.get(step) for step in expected}, expected)
        with open(f"{visit.out}/summary.md", encoding="utf-8") as file:
            self.assertRegex(file.read(), r"\| 4/2 heads, B 2, 128 tokens \| decode \| \d")

        # Again: and in another part the wrong kernel's cases are still looked at.
        before = visit.calls()
        again = visit.call(*words)
        self.assertEqual((again.returncode, visit.calls()), (1, before))
        self.assertEqual(again.stdout.splitlines()[-1], last)

    def test_kvsieve_takes_every_experiment_of_the_full_plan(self):
        with open(f"{FIXTURES}/doctor.json", encoding="utf-8") as file:
            planned = plan.Plan(BINARY, json.load(file) | {"tiny": False})
        named = [step for part in main.WIDTHS for step in getattr(planned, part)()]
        self.assertEqual(len({step.name for step in named}), len(named))
        asked = {step.files["cells.toml"]: step for step in named if "cells.toml" in step.files}
        self.assertGreater(len(asked), 10)
        for text, step in asked.items():
            with open(f"{self.folder}/cells.toml", "w", encoding="utf-8") as file:
                file.write(text)
            command = [BINARY, "run", "cells.toml", "--device", "cuda", "--dry-run"]
            done = subprocess.run(command, capture_output=True, text=True, cwd=self.folder)
            # A smoke test finds kernels that have none, before these are run.
            if "has no backward pass" not in done.stderr:
                self.assertEqual(done.returncode, 0, step.name + done.stderr)

    def test_a_pass_that_differs_in_its_last_bits_is_found(self):
        visit = Visit(self.folder, {"--output again.safetensors": "wrong"})
        asked = {"binary": visit.binary, "kernel": "decode", "shape": [1, 2, 1, 1, 40, 64], "dtype": "bf16", "mask": "causal"}
        asked |= {"backward": False, "causal": True, "twice": True}
        command = [sys.executable, os.path.join(HERE, "check.py"), json.dumps(asked)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=self.folder)
        self.assertEqual(json.loads(done.stdout)["reason"], "o differs in a second pass", done.stdout + done.stderr)

    def test_what_a_token_takes_is_set_beside_its_kernels(self):
        # Three launches of 2 us for each token, and two of 5 us before the first.
        write(f"{self.folder}/bin/ncu", NCU)
        path = f"{self.folder}/bin{os.pathsep}{os.environ['PATH']}"
        visit = Visit(self.folder, {}, None)
        write(f"{self.folder}/report.json", '{"step_ns": 1, "tokens": [0]}')
        command = [sys.executable, os.path.join(HERE, "layers.py"), "tiny", visit.binary]
        done = subprocess.run(command, capture_output=True, text=True, cwd=self.folder, env=os.environ | {"PATH": path})
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        self.assertEqual(lines[1:], [{"kernels": 3.0, "kernels_ns": 6000.0, "by_kernel": {"x": [3.0, 6000.0]}}], done.stderr)

    def test_findings_of_the_sanitizer_are_counted(self):
        visit = Visit(self.folder, {})
        write(f"{self.folder}/bin/compute-sanitizer", SANITIZER)
        done = visit.call("--part", "sanitizer", PATH=f"{self.folder}/bin{os.pathsep}{os.environ['PATH']}")
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertIn("naive wrong in sanitizer/racecheck/naive (racecheck: 3 findings)", done.stdout.splitlines()[-1])
        ended = visit.ended()
        self.assertEqual(ended["sanitizer/memcheck/naive"], "ok")
        self.assertEqual(ended["sanitizer/memcheck/hopper"], "unfinished")  # it cannot say anything


FAKE_TORCH = """
__version__ = "0"
class cuda:
    is_available = lambda: True
class backends:
    class cudnn:
        version = lambda: 0
def zeros(*_, **__):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")
"""

NCU = """#!/usr/bin/env python3
import sys
words = sys.argv[1:]
tokens = int(words[words.index("--max-new-tokens") + 1])
with open(words[words.index("--log-file") + 1], "w") as file:
    file.write('==PROF== Connected\\n"ID","Kernel Name","gpu__time_duration.sum"\\n"","","ns"\\n')
    file.writelines(f'"{at}","x","{5_000 if at < 2 else 2_000:,}"\\n' for at in range(2 + 3 * tokens))
"""

SANITIZER = """#!/bin/sh
case "$*" in
*memcheck*hopper*) echo "Device not supported"; exit 1 ;;
*racecheck*naive*) echo "========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)" ;;
*) echo "========= ERROR SUMMARY: 0 errors" ;;
esac
"""


class Steps(Case):
    """A step by itself; no GPU, no binary."""

    def run_step(self, script, limit_s=20, left_s=1000, **more):
        return steps.run(steps.Step("times/x/tiled/1", "tiled", ["bash", "-c", script], limit_s, **more), left_s)

    def test_what_was_printed_before_a_hang_is_kept_and_the_whole_group_is_killed(self):
        record = self.run_step(
            f"echo '{{\"a\": 1}}'; echo '{{\"torn\": '; (sleep 1.5; touch {self.folder}/alive) & sleep 1000", 0.5
        )
        self.assertEqual((record["status"], record["found"]), ("hung", [{"a": 1}]))
        time.sleep(1.5)
        self.assertFalse(os.path.exists(f"{self.folder}/alive"))

    def test_how_a_step_ended(self):
        failed = '{"status": "failed", "reason": "%s"}'
        for script, expected in [
            ("true", ("ok", None)),
            ("echo no such thing >&2; exit 2", ("refused", "no such thing")),
            ("echo went wrong >&2; exit 1", ("failed", "went wrong")),
            ("kill -ABRT $$", ("crashed", "killed by SIGABRT")),
            ("echo '%s'; exit 1" % (failed % "drift of 0.3"), ("wrong", "drift of 0.3")),
            ("echo '%s'; exit 1" % (failed % "CUDA: running the kernels failed"), ("failed", "CUDA: running the kernels failed")),
            ('echo \'{"ended": "wrong", "reason": "o is off"}\'', ("wrong", "o is off")),
        ]:
            record = self.run_step(script)
            self.assertEqual((record["status"], record["reason"]), expected)

    def test_a_step_cut_short_by_the_end_of_the_visit_has_no_record(self):
        self.assertIsNone(self.run_step("sleep 1000", left_s=0.3))
        self.assertEqual(self.run_step("sleep 1000", limit_s=0.3, slow=True)["status"], "unfinished")

    def test_a_torn_last_line_is_cut_off(self):
        path = f"{self.folder}/records.jsonl"
        Records(path).add({"step": "a"})
        with open(path, "a", encoding="utf-8") as file:
            file.write('{"step": "b')
        Records(path).add({"step": "c"})
        self.assertEqual([line["step"] for line in Records(path).lines], ["a", "c"])

    def test_what_stops_a_step(self):
        for unit, status, at, name, stopped in [
            ("tiled", "hung", "smoke/tiled", "check/tiled backward/x", True),
            ("tiled backward", "hung", "smoke/tiled backward", "check/tiled/x", False),
            ("tiled", "wrong", "smoke/tiled", "times/x/tiled/1", True),
            ("tiled", "wrong", "smoke/tiled", "check/tiled/x", False),
            ("hopper", "refused", "smoke/hopper", "check/hopper/x", True),
            ("hopper", "refused", "check/hopper/f32", "check/hopper/bf16", False),
            ("fa3", "absent", "times/x/fa3/1", "times/x/fa3/2", True),
            ("tiled", "crashed", "smoke/tiled", "times/evict/evict/1", True),
            ("hopper", "crashed", "smoke/hopper", "times/evict/evict/1", False),
        ]:
            records = Records(f"{self.folder}/none")
            records.lines = [{"step": at, "unit": unit, "status": status}]
            who = name.split("/")[-2 if name.startswith("times") else 1]
            step = steps.Step(name, who, [], 1, ("tiled", "decode") if who == "evict" else ())
            self.assertEqual(records.stops(step) is not None, stopped, (unit, status, name))


class Errors(unittest.TestCase):
    def test_one_wrong_number_among_many_shows(self):
        true = [(-1) ** at * (0.5 + at % 7) for at in range(100_000)]
        for at in (0, 99_999):
            found = list(true)
            found[at] = 0.0
            self.assertLess(check.distance(found, true), check.ALLOWED["bf16"])
            self.assertGreater(check.farthest(found, true), check.FARTHEST * check.ALLOWED["bf16"])
        self.assertEqual(check.farthest(true, true), 0)

    def test_infinities_and_nans_show(self):
        nan, infinite = float("nan"), float("inf")
        for found, true, least, most in [
            ([1, 2, -infinite], [1, 2, -infinite], 0, 0),
            ([1.5, 2.0], [1.0, 2.0], 0.22, 0.23),
        ]:
            self.assertTrue(least <= check.distance(found, true) <= most)
        for found, true in [([1, nan], [1, 2]), ([1, 2], [1, -infinite]), ([1, infinite], [1, 2])]:
            self.assertFalse(check.distance(found, true) <= 1e9, (found, true))


class Calls(Case):
    """Arguments, time, and a GPU that is gone: the binary only answers `doctor`."""

    def visit(self, faults=None):
        return Visit(self.folder, faults or {}, None)

    def test_a_part_may_be_steps_whose_names_begin_so(self):
        visit = self.visit()
        visit.call("--part", "smoke/tiled", "--part", "ceilings")
        named = {step for step in visit.ended() if step != "start" and not step.startswith("probe/")}
        self.assertEqual(named, {"smoke/tiled", "smoke/tiled backward", "ceilings/ceilings"})

    def test_wrong_usage_is_one_line_and_status_2(self):
        visit = self.visit()
        self.assertEqual(visit.call("--minutes", "0").returncode, 0)
        for words, text in [
            (["--bundle", self.folder], "kvsieve.xz is not there"),
            (["--binary", "/none"], "/none is not there"),
            (["--part", "nothing"], "nothing: a part is one of"),
            (["--minutes", "soon"], "'soon'"),
        ]:
            done = visit.call(*words)
            self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1), done.stderr)
            self.assertIn(text, done.stderr)
        with open(f"{visit.out}/records.jsonl", encoding="utf-8") as file:
            start = json.loads(file.readline())
        for change in [{"git_rev": "0"}, {"tiny": False}, {"cuda": {"device": {"name": "another"}}}]:
            write(f"{self.folder}/other/records.jsonl", json.dumps(start | {"found": [start["found"][0] | change]}) + "\n")
            done = visit.call(out=f"{self.folder}/other")
            self.assertEqual(done.returncode, 2)
            self.assertIn("give another folder", done.stderr)

    def test_a_bundle_brings_binary_kernels_and_peers(self):
        visit, bundle = self.visit({}), f"{self.folder}/bundle"
        os.makedirs(bundle)
        with lzma.open(f"{bundle}/kvsieve.xz", "w") as packed, open(visit.binary, "rb") as binary:
            packed.write(binary.read())
        torch = f"{self.folder}/site/torch"
        write(f"{torch}/__init__.py", FAKE_TORCH)
        write(f"{torch}/nn/__init__.py", "")
        # A peer whose steps say which kernels are kept.
        raises = "import os\nraise OSError(' '.join(os.listdir(os.environ['KVSIEVE_CACHE'])))"
        write(f"{torch}/nn/attention/__init__.py", raises)
        write(f"{self.folder}/kernels/compiled.cubin", "")
        for part in ("kernels", "site"):
            with tarfile.open(f"{bundle}/{part}.tar.xz", "w:xz") as packed:
                packed.add(f"{self.folder}/{part}", part)
        done = visit.call("--bundle", bundle, "--binary", "/none", "--part", "times")
        self.assertIn("flash failed in times/forward causal/flash/1 (OSError: compiled.cubin)", done.stdout)

    def test_without_time_nothing_is_begun_and_the_steps_left_are_told(self):
        done = self.visit().call("--minutes", "0")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, r"\d+ steps are left, the first is smoke/hopper")

    def test_no_step_outlives_a_call_that_is_killed(self):
        visit = self.visit({"attend": "hang"})
        with subprocess.Popen(visit.command("--part", "smoke"), stdout=subprocess.DEVNULL) as call:
            while not (os.path.exists(f"{self.folder}/log") and visit.calls()):
                time.sleep(0.05)
            call.terminate()
        time.sleep(1.5)
        self.assertEqual((call.returncode, os.path.exists(f"{self.folder}/alive")), (143, False))
        self.assertEqual(visit.ended(), {"start": "ok"})

    def test_a_gpu_that_is_gone_ends_the_visit(self):
        visit = self.visit({"attend": "crash"})
        done = visit.call("--part", "smoke", "--part", "times")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("the GPU no longer answers after smoke/hopper: no device: CUDA: the device is lost", done.stdout)
        self.assertEqual(list(visit.ended()), ["start", "smoke/hopper", "probe/smoke/hopper"])


class Table(unittest.TestCase):
    def test_the_table_of_fixture_records_is_as_reviewed(self):
        text, problems = table.draw(Records(f"{FIXTURES}/records.jsonl").lines)
        path = f"{FIXTURES}/summary.md"
        if os.environ.get("UPDATE"):
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        with open(path, encoding="utf-8") as file:
            self.assertEqual(text, file.read())
        named = (
            "naive backward wrong",
            "fa3 hung",
            "tiled wrong in sanitizer/",
            "tiled backward wrong: dq",
            "naive backward wrong: dk",
        )
        self.assertEqual([problem.startswith(name) for problem, name in zip(problems, named, strict=True)], [True] * 5)


if __name__ == "__main__":
    if not BINARY:
        sys.exit(__doc__)
    unittest.main(argv=sys.argv[:1] + sys.argv[2:])
