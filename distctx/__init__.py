"""The start, the shape and the end of a distributed PyTorch process.

Names are loaded on first use: ``import distctx`` imports neither torch nor attrs.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distctx.environment import LaunchEnvironment as LaunchEnvironment
    from distctx.exceptions import DistctxError as DistctxError
    from distctx.exceptions import GroupConflictError as GroupConflictError
    from distctx.exceptions import LaunchEnvironmentError as LaunchEnvironmentError
    from distctx.exceptions import LayoutError as LayoutError
    from distctx.exceptions import RankDisagreementError as RankDisagreementError
    from distctx.exceptions import RemoteRankError as RemoteRankError
    from distctx.exceptions import RendezvousError as RendezvousError
    from distctx.exceptions import RendezvousTimeoutError as RendezvousTimeoutError
    from distctx.exceptions import RuntimeStateError as RuntimeStateError
    from distctx.layout import MeshLayout as MeshLayout
    from distctx.layout import Partition as Partition
    from distctx.mesh import DTENSOR_AVAILABLE as DTENSOR_AVAILABLE
    from distctx.mesh import build_device_mesh as build_device_mesh
    from distctx.mesh import ensure_distributed_initialized as ensure_distributed_initialized
    from distctx.mesh import resolve_data_parallel_partition as resolve_data_parallel_partition
    from distctx.mesh import (
        resolve_tensor_parallel_group_size as resolve_tensor_parallel_group_size,
    )
    from distctx.runtime import DistributedRuntime as DistributedRuntime
    from distctx.runtime import State as State

_HOME = {
    "DTENSOR_AVAILABLE": "mesh",
    "DistctxError": "exceptions",
    "DistributedRuntime": "runtime",
    "GroupConflictError": "exceptions",
    "LaunchEnvironment": "environment",
    "LaunchEnvironmentError": "exceptions",
    "LayoutError": "exceptions",
    "MeshLayout": "layout",
    "Partition": "layout",
    "RankDisagreementError": "exceptions",
    "RemoteRankError": "exceptions",
    "RendezvousError": "exceptions",
    "RendezvousTimeoutError": "exceptions",
    "RuntimeStateError": "exceptions",
    "State": "runtime",
    "build_device_mesh": "mesh",
    "ensure_distributed_initialized": "mesh",
    "resolve_data_parallel_partition": "mesh",
    "resolve_tensor_parallel_group_size": "mesh",
}

# Type checkers have the imports above.
__all__ = list(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version(__name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
