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

from distctx import _torch, debug
from distctx.devices import (
    binds_device,
    check_backend,
    choose_device,
    current_device,
    default_backend,
    device_type_of,
    gloo_on_loopback,
    gloo_reads_at_once,
    same_backend,
    use_device,
)
from distctx.environment import LaunchEnvironment, is_env
from distctx.exceptions import DistctxError, GroupConflictError, LaunchEnvironmentError
from distctx.layout import MeshLayout
from distctx.meeting import Meeting
from distctx.rendezvous import meet
from distctx.request import Request
from distctx.stores import HashStore, PrefixStore, Store, is_served, open_store
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
            request, environment, layout, backend, device_type, rendezvous_timeout
        )
        store = PrefixStore("group", meeting.store)
        if meeting.local is not None:
            local_rank, local_world_size = meeting.local
            environment = attrs.evolve(
                environment, local_rank=local_rank, local_world_size=local_world_size
            )
    arguments: dict[str, Any] = {
        "backend": backend,
        "store": store,
        "rank": environment.rank,
        "world_size": environment.world_size,
        "timeout": timeout,
    }
    if request.pg_options is not None:
        arguments["pg_options"] = request.pg_options
    with contextlib.ExitStack() as undo:
        if backend != "fake":
            undo.enter_context(debug.door(environment, layout))
        try:
            device = device or choose(environment.local_rank)
            if binds_device(backend, device):
                arguments["device_id"] = device
            undo.enter_context(use_device(device))
            with contextlib.ExitStack() as told:
                if environment.world_size == 1:
                    told.enter_context(gloo_on_loopback())
                told.enter_context(gloo_reads_at_once(store, rendezvous_timeout))
                _init(meeting.token if meeting else secrets.token_hex(4), arguments, undo)
        except Exception as error:
            if meeting is None:
                raise
            meeting.report_failure(environment.rank, error)
            if isinstance(error, RuntimeError) and not isinstance(error, DistctxError):
                raise meeting.not_built("the world's group", error) from error
            raise
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
            server=_server(request, environment, meeting),
        )
        made.undo = undo.pop_all()
    if meeting is not None:
        if request.store is None:
            store.set_timeout(timeout)
        meeting.report_built()
        made.to_be_read.append((meeting.store, "built", environment.world_size))
    return made


def _server(request: Request, environment: LaunchEnvironment, meeting: Meeting | None) -> str:
    """Who serves the store of a world that was made, in words; empty where nobody does."""
    if meeting is None or not is_served(meeting.store):
        return ""
    if request.store is not None:
        return "its maker"
    is_agents = is_env(request.init_method) and environment.store_is_served
    return "the launcher" if is_agents else "rank 0"


def _meet_to_start(
    request: Request,
    environment: LaunchEnvironment,
    layout: MeshLayout,
    backend: str,
    device_type: str,
    rendezvous_timeout: timedelta,
) -> tuple[Meeting, str]:
    """The meeting before a world is made, and the place of its store in words."""
    if request.store is None:
        store, place = open_store(environment, request.init_method, rendezvous_timeout)
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
    except BaseException:
        if dist.is_initialized():
            dist.destroy_process_group()
        _torch.move_group_names("")
        sys.excepthook = hook
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
    bound = getattr(group, "bound_device_id", None)
    device_type = request.device_type or (bound.type if bound else device_type_of(backend))
    undo = contextlib.ExitStack()
    if backend != "fake":
        undo.enter_context(debug.door(environment, None))
    device = bound or current_device(device_type)
    if bound is None and device.index is None:  # nobody chose one yet, so it falls to us
        local_rank = environment.local_rank
        device = choose_device(device_type, local_rank, asked=request.device, backend=backend)
        undo.enter_context(use_device(device))
    timeout = request.timeout or _torch.group_timeout(group) or _torch.default_timeout(backend)
    store = _torch.default_store() if backend != "fake" else None
    adopted = World(
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
    adopted.undo = undo
    return adopted


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
    if request.backend is None and there.backend == "fake":
        wrong.append(
            "backend: got 'fake', which is simulated and computes nothing, wanted a real one (to "
            "join it, make the runtime with backend='fake' or with simulate())"
        )
    elif request.backend is not None and not same_backend(request.backend, there.backend):
        wrong.append(f"backend: got {there.backend!r}, wanted {request.backend!r}")
    wanted_type = request.device.type if request.device else request.device_type
    if wanted_type is not None and wanted_type != there.device.type:
        wrong.append(f"device type: got {there.device.type!r}, wanted {wanted_type!r}")
    elif request.device is not None and request.device.index not in (None, there.device.index):
        wrong.append(f"device: got {str(there.device)!r}, wanted {str(request.device)!r}")
    told_elsewhere = ("init_method", "store", "pg_options")
    wrong += [
        f"{name}: a group that is there takes none"
        for name in told_elsewhere
        if getattr(request, name) is not None
    ]
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
