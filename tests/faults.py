"""What the ranks of test_faults.py run: a life, in which one rank meets its fault at one moment."""

from __future__ import annotations

import os
import signal
import sys
import time
from bdb import BdbQuit
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from distctx import DistributedRuntime

MOMENTS = ("before meeting", "during init", "first mesh", "in a collective", "closing")
FAULTS = ("absent", "late", "SIGKILL", "SIGSTOP", "raise", "sys.exit", "Ctrl-C", "BdbQuit")


def strike(fault: str, late: float) -> None:
    """Do to this very process what the fault says."""
    if fault == "absent":
        time.sleep(3600)
    elif fault == "late":
        time.sleep(late)
    elif fault == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "SIGSTOP":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "raise":
        raise KeyError("the fault")
    elif fault == "sys.exit":
        sys.exit("the fault")
    elif fault == "Ctrl-C":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
    elif fault == "BdbQuit":
        raise BdbQuit("the fault")


def forbid_waiting() -> None:
    """From now on, a barrier or a collective is an error: nobody waits on the way out."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("somebody waits on the way out")

    for name in ("barrier", "monitored_barrier", "all_reduce", "all_gather", "broadcast"):
        setattr(dist, name, refuse)


def life(plan: dict[str, Any]) -> Any:
    """One life of this rank; ``plan`` says who meets which fault, and when."""
    rank = int(os.environ["RANK"])
    moment = plan["moment"] if rank == plan["victim"] else None

    def at(here: str) -> None:
        if moment == here:
            strike(plan["fault"], plan["late"])

    init = dist.init_process_group

    def started(**arguments: Any) -> None:
        at("during init")
        init(**arguments)

    dist.init_process_group = started
    at("before meeting")
    runtime = DistributedRuntime(
        mesh_shape=(-1,),
        mesh_dim_names=("dp",),
        timeout=plan["timeout"],
        rendezvous_timeout=plan["rendezvous_timeout"],
    )
    with runtime as rt:
        try:
            at("first mesh")
            _ = rt.mesh
            dist.all_reduce(torch.ones(1), group=rt.group("dp"))  # so all are past the mesh
            at("in a collective")
            total = torch.ones(1)
            for _ in range(plan.get("collectives", 1)):
                dist.all_reduce(total, group=rt.group("dp"))
            at("closing")
            return total.item()
        finally:
            forbid_waiting()


def open_and_close(arguments: dict[str, Any]) -> Any:
    """One runtime with these arguments, opened and closed."""
    by_rank: dict[str, Any] = arguments.pop("by_rank", {})
    arguments |= by_rank.get(os.environ.get("RANK", "0"), {})
    with DistributedRuntime(**arguments) as rt:
        return rt.rank


def wait_for_a_signal(plan: dict[str, Any]) -> Any:
    """Wait at one of the places where ranks wait; the test interrupts it there."""
    where, rank = plan["where"], int(os.environ["RANK"])
    waits: dict[str, Callable[[DistributedRuntime], Any]] = {
        "mesh": lambda rt: rt.mesh,
        "main_first": lambda rt: rt.main_first().__enter__(),
    }
    runtime = DistributedRuntime(timeout=60)
    if where in ("rank 0", "store"):
        runtime.open()
    with runtime as rt:
        if rank == plan["waits"]:
            return waits[where](rt)
        time.sleep(3600)
