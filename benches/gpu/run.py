"""The steps of benches/gpu.sh, in order of what matters most: each gets what is left of 8 minutes."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

import ceilings
import check
import judged
import peers

TINY = os.environ.get("KVSIEVE_GPU_SIZES") == "tiny"
BUDGET_S = 3600 if TINY else 480
TIMING = "[timing]\nmin_rounds = 1\nmax_rounds = 2\ncap_s = 0.1\n" if TINY else "[timing]\nmin_rounds = 9\nmax_rounds = 30\ncap_s = 4\n"
# What issue and README promise: at least so much of what the other does.
GOALS = {("forward", "flash"): 0.9, ("backward", "flash"): 0.8}
HOPPER_GOALS = {("forward", "flash"): 1.5, ("forward", "cudnn"): 0.9}


class Session:
    """The binary under test, where results go, and the time that is left."""

    def __init__(self, binary, out):
        self.binary, self.out = os.path.abspath(binary), out
        self.started = time.monotonic()
        self.summary = []
        # What this GPU can run; `hopper` is for Hopper's own instructions.
        self.kernels = ["naive", "tiled", "decode"]

    def left_s(self):
        return BUDGET_S - (time.monotonic() - self.started)

    def say(self, text=""):
        print(text, flush=True)
        self.summary.append(text)

    def kvsieve(self, *arguments, timeout=None):
        """Runs the binary; (exit status, standard output, standard error)."""
        limit = max(1.0, min(timeout or BUDGET_S, self.left_s()))
        try:
            done = subprocess.run([self.binary, *arguments], capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            return 124, "", f"stopped after {limit:.0f} s"
        return done.returncode, done.stdout, done.stderr

    def records(self, arguments, name):
        """Runs an experiment; its lines, also kept in a file."""
        status, out, err = self.kvsieve("run", *arguments, "--device", "cuda", "--out", f"{self.out}/runs", "--json", "-")
        if status:
            self.say(f"{name}: {err.strip()}")
        with open(f"{self.out}/{name}.jsonl", "w", encoding="utf-8") as file:
            file.write(out)
        return [json.loads(line) for line in out.splitlines()]


def times_toml(kernels):
    """Forward, backward and decode cells: bf16, D 128, 16K tokens in all, as the goals say."""
    grids = []
    lengths = [64, 96] if TINY else [2048, 4096, 8192, 16384]
    heads, total = ("2/2", 96) if TINY else ("16/16", 16384)
    common = f'head_dim = 128\ndtype = "bf16"\nheads = "{heads}"\n'
    for length in lengths:
        for causal in ["true", "false"]:
            for measure in ["forward", "backward"]:
                grids.append(
                    f'[[grid]]\nmeasure = "{measure}"\nkernel = {json.dumps(kernels[measure])}\ncausal = {causal}\n'
                    f"context_tokens = {length}\nbatch = {max(1, total // length)}\n{common}"
                )
    context, heads = (128, "4/2") if TINY else (65536, "32/8")
    grids.append(
        f'[[grid]]\nmeasure = "decode"\ncontext_tokens = {context}\nbatch = 2\nheads = "{heads}"\nhead_dim = 128\n'
        f'dtype = "bf16"\npage_tokens = ["contiguous", 16]\n'
    )
    return f'name = "gpu-times"\n{TIMING}' + "".join(grids)


def cliff_toml():
    """Shapes whose longest passes take seconds: many sequences for tiled, whose memory is linear."""
    naive, batch = ('"2/2"', 1) if TINY else ('"32/8"', 64)
    grid = '[[grid]]\nmeasure = "forward"\nhead_dim = 128\ndtype = "bf16"\ncontext_tokens = 64\n'
    return f'name = "gpu-cliff"\n{grid}kernel = "naive"\nheads = {naive}\n{grid}kernel = "tiled"\nheads = {naive}\nbatch = {batch}\n'


def shown(rate):
    return f"{rate / 1e12:.1f} TFLOP/s"


def times(session, folder, report, ceiling):
    """The table of times beside PyTorch's."""
    device = report["cuda"]["device"]
    kernels = {"forward": [name for name in session.kernels if name in ("tiled", "hopper")], "backward": ["tiled"]}
    path = f"{folder}/gpu-times.toml"
    with open(path, "w", encoding="utf-8") as file:
        file.write(times_toml(kernels))
    decode_ns = {}
    with open(f"{session.out}/peers.jsonl", "w", encoding="utf-8") as kept:
        for record in session.records([path], "times"):
            cell, measure = record["cell"], record["cell"]["measure"]
            pages = {None: "", 0: " contiguous"}.get(cell.get("page_tokens"), f" page {cell.get('page_tokens')}")
            label = f"{measure:8} {cell['kernel']:6} L {cell['context_tokens']:6} B {cell['batch']}{' causal' if cell['causal'] else ''}{pages}"
            if record["status"] != "ok":
                session.say(f"{label}: {record['status']}: {record['reason']}")
                continue
            own_ns = record["latency"][measure]["median_ns"]
            line = f"{label}: {own_ns / 1e6:.4f} ms, {shown(record['work']['flops_per_s'])}"
            if measure == "decode":
                decode_ns[cell.get("page_tokens")] = own_ns
                rate = record["work"]["kv_bytes_read"] / own_ns * 1e9
                line += f", {rate / 1e12:.2f} TB/s of keys and values"
                if copy := ceiling.get("copy_bytes_per_s"):
                    line += f", {100 * rate / copy:.0f}% of a copy (goal 85%)"
            rivals = peers.attention_ms(cell, device["l2_bytes"]) if session.left_s() > 60 else {}
            for name, milliseconds in rivals.items():
                if isinstance(milliseconds, str):
                    line += f"; {name}: {milliseconds}"
                    continue
                ratio, goals = milliseconds * 1e6 / own_ns, HOPPER_GOALS if cell["kernel"] == "hopper" else GOALS
                goal = goals.get((measure, name))
                line += f"; {name} {milliseconds:.4f} ms, {ratio:.2f}x as fast" + (f" (goal {goal}x)" if goal else "")
            session.say(line)
            kept.write(json.dumps({"cell": cell, "median_ns": own_ns, "peers_ms": rivals}) + "\n")
    if 0 in decode_ns and 16 in decode_ns:
        session.say(f"pages of 16 tokens cost {100 * (decode_ns[16] / decode_ns[0] - 1):.1f}% (goal 5%)")


def cliff(session, folder):
    """Where the memory ends, beside where the formula says."""
    path = f"{folder}/gpu-cliff.toml"
    with open(path, "w", encoding="utf-8") as file:
        file.write(cliff_toml())
    limit = ["--limit-memory", "200KiB"] if TINY else []
    for found in session.records([path, "--find-cliff", *limit], "cliffs"):
        kernel, goal = found["cell"]["kernel"], {"naive": 1, "tiled": 2}[found["cell"]["kernel"]]
        session.say(
            f"{kernel}: {found['found_tokens']} tokens run, {found['predicted_tokens']} were predicted: "
            f"{100 * found['apart']:+.2f}% (goal {goal}%); {found['reason']}"
        )


def experiments(session):
    """The shipped experiments, for their figures."""
    for name in [] if TINY else ["quickstart", "memory-vs-context", "latency-vs-context"]:
        if session.left_s() < 30:
            session.say(f"{name}: no time left")
            continue
        arguments = ["run", name, "--device", "cuda", "--out", f"{session.out}/runs"]
        status, out, err = session.kvsieve(*arguments, timeout=120)
        session.say(f"{name}: {out.strip().splitlines()[-1] if status == 0 else err.strip()}")


def main():
    session = Session(*sys.argv[1:3])
    os.makedirs(session.out, exist_ok=True)
    status, out, err = session.kvsieve("doctor", "--json", "-")
    if status:
        sys.exit(err)
    report = json.loads(out)
    with open(f"{session.out}/doctor.json", "w", encoding="utf-8") as file:
        file.write(out)
    for part in ("device", "nvrtc"):
        if "error" in report["cuda"][part]:
            sys.exit(f"no {part}: {report['cuda'][part]['error']}")
    device = report["cuda"]["device"]
    session.kernels += ["hopper"] if device["capability"] == "9.0" else []
    session.say(f"# {device['name']}, {device['architecture']}, kvsieve {report['version']} ({report['git_rev']})")
    session.say(f"peer: {peers.name() or 'PyTorch is not here: no comparison'}")
    session.say("\n## Correctness\n")
    folder = tempfile.mkdtemp()
    try:
        wrong = check.all(session, folder, TINY)
        wrong += judged.policies(session, folder, TINY) + judged.models(session, folder, TINY)
        check.sanitize(session, folder)
        session.say("\n## Ceilings\n")
        ceiling = ceilings.measure(TINY)
        with open(f"{session.out}/ceilings.json", "w", encoding="utf-8") as file:
            json.dump(ceiling, file)
        session.say(json.dumps(ceiling))
        session.say("\n## Memory\n")
        cliff(session, folder)
        session.say("\n## Times (cold L2, medians)\n")
        times(session, folder, report, ceiling)
        session.say("\n## Experiments\n")
        experiments(session)
        session.say(f"\n{BUDGET_S - session.left_s():.0f} s in all, {wrong} wrong")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with open(f"{session.out}/summary.md", "w", encoding="utf-8") as file:
            file.write("\n".join(session.summary) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
