"""OUT/records.jsonl: one line of JSON for each step that ended. What to do next and every table follow from it alone."""

import json
import os
import threading

# How a step may end. `ok`; `absent`: what it asks for does not exist here; `refused`: it exists and does not take this;
# `unfinished`: a step that may be slow was; `dropped`: not run, as something it needs had gone wrong. The rest is wrong:
WRONG = ("hung", "crashed", "failed", "wrong", "lost")


class Records:
    """The file, and its lines as objects."""

    def __init__(self, path):
        self.path, self.lines, self.lock = path, [], threading.Lock()
        if not os.path.exists(path):
            return
        with open(path, "rb") as file:
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        if whole != text:  # the last call was killed while it wrote
            with open(path, "r+b") as file:
                file.truncate(len(whole))
        self.lines = [json.loads(line) for line in whole.splitlines()]

    def add(self, record):
        with self.lock:
            self.lines.append(record)
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
                file.flush()
                os.fsync(file.fileno())

    def find(self, step):
        """The record of a step; None before it ended."""
        return next((record for record in self.lines if record["step"] == step), None)

    def part(self, name):
        return [record for record in self.lines if record["step"].split("/")[0] == name]

    def stops(self, step):
        """Why a step is not to be run: what its unit, or another that it needs, did before. None if it may run."""
        part = step.name.split("/")[0]
        for record in list(self.lines):
            unit, status = record.get("unit"), record["status"]
            if unit is None or not any(same_or_of(need, unit) for need in (step.unit, *step.needs)):
                continue
            # What a smoke test or the first visit of a peer finds missing stays so.
            missing = status in ("refused", "absent") and record["step"].split("/")[0] in ("smoke", "times")
            ends = status in ("hung", "crashed", "failed") or missing
            # A kernel that is wrong does no harm, and which cases are wrong is worth knowing; but its times are not. What racecheck
            # reports of a right one (it does not know the barriers of wgmma) says nothing of these.
            found_by_tool = record["step"].startswith("sanitizer/")
            if ends or (status == "wrong" and part == "times" and not found_by_tool):
                return f"{unit} {status} in {record['step']}"
        return None


def same_or_of(unit, other):
    """Whether `unit` is `other` or a part of it, as 'tiled backward' is of 'tiled'."""
    return unit == other or unit.startswith(other + " ")
