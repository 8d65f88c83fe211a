"""Every use of torch that is not public: each with its reason, and what happens where it is gone.

Nothing else in distctx touches a private name of torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = [
    "abort_world",
    "accelerator_type",
    "default_store",
    "default_timeout",
    "end_groups",
    "fake_store",
    "flattened_group",
    "forget_sharding",
    "group_timeout",
    "keep_groups_for_ever",
    "move_group_names",
    "named_group",
    "names_groups",
    "number_of_groups",
    "set_group_timeout",
]

_HELPER_NEEDS = {
    "group_size",
    "group_rank",
    "global_ranks_in_group",
    "backend",
    "store",
    "group_name",
    "timeout",
}


def names_groups() -> bool:
    """Whether ``named_group`` can be used with this torch and this default group.

    It cannot where torch's helper has changed, where the default group makes its sub-groups itself,
    or where an accelerator is bound to it: then torch splits the group, which is faster still.
    """
    world = getattr(c10d, "_world", None)
    if not hasattr(world, "pg_group_ranks") or not hasattr(world, "pg_map"):
        return False
    group = dist.group.WORLD
    return (
        _parameters(getattr(c10d, "_new_process_group_helper", None)) >= _HELPER_NEEDS
        and getattr(group, "bound_device_id", None) is None
        and "mesh_dim_names" in _parameters(device_mesh.DeviceMesh.from_group)
        and not hasattr(group, "new_group")
    )


@functools.cache
def _parameters(function: Any) -> frozenset[str]:
    """The names of what a function takes; none where there is no such function."""
    return frozenset(inspect.signature(function).parameters if function else ())


def named_group(ranks: Sequence[int], name: str, timeout: timedelta, description: str) -> Any:
    """A group of ``ranks``, made by its members alone, under ``name``. Talks to the members.

    Public ``new_group`` must be called by every rank for every group, which costs each rank as many
    calls as there are groups. ``use_local_synchronization=True`` spares that, but names a group by
    how many groups this rank holds, and ranks that hold different numbers wait for each other for
    ever. Guarded by ``names_groups``; without it distctx uses ``init_device_mesh``.
    """
    world: Any = dist.group.WORLD
    backend, store = c10d._world.pg_map[world]
    helper: Any = c10d._new_process_group_helper
    extra = {"group_desc": description} if "group_desc" in _parameters(helper) else {}
    group, _ = helper(
        group_size=len(ranks),
        group_rank=list(ranks).index(world.rank()),
        global_ranks_in_group=list(ranks),
        backend=c10d.Backend(backend),
        store=store,
        group_name=name,
        timeout=timeout,
        **extra,
    )
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group


def flattened_group(mesh: Any, dims: tuple[str, ...]) -> Any:
    """The one group that spans several dims of a mesh that somebody else made.

    Every rank of the mesh must call this the first time. ``_flatten`` is the only way to a group
    that the mesh itself knows.
    """
    flat = mesh[dims]._flatten()
    try:
        return flat.get_group()
    except (RuntimeError, TypeError):
        # torch 2.8 keeps flattened meshes of earlier worlds, and finds them by equality.
        resources: Any = getattr(device_mesh, "_mesh_resources", None)
        kept = getattr(resources, "root_to_flatten_mapping", None)
        if not kept:
            raise
        kept.pop(resources.get_root_mesh(mesh), None)
        return mesh[dims]._flatten().get_group()


def default_store() -> Store | None:
    """The store of the default group, so that ranks can meet in a world that distctx did not make.

    There is no public way to it. None where it is gone: then nothing meets there.
    """
    getter = getattr(c10d, "_get_default_store", None)
    return None if getter is None else getter()


def move_group_names(token: str) -> None:
    """Let the next world's groups be numbered from ``token``, so that no name comes twice.

    torch looks groups up by name, and names start from "0" again in each world: a mesh that
    somebody kept would be answered with the next world's groups. Must be called alike on every
    rank, just before ``init_process_group``; an empty token puts torch's own count back. Where
    torch no longer counts there, names are as torch makes them.
    """
    world: Any = getattr(c10d, "_world", None)
    if isinstance(getattr(world, "group_count", None), int):
        world.group_count = int(token, 16) * 1_000_000 if token else 0


def number_of_groups() -> int | None:
    """How many groups this process holds now, the default one with them; None where torch does not
    say."""
    names = getattr(getattr(c10d, "_world", None), "pg_names", None)
    return None if names is None else len(names)


def default_timeout(backend: str) -> timedelta:
    """torch's own timeout for a backend's groups."""
    nccl = getattr(c10d, "default_pg_nccl_timeout", None)
    if backend == "nccl" and isinstance(nccl, timedelta):
        return nccl
    return c10d.default_pg_timeout


def group_timeout(group: Any) -> timedelta | None:
    """The timeout of a group that somebody else made; None where torch does not say."""
    for device in getattr(group, "_device_types", ()):
        options = getattr(group._get_backend(device), "options", None)
        if isinstance(timeout := getattr(options, "_timeout", None), timedelta):
            return timeout
    return None


def set_group_timeout(group: Any, timeout: timedelta) -> None:
    """Give a group that ``init_device_mesh`` made the timeout that was asked for.

    ``init_device_mesh`` takes none. Where torch has no setter, the group keeps torch's default.
    """
    if (setter := getattr(c10d, "_set_pg_timeout", None)) is not None:
        setter(timeout, group)


def abort_world() -> None:
    """Abort all groups without waiting for the others, where torch can; else destroy them.

    ``destroy_process_group`` on NCCL waits for what is still running on the device, and peers may
    never come to it; abort is torch's way out and has no public name. It has no bound either. Quiet
    about what ended meanwhile.
    """
    with contextlib.suppress(KeyError, AssertionError):
        getattr(c10d, "_abort_process_group", dist.destroy_process_group)()


def end_groups(groups: Sequence[Any], *, abort: bool) -> None:
    """End sub-groups that were made here, the last first; quiet about what somebody ended before.

    ``abort``: without waiting for peers, where torch can (see ``abort_world``). No bound.
    """
    end = getattr(c10d, "_abort_process_group", None) if abort else None
    for group in reversed(groups):
        with contextlib.suppress(ValueError, AssertionError, KeyError):
            (end or dist.destroy_process_group)(group)


def forget_sharding() -> None:
    """Let DTensor forget what it worked out on meshes whose groups have ended, in this thread.

    It keeps the outcome of each operation, with the mesh of then, under the mesh's shape and names:
    the next mesh that is alike would be answered with groups that are gone ("Could not resolve the
    process group registered under the name …"). There is no public way to clear that; where torch
    keeps it elsewhere, it stays.
    """
    tensor = sys.modules.get("torch.distributed.tensor")
    dispatcher: Any = getattr(getattr(tensor, "DTensor", None), "_op_dispatcher", None)
    propagator = getattr(dispatcher, "sharding_propagator", None)
    kept = getattr(getattr(propagator, "propagate_op_sharding", None), "cache", None)
    if kept is not None:
        kept.cache_clear()
        # The same once more in C++, in newer torch.
        getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()


def keep_groups_for_ever() -> None:
    """In a forked child: never let torch destroy the groups it inherited.

    A child has none of the threads that their destructors join, so that it would hang when the
    interpreter ends. torch holds them in a dict without a public name; where that is gone, a child
    has to leave by ``os._exit``.
    """
    world = getattr(c10d, "_world", None)
    for group in list(getattr(world, "pg_map", ())):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def cuda_was_forked() -> bool:
    """Whether this process was forked from one that had touched CUDA, so that it has none.

    Torch knows, and has no public word for it; where that is gone, the first use of CUDA says so.
    """
    return bool(getattr(torch.cuda, "_is_in_bad_fork", bool)())


def fake_store() -> Store:
    """A store for the ``fake`` backend; importing it registers that backend with older torch."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def accelerator_type() -> str | None:
    """The type of this host's accelerator, or None. ``torch.accelerator`` is there from torch
    2.6."""
    if (accelerator := getattr(torch, "accelerator", None)) is not None:
        return accelerator.current_accelerator().type if accelerator.is_available() else None
    return "cuda" if torch.cuda.is_available() else None
