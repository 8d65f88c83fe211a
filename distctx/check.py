"""``python -m distctx check``: open a world, exercise it, say who sits where."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from distctx import display
from distctx.devices import check_backend, default_backend, gloo_on_loopback
from distctx.environment import LaunchEnvironment
from distctx.exceptions import DistctxError, LaunchEnvironmentError, exit_status
from distctx.layout import MeshLayout
from distctx.runtime import DistributedRuntime

__all__ = ["run", "start"]


def start(args: argparse.Namespace, arguments: list[str]) -> int:
    """Start ``--nproc`` ranks of this very command with torch's elastic launcher."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    here = LaunchEnvironment.detect()
    if here.launcher != "none":
        raise LaunchEnvironmentError(
            f"--nproc starts ranks of its own, but this is rank {here.rank} of a launch by "
            f"{here.launcher} already; leave --nproc out to check that one."
        )
    # What can be refused is refused here, once, before any rank starts.
    _refuse_fake(args)
    check_backend(args.backend or default_backend(None))
    shape, names = args.mesh or ((-1,), None)
    MeshLayout(shape, names).resolve(args.nproc)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=args.nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        local_addr="127.0.0.1",
    )
    try:
        with gloo_on_loopback():  # the ranks inherit it
            elastic_launch(config, sys.executable)("-m", "distctx", *arguments, "--launched")
    except SignalException as error:
        return 128 + int(error.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        said: Any = failure.message  # a dict where the rank recorded an exception
        message = " ".join(str(said["message"] if isinstance(said, dict) else said).split())
        print(f"distctx check: rank {rank}: {message}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 1
    return 0


def run(args: argparse.Namespace) -> int:
    """Check the world that this process is part of."""
    if args.launched:
        # The launcher that started this collects what each rank says, and prints one.
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        handler = get_error_handler()
        handler.initialize()
        try:
            return _run(args)
        except Exception as error:
            handler.record_exception(error)
            return exit_status(error)
    try:
        return _run(args)
    except DistctxError:
        raise
    except Exception as error:
        raise DistctxError(f"{type(error).__name__}: {error}") from error


def _refuse_fake(args: argparse.Namespace) -> None:
    if args.backend == "fake":
        raise LaunchEnvironmentError(
            "check communicates for real, and the backend 'fake' computes nothing; `python -m "
            "distctx layout` draws a layout without processes."
        )


def _run(args: argparse.Namespace) -> int:
    _refuse_fake(args)
    shape, names = args.mesh or (None, None)
    begin = time.perf_counter()
    report: dict[str, Any] | None = None
    with (
        _stdout_free_of_others(),
        DistributedRuntime(
            args.backend,
            mesh_shape=shape,
            mesh_dim_names=names,
            timeout=args.timeout,
            rendezvous_timeout=args.timeout,
        ) as rt,
    ):
        checks = [_timed("world: all ranks met, the group is there", lambda: None, begin)]
        checks.append(_timed("group: all_reduce over all ranks", lambda: _check_world(rt)))
        checks.append(_timed("mesh: built, and equal to the layout", lambda: _check_mesh(rt)))
        for name in rt.layout.dim_names:
            checks.append(
                _timed(f"{name}: all_gather along the dim", functools.partial(_check_dim, rt, name))
            )
        everyone = _gather(rt, {"who": _row(rt), "checks": checks})
        if rt.is_main_process:
            report = _report(rt, everyone, time.perf_counter() - begin)
    if report is None:
        return 0
    print(json.dumps(report) if args.json else _picture(report), flush=True)
    return 0 if report["ok"] else 1


@contextlib.contextmanager
def _stdout_free_of_others() -> Iterator[None]:
    """Keep what libraries write on stdout off it: the report stands there alone, also as JSON.

    gloo of torch 2.8 and 2.9 writes a line at every start, from C++.
    """
    if sys.stdout is None:
        yield
        return
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def _timed(
    name: str, check: Callable[[], str | None], begin: float | None = None
) -> dict[str, Any]:
    begin = time.perf_counter() if begin is None else begin
    fault = check()
    return {"name": name, "fault": fault, "seconds": round(time.perf_counter() - begin, 6)}


def _check_world(rt: DistributedRuntime) -> str | None:
    total = torch.tensor([rt.rank + 1], device=rt.device)
    dist.all_reduce(total)
    wanted = rt.world_size * (rt.world_size + 1) // 2
    return None if total.item() == wanted else f"the sum is {total.item()}, not {wanted}"


def _check_mesh(rt: DistributedRuntime) -> str | None:
    mesh = rt.mesh
    there = (tuple(mesh.shape), tuple(mesh.get_coordinate() or ()), mesh.mesh_dim_names)
    wanted = (rt.layout.shape, rt.coordinate, rt.layout.dim_names)
    return None if there == wanted else f"the mesh says {there}, the layout {wanted}"


def _check_dim(rt: DistributedRuntime, name: str) -> str | None:
    parts = [torch.zeros(1, dtype=torch.int64, device=rt.device) for _ in range(rt.size(name))]
    mine = torch.tensor([rt.rank], dtype=torch.int64, device=rt.device)
    dist.all_gather(parts, mine, group=rt.group(name))
    got = tuple(int(part.item()) for part in parts)
    return None if got == rt.ranks(name) else f"the group holds {got}, not {rt.ranks(name)}"


def _row(rt: DistributedRuntime) -> dict[str, Any]:
    partition = rt.describe().dp_partition
    return {
        "rank": rt.rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": str(rt.device),
        "coordinate": dict(zip(rt.layout.dim_names, rt.coordinate, strict=True)),
        "dp_partition": None if partition is None else list(partition),
        "tp_size": rt.tp_size,
    }


def _gather(rt: DistributedRuntime, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """What every rank says, in the order of ranks. torch's own gathering of objects wants numpy."""
    data = torch.tensor(list(json.dumps(mine).encode()), dtype=torch.uint8, device=rt.device)
    length = torch.tensor([data.numel()], device=rt.device)
    lengths = [torch.zeros_like(length) for _ in range(rt.world_size)]
    dist.all_gather(lengths, length)
    longest = max(int(n.item()) for n in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8, device=rt.device)
    padded[: data.numel()] = data
    parts = [torch.zeros_like(padded) for _ in range(rt.world_size)]
    dist.all_gather(parts, padded)
    texts = [bytes(p[: int(n.item())].tolist()) for p, n in zip(parts, lengths, strict=True)]
    return [json.loads(text) for text in texts]


def _report(rt: DistributedRuntime, everyone: list[dict[str, Any]], took: float) -> dict[str, Any]:
    checks = []
    for same in zip(*(one["checks"] for one in everyone), strict=True):
        faults = {str(rank): check["fault"] for rank, check in enumerate(same) if check["fault"]}
        checks.append(
            {
                "name": same[0]["name"],
                "ok": not faults,
                "seconds": same[0]["seconds"],
                "faults": faults,
            }
        )
    return {
        "ok": all(check["ok"] for check in checks),
        "world_size": rt.world_size,
        "backend": rt.backend,
        "mesh": dict(zip(rt.layout.dim_names, rt.layout.shape, strict=True)),
        "ranks": [one["who"] for one in everyone],
        "checks": checks,
        "seconds": round(took, 6),
        "torch": torch.__version__,
    }


def _picture(report: dict[str, Any]) -> str:
    rows = []
    for who in report["ranks"]:
        partition = who["dp_partition"]
        rows.append(
            (
                str(who["rank"]),
                who["host"],
                str(who["pid"]),
                who["device"],
                ", ".join(f"{name}={index}" for name, index in who["coordinate"].items()),
                "not said" if partition is None else f"{partition[1]} of {partition[0]}",
            )
        )
    header = ("rank", "host", "pid", "device", "coordinate", "dp_partition")
    mesh = " × ".join(f"{name}={size}" for name, size in report["mesh"].items())
    lines = [
        f"{len(rows)} rank{'s' if len(rows) > 1 else ''}, {report['backend']}, mesh {mesh}, torch "
        f"{report['torch']}",
        "",
        display.table(rows, header),
        "",
    ]
    for check in report["checks"]:
        lines.append(
            f"{'ok  ' if check['ok'] else 'FAIL'}  {check['seconds'] * 1e3:8.1f} ms  "
            f"{check['name']}"
        )
        lines += [f"      rank {rank}: {fault}" for rank, fault in check["faults"].items()]
    verdict = "all is well" if report["ok"] else "something is wrong, see FAIL above"
    lines += ["", f"{verdict}, {report['seconds']:.2f} s"]
    return "\n".join(lines)
