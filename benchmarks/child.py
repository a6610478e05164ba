"""One contender in this process: `python -m benchmarks.child ROW CONTENDER ROUND FOLDER SHARED`; see harness.py."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from benchmarks.harness import Job, Skip, Turns
from benchmarks.registry import row_named


def main() -> None:
    key, name, number, folder, shared = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a host prints goes to the log
    row = row_named(key)
    turns = Turns(sys.stdin, answers) if row.steps is not None else None
    job = Job(int(number), bool(os.environ["BENCHMARKS_QUICK"]), Path(folder), Path(shared), turns)
    try:
        found = row.named(name).run(job)
    except Skip as why:
        found = {"skip": str(why)}
    print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
