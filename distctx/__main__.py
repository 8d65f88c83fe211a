"""``python -m distctx``: check a world, draw a layout, show the launch, look into a job.

Exit status: 0 all is well; 1 something failed, or a check gave a wrong result; 2 the arguments, the
mesh or the environment are not right; 3 the ranks did not meet; 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence

import attrs

from distctx import display, picture
from distctx.environment import LaunchEnvironment
from distctx.exceptions import DistctxError, LaunchEnvironmentError, LayoutError, exit_status
from distctx.launchers import known_variables
from distctx.layout import MeshLayout

__all__ = ["main"]

#: The shape and the names that ``--mesh`` gives.
Mesh = tuple[tuple[int, ...], tuple[str, ...]]


def mesh_argument(text: str) -> Mesh:
    """``dp=2,tp=-1`` as a shape and names."""
    shape, names = [], []
    for part in text.split(","):
        name, equals, size = part.partition("=")
        if not (equals and name.strip() and size.strip().lstrip("-").isdigit()):
            raise argparse.ArgumentTypeError(
                f"{part!r} in {text!r} is not NAME=SIZE; wanted the like of dp=2,tp=4, one size "
                "may be -1"
            )
        names.append(name.strip())
        shape.append(int(size))
    try:
        layout = MeshLayout(shape, names)
    except LayoutError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return layout.shape, layout.dim_names


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"wanted a whole number of at least 1, got {text!r}")
    return int(text)


def seconds(text: str) -> float:
    """A number of seconds, more than 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"wanted seconds, more than 0, got {text!r}")
    return value


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="python -m distctx",
        description="Open and check a distributed world, draw a mesh layout, show the launch.",
        epilog="Exit status: 0 all is well; 1 something failed, or a check gave a wrong result; "
        "2 the arguments, the mesh or the environment are not right; 3 the ranks did not meet; 130 "
        "interrupted.",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    check = commands.add_parser(
        "check",
        help="open a world, exercise group, mesh and collectives, print who sits where",
        description="Open a world and exercise it: the group, the mesh, a collective along every "
        "mesh dim whose result is checked. Under torchrun, srun or mpirun it uses that world and "
        "the main rank prints; alone it is a world of 1.",
    )
    check.add_argument(
        "--nproc", type=positive, help="start this many ranks here, with torch's elastic launcher"
    )
    check.add_argument("--mesh", type=mesh_argument, help="such as dp=2,tp=2; one size may be -1")
    check.add_argument("--backend", help="such as gloo or nccl (default: by device)")
    check.add_argument(
        "--timeout",
        type=seconds,
        default=60.0,
        help="seconds to wait for ranks and for each collective (default: 60)",
    )
    check.add_argument("--json", action="store_true", help="print the report as JSON")
    check.add_argument("--launched", action="store_true", help=argparse.SUPPRESS)

    layout = commands.add_parser(
        "layout",
        help="draw any layout as a grid, without processes",
        description="Draw a mesh layout as a grid of ranks, without processes and without torch.",
    )
    layout.add_argument("--mesh", type=mesh_argument, required=True, help="such as pp=2,dp=4,tp=8")
    layout.add_argument("--world-size", type=positive, help="what a size of -1 follows")
    layout.add_argument("--rank", type=int, help="mark this rank, and its group")
    layout.add_argument("--groups", help="list the groups along a dim, or several: dp or dp,tp")

    env = commands.add_parser(
        "env",
        help="what the launcher told this process",
        description="Print what the launcher told this process and where each value came from.",
    )
    env.add_argument("--json", action="store_true", help="print it as JSON")

    attach = commands.add_parser(
        "attach",
        help="list the ranks that are stopped at a breakpoint, or open one",
        description="List the ranks of yours on this machine that are stopped in rt.breakpoint(), "
        "or open one: its pdb, here. Ctrl-C stops what it runs, Ctrl-D leaves it stopped, c lets "
        "all ranks go on, q ends them.",
    )
    attach.add_argument("where", nargs="*", metavar="[DIR] [RANK]", help="DIR: see DISTCTX_DIR")
    attach.add_argument("--pid", type=positive, help="where several jobs have such a rank")

    stacks = commands.add_parser(
        "stacks",
        help="where every open rank on this machine stands, also in a job that hangs",
        description="Print where every open rank of yours on this machine stands, those that stand "
        "alike together, and their Python stacks.",
    )
    stacks.add_argument("where", nargs="?", metavar="DIR", help="see DISTCTX_DIR")
    return top


def look(args: argparse.Namespace) -> int:
    """``python -m distctx attach`` and ``stacks``."""
    from distctx import attach

    if args.command == "stacks":
        return attach.stacks(args.where)
    folders = [word for word in args.where if not word.isdigit()]
    ranks = [int(word) for word in args.where if word.isdigit()]
    if len(folders) > 1 or len(ranks) > 1:
        print("distctx attach: wanted a folder, a rank, or both", file=sys.stderr)
        return 2
    return attach.attach(folders[0] if folders else None, ranks[0] if ranks else None, args.pid)


def one_line(error: BaseException) -> str:
    """An error as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def show_layout(args: argparse.Namespace) -> int:
    """``python -m distctx layout``."""
    layout = MeshLayout(*args.mesh)
    if args.world_size is None and not layout.is_resolved:
        raise LayoutError(f"{layout!r} holds -1; say --world-size, which it follows.")
    layout = layout.resolve(args.world_size or layout.world_size)
    groups = args.groups.split(",") if args.groups else ()
    size = shutil.get_terminal_size()
    print(picture.draw(layout, args.rank, groups, size.columns, max(size.lines, 24)))
    return 0


def show_environment(args: argparse.Namespace) -> int:
    """``python -m distctx env``."""
    there = {name: os.environ[name] for name in known_variables() if name in os.environ}
    try:
        environment = LaunchEnvironment.detect()
    except LaunchEnvironmentError as error:
        print(f"distctx env: {error}", file=sys.stderr)
        print("\n".join(["Set are:", *(f"  {name}={value}" for name, value in there.items())]))
        return exit_status(error)
    values = attrs.asdict(environment)
    sources, reason = values.pop("sources"), values.pop("reason")
    values.pop("is_doubtful")
    if args.json:
        report = {"values": values, "sources": sources, "reason": reason, "variables": there}
        print(json.dumps(report))
        return 0
    rows = [
        (name, "not said" if value is None else str(value), sources.get(name, ""))
        for name, value in values.items()
    ]
    lines = [display.table(rows, ("", "value", "from"))]
    if there:
        lines += ["", "Set are:", *(f"  {name}={value}" for name, value in there.items())]
    if reason:
        lines += ["", f"No launch: {reason}."]
    print("\n".join(lines))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(arguments)
    try:
        if args.command in ("layout", "env"):
            status = show_layout(args) if args.command == "layout" else show_environment(args)
            if sys.stdout is not None:
                sys.stdout.flush()  # so that a full disk is an error here
            return status
        if args.command in ("attach", "stacks"):
            return look(args)
        from distctx import check

        if args.nproc and not args.launched:
            return check.start(args, arguments)
        return check.run(args)
    except KeyboardInterrupt as error:
        return exit_status(error)
    except DistctxError as error:
        print(f"distctx {args.command}: {one_line(error)}", file=sys.stderr)
        return exit_status(error)
    except OSError as error:  # the reader has gone, as with `| head`, or the disk is full
        if not isinstance(error, BrokenPipeError):
            print(f"distctx {args.command}: {one_line(error)}", file=sys.stderr)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  or the interpreter's end fails too
        return 1


if __name__ == "__main__":
    sys.exit(main())
