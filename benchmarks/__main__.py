"""``python -m benchmarks``: all benchmarks, one table."""

from __future__ import annotations

import argparse
import importlib
import sys
import time

from benchmarks.common import Findings, as_markdown, as_rst, as_text, is_here, machine

#: In the order of the questions that a user would ask.
NAMES = ("start", "lifecycle", "rendezvous", "mesh", "lookup", "pytest", "import")

#: What some benchmarks compare with, and skip where it is not installed.
PEERS = ("accelerate", "lightning_fabric", "expecttest")


def measured(names: list[str]) -> Findings:
    """What the benchmarks of those names found; says on stderr how far it is."""
    rows, lines = [], []
    for name in names:
        start = time.monotonic()
        print(f"bench_{name} …", end=" ", file=sys.stderr, flush=True)
        found = importlib.import_module(f"benchmarks.bench_{name}").main()
        print(f"{time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        rows += found.rows
        lines += found.lines
    return Findings(rows, lines)


def main(argv: list[str] | None = None) -> int:
    """Exit status 0, or 1 where a ratio passes what it must not."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure distctx against what it replaces."
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; none: all"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print a table for Markdown")
    form.add_argument("--rst", action="store_true", help="print a table for reStructuredText")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.names if name not in NAMES]:
        parser.error(f"no benchmark is called {unknown[0]!r}; there are {', '.join(NAMES)}")

    found = measured(args.names or list(NAMES))
    table = as_markdown if args.markdown else as_rst if args.rst else as_text
    print(table(found.rows), *found.lines, sep="\n")
    if absent := [peer for peer in PEERS if not is_here(peer)]:
        print(f"\nnot installed, so not compared with: {', '.join(absent)}")
    print(f"\n{machine()}")
    missed = [row.question for row in found.rows if row.is_missed]
    for question in missed:
        print(f"missed: {question}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
