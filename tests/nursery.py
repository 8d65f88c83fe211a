"""A process that has imported torch and forks ranks from itself, in milliseconds each.

It reads one JSON request a line, ``{"ranks": [environment, …], "call": [module, function,
argument], "out": folder}``, and answers with the pids; then, for each rank that ends, with
``[index, status]``. A rank writes what the function returned, or what it raised, to
``OUT/INDEX.json``, and all else to ``OUT/INDEX.txt``. The nursery itself starts no threads and no
process group, so that its forks are clean; ranks die with it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import distctx.runtime
import distctx.start  # noqa: F401  so that no rank has to import torch

PR_SET_PDEATHSIG = 1


def describe(error: BaseException) -> dict[str, Any]:
    """An error as JSON."""
    return {
        "type": type(error).__name__,
        "text": str(error),
        "notes": getattr(error, "__notes__", []),
        "missing": list(getattr(error, "missing_ranks", ())),
        "values": {str(k): dict(v) for k, v in getattr(error, "values", {}).items()},
    }


def rank(index: int, request: dict[str, Any]) -> None:
    """The life of one rank; never returns."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    out = Path(request["out"])
    with (out / f"{index}.txt").open("w", buffering=1) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        faulthandler.enable(log)
        faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
        os.environ.update(request["ranks"][index])
        module, function, argument = request["call"]
        start = time.monotonic()
        status, told = 0, {}
        try:
            told = {"value": getattr(importlib.import_module(module), function)(argument)}
        except BaseException as error:
            traceback.print_exc()
            told, status = describe(error), 1
        told["seconds"] = time.monotonic() - start
        (out / f"{index}.json").write_text(json.dumps(told))
        sys.stdout.flush()
        os._exit(status)


def main() -> None:
    """Serve requests until stdin ends."""
    sys.path.insert(0, str(Path(__file__).parent))
    for line in sys.stdin:
        request = json.loads(line)
        pids: dict[int, int] = {}
        for index in range(len(request["ranks"])):
            if (pid := os.fork()) == 0:
                rank(index, request)
            pids[pid] = index
        print(json.dumps(list(pids)), flush=True)
        while pids:
            pid, status = os.wait()
            index = pids.pop(pid)
            print(json.dumps([index, os.waitstatus_to_exitcode(status)]), flush=True)


if __name__ == "__main__":
    main()
