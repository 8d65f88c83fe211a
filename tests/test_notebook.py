"""In real Jupyter, run without a screen: open, run the cell again, look, close."""

from __future__ import annotations

import pytest

from launch import clean_environment, need

OPEN = {
    "single": "rt = DistributedRuntime(mesh_shape=(1, 1), mesh_dim_names=('dp', 'tp')).open()",
    "simulated": "rt = DistributedRuntime.simulate(\n"
    "    5, 8, mesh_shape=(-1, 2), mesh_dim_names=('dp', 'tp')).open()",
}


def outputs(cell) -> tuple[str, str]:
    """What a cell printed, and what it showed as HTML."""
    printed = "".join(one.get("text", "") for one in cell.outputs if one.output_type == "stream")
    shown = [one.data.get("text/html", "") for one in cell.outputs if hasattr(one, "data")]
    return printed, "".join(shown)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world", ["single", "simulated"])
def test_a_notebook(tmp_path, monkeypatch, world):
    """Running the cell that opens again joins what is there; looking shows the picture; closing
    ends it, and opening after that begins anew."""
    need("nbclient")
    need("ipykernel")
    import nbclient
    import nbformat

    open_again = f"first = id(rt.mesh)\n{OPEN[world]}\nprint(id(rt.mesh) == first, rt.state.name)"
    cells = [
        "import torch, torch.distributed as dist\nfrom distctx import DistributedRuntime",
        OPEN[world],
        open_again,
        "rt",
        "rt.layout",
        "print(rt.draw('tp'))\nprint(rt.describe())",
        "total = torch.ones(1)\ndist.all_reduce(total, group=rt.group('tp'))\nprint(total.item())",
        "import gc; gc.collect()\nrt.close()\nprint(rt.state.name, dist.is_initialized())",
        f"{OPEN[world]}\nprint(rt.mesh.shape)\nrt.close()\nprint(dist.is_initialized())",
    ]
    monkeypatch.setattr("os.environ", clean_environment({"JUPYTER_PLATFORM_DIRS": "1"}))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(
        notebook, timeout=60, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    _, opened, again, shown, layout, drawn, summed, closed, anew = map(outputs, notebook.cells)
    assert opened == ("", "")
    assert again[0].strip().endswith("True OPEN")
    rank = "0/1 at (dp=0, tp=0)" if world == "single" else "5/8 at (dp=2, tp=1)"
    assert f"DistributedRuntime(open, rank {rank}" in shown[1]
    assert "<table" in shown[1]
    assert "<table" in layout[1]
    assert f"[{rank[0]}]" in drawn[0]
    assert "dp_partition" in drawn[0]
    assert summed[0] == "1.0\n"
    assert closed[0] == "CLOSED False\n"
    assert anew[0].endswith("False\n")
