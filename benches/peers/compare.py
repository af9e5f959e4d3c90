#!/usr/bin/env python3
"""Compare kvsieve's CPU attention with PyTorch's, the two taking turns in one run.

    python3 benches/peers/compare.py                   # everything, to standard output
    python3 benches/peers/compare.py --quick           # a short try
    python3 benches/peers/compare.py --only decode --out results/peers

README.md beside this file says what is timed and how to read the tables.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # the source tree stays as it is

from cases import ACCURACY, PARTS, Case  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ["torch", "safetensors", "numpy"]  # PyTorch warns where numpy is missing
FEWEST_ROUNDS, MOST_ROUNDS = 5, 11
SAMPLE_NS, CASE_SECONDS = 80_000_000, 3.0  # a sample lasts at least, a case at most (but for the fewest rounds)
QUICK_SAMPLE_NS, QUICK_CASE_SECONDS = 30_000_000, 0.5
SETTLE_SECONDS = 0.02  # the other side's idle threads spin for a moment before they sleep
ACCURACY_SEED, ACCURACY_MARGIN = 1, 1.05


# --- The two sides ---


class Failure(Exception):
    """A case that one side could not do; the text is shown in its place."""


class Worker:
    """kvsieve: the bench executable `peer_worker`, asked line by line."""

    def __init__(self) -> None:
        command = ["cargo", "bench", "--no-run", "--bench", "peer_worker", "--message-format=json-render-diagnostics"]
        built = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        if built.returncode != 0:
            sys.exit("compare.py: cargo could not build the worker; its reasons are above")
        messages = [json.loads(line) for line in built.stdout.splitlines()]
        executable = next(m["executable"] for m in messages
                          if m.get("executable") and m["target"]["name"] == "peer_worker")
        self.process = subprocess.Popen([executable, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, op: str, **request: Any) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        try:
            self.process.stdin.write(json.dumps({"op": op, **request}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            sys.exit(f"compare.py: the worker died of the request '{op}' {request}")
        answer = json.loads(line)
        if "error" in answer:
            raise Failure(answer["error"])
        return answer


def gqa(q_heads: int, kv_heads: int) -> dict[str, Any]:
    """The argument that tells PyTorch of shared heads; left out where there are none, as older versions lack it."""
    return {"enable_gqa": True} if q_heads != kv_heads else {}


def reason(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


class Torch:
    """PyTorch: makes the same problems and times calls as the worker does."""

    def __init__(self) -> None:
        import torch
        from safetensors.torch import load_file
        from torch.nn.attention import SDPBackend, sdpa_kernel

        self.torch, self.load_file = torch, load_file
        self.sdpa = torch.nn.functional.scaled_dot_product_attention
        self.flash_only = lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION)
        self.version, self.capability = torch.__version__, torch.backends.cpu.get_cpu_capability()
        torch.manual_seed(0)

    def prepare(self, case: Case, rotate_bytes: int) -> Callable[[], Any]:
        """The call to time. The flash backend is the only one allowed, except to decode, where PyTorch chooses."""
        (q_heads, kv_heads), dim, sdpa = case.heads, case.head_dim, self.sdpa
        dtype = {"f32": self.torch.float32, "bf16": self.torch.bfloat16, "f16": self.torch.float16}[case.dtype]

        def normal(heads: int, length: int) -> Any:
            return self.torch.randn(1, heads, length, dim).to(dtype)

        q = normal(q_heads, case.q_len)
        if case.op == "decode":
            count = -(-rotate_bytes // (2 * kv_heads * case.kv_len * dim * q.element_size()))
            turns = itertools.cycle([[normal(kv_heads, case.kv_len) for _ in "kv"] for _ in range(count)])
            if case.peer == "PyTorch, group as rows":
                q = q.view(1, kv_heads, q_heads // kv_heads, dim)
            grouped = gqa(q.shape[1], kv_heads)
            return lambda: sdpa(q, *next(turns), **grouped)
        k, v = normal(kv_heads, case.kv_len), normal(kv_heads, case.kv_len)
        if case.op == "forward":
            def forward() -> Any:
                with self.flash_only():
                    return sdpa(q, k, v, is_causal=case.causal)
            return forward
        leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
        with self.flash_only():
            out = sdpa(*leaves, is_causal=case.causal)
        grad = normal(q_heads, case.q_len)
        return lambda: self.torch.autograd.grad(out, leaves, grad, retain_graph=True)

    def sample(self, case: Case, call: Callable[[], Any], min_ns: int) -> float:
        """Nanoseconds of one call, over calls until `min_ns` have passed."""
        self.torch.set_num_threads(case.threads)
        calls, elapsed, start = 0, 0, time.perf_counter_ns()
        while calls == 0 or elapsed < min_ns:
            call()
            calls += 1
            elapsed = time.perf_counter_ns() - start
        return elapsed / calls

    def error(self, case: Case, inputs: Path) -> float:
        """Relative L2 error of the rows `at` against the f64 rows `o` of a file that the worker wrote."""
        stored = self.load_file(str(inputs))
        self.torch.set_num_threads(case.threads)
        out = self.sdpa(stored["q"], stored["k"], stored["v"], is_causal=case.causal, **gqa(*case.heads))
        batch, head, query = stored["at"].unbind(1)
        return float((out[batch, head, query].double() - stored["o"]).norm() / stored["o"].norm())


# --- Sampling ---


@dataclasses.dataclass
class Result:
    """The samples of a case, one of each per round; `peer_failure` stands where the peer has none."""

    case: Case
    work: float = 0.0  # flops of a call, or bytes of keys and values when it decodes
    own_ns: list[float] = dataclasses.field(default_factory=list)
    peer_ns: list[float] = dataclasses.field(default_factory=list)
    peaks: list[float] = dataclasses.field(default_factory=list)  # per second
    failure: str | None = None
    peer_failure: str | None = None


def measure(case: Case, worker: Worker, peer: Torch, quick: bool, rotate_bytes: int) -> Result:
    """Samples both sides, and the ceiling where there is one, in turn."""
    min_ns, most_seconds = (QUICK_SAMPLE_NS, QUICK_CASE_SECONDS) if quick else (SAMPLE_NS, CASE_SECONDS)
    result, call = Result(case), None  # the call is set below, where the peer is PyTorch
    common = {**case.problem, "min_ns": min_ns, "rotate_bytes": rotate_bytes if case.op == "decode" else 0}
    peer_request = {"naive": ("naive", case.threads), "1 thread": (case.op, 1)}.get(case.peer)

    def ask(op: str, threads: int, **request: Any) -> dict[str, Any]:
        time.sleep(SETTLE_SECONDS)
        return worker.ask(op, threads=threads, **request)

    def sample_peer() -> float:
        if peer_request:
            return ask(*peer_request, **common)["ns"]
        time.sleep(SETTLE_SECONDS)
        return peer.sample(case, call, min_ns)

    try:
        if not peer_request:
            call = peer.prepare(case, rotate_bytes)
            peer.sample(case, call, 0)  # warms up, as the worker does on its own
    except Exception as error:  # whatever PyTorch raises for what it cannot do
        result.peer_failure = reason(error)
    start, rounds = time.monotonic(), 0
    try:
        while rounds < FEWEST_ROUNDS or (rounds < MOST_ROUNDS and time.monotonic() - start < most_seconds):
            answer = ask(case.op, case.threads, **common)
            result.own_ns.append(answer["ns"])
            result.work = answer["kv_bytes"] if case.op == "decode" else answer["flops"]
            if result.peer_failure is None:
                result.peer_ns.append(sample_peer())
            peak = ask("probe", case.threads, ceiling=case.peak)["per_second"] if case.peak else None
            result.peaks += [peak] if peak else []
            rounds += 1
    except Failure as failure:
        result.failure = str(failure)
    return result


def judge(case: Case, worker: Worker, peer: Torch) -> dict[str, Any]:
    """The case with both errors, or with the reason why PyTorch has none."""
    seeded = {**case.problem, "seed": ACCURACY_SEED}
    with tempfile.TemporaryDirectory() as folder:
        inputs = Path(folder) / "inputs.safetensors"
        worker.ask("inputs", path=str(inputs), **seeded)
        found = {**seeded, "kvsieve_error": worker.ask("error", kernel=case.kernel, **seeded)["error_l2"]}
        try:
            return {**found, "pytorch_error": peer.error(case, inputs)}
        except Exception as error:  # whatever PyTorch raises for what it cannot do
            return {**found, "failure": reason(error)}


def median_interval(values: list[float]) -> tuple[float, float, float]:
    """Median and the 95 % interval of it by bootstrap, with a fixed seed."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(1000))
    return statistics.median(values), medians[25], medians[974]


def shown(values: list[float]) -> str:
    """Median and interval with three digits; a dash for no values."""
    if not values:
        return "–"
    middle, low, high = (f"{x:.0f}" if x >= 99.95 else f"{x:.1f}" if x >= 9.995 else f"{x:.2f}"
                         for x in median_interval(values))
    return f"{middle} ({low}–{high})"


# --- Tables ---


class Report:
    """Prints Markdown as it comes and keeps it for `--out`."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.section = ""
        self.verdicts = {"yes": 0, "no": 0, "unknown": 0}

    def progress(self, text: str) -> None:
        """Shows what is running on a terminal's last line, until the next line is printed."""
        if sys.stderr.isatty():
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    def line(self, text: str) -> None:
        self.progress("")
        self.lines.append(text)
        print(text, flush=True)

    def row(self, section: str, heads: list[str], cells: list[str]) -> None:
        if section != self.section:
            self.section = section
            self.line(f"\n## {section}\n")
            self.line("| " + " | ".join(heads) + " |")
            self.line("|---" + "|--:" * (len(heads) - 3) + "|---|---|")
        self.line("| " + " | ".join(cells) + " |")

    def timing(self, result: Result) -> None:
        case, unit = result.case, "GB/s" if result.case.op == "decode" else "GFLOP/s"
        heads = ["case", "threads", f"kvsieve, {unit}", f"{case.peer.split(',')[0]}, {unit}", "ratio", "% of peak",
                 "goal", "met"]
        ratios = [theirs / ours for ours, theirs in zip(result.own_ns, result.peer_ns)]
        percents = [100e9 * result.work / ns / peak for ns, peak in zip(result.own_ns, result.peaks)]
        goals, verdicts = [], []
        for what, unit, goal, values in (("ratio", "x", case.ratio_goal, ratios),
                                         ("peak", " %", case.peak_goal, percents)):
            if goal:
                goals.append(f"≥ {goal:g}{unit}")
                verdict = "unknown" if not values else "yes" if statistics.median(values) >= goal else "no"
                verdicts.append(f"{what} {verdict}")
                self.verdicts[verdict] += 1
        own, theirs = (shown([result.work / ns for ns in samples]) for samples in (result.own_ns, result.peer_ns))
        own = f"failed: {result.failure}" if result.failure else own
        theirs = f"failed: {result.peer_failure}" if result.peer_failure else theirs
        self.row(case.section, heads, [case.name, str(case.threads), own, theirs, shown(ratios), shown(percents),
                                       ", ".join(goals) or "–", ", ".join(verdicts) or "–"])

    def accuracy(self, case: Case, found: dict[str, Any]) -> None:
        heads = ["case", "kernel", "kvsieve's error", "PyTorch's error", "kvsieve / PyTorch", "goal", "met"]
        own, peer, met = found["kvsieve_error"], found.get("pytorch_error"), "unknown"
        theirs, ratio = f"failed: {found.get('failure')}", "–"
        if peer:
            theirs, ratio, met = f"{peer:.3e}", f"{own / peer:.3f}", "yes" if own <= ACCURACY_MARGIN * peer else "no"
        self.verdicts[met] += 1
        goal = f"≤ {ACCURACY_MARGIN}"
        self.row(case.section, heads, [case.name, case.kernel, f"{own:.3e}", theirs, ratio, goal, met])


# --- The run ---


def enter_environment(env: Path, program: Path = Path(__file__)) -> None:
    """Starts `program` again with the Python of `env`, which is made and filled where that is needed."""
    python = env / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if Path(sys.prefix).resolve() == env.resolve():
        return
    if not python.exists():
        print(f"peers: making a Python environment in {env}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(env)], check=True)
    if subprocess.run([python, "-c", "import " + ", ".join(PACKAGES)], stderr=subprocess.DEVNULL).returncode != 0:
        print(f"peers: installing {', '.join(PACKAGES)} there (a large download)", file=sys.stderr)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    os.execv(python, [str(python), str(program), *sys.argv[1:]])


def last_cache_bytes() -> int:
    """Size of the last-level cache; 32 MiB where the system does not tell."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size[:-1]) * {"K": 1024, "M": 1024**2}[size[-1]] for size in sizes), default=32 * 1024**2)


def collect_facts(worker: Worker, peer: Torch) -> dict[str, Any]:
    git = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    revision = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "of unknown revision"
    now = datetime.datetime.now(datetime.timezone.utc)
    return {**worker.ask("info"), "torch": peer.version, "torch_cpu_capability": peer.capability,
            "revision": revision, "date": now.strftime("%Y-%m-%d %H:%M UTC"), "load_before": os.getloadavg()[0]}


def write_fixture(path: Path, facts: dict[str, Any], errors: list[dict[str, Any]]) -> None:
    """PyTorch's errors, one case a line, for tests/attention/accuracy.rs."""
    about = {"torch": facts["torch"], "cpu": facts["model"], "cpu_capability": facts["torch_cpu_capability"]}
    keep = [error for error in errors if "pytorch_error" in error]
    cases = [{name: value for name, value in error.items() if name != "kvsieve_error"} for error in keep]
    rows = ",\n".join("    " + json.dumps(case) for case in cases)
    path.write_text(json.dumps(about, indent=2)[:-2] + ',\n  "cases": [\n' + rows + "\n  ]\n}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter samples and no long contexts")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part alone; may be repeated")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write table.md and samples.json there")
    parser.add_argument("--accuracy-fixture", type=Path, metavar="FILE", help="write PyTorch's errors there")
    parser.add_argument("--env", type=Path, metavar="DIR", default=ROOT / "target" / "peers-env",
                        help="Python environment to use, made if it is not there (default: target/peers-env)")
    args = parser.parse_args()
    enter_environment(args.env)

    parts = args.only or list(PARTS)
    if args.accuracy_fixture and "accuracy" not in parts:
        parser.error("--accuracy-fixture needs the part 'accuracy'")

    started, worker, peer, report = time.monotonic(), Worker(), Torch(), Report()
    facts, rotate_bytes = collect_facts(worker, peer), 4 * last_cache_bytes()
    for text in (
        "# kvsieve and PyTorch on one CPU\n",
        f"- CPU: {facts['model']}, {facts['cores']} cores ({', '.join(facts['isa'])})",
        f"- kvsieve {facts['revision']}, instruction path {facts['isa_path']}",
        f"- PyTorch {facts['torch']}, CPU capability {facts['torch_cpu_capability']}",
        f"- {facts['date']}, load {facts['load_before']:.1f} before the run",
        "- Medians with 95 % bootstrap intervals. A ratio above 1 means that kvsieve is faster; it is taken by round.",
        "- Ratios belong to this CPU, and to the unit that either side takes for bf16.",
    ):
        report.line(text)

    results: list[Result] = []
    errors: list[dict[str, Any]] = []
    cases = [case for part in parts for case in PARTS[part](args.quick)]
    for index, case in enumerate(cases, 1):
        report.progress(f"[{index}/{len(cases)}] {case.section}: {case.name}")
        if case.section != ACCURACY:
            results.append(measure(case, worker, peer, args.quick, rotate_bytes))
            report.timing(results[-1])
            continue
        errors.append(judge(case, worker, peer))
        report.accuracy(case, errors[-1])
    minutes, seconds = divmod(round(time.monotonic() - started), 60)
    yes, no, unknown = report.verdicts.values()
    report.line(f"\nGoals met: {yes}; not met: {no}; not known: {unknown}. The run took {minutes} min {seconds} s.")

    if args.accuracy_fixture:
        write_fixture(args.accuracy_fixture, facts, errors)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "table.md").write_text("\n".join(report.lines) + "\n")
        samples = {**facts, "timings": [dataclasses.asdict(result) for result in results], "errors": errors}
        (args.out / "samples.json").write_text(json.dumps(samples, indent=1) + "\n")


if __name__ == "__main__":
    main()
