"""The package is shaped as README.rst says."""

from __future__ import annotations

import ast
import re

import pytest

from launch import HERE

PACKAGE = HERE.parent / "distctx"
README = (HERE.parent / "README.rst").read_text()
ORDER = re.findall(r"^``([\w/]+)\.py``", README[README.index("How it is made") :], re.MULTILINE)


def imports_of(path) -> set[str]:
    """The modules of the package that a module imports when it is loaded, or inside functions."""
    tree = ast.parse(path.read_text())
    typing_only = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node not in typing_only:
            where = (node.module or "").replace(".", "/")
            if where == "distctx" or ((PACKAGE.parent / where).is_dir() and "distctx/" in where):
                found |= {f"{where}/{alias.name}" for alias in node.names}
            elif where.startswith("distctx/"):
                found.add(where)
    names = {name.removeprefix("distctx/") for name in found}
    return {name for name in names if (PACKAGE / f"{name}.py").exists()}


def test_every_module_is_listed():
    """README.rst lists every module of the package, once."""
    modules = {
        str(path.relative_to(PACKAGE).with_suffix(""))
        for path in PACKAGE.rglob("*.py")
        if path.stem != "__init__"
    }
    assert sorted(ORDER) == sorted(modules)


@pytest.mark.parametrize("module", ORDER)
def test_imports_go_one_way(module):
    """A module imports only what stands above it in README.rst's list."""
    above = set(ORDER[: ORDER.index(module)])
    below_by_right = {"picture"} if module == "layout" else set()
    assert imports_of(PACKAGE / f"{module}.py") <= above | below_by_right


@pytest.mark.parametrize("module", [m for m in ORDER if m != "_torch"])
def test_private_names_of_torch_stand_in_one_place(module):
    """No module but _torch.py touches a private name of torch at run time."""
    source = (PACKAGE / f"{module}.py").read_text()
    source = re.sub(r"if TYPE_CHECKING:.*?(?=\nelse|\n\S)", "", source, flags=re.DOTALL)
    assert not re.search(r"(dist|torch|c10d|mesh)\._[a-z]\w*(?!_)\(", source)
    assert "torch._C" not in source
    assert "distributed_c10d" not in source
