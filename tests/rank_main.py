"""What each rank of a multi-rank test runs: the bodies it is told to, one after the other.

``rank_main.py OUT MODULE BODY…``: each body is a function of the test module; what it returns, or
the exception it raised, goes to ``OUT/RANK.json``. SIGUSR1 writes the stacks to ``OUT/RANK.stack``.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path


def main() -> None:
    """Run the bodies and write what came of them."""
    out, module_name, *bodies = sys.argv[1:]
    rank = os.environ["RANK"]
    with Path(out, f"{rank}.stack").open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        Path(out, f"{rank}.pid").write_text(str(os.getpid()))
        sys.path.insert(0, str(Path(__file__).parent))
        module = importlib.import_module(module_name)
        results = {}
        for body in bodies:
            try:
                results[body] = {"value": getattr(module, body)()}
            except Exception:
                results[body] = {"error": traceback.format_exc()}
            Path(out, f"{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
