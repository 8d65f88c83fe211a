"""The mesh of a layout, its sub-meshes and its groups: built when first asked for, then the same
object."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from distctx import _torch
from distctx.devices import gloo_reads_at_once
from distctx.layout import MeshLayout

if TYPE_CHECKING:
    from distctx.world import World

__all__ = ["MeshCache"]


@attrs.define(eq=False, repr=False)
class MeshCache:
    """What was built of one layout in one world.

    All dims are built under one root, on first touch of any, so that FSDP2 with TP finds a common
    parent. Where no accelerator is bound, each rank makes only the groups it belongs to; where one
    is, ``init_device_mesh`` splits the world's communicator, which is one call a dim.
    """

    world: World
    layout: MeshLayout
    device_type: str
    timeout: timedelta
    rendezvous_timeout: timedelta

    _lock: threading.RLock = attrs.field(init=False, factory=threading.RLock)
    _root: DeviceMesh | None = attrs.field(init=False, default=None)
    _submeshes: dict[tuple[int, ...], DeviceMesh] = attrs.field(init=False, factory=dict)
    _spanning: dict[tuple[int, ...], Any] = attrs.field(init=False, factory=dict)
    _made: list[Any] = attrs.field(init=False, factory=list)

    @property
    def is_built(self) -> bool:
        """Whether the mesh is there already."""
        return self._root is not None

    def root(self) -> DeviceMesh:
        """The mesh of all dims. Talks to every rank the first time."""
        with self._lock:
            if self._root is None:
                with self._building("to build the mesh", {"building": "the mesh"}) as token:
                    named = self._names_groups()
                    self._root = self._build_named(token) if named else self._build()
            return self._root

    def submesh(self, dims: tuple[int, ...]) -> DeviceMesh:
        """The mesh of some dims, in mesh order. Talks to every rank if the mesh is not built."""
        with self._lock:
            root = self.root()
            if len(dims) == self.layout.ndim:
                return root
            if dims not in self._submeshes:
                self._submeshes[dims] = root[tuple(self.layout.dim_names[dim] for dim in dims)]
            return self._submeshes[dims]

    def group(self, dims: tuple[int, ...]) -> Any:
        """The group along one dim, or the one that spans several. Talks to every rank the first
        time."""
        with self._lock:
            root = self.root()
            ranks = self.layout.ranks(self.world.rank, *dims)
            if len(ranks) == self.world.world_size:
                return dist.group.WORLD
            for dim in dims:
                if self.layout.ranks(self.world.rank, dim) == ranks:
                    return root.get_group(dim)
            if dims not in self._spanning:
                names = [self.layout.dim_names[dim] for dim in dims]
                purpose = f"to build the group of {', '.join(names)}"
                with self._building(purpose, {"building": f"group({names})"}) as token:
                    self._spanning[dims] = self._build_spanning(token, dims, ranks)
            return self._spanning[dims]

    def forget(self) -> list[Any]:
        """Let go of everything; returns the groups that were made here, for the caller to end."""
        made, self._made, self._root = self._made, [], None
        self._submeshes.clear()
        self._spanning.clear()
        return made

    def _names_groups(self) -> bool:
        # Names must be alike on all ranks, so they come from a meeting, which needs a store.
        can_meet = self.world.store is not None or self.world.backend == "fake"
        return _torch.names_groups() and (can_meet or self.world.world_size == 1)

    def _build_named(self, token: str) -> DeviceMesh:
        groups = []
        for dim, name in enumerate(self.layout.dim_names):
            ranks = self.layout.ranks(self.world.rank, dim)
            groups.append(self._named_group(token, name, ranks))
        if len(groups) == 1:
            return DeviceMesh.from_group(
                groups[0], self.device_type, mesh_dim_names=self.layout.dim_names
            )
        return DeviceMesh.from_group(
            groups,
            self.device_type,
            mesh=torch.arange(self.world.world_size, dtype=torch.int).view(self.layout.shape),
            mesh_dim_names=self.layout.dim_names,
        )

    def _named_group(self, token: str, name: str, ranks: tuple[int, ...]) -> Any:
        if len(ranks) == self.world.world_size:
            return dist.group.WORLD
        group = _torch.named_group(
            ranks, f"{token}-{name}-{ranks[0]}", self.timeout, f"mesh_{name}"
        )
        self._made.append(group)
        return group

    def _build(self) -> DeviceMesh:
        mesh = init_device_mesh(
            self.device_type, self.layout.shape, mesh_dim_names=self.layout.dim_names
        )
        for dim in range(self.layout.ndim):
            group = mesh.get_group(dim)
            if group is not dist.group.WORLD:
                self._made.append(group)
                if self.world.backend != "fake":
                    _torch.set_group_timeout(group, self.timeout)
        return mesh

    def _build_spanning(self, token: str, dims: tuple[int, ...], ranks: tuple[int, ...]) -> Any:
        name = "_".join(self.layout.dim_names[dim] for dim in dims)
        if self._names_groups():
            return self._named_group(token, name, ranks)
        parts = [list(part) for part in self.layout.all_groups(*dims)]
        if getattr(dist.group.WORLD, "bound_device_id", None) is not None:
            group = dist.split_group(
                split_ranks=parts, timeout=self.timeout, group_desc=f"mesh_{name}"
            )
            mine = [group]
        else:
            made = [dist.new_group(part, timeout=self.timeout) for part in parts]
            mine = [group for group, part in zip(made, parts, strict=True) if list(ranks) == part]
        self._made += mine
        return mine[0]

    @contextlib.contextmanager
    def _building(self, purpose: str, wants: dict[str, Any]) -> Iterator[str]:
        """All ranks build the same here; what was made is taken back if it fails."""
        wants |= {
            "mesh_shape": list(self.layout.shape),
            "mesh_dim_names": list(self.layout.dim_names),
        }
        with self.world.meeting(purpose, wants, self.rendezvous_timeout) as token:
            before = len(self._made)
            try:
                with gloo_reads_at_once(self.world.store, self.timeout):
                    yield token
            except BaseException:
                made, self._made = self._made[before:], self._made[:before]
                _torch.end_groups(made, abort=False)
                raise
