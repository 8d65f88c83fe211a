"""Which backend, which device: chosen from what torch itself says, before any group is made."""

from __future__ import annotations

import contextlib
import inspect
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from distctx import _torch
from distctx.exceptions import LaunchEnvironmentError

if TYPE_CHECKING:
    from distctx.stores import Store

__all__ = [
    "as_device",
    "binds_device",
    "check_backend",
    "choose_device",
    "current_device",
    "default_backend",
    "device_type_of",
    "gloo_on_loopback",
    "gloo_reads_at_once",
    "same_backend",
    "use_device",
]


def default_backend(device_type: str | None) -> str:
    """The backend that torch's own map has for a device type; None: for this host's accelerator."""
    wanted = device_type or _torch.accelerator_type() or "cpu"
    backend = dist.Backend.default_device_backend_map.get(wanted)
    if backend is None:
        known = ", ".join(sorted(dist.Backend.default_device_backend_map))
        raise LaunchEnvironmentError(
            f"torch knows no backend for device_type={wanted!r}; pass backend=, or one of: {known}."
        )
    return str(backend)


def _backend_map(backend: str) -> dict[str, str]:
    """``"cpu:gloo,cuda:nccl"`` as a dict; a plain name has no devices and gives an empty one."""
    if ":" not in backend:
        return {}
    pairs = [part.strip().split(":") for part in backend.lower().split(",")]
    if any(len(pair) != 2 or not all(pair) for pair in pairs):
        raise LaunchEnvironmentError(
            f"backend={backend!r} is not understood; wanted a name such as 'gloo', or a map such "
            "as 'cpu:gloo,cuda:nccl'."
        )
    return dict(pairs)


def device_type_of(backend: str) -> str:
    """The device type a backend is for: its accelerator where it has one; ``fake``: cpu."""
    if backend == "fake":
        return "cpu"  # torch's map has it for types that it never saw
    devices = list(_backend_map(backend))
    if not devices:
        devices = [
            device
            for device, name in dist.Backend.default_device_backend_map.items()
            if str(name) == backend.lower()
        ]
    return next((device for device in devices if device not in ("cpu", "mps")), "cpu")


def same_backend(wanted: str, got: str) -> bool:
    """Whether a group made with backend ``got`` is what ``wanted`` asks for."""
    want, have = _backend_map(wanted), _backend_map(got)
    if want and have:
        return want.items() <= have.items()
    if want:
        return set(want.values()) == {got.lower()}
    return wanted.lower() in (set(have.values()) or {got.lower()})


def check_backend(backend: str) -> None:
    """Refuse a backend that this torch does not have, before any socket opens."""
    for name in set(_backend_map(backend).values()) or {backend.lower()}:
        if name != "fake" and not dist.is_backend_available(name):
            there = [b for b in dist.Backend.backend_list if b == "fake" or _available(b)]
            raise LaunchEnvironmentError(
                f"backend={name!r} is not available in this build of torch; available: "
                f"{', '.join(there)}."
            )


def _available(backend: str) -> bool:
    return backend != "undefined" and bool(dist.is_backend_available(backend))


def _handle(device_type: str) -> Any:
    """``torch.cuda`` and its like; None for a type that has no such module."""
    return getattr(torch, device_type, None)


def as_device(device: Any) -> torch.device:
    """``"cuda:1"``, an index of the accelerator, or a ``torch.device``, as the last."""
    try:
        if isinstance(device, int) and not isinstance(device, bool):
            return torch.device(_torch.accelerator_type() or "cpu", device)
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise LaunchEnvironmentError(
            f"device={device!r} is no device: {str(error).splitlines()[0]}"
        ) from error


def choose_device(
    device_type: str, local_rank: int | None, *, asked: torch.device | None, backend: str
) -> torch.device:
    """The device of this process: the one asked for, else by local rank, else the only one there
    is."""
    try:
        bare = torch.device(device_type)
    except RuntimeError as error:
        raise LaunchEnvironmentError(
            f"device_type={device_type!r} is no type of device: {str(error).splitlines()[0]}"
        ) from error
    if asked is not None and asked.type != bare.type:
        raise LaunchEnvironmentError(
            f"device={str(asked)!r} is not of device_type={device_type!r}, which follows from the "
            "backend where it is not given; pass backend= or device_type= that fit the device."
        )
    if bare.type in ("cpu", "meta") or backend == "fake":
        return asked or bare
    handle = _handle(bare.type)
    count = handle.device_count() if hasattr(handle, "device_count") else 0
    if count == 0:
        raise LaunchEnvironmentError(
            f"device_type={device_type!r}, but torch sees no such device on this host; pass "
            "device_type='cpu' and backend='gloo' to run without."
        )
    # One visible device for each process is common; its index is 0 whatever the local rank is.
    index = 0 if count == 1 else local_rank
    if asked is not None and asked.index is not None:
        index = asked.index
    if index is None or not 0 <= index < count:
        raise LaunchEnvironmentError(
            f"This is local rank {local_rank}, but torch sees {count} {bare.type} devices here (0 "
            f"to {count - 1}); start at most {count} processes on a host, or pass device=."
        )
    return torch.device(bare.type, index)


def current_device(device_type: str) -> torch.device:
    """The device in use, without initialising it where it is not."""
    handle = _handle(device_type)
    is_initialized = getattr(handle, "is_initialized", None)
    if device_type == "cpu" or is_initialized is None or not is_initialized():
        return torch.device(device_type)
    return torch.device(device_type, handle.current_device())


def binds_device(backend: str, device: torch.device) -> bool:
    """Whether torch takes ``device_id`` here: an accelerator, and a backend made for it."""
    if device.type == "cpu" or backend == "fake":
        return False
    name = _backend_map(backend).get(device.type, backend)
    return name == str(dist.Backend.default_device_backend_map.get(device.type)) and (
        "device_id" in inspect.signature(dist.init_process_group).parameters
    )


@contextlib.contextmanager
def use_device(device: torch.device) -> Iterator[None]:
    """Make ``device`` the current one, and put back what was current before.

    Nothing was current where the device was not initialised: then nothing is put back, since only
    initialising it could tell.
    """
    handle = _handle(device.type)
    if device.type == "cpu" or device.index is None or not hasattr(handle, "set_device"):
        yield
        return
    before = handle.current_device() if handle.is_initialized() else None
    handle.set_device(device)
    try:
        yield
    finally:
        if before is not None:
            handle.set_device(before)


@contextlib.contextmanager
def gloo_on_loopback() -> Iterator[None]:
    """Let the gloo groups made in this block listen on loopback alone, unless the user says where.

    gloo listens even in a world of 1, and takes its interface from the environment only.
    """
    loopback = next((n for _, n in socket.if_nameindex() if n in ("lo", "lo0")), None)
    with _told_gloo("GLOO_SOCKET_IFNAME", loopback):
        yield


@contextlib.contextmanager
def gloo_reads_at_once(store: Store | None, timeout: timedelta) -> Iterator[None]:
    """Let the gloo groups made in this block read all addresses in one go, unless the user decided.

    gloo asks the store for its ranks one by one, three requests each, unless its environment says
    that the store can tell many at once. A store that cannot is asked as ever. Then gloo waits for
    as long as the store does, not the group: ``timeout``, here.
    """
    with contextlib.ExitStack() as undo:
        undo.enter_context(_told_gloo("GLOO_ENABLE_STORE_V2_API", "1"))
        if store is not None:
            untyped: Any = store  # torch's types do not know its timeout
            undo.callback(store.set_timeout, untyped.timeout)
            store.set_timeout(timeout)
        yield


@contextlib.contextmanager
def _told_gloo(name: str, value: str | None) -> Iterator[None]:
    """A variable for the gloo groups made in this block, unless it is set already."""
    if name in os.environ or value is None:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
