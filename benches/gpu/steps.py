"""Steps: each is a process of its own, in a folder of its own, which is killed with all its children when its time is up."""

import dataclasses
import json
import os
import signal
import subprocess
import tempfile
import time


# Process groups of the steps that run now.
running = set()


@dataclasses.dataclass(frozen=True)
class Step:
    """What is run and who is to blame if it goes wrong."""

    # Part, what is measured, of whom: as 'times/forward causal/hopper/1'. A step whose name has a record is not run again.
    name: str
    # What is marked in the records: a kernel ('hopper', 'tiled backward'), a peer, a policy, a model.
    unit: str
    command: list
    limit_s: float
    # Units without which this step makes no sense.
    needs: tuple = ()
    # Texts written into the step's folder, in which it is run, by name.
    files: dict = dataclasses.field(default_factory=dict)
    # Whether it may be slow: then running out of time says nothing of the kernel.
    slow: bool = False
    # Reads (return code, objects printed, all that was printed) where that says more: (status, reason) or None.
    judge: object = None
    # A folder of the step's own that is kept in OUT/runs.tar.
    keep: str = ""


def run(step, left_s, keep=None):
    """Runs a step in at most `left_s`; its record, or None if it was cut short by that and not by its own limit."""
    limit_s = min(step.limit_s, left_s)
    with tempfile.TemporaryDirectory(prefix="kvsieve-gpu-", ignore_cleanup_errors=True) as folder:
        for name, text in step.files.items():
            with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
                file.write(text)
        started = time.monotonic()
        status = process(step.command, folder, limit_s)
        seconds = time.monotonic() - started
        with open(f"{folder}/stdout", encoding="utf-8", errors="replace") as file:
            out = file.read()
        with open(f"{folder}/stderr", encoding="utf-8", errors="replace") as file:
            err = file.read()
        if keep and step.keep and os.path.isdir(f"{folder}/{step.keep}"):
            keep(step, f"{folder}/{step.keep}")
    if status is None and limit_s < step.limit_s:
        return None
    found = objects(out)
    ended, reason = judge(step, status, limit_s, found, out, err)
    record = {
        "step": step.name,
        "unit": step.unit,
        "status": ended,
        "reason": reason,
        "seconds": round(seconds, 2),
        "found": found,
    }
    return record if ended == "ok" else record | {"said": err[-1000:]}


def process(command, folder, limit_s):
    """Runs a command with its outputs in files, which outlive it; its return code, None if it had to be killed."""
    with open(f"{folder}/stdout", "wb") as out, open(f"{folder}/stderr", "wb") as err:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=folder, start_new_session=True)
        running.add(child.pid)
        try:
            return child.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            running.discard(child.pid)
            kill(child.pid)
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:  # inside the driver for ever: it is left behind
                pass


def kill(group):
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass


def end(number, _):
    """A handler of signals: no step outlives this process."""
    for group in list(running):
        kill(group)
    os._exit(128 + number)


def objects(out):
    """What was printed, if it is one object; else the lines that are, of which the last may be torn in a killed process."""
    try:
        whole = json.loads(out)
        return [whole] if isinstance(whole, dict) else []
    except ValueError:
        return list(lines(out))


def lines(out):
    for line in out.splitlines():
        if line.startswith("{"):
            try:
                yield json.loads(line)
            except ValueError:
                continue


def judge(step, status, limit_s, found, out, err):
    """(how the step ended, why)."""
    last = next((line.strip() for line in reversed(err.splitlines()) if line.strip()), f"exit status {status}")
    if status is None:
        return ("unfinished" if step.slow else "hung"), f"killed after {limit_s:.0f} s"
    if step.judge and (ended := step.judge(status, found, out + err)):
        return ended
    if status < 0:
        return "crashed", signal_name(-status)
    if found and "ended" in found[-1]:
        return found[-1]["ended"], found[-1]["reason"]
    failed = [line["reason"] for line in found if line.get("status") == "failed"]
    if failed:
        # A pass that the driver broke off, or one whose result is not to be trusted.
        return ("failed" if "CUDA" in failed[0] else "wrong"), failed[0]
    if status == 0:
        return "ok", None
    return ("refused" if status == 2 else "failed"), last


def signal_name(number):
    try:
        return f"killed by {signal.Signals(number).name}"
    except ValueError:
        return f"killed by signal {number}"
