"""What the launcher told this process: read once, checked whole, before any socket opens. No torch
here.

A process can sit inside several launches at once (torchrun started by srun, mpirun inside an
allocation), so the
launchers are layers, innermost first: torchrun, Open MPI, MPICH and Intel MPI (PMI), SLURM. The
    innermost one that is there decides; one further out only adds what it does not say, and only
    where both name the same rank and world size. Arguments lie over all of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

import attrs

from distctx.arguments import as_int
from distctx.exceptions import LaunchEnvironmentError
from distctx.launchers import (
    LAUNCHERS,
    Environ,
    Fault,
    Layer,
    Value,
    known_variables,
    misfits,
    read_layer,
)

__all__ = ["LaunchEnvironment", "is_env"]

_DEFAULT_PORT = 29500

_SAY_WHERE = "set both to the host of rank 0 and a free port there, or pass init_method= or store="
_WHERE_TO_MEET = {
    "openmpi": "mpirun does not say on which host the ranks of several hosts can meet; run it with "
    "-x MASTER_ADDR=<host of rank 0>",
    "pmi": "mpiexec does not say on which host the ranks of several hosts can meet; run it with "
    "-genv MASTER_ADDR <host of rank 0>",
}

_ALONE = {"rank": 0, "world_size": 1, "local_rank": 0, "local_world_size": 1, "node_rank": 0}


@attrs.frozen
class LaunchEnvironment:
    """Who this process is, as its launcher and the arguments say.

    Attributes:
        launcher: ``"torchrun"`` (or anything else that sets RANK and WORLD_SIZE), ``"openmpi"``,
            ``"pmi"`` (MPICH, Intel MPI), ``"slurm"`` (srun), or ``"none"``.
        rank: which process of the world this is, from 0.
        world_size: how many processes the world has.
        local_rank: which process of this host this is, from 0. None: not said, the ranks find out
            when they meet.
        local_world_size: how many processes of the world are on this host. None: not said.
        node_rank: which host of the world this is, from 0. None: not said.
        master_addr: the host where the ranks meet. None: not needed, since the world is 1 or the
            arguments name another place.
        master_port: the TCP port there.
        store_is_served: the launcher itself serves the store at that address, as torchrun does; no
            rank has to.
        sources: where each value came from, by attribute.
        reason: why this is no launch; empty where it is one.
        is_doubtful: this is no launch, but something says that more processes were meant.

    Example:
        >>> srun = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5",
        ...         "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "gpu[07-08]"}
        >>> env = LaunchEnvironment.detect(srun)
        >>> env.rank, env.world_size, env.local_rank, env.master_addr, env.launcher
        (5, 8, 1, 'gpu07', 'slurm')
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    store_is_served: bool = False
    sources: Mapping[str, str] = attrs.field(factory=dict, eq=False, repr=False)
    reason: str = attrs.field(default="", eq=False, repr=False)
    is_doubtful: bool = attrs.field(default=False, eq=False, repr=False)

    @classmethod
    def detect(
        cls,
        environ: Environ | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        init_method: str | None = None,
        needs_address: bool = True,
    ) -> LaunchEnvironment:
        """Read the launch from ``environ``, with the arguments on top. Talks to nobody.

        Args:
            environ: the variables; None: ``os.environ``.
            rank: this process's rank, over what the launcher says.
            world_size: the number of processes, over what the launcher says.
            init_method: torch's URL for the meeting place; ``?rank=…&world_size=…`` in it counts as
                those arguments. None or ``env://``: the address comes from the launcher.
            needs_address: False: the ranks do not meet by address (they have a store already, or do
                not meet at all), so it may be absent.

        Raises:
            LaunchEnvironmentError: the launch is partly set, a value is no number, the rank is
                outside the world, or a launcher's own variables contradict each other; lists every
                variable at fault.
        """
        environ = os.environ if environ is None else environ
        arguments = _arguments(rank, world_size, init_method)
        layers = [
            read_layer(launcher, environ) for launcher in LAUNCHERS if launcher.present(environ)
        ]
        if not arguments and not layers:
            sources = dict.fromkeys(_ALONE, "no launcher")
            reason, doubtful = _why_no_launch(environ)
            return cls("none", 0, 1, 0, 1, 0, sources=sources, reason=reason, is_doubtful=doubtful)
        found, launcher = _merge(arguments, layers)
        if found["world_size"].value == 1:
            found = {name: Value(value, "a world of 1") for name, value in _ALONE.items()} | found
        elsewhere = found["world_size"].value == 1 or not is_env(init_method)
        address, faults = _address(environ, found, launcher)
        if needs_address and not elsewhere:
            _raise(faults)
        found = {name: value for name, value in found.items() if not name.startswith("master")}
        if not elsewhere and not faults:
            found |= address
        agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(
            launcher,
            store_is_served=agent and "master_addr" in found,
            **{name: value.value for name, value in found.items()},
            sources={name: value.source for name, value in found.items()},
        )


def is_env(init_method: str | None) -> bool:
    """Whether the address comes from the launcher."""
    return init_method is None or urlsplit(init_method).scheme == "env"


def _raise(faults: Sequence[Fault]) -> None:
    if faults:
        raise LaunchEnvironmentError(
            "The launch environment is not right:\n"
            + "".join(f"  - {fault.text}\n" for fault in faults)
            + "Correct or unset these, or pass rank= and world_size=; `python -m distctx env` "
            "shows all that is set."
        )


def _arguments(rank: Any, world_size: Any, init_method: str | None) -> dict[str, Value]:
    given: dict[str, Value] = {}
    if init_method is not None:
        if not isinstance(init_method, str) or "://" not in init_method:
            raise LaunchEnvironmentError(
                "init_method must be a URL such as 'tcp://host:port', 'file:///path' or 'env://', "
                f"got {init_method!r}."
            )
        query = parse_qs(urlsplit(init_method).query, keep_blank_values=True)
        for name in ("rank", "world_size"):
            texts = query.get(name, [])
            if len(texts) > 1 or not all(re.fullmatch(r"[0-9]{1,18}", text) for text in texts):
                raise LaunchEnvironmentError(
                    f"{name}={'&'.join(texts)!r} in init_method={init_method!r} is not one whole "
                    "number."
                )
            if texts:
                given[name] = Value(int(texts[0]), f"{name} in init_method")
    for name, value in (("rank", rank), ("world_size", world_size)):
        if value is not None:
            number = as_int(value, name, LaunchEnvironmentError)
            if name in given and given[name].value != number:
                raise LaunchEnvironmentError(
                    f"The argument {name}={number} and init_method={init_method!r} contradict each "
                    "other."
                )
            given[name] = Value(number, f"argument {name}")
    if any(value.value < (1 if name == "world_size" else 0) for name, value in given.items()):
        raise LaunchEnvironmentError(
            "rank must be at least 0 and world_size at least 1, got "
            + ", ".join(f"{name}={value.value}" for name, value in given.items())
            + "; leave them None to follow the launcher."
        )
    return given


def _merge(arguments: Mapping[str, Value], layers: list[Layer]) -> tuple[dict[str, Value], str]:
    """Lay the layers over each other, innermost first, arguments on top; the values, and who said
    the rank."""
    found = dict(arguments)
    name = "none"
    for layer in layers:
        layer.drop(arguments)
        complete = {"rank", "world_size"} <= set(found)
        own = {key: layer.values[key] for key in ("rank", "world_size") if key in layer.values}
        clash = [key for key in own if key in found and own[key].value != found[key].value]
        told = [key for key in clash if key not in arguments]
        if complete and (layer.faults or told):
            continue  # a launch further out, which rightly counts other processes
        says_otherwise = [
            Fault(
                (key,),
                f"{found[key].source}={found[key].value} is set without the rest of its launch, "
                f"and {own[key].source}={own[key].value} says otherwise",
            )
            for key in told
        ]
        _raise(layer.faults + says_otherwise)
        new = {key: value for key, value in layer.values.items() if key not in found}
        if clash:
            # The arguments make a world of their own out of the launcher's processes. Where each
            # sits on its host still holds, unless they are more than it started: then they are not
            # its processes.
            size, started = found.get("world_size"), own.get("world_size")
            fewer = size is None or started is None or size.value <= started.value
            new = {
                key: value
                for key, value in new.items()
                if key in own or (key == "local_rank" and fewer)
            }
        if new and (name == "none" or "rank" in new):
            name = layer.name
        found |= new
    _raise(_half_a_launch(found, name))
    _raise(misfits({key: found[key] for key in ("rank", "world_size")}))
    return found, name


def _half_a_launch(found: Mapping[str, Value], name: str) -> list[Fault]:
    """The fault of a launch without its rank or its world size."""
    missing = [key for key in ("rank", "world_size") if key not in found]
    if not missing:
        return []
    read = set(known_variables())
    have = [
        f"{value.source}={value.value}"
        for key, value in found.items()
        if value.source in read - {"SLURM_STEP_TASKS_PER_NODE"} or key in ("rank", "world_size")
    ]
    launcher = next((one for one in LAUNCHERS if one.name == name), LAUNCHERS[0])
    lacks = " and ".join(f"{launcher.variables[key]} (or the argument {key})" for key in missing)
    return [
        Fault(tuple(missing), f"{' and '.join(have)} is set, but {lacks} is not: half a launch")
    ]


def _address(
    environ: Environ, found: Mapping[str, Value], launcher: str
) -> tuple[dict[str, Value], list[Fault]]:
    """MASTER_ADDR and MASTER_PORT where they are set, else what the launcher's own variables
    yield."""
    told = Layer(
        "address", {key: found[key] for key in ("master_addr", "master_port") if key in found}
    )
    if addr := environ.get("MASTER_ADDR"):
        told.values["master_addr"] = Value(addr, "MASTER_ADDR")
    told.read(environ, "master_port", "MASTER_PORT", 1, 65535)
    if launcher in ("openmpi", "pmi"):  # MPICH's Hydra gives its jobs no id
        told.values.setdefault("master_port", Value(_DEFAULT_PORT, "torch's default"))
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name.lower() not in told.values]
    if missing and not told.faults:
        size = found["world_size"]
        names = " and ".join(missing) + (" is" if len(missing) == 1 else " are")
        text = f"{names} not set, but {size.source}={size.value} is more than 1: "
        told.faults.append(Fault(("master_addr",), text + _WHERE_TO_MEET.get(launcher, _SAY_WHERE)))
    return told.values, told.faults


def _why_no_launch(environ: Environ) -> tuple[str, bool]:
    """Why this is a world of 1, and whether that is doubtful."""
    given = [
        f"{name}={environ[name]}" for name in ("MASTER_ADDR", "MASTER_PORT") if environ.get(name)
    ]
    if job := environ.get("SLURM_JOB_ID"):
        tasks = environ.get("SLURM_NTASKS", "1")
        return (
            f"this is SLURM job {job} (SLURM_NTASKS={tasks}), but not a step that srun started; "
            "start the program with srun or torchrun to use more processes",
            tasks != "1",
        )
    if given:
        there = " and ".join(given) + (" is" if len(given) == 1 else " are")
        return (
            f"{there} set, but neither RANK nor WORLD_SIZE: nothing says that there are more",
            True,
        )
    return "no launcher has set RANK and WORLD_SIZE, and no MPI or SLURM step is there", False
