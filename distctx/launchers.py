"""The variables that each launcher sets, and what follows from them. Internal to environment.py."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import attrs

__all__ = [
    "LAUNCHERS",
    "Environ",
    "Fault",
    "Launcher",
    "Layer",
    "Value",
    "first_host",
    "known_variables",
    "misfits",
    "read_layer",
]

Environ = Mapping[str, str]

#: What is read beside each launcher's table below.
_ALSO_READ = (
    "OMPI_MCA_ess_base_jobid",
    "PMIX_NAMESPACE",
    "PMI_JOBID",
    "SLURM_JOB_ID",
    "SLURM_NTASKS",
    "SLURM_STEP_ID",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_TASKS_PER_NODE",
)

#: slurm.h's ids of the interactive step and of the batch script, as SLURM_STEP_ID shows them.
_SLURM_SHELL_STEPS = ("4294967290", "4294967291")


class Value(NamedTuple):
    """A value and where it came from."""

    value: Any
    source: str


class Fault(NamedTuple):
    """What is wrong, and which attributes it is about."""

    about: tuple[str, ...]
    text: str


class Launcher(NamedTuple):
    """How to read one launcher: its variables by attribute, what says it is there, what follows."""

    name: str
    variables: Mapping[str, str]
    present: Callable[[Environ], bool]
    derive: Callable[[Layer, Environ], None]


@attrs.define(eq=False)
class Layer:
    """What one launcher says, and what is wrong with it."""

    name: str
    values: dict[str, Value] = attrs.field(factory=dict)
    faults: list[Fault] = attrs.field(factory=list)

    def read(
        self, environ: Environ, attribute: str, name: str, low: int, high: int | None = None
    ) -> None:
        """Read a whole number; what is none is a fault."""
        text = environ.get(name)
        if text is None:
            return
        if not re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", text):
            shown = text if len(text) < 40 else f"{text[:40]}…"
            self.faults.append(Fault((attribute,), f"{name}={shown!r} is not a whole number"))
        elif int(text) < low or (high is not None and int(text) > high):
            bounds = f"at least {low}" + (f", at most {high}" if high else "")
            self.faults.append(Fault((attribute,), f"{name}={text!r} must be {bounds}"))
        else:
            self.values[attribute] = Value(int(text), name)

    def drop(self, attributes: Collection[str]) -> None:
        """Forget the faults of what something else says better."""
        self.faults = [fault for fault in self.faults if not set(fault.about) & set(attributes)]


def read_layer(launcher: Launcher, environ: Environ) -> Layer:
    """What a launcher says, with what follows from it, and every fault of it."""
    layer = Layer(launcher.name)
    for attribute, name in launcher.variables.items():
        layer.read(environ, attribute, name, low=1 if attribute.endswith("world_size") else 0)
    launcher.derive(layer, environ)
    layer.faults += misfits(layer.values)
    return layer


def known_variables() -> list[str]:
    """Every variable that a launch is read from."""
    names = ["MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", *_ALSO_READ]
    return names + [name for launcher in LAUNCHERS for name in launcher.variables.values()]


def misfits(values: Mapping[str, Value]) -> list[Fault]:
    """One launch's values that contradict each other."""
    faults = []
    for small, large, strict in (
        ("rank", "world_size", True),
        ("local_rank", "local_world_size", True),
        ("local_rank", "world_size", True),
        ("local_world_size", "world_size", False),
        ("node_rank", "world_size", True),
    ):
        if small in values and large in values:
            a, b = values[small], values[large]
            if a.value > b.value or (strict and a.value == b.value):
                relation = "less than" if strict else "at most"
                text = f"{a.source}={a.value} must be {relation} {b.source}={b.value}"
                faults.append(Fault((small, large), text))
    return faults


def _job_port(*job: str) -> int:
    """A port that follows from a job's id: below Linux's ephemeral range, the same on every
    rank."""
    return 10000 + zlib.crc32(".".join(job).encode()) % 20000


_BRACKET = r"\[[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\]"
_HOST = re.compile(rf"((?:[\w.-]|{_BRACKET})+)(?:,|$)")


def first_host(nodelist: str) -> str | None:
    """The first host of a SLURM node list such as ``a[01-03,7],b2``; None where it is none."""
    match = _HOST.match(nodelist.strip())
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", match[1]) if match else None


def _tasks_per_node(text: str) -> list[int] | None:
    """``4(x2),1`` as a list with a number for each host; None where it is none."""
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,6})\))?", part.strip())
        if match is None:
            return None
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def _derive_slurm(layer: Layer, environ: Environ) -> None:
    def fault(about: str, text: str) -> None:
        layer.faults.append(Fault((about,), text))

    size, node = layer.values.get("world_size"), layer.values.get("node_rank")
    if (text := environ.get("SLURM_STEP_TASKS_PER_NODE")) is not None:
        tasks = _tasks_per_node(text)
        here = f"SLURM_STEP_TASKS_PER_NODE={text!r}"
        if tasks is None:
            fault("local_world_size", f"{here} is not a list such as '4(x2),1'")
        elif size is not None and sum(tasks) != size.value:
            fault("world_size", f"{here} adds up to {sum(tasks)}, but {size.source}={size.value}")
        elif node is not None and node.value >= len(tasks):
            fault("node_rank", f"{here} is {len(tasks)} hosts, but {node.source}={node.value}")
        elif node is not None:
            layer.values["local_world_size"] = Value(tasks[node.value], "SLURM_STEP_TASKS_PER_NODE")
    if nodelist := environ.get("SLURM_STEP_NODELIST"):
        if host := first_host(nodelist):
            layer.values["master_addr"] = Value(host, "first host of SLURM_STEP_NODELIST")
        else:
            text = f"SLURM_STEP_NODELIST={nodelist!r} is not a node list such as 'a[01-03,7],b2'"
            fault("master_addr", text)
    job, step = (environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    port = _job_port("slurm", job, step)
    layer.values["master_port"] = Value(port, "SLURM_JOB_ID and SLURM_STEP_ID")


def _derive_mpi(*job_ids: str) -> Callable[[Layer, Environ], None]:
    def derive(layer: Layer, environ: Environ) -> None:
        size, local_size = layer.values.get("world_size"), layer.values.get("local_world_size")
        if size is not None and local_size is not None and size.value == local_size.value:
            layer.values["node_rank"] = Value(0, "all ranks are on this host")
            layer.values["master_addr"] = Value("127.0.0.1", "all ranks are on this host")
        if name := next((name for name in job_ids if environ.get(name)), None):
            layer.values["master_port"] = Value(_job_port("mpi", environ[name]), name)

    return derive


def _derive_nothing(layer: Layer, environ: Environ) -> None:
    pass


def _any_of(*names: str) -> Callable[[Environ], bool]:
    return lambda environ: any(name in environ for name in names)


def _is_slurm_step(environ: Environ) -> bool:
    """Whether srun started this. An allocation's shell and its batch script have SLURM_JOB_ID, the
    script even SLURM_PROCID=0, but not both of these; a shell that is a step of its own (salloc)
    has a reserved id."""
    return "SLURM_STEP_NUM_TASKS" in environ and environ.get("SLURM_STEP_ID") not in (
        None,
        *_SLURM_SHELL_STEPS,
    )


LAUNCHERS = (
    Launcher(
        "torchrun",
        {
            "rank": "RANK",
            "world_size": "WORLD_SIZE",
            "local_rank": "LOCAL_RANK",
            "local_world_size": "LOCAL_WORLD_SIZE",
            "node_rank": "GROUP_RANK",
        },
        _any_of("RANK", "WORLD_SIZE", "LOCAL_RANK"),
        _derive_nothing,
    ),
    Launcher(
        "openmpi",
        {
            "rank": "OMPI_COMM_WORLD_RANK",
            "world_size": "OMPI_COMM_WORLD_SIZE",
            "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
            "local_world_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
        },
        _any_of("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        _derive_mpi("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"),
    ),
    Launcher(
        "pmi",
        {
            "rank": "PMI_RANK",
            "world_size": "PMI_SIZE",
            "local_rank": "MPI_LOCALRANKID",
            "local_world_size": "MPI_LOCALNRANKS",
        },
        _any_of("PMI_RANK", "PMI_SIZE"),
        _derive_mpi("PMI_JOBID"),
    ),
    Launcher(
        "slurm",
        {
            "rank": "SLURM_PROCID",
            "world_size": "SLURM_STEP_NUM_TASKS",
            "local_rank": "SLURM_LOCALID",
            "node_rank": "SLURM_NODEID",
        },
        _is_slurm_step,
        _derive_slurm,
    ),
)
