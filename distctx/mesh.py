"""Plain functions over torch's DeviceMesh, for code that has a mesh already.

A mesh here is anything with ``.mesh`` (a tensor of ranks) and, where a coordinate is needed,
``.get_coordinate()``; a DeviceMesh is one. A dim is an index, a negative one counted from the end,
or a name; where data parallelism is meant, also a tuple of them, which count as one dim, row-major
in the order given.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from distctx._torch import fake_store, flattened_group
from distctx.arguments import as_int
from distctx.environment import LaunchEnvironment, is_env
from distctx.exceptions import DistctxError, LayoutError, RuntimeStateError
from distctx.layout import Dim, MeshLayout, Partition
from distctx.stores import HashStore

# What DTENSOR_AVAILABLE guards is bound.
# pyright: reportPossiblyUnboundVariable=false
try:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    DTENSOR_AVAILABLE = dist.is_available()
except ImportError:
    DTENSOR_AVAILABLE = False

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "DTENSOR_AVAILABLE",
    "build_device_mesh",
    "ensure_distributed_initialized",
    "resolve_data_parallel_partition",
    "resolve_tensor_parallel_group_size",
]

_NOT_INITIALIZED = (
    "torch.distributed is not initialized. Call ensure_distributed_initialized() first."
)


def ensure_distributed_initialized(
    backend: str | None = None,
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> bool:
    """Initialise the default process group unless there is one. Talks to every rank if it does.

    Args:
        backend: None: ``"nccl"`` with CUDA, else ``"gloo"``.
        init_method: torch's URL for the meeting place. None: from the launcher.
        rank: None: from the launcher.
        world_size: None: from the launcher; without one, a world of 1.

    Returns:
        True if this call initialised the group, False if there was one.

    Raises:
        RuntimeError: torch was built without distributed.
        LaunchEnvironmentError: the launch is partly set or contradicts itself.
    """
    if not dist.is_available():
        raise DistctxError(
            "torch.distributed is not available in this build of torch; install a torch that has "
            "it."
        )
    if dist.is_initialized():
        return False
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    environment = LaunchEnvironment.detect(
        rank=rank, world_size=world_size, init_method=init_method, needs_address=backend != "fake"
    )
    arguments: dict[str, Any] = {"rank": environment.rank, "world_size": environment.world_size}
    if backend == "fake":
        arguments["store"] = fake_store()
    elif not is_env(init_method):
        arguments["init_method"] = init_method
        for name in ("rank", "world_size"):
            if environment.sources[name].endswith("in init_method"):
                del arguments[name]  # torch takes it from there, and only from there
    elif environment.world_size == 1:
        arguments["store"] = HashStore()
    else:
        arguments["init_method"] = f"tcp://{environment.master_addr}:{environment.master_port}"
    if backend == "nccl" and "device_id" in inspect.signature(dist.init_process_group).parameters:
        arguments["device_id"] = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group(backend=backend, **arguments)
    return True


def build_device_mesh(
    device_type: str = "cuda",
    mesh_shape: Sequence[int] | None = None,
    mesh_dim_names: Sequence[str] | None = None,
) -> DeviceMesh:
    """A DeviceMesh over all ranks, by torch's ``init_device_mesh``. Talks to every rank.

    Args:
        device_type: the type of the mesh's devices.
        mesh_shape: the size of each dim; one of them may be -1. None: all ranks in one dim.
        mesh_dim_names: a name for each dim. None: no names, and then no dim can be asked for by
            name.

    Raises:
        RuntimeError: torch has no DeviceMesh, or no process group is initialised.
        ValueError: the shape does not use every rank exactly once.
    """
    if not DTENSOR_AVAILABLE:
        raise DistctxError(
            "torch.distributed.device_mesh is not available in this build of torch; install torch "
            "2.3 or newer, built with distributed."
        )
    if not dist.is_initialized():
        raise RuntimeStateError(_NOT_INITIALIZED)
    world_size = dist.get_world_size()
    layout = MeshLayout((-1,) if mesh_shape is None else mesh_shape, mesh_dim_names)
    if layout.is_resolved and layout.world_size != world_size:
        raise LayoutError(
            f"mesh_shape={layout.shape} uses {layout.world_size} ranks, but "
            f"world_size={world_size}."
        )
    names = None if mesh_dim_names is None else layout.dim_names
    return init_device_mesh(device_type, layout.resolve(world_size).shape, mesh_dim_names=names)


def resolve_data_parallel_partition(
    device_mesh: Any, dp_mesh_dim: Dim | tuple[Dim, ...] | None, sharded_by_data_parallel: bool
) -> Partition:
    """Which share of the data is this rank's. Talks to nobody.

    Args:
        device_mesh: the mesh; None: the data is whole on every rank. Without ``.mesh``: all ranks
            of the world share the data.
        dp_mesh_dim: the dim, or tuple of dims, along which the data is split. None needs a 1-D
            mesh.
        sharded_by_data_parallel: False: the data is whole on every rank.

    Returns:
        ``(num_partitions, partition_index)``.

    Raises:
        ValueError: ``dp_mesh_dim`` is None and the mesh has more than one dim, or it is no dim of
            the mesh, or this rank is not in the mesh.
    """
    if not sharded_by_data_parallel or device_mesh is None:
        return Partition(1, 0)
    shape = _shape(device_mesh)
    if shape is None:
        if not _initialized():
            return Partition(1, 0)
        return Partition(dist.get_world_size(), dist.get_rank())
    if dp_mesh_dim is None:
        if len(shape) != 1:
            raise LayoutError(
                f"dp_mesh_dim must be specified for a mesh with {len(shape)} dimensions, shape "
                f"{shape}: pass the dim along which the data is split, or a tuple of dims."
            )
        dp_mesh_dim = 0
    dims = _dims(device_mesh, dp_mesh_dim, "dp_mesh_dim", shape)
    coordinate = device_mesh.get_coordinate()
    if coordinate is None:
        raise LayoutError(
            "Current rank does not belong to the supplied DeviceMesh; ask only on the ranks that "
            f"are in it (its shape is {shape})."
        )
    index = 0
    for dim in dims:
        index = index * shape[dim] + int(coordinate[dim])
    return Partition(math.prod(shape[dim] for dim in dims), index)


def resolve_tensor_parallel_group_size(
    device_mesh: Any, tp_mesh_dim: Dim | None, tensor_parallel_enabled: bool
) -> int:
    """How many ranks share one tensor. Talks to nobody.

    Args:
        device_mesh: the mesh; None: 1. Without ``.mesh``: the whole world, or 1 without a group.
        tp_mesh_dim: the dim of tensor parallelism. None: the dim named ``tp``; 1 where there is
            none.
        tensor_parallel_enabled: False: 1.

    Raises:
        ValueError: ``tp_mesh_dim`` is no dim of the mesh.
    """
    if not tensor_parallel_enabled or device_mesh is None:
        return 1
    shape = _shape(device_mesh)
    if shape is None:
        return dist.get_world_size() if _initialized() else 1
    if tp_mesh_dim is None:
        tp_mesh_dim = "tp" if "tp" in (getattr(device_mesh, "mesh_dim_names", None) or ()) else None
    if tp_mesh_dim is None:
        return 1
    return shape[_dim(device_mesh, tp_mesh_dim, "tp_mesh_dim", shape)]


def _resolve_mesh_submesh(device_mesh: DeviceMesh, mesh_dim: Dim) -> DeviceMesh:
    """The sub-mesh along one dim; a 1-D mesh is itself. Talks to nobody.

    Raises:
        ValueError: the mesh has no mesh_dim_names, by which torch slices, or no such dim.
    """
    shape = _shape(device_mesh) or ()
    if len(shape) == 1:
        return device_mesh
    names = getattr(device_mesh, "mesh_dim_names", None)
    if not names:
        raise LayoutError(
            f"A mesh with shape {shape} can be sliced only by name, and this one has no "
            "mesh_dim_names; pass mesh_dim_names where it is made."
        )
    return device_mesh[names[_mesh_dim(device_mesh, mesh_dim)]]


def _resolve_mesh_dim_group(device_mesh: DeviceMesh, mesh_dim: Dim) -> ProcessGroup:
    """The process group along one dim. Talks to nobody.

    Raises:
        ValueError: the mesh has no such dim.
    """
    return device_mesh.get_group(_mesh_dim(device_mesh, mesh_dim))


def _resolve_dp_group_from_mesh(
    device_mesh: DeviceMesh, dp_mesh_dim: Dim | tuple[Dim, ...] | None
) -> ProcessGroup | None:
    """The process group of data parallelism; None where ``dp_mesh_dim`` is None.

    Talks to nobody for one dim. A tuple of several, in mesh order, is the one group that spans
    them,
    which torch makes the first time it is asked: then every rank of the mesh must ask.
    """
    if dp_mesh_dim is None:
        return None
    if not isinstance(dp_mesh_dim, (tuple, list)):
        return _resolve_mesh_dim_group(device_mesh, dp_mesh_dim)
    dims = _dims(device_mesh, dp_mesh_dim, "dp_mesh_dim", _shape(device_mesh) or ())
    if len(dims) == 1:
        return _resolve_mesh_dim_group(device_mesh, dims[0])
    names = device_mesh.mesh_dim_names
    if not names or list(dims) != sorted(dims):
        raise LayoutError(
            f"dp_mesh_dim={dp_mesh_dim!r} must name its dims in the order of the mesh, and the "
            f"mesh must have mesh_dim_names (its are {names}), for one group to span them."
        )
    spanning: ProcessGroup = flattened_group(device_mesh, tuple(names[dim] for dim in dims))
    return spanning


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def _shape(device_mesh: Any) -> tuple[int, ...] | None:
    """The shape of a mesh, or None for what has no ``.mesh``."""
    if DTENSOR_AVAILABLE and isinstance(device_mesh, DeviceMesh):
        return tuple(device_mesh.shape)  # `.mesh.shape` makes a tensor first: 57 µs
    tensor = getattr(device_mesh, "mesh", None)
    return None if tensor is None else tuple(tensor.shape)


def _dim(device_mesh: Any, dim: Dim, what: str, shape: tuple[int, ...]) -> int:
    if isinstance(dim, str):
        names = getattr(device_mesh, "mesh_dim_names", None)
        if not names:
            raise LayoutError(
                f"{what}={dim!r} is a name, but this mesh has no mesh_dim_names; pass an index "
                f"from 0 to {len(shape) - 1}, or mesh_dim_names where the mesh is made."
            )
        return MeshLayout(shape, names).dim(dim, what)
    return MeshLayout(shape).dim(dim, what)


def _mesh_dim(device_mesh: Any, mesh_dim: Dim) -> int:
    shape = _shape(device_mesh) or ()
    if not isinstance(mesh_dim, str):
        index = as_int(mesh_dim, "mesh_dim")
        if not -len(shape) <= index < len(shape):
            raise LayoutError(
                f"mesh_dim={index} is out of range for a mesh with {len(shape)} dimensions."
            )
    return _dim(device_mesh, mesh_dim, "mesh_dim", shape)


def _dims(device_mesh: Any, dims: Any, what: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    given = tuple(dims) if isinstance(dims, (tuple, list)) else (dims,)
    indices = tuple(_dim(device_mesh, dim, what, shape) for dim in given)
    if not indices or len(set(indices)) != len(indices):
        raise LayoutError(f"{what}={dims!r} must name at least one dim, and none twice.")
    return indices
