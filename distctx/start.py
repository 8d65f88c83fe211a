"""How a world begins: joined where a process group is there, made where none is."""

from __future__ import annotations

import contextlib
import functools
import secrets
import sys
from datetime import timedelta
from typing import Any

import attrs
import torch.distributed as dist

from distctx import _torch
from distctx.devices import (
    binds_device,
    check_backend,
    choose_device,
    current_device,
    default_backend,
    device_type_of,
    gloo_on_loopback,
    same_backend,
    use_device,
)
from distctx.environment import LaunchEnvironment, is_env
from distctx.exceptions import GroupConflictError, LaunchEnvironmentError
from distctx.layout import MeshLayout
from distctx.rendezvous import Meeting, meet, not_connected
from distctx.request import Request
from distctx.stores import HashStore, PrefixStore, Store, open_store
from distctx.world import World, current

__all__ = ["find", "make"]


def find(request: Request) -> World | None:
    """The world that is there already, checked against ``request``; None where there is none.

    Talks to nobody.

    Raises:
        GroupConflictError: it is not what was asked for.
    """
    if not dist.is_initialized():
        return None
    there = current() or _adopt(request)
    _check(there, request)
    return there


def make(request: Request, environment: LaunchEnvironment, layout: MeshLayout) -> World:
    """Start a world: choose the device, meet, make the default group. Talks to every rank.

    Raises:
        LaunchEnvironmentError: this host lacks the backend or the device; before any socket opens.
        RendezvousError: and what is below it; see ``meet``.
    """
    backend = request.backend or default_backend(request.device_type)
    check_backend(backend)
    device_type = request.device_type or device_type_of(backend)
    timeout = request.timeout or _torch.default_timeout(backend)
    rendezvous_timeout = request.rendezvous_timeout or timeout
    choose = functools.partial(choose_device, device_type, asked=request.device, backend=backend)
    early = environment.local_rank is not None or device_type == "cpu" or request.device is not None
    device = choose(environment.local_rank) if early else None
    if backend == "fake" or (
        environment.world_size == 1 and request.store is None and is_env(request.init_method)
    ):
        meeting = None
        store: Store = _torch.fake_store() if backend == "fake" else HashStore()
        place = "this process"
    else:
        meeting, place = _meet_to_start(
            request, environment, layout, backend, device_type, timeout, rendezvous_timeout
        )
        store = PrefixStore("group", meeting.store)
        if meeting.local is not None:
            local_rank, local_world_size = meeting.local
            environment = attrs.evolve(
                environment, local_rank=local_rank, local_world_size=local_world_size
            )
    device = device or choose(environment.local_rank)
    arguments: dict[str, Any] = {
        "backend": backend,
        "store": store,
        "rank": environment.rank,
        "world_size": environment.world_size,
        "timeout": timeout,
    }
    if request.pg_options is not None:
        arguments["pg_options"] = request.pg_options
    if binds_device(backend, device):
        arguments["device_id"] = device
    with contextlib.ExitStack() as undo:
        undo.enter_context(use_device(device))
        with gloo_on_loopback() if environment.world_size == 1 else contextlib.nullcontext():
            _init(meeting.token if meeting else secrets.token_hex(4), arguments, undo)
        made = World(
            group=dist.group.WORLD,
            rank=environment.rank,
            world_size=environment.world_size,
            backend=backend,
            device=device,
            environment=environment,
            owned=True,
            timeout=timeout,
            rendezvous_timeout=rendezvous_timeout,
            store=meeting.store if meeting else None,
            place=place,
        )
        made.undo = undo.pop_all()
    if meeting is not None:
        meeting.report_built()
        made.built_together.append(meeting)
    return made


def _meet_to_start(
    request: Request,
    environment: LaunchEnvironment,
    layout: MeshLayout,
    backend: str,
    device_type: str,
    timeout: timedelta,
    rendezvous_timeout: timedelta,
) -> tuple[Meeting, str]:
    """The meeting before a world is made, and the place of its store in words."""
    if request.store is None:
        store, place = open_store(environment, request.init_method, rendezvous_timeout)
        store.set_timeout(timeout)
    else:
        store, place = request.store, f"the {type(request.store).__name__} that was given"
    meeting = meet(
        PrefixStore("distctx", store),
        environment.rank,
        environment.world_size,
        {
            "backend": backend,
            "device_type": device_type,
            "mesh_shape": list(layout.shape),
            "mesh_dim_names": list(layout.dim_names),
        },
        rendezvous_timeout,
        place=place,
        purpose="to start the world",
        need_local=environment.local_rank is None,
    )
    return meeting, place


def _init(token: str, arguments: dict[str, Any], undo: contextlib.ExitStack) -> None:
    """torch's own start, its group names moved on, its excepthook to be taken off again."""
    hook = sys.excepthook
    try:
        _torch.move_group_names(token)
        dist.init_process_group(**arguments)
    except BaseException as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        _torch.move_group_names("")
        sys.excepthook = hook
        if isinstance(error, RuntimeError):
            raise not_connected("the world's group", error) from error
        raise
    undo.callback(_put_back_excepthook, hook, sys.excepthook)


def _adopt(request: Request) -> World:
    """A default group that is there already, made by somebody else. Talks to nobody."""
    group = dist.group.WORLD
    backend = str(dist.get_backend(group))
    if backend in ("undefined", "custom"):
        backend = dist.get_backend_config(group)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    try:
        environment = LaunchEnvironment.detect(
            rank=rank, world_size=world_size, needs_address=False
        )
    except LaunchEnvironmentError:
        environment = LaunchEnvironment("none", rank, world_size)
    device_type = request.device_type or device_type_of(backend)
    bound = getattr(group, "bound_device_id", None)
    if request.device is not None:
        device = request.device
    elif bound is not None and bound.type == device_type:
        device = bound
    else:
        device = current_device(device_type)
    timeout = request.timeout or _torch.group_timeout(group) or _torch.default_timeout(backend)
    store = _torch.default_store() if backend != "fake" else None
    return World(
        group=group,
        rank=rank,
        world_size=world_size,
        backend=backend,
        device=device,
        environment=environment,
        owned=False,
        timeout=timeout,
        rendezvous_timeout=request.rendezvous_timeout or timeout,
        store=None if store is None else PrefixStore("distctx", store),
        place="the store of the group that was there",
    )


def _check(there: World, request: Request) -> None:
    """Hold a world that is there against what was asked for."""
    wrong = [
        f"{name}: got {got!r}, wanted {wanted!r}"
        for name, got, wanted in (
            ("world_size", there.world_size, request.world_size),
            ("rank", there.rank, request.rank),
        )
        if wanted is not None and wanted != got
    ]
    if request.backend is not None and not same_backend(request.backend, there.backend):
        wrong.append(f"backend: got {there.backend!r}, wanted {request.backend!r}")
    bound = getattr(there.group, "bound_device_id", None) or (there.device if there.owned else None)
    if request.device is not None and bound is not None and request.device != bound:
        wrong.append(f"device: got {str(bound)!r}, wanted {str(request.device)!r}")
    if wrong:
        raise GroupConflictError(
            "The process group that is initialised already is not the one asked for; "
            + "; ".join(wrong)
            + ". Leave these arguments out to join it as it is, or destroy it first."
        )


def _put_back_excepthook(before: Any, torchs: Any) -> None:
    """torch wraps the hook at each start and never unwraps it. One that came later is left
    alone."""
    if sys.excepthook is torchs:
        sys.excepthook = before
