"""Numbers, shapes and names as callers give them, checked; with the errors for what cannot be."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

from distctx.exceptions import LayoutError

__all__ = [
    "are_names",
    "as_int",
    "as_names",
    "as_shape",
    "default_dim_names",
    "divisors",
    "is_sequence",
]


def as_int(value: Any, what: str, error: type[Exception] = LayoutError) -> int:
    """``value`` as an int; a bool, a float or a string is an ``error`` that names ``what``."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise error(f"{what} must be an int, got {value!r} ({type(value).__name__}).")


def are_names(dims: tuple[Any, ...]) -> bool:
    """Whether what is known of ``dims`` may be kept under them: a number equals others, as 1 does
    True, which is no dim."""
    return all(type(dim) is str for dim in dims)


def is_sequence(value: Any) -> bool:
    """Whether ``value`` has an order: a list, a tuple, a torch.Size; not a str, a set or a dict."""
    return hasattr(value, "__getitem__") and not isinstance(value, (str, bytes, Mapping))


def as_shape(shape: Any) -> tuple[int, ...]:
    """Sizes, at least one, of which one may be -1.

    Raises:
        LayoutError: they are not.
    """
    if not is_sequence(shape):
        raise LayoutError(f"mesh_shape must be a sequence of ints such as (-1, 2), got {shape!r}.")
    shape = tuple(shape)
    sizes = tuple(as_int(size, f"each size in mesh_shape={shape!r}") for size in shape)
    if not sizes:
        raise LayoutError("mesh_shape=() has no dims; pass at least one size, such as (-1,).")
    if bad := [size for size in sizes if size < 1 and size != -1]:
        raise LayoutError(
            f"mesh_shape={sizes} holds {bad[0]}; every size must be at least 1, or -1 once for "
            "what is left of the world size."
        )
    if sizes.count(-1) > 1:
        raise LayoutError(
            f"mesh_shape={sizes} holds -1 {sizes.count(-1)} times; only one size can be left open."
        )
    return sizes


def divisors(number: int, most: int = 4096) -> str:
    """The divisors of a number, as far as they are cheap to find, for an error."""
    small = [d for d in range(1, min(math.isqrt(number), most) + 1) if number % d == 0]
    known = sorted({*small, *(number // d for d in small)})
    shown = known if len(known) <= 18 else [*known[:16], "…", known[-1]]
    return ", ".join(map(str, shown)) + ("" if math.isqrt(number) <= most else ", and maybe others")


def default_dim_names(ndim: int) -> tuple[str, ...]:
    """``("dp",)`` for one dim, ``("dim_0", "dim_1", …)`` for more."""
    return ("dp",) if ndim == 1 else tuple(f"dim_{i}" for i in range(ndim))


def as_names(given: Any) -> tuple[str, ...]:
    """Names, no two alike.

    Raises:
        LayoutError: they are not.
    """
    if not is_sequence(given):
        raise LayoutError(
            f"mesh_dim_names must be a sequence of names such as ('dp', 'tp'), got {given!r}."
        )
    names: tuple[str, ...] = tuple(given)
    for name in names:
        if not isinstance(name, str) or not name:
            raise LayoutError(
                f"mesh_dim_names={names!r}: each name must be a str that is not empty, got "
                f"{name!r}."
            )
        if names.count(name) > 1:
            raise LayoutError(
                f"mesh_dim_names={names!r} holds {name!r} {names.count(name)} times; names must "
                "differ."
            )
    return names
