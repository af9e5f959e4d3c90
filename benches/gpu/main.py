"""What benches/gpu.sh runs: the steps that have no record yet, in order of what matters most, until the time is up."""

import argparse
import concurrent.futures
import glob
import lzma
import os
import shutil
import signal
import sys
import tarfile
import tempfile
import threading
import time

import plan
import steps
import table
from records import Records

# Parts in order, and how many of a part's steps share the GPU: times need it alone.
WIDTHS = {
    "smoke": 1, "times": 1, "ceilings": 1, "check": 12, "policies": 12, "models": 12, "maximum": 1, "sanitizer": 4,
    "experiments": 1,
}  # fmt: skip
# Below this a step is not begun.
LEAST_S = 8


def usage(text):
    print(f"gpu.sh: {text}", file=sys.stderr)
    sys.exit(2)


def arguments(words):
    parser = argparse.ArgumentParser(prog="gpu.sh", description=__doc__)
    parser.error = usage
    parser.add_argument("out", metavar="OUT", help="folder of the results; another call with it goes on")
    parser.add_argument("--part", action="append", help="only this part, or steps whose names begin so, as times/decode")
    parser.add_argument("--minutes", type=float, default=9, help="no longer than this [%(default)s]")
    parser.add_argument("--binary", help="kvsieve [target/release/kvsieve]")
    parser.add_argument("--bundle", metavar="DIR", help="what bundle.sh made: binary, compiled kernels, peers")
    parser.add_argument("--tiny", action="store_true", help="sizes for the emulated device, whose times mean nothing")
    asked = parser.parse_args(words)
    for part in asked.part or []:
        if part.split("/")[0] not in WIDTHS:
            usage(f"--part {part}: a part is one of {', '.join(WIDTHS)}")
    return asked


class Call:
    """One call: what is under test, where results go, and the time that is left."""

    def __init__(self, asked, scratch):
        self.started, self.asked = time.monotonic(), asked
        os.makedirs(asked.out, exist_ok=True)
        self.out = os.path.abspath(asked.out)
        self.records = Records(f"{self.out}/records.jsonl")
        plain = os.path.abspath(asked.binary or "target/release/kvsieve")
        self.binary = unpack(asked.bundle, scratch) if asked.bundle else plain
        if not os.access(self.binary, os.X_OK):
            usage(f"{self.binary} is not there: cargo build --release, or give --binary or --bundle")
        self.lost = threading.Event()
        self.tar_lock = threading.Lock()

    def left_s(self):
        return 60 * self.asked.minutes - (time.monotonic() - self.started)

    def step(self, step):
        """Runs a step unless it has a record, must not run, or there is no time for it."""
        if self.records.find(step.name) or self.lost.is_set() or self.left_s() < LEAST_S:
            return
        if why := self.records.stops(step):
            self.records.add({"step": step.name, "unit": None, "status": "dropped", "reason": why})
            return
        record = steps.run(step, self.left_s(), self.keep)
        if record is None:
            return
        self.records.add(record)
        print(
            f"{record['seconds']:6.1f} s  {step.name}: {': '.join(filter(None, (record['status'], record['reason'])))}",
            flush=True,
        )
        if record["status"] in ("hung", "crashed", "failed"):
            self.probe(step)

    def probe(self, step):
        """After a step went down: does the GPU still answer?"""
        doctor = steps.run(plan.doctor(self.binary), 30)
        if why := unusable(doctor):
            reason = f"the GPU no longer answers after {step.name}: {why}"
            self.records.add({"step": f"probe/{step.name}", "unit": None, "status": "lost", "reason": reason})
            self.lost.set()

    def keep(self, step, folder):
        """Adds a folder to OUT/runs.tar, so that few files have to be brought back."""
        with self.tar_lock, tarfile.open(f"{self.out}/runs.tar", "a") as tar:
            tar.add(folder, arcname=step.name)

    def start(self):
        """Who is measured where; records of another binary or GPU are not gone on with."""
        record = steps.run(plan.doctor(self.binary), 30)
        if why := unusable(record):
            usage(why)
        (about,) = record["found"]
        about["tiny"] = self.asked.tiny
        before = self.records.find("start")
        if before is None:
            self.records.add(record | {"found": [about], "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())})
            return about
        (then,) = before["found"]
        for what, old, new in [
            ("kvsieve", then["git_rev"], about["git_rev"]),
            ("GPU", then["cuda"]["device"]["name"], about["cuda"]["device"]["name"]),
            ("sizes", "tiny" if then["tiny"] else "full", "tiny" if about["tiny"] else "full"),
        ]:
            if old != new:
                usage(f"{self.out} holds records of {what} {old}, and this is {new}: give another folder")
        return then

    def run(self):
        about = self.start()
        planned = plan.Plan(self.binary, about)
        waiting = []
        named = tuple(self.asked.part or WIDTHS)
        for part in (part for part in WIDTHS if any(name.split("/")[0] == part for name in named)):
            todo = [step for step in getattr(planned, part)() if step.name.startswith(named)]
            with concurrent.futures.ThreadPoolExecutor(min(WIDTHS[part], max(2, os.cpu_count() or 2))) as pool:
                list(pool.map(self.step, todo))
            draw(self.asked.out)  # this process may be killed
            waiting += [step.name for step in todo if not self.records.find(step.name)]
        return waiting


def unusable(doctor):
    """What is missing, by a record of `kvsieve doctor`; None if nothing is."""
    if doctor is None or not doctor["found"]:
        return f"kvsieve doctor: {doctor['reason'] if doctor else 'did not end'}"
    cuda = doctor["found"][0]["cuda"]
    return next((f"no {part}: {cuda[part]['error']}" for part in ("device", "nvrtc") if "error" in cuda[part]), None)


def unpack(bundle, scratch):
    """Makes a bundle's parts known to every step; its binary."""
    folder = os.path.abspath(bundle)
    if not os.path.isfile(f"{folder}/kvsieve.xz"):
        usage(f"{folder}/kvsieve.xz is not there: benches/gpu/bundle.sh {bundle} makes it")
    with lzma.open(f"{folder}/kvsieve.xz") as packed, open(f"{scratch}/kvsieve", "wb") as binary:
        shutil.copyfileobj(packed, binary)
    os.chmod(f"{scratch}/kvsieve", 0o755)
    for archive in glob.glob(f"{folder}/*.tar.xz"):
        with tarfile.open(archive) as packed:
            packed.extractall(scratch, filter="data")
    if os.path.isdir(f"{scratch}/kernels"):
        os.environ["KVSIEVE_CACHE"] = f"{scratch}/kernels"
    if os.path.isdir(f"{scratch}/site"):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [f"{scratch}/site", os.environ.get("PYTHONPATH")]))
    return f"{scratch}/kvsieve"


def draw(out):
    """Writes OUT/summary.md from the records; the problems that they tell of."""
    path = f"{out}/records.jsonl"
    if not os.path.exists(path):
        usage(f"{path} is not there")
    text, problems = table.draw(Records(path).lines)
    with open(f"{out}/summary.md", "w", encoding="utf-8") as file:
        file.write(text)
    return problems


def main(words):
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, steps.end)
    if words[:1] == ["table"]:
        if len(words) != 2:
            usage("table takes one folder: gpu.sh table OUT")
        waiting, out = [], words[1]
    else:
        asked = arguments(words)
        out = asked.out
        with tempfile.TemporaryDirectory(prefix="kvsieve-gpu-") as scratch:
            waiting = Call(asked, scratch).run()
    problems = draw(out)
    print(f"{out}/summary.md: {len(problems)} problems" if problems else f"{out}/summary.md")
    if waiting:
        print(f"{len(waiting)} steps are left, the first is {waiting[0]}: call again with the same folder")
    if problems:
        print(f"WRONG: {'; '.join(problems)}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
