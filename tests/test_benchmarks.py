"""The benchmarks run and judge as they say; what they measure is for a quiet machine to tell."""

from __future__ import annotations

import math

import pytest

import benchmarks.__main__ as command
from benchmarks import (
    bench_import,
    bench_lifecycle,
    bench_lookup,
    bench_mesh,
    bench_pytest,
    bench_rendezvous,
    bench_start,
    common,
    ranks,
)
from benchmarks.common import Findings, Ratio

MET = Ratio("a / b", [1.0, 2.0, 3.0], [2.0, 2.0, 2.0], 1.0)
MISSED = Ratio("c / d", [1.0, 3.0, 3.0], [1.0, 2.0, 2.0], 1.4, "MiB")
OPEN = Ratio("e / f", [5.0, 5.0, 5.0], [1.0, 1.0, 1.0])


@pytest.fixture(autouse=True)
def from_the_checkout(monkeypatch):
    """As a person runs them: the forkserver and the processes find the package by its folder."""
    monkeypatch.chdir(command.__file__.rsplit("/", 2)[0])


def test_a_ratio_is_judged_by_its_median():
    """Pair by pair, then the median: not the ratio of the medians, nor the best pair."""
    assert MET.ratios == [0.5, 1.0, 1.5]
    assert not MET.is_missed
    assert MISSED.is_missed
    assert not OPEN.is_missed
    swapped = Ratio("g / h", [1.0, 10.0, 100.0], [100.0, 1.0, 10.0], 1.0)
    assert swapped.is_missed  # though the medians are alike


def test_sides_take_turns():
    """Each round measures every side once, and begins with another; the first does not count."""
    order = []

    def side(name):
        def measure():
            order.append(name)
            return len(order)

        return measure

    took = common.rounds({"a": side("a"), "b": side("b"), "c": side("c")}, 3)
    assert "".join(order) == "abcabcbcacab"
    assert took == {"a": [4, 9, 11], "b": [5, 7, 12], "c": [6, 8, 10]}


def test_the_exponent_is_the_slope_on_log_axes():
    """What grows with the square has 2, what does not grow 0."""
    sizes = [2, 4, 8, 16]
    assert common.exponent(sizes, [size**2 / 7 for size in sizes]) == pytest.approx(2)
    assert common.exponent(sizes, [0.3] * 4) == pytest.approx(0)


def test_the_plot_has_a_line_a_doubling_and_marks_in_order():
    """Sizes not measured are empty lines, so that the axis is logarithmic; marks stand by cost."""
    lines = common.on_log_axes([2, 8], {"us": [0.001, 0.01], "them": [0.1, 10.0]}, width=5)
    assert lines == [
        "o us, x them",
        "        2 |o x  | 1 ms, 100 ms",
        "        4 |     |",
        "        8 | o  x| 10 ms, 10 s",
    ]


def test_tables():
    """The same rows for a terminal, for Markdown and for reStructuredText."""
    assert common.as_markdown([MET, MISSED]).splitlines() == [
        "| ours / theirs | ratio | quartiles | at most | medians | pairs |",
        "| --- | --- | --- | --- | --- | --- |",
        "| a / b | 1 | 0.75 to 1.25 | 1 | 2 s / 2 s | 3 |",
        "| c / d | 1.5 | 1.25 to 1.5 | 1.4, missed | 3 MiB / 2 MiB | 3 |",
    ]
    assert common.as_rst([MET, MISSED]).splitlines() == [
        "=============  =====  ============  ===========  =====",
        "ours / theirs  ratio  quartiles     at most      pairs",
        "=============  =====  ============  ===========  =====",
        "a / b          1      0.75 to 1.25  1            3",
        "c / d          1.5    1.25 to 1.5   1.4, missed  3",
        "=============  =====  ============  ===========  =====",
    ]
    assert "1.4, missed" in common.as_text([MET, MISSED])


@pytest.mark.parametrize(("rows", "status"), [([MET, OPEN], 0), ([MET, MISSED], 1)])
def test_the_command_fails_where_a_bound_is_passed(monkeypatch, capsys, rows, status):
    """One table of all that was asked for, the machine below it, and what was missed said."""
    monkeypatch.setattr(bench_import, "main", lambda: Findings(rows[:1]))
    monkeypatch.setattr(bench_lookup, "main", lambda: Findings(rows[1:], ["and a line"]))
    assert command.main(["import", "lookup", "--markdown"]) == status
    said = capsys.readouterr()
    assert said.out.startswith(common.as_markdown(rows) + "\nand a line\n")
    assert said.out.endswith(common.machine().partition("load")[2].split(", ", 1)[1] + "\n")
    assert [line for line in said.err.splitlines() if "missed" in line] == (
        ["missed: c / d"] if status else []
    )


def test_the_command_names_what_there_is(capsys):
    """A name that is none is an error that lists those that are."""
    with pytest.raises(SystemExit) as caught:
        command.main(["lockup"])
    assert caught.value.code == 2
    assert "'lockup'; there are start, lifecycle" in capsys.readouterr().err


def test_absent_peers_are_said(monkeypatch, capsys):
    """What is not compared is said, so that no table looks whole that is not."""
    monkeypatch.setattr(command, "is_here", lambda peer: peer == "accelerate")
    monkeypatch.setattr(bench_import, "main", lambda: Findings([MET]))
    command.main(["import"])
    said = capsys.readouterr().out
    assert "not installed, so not compared with: lightning_fabric, expecttest" in said


def complete(rows, number):
    """Whether each row has so many pairs of times that passed."""
    return all(len(row.ours) == len(row.theirs) == number for row in rows) and all(
        cost > 0 and math.isfinite(cost) for row in rows for cost in (*row.ours, *row.theirs)
    )


def test_each_benchmark_has_its_bounds():
    """The table of the command has a row for every promise: so the bounds stand in the code."""
    assert {shape: bound for shape, bound in bench_mesh.SIMULATED.items() if bound} == {
        (16, 16, 16): 1 / 8,
        (64, 32, 32): 1 / 20,
        (64, 64, 64): 1 / 20,
    }
    assert bench_start.RANKS == (1, 2, 4, 8)
    assert bench_lifecycle.RANKS == (1, 4)
    assert [math.prod(shape) for shape in bench_mesh.REAL] == [4, 8, 16, 32, 64]


def test_lookups(monkeypatch):
    """Every question is held against a bare lookup, a DeviceMesh and its own growth."""
    monkeypatch.setattr(bench_lookup, "TIMES", 10)
    monkeypatch.setattr(bench_lookup, "LARGE", (4, 4, 4))
    rows = bench_lookup.main(2).rows
    assert complete(rows, 2)
    assert len(rows) == 2 * 12 + 5
    assert sum(row.at_most == 3.0 for row in rows) == 10
    assert sum(row.at_most == 0.01 for row in rows) == 8


def test_lifecycle(monkeypatch):
    """One rank, and a torchrun job."""
    monkeypatch.setattr(bench_lifecycle, "LIVES", 1)
    monkeypatch.setattr(bench_lifecycle, "RANKS", (1, 2))
    rows = bench_lifecycle.main(2).rows
    assert complete(rows, 2)
    assert [row.at_most for row in rows] == [1.10, 1.10]


def test_starts(monkeypatch):
    """Each peer that is here has a row, and its script gives the right sum."""
    monkeypatch.setattr(bench_start, "RANKS", (2,))
    rows = bench_start.main(1).rows
    assert complete(rows, 1)
    assert rows[0].question == "process start to first sum, 2 ranks / bare torch"
    assert rows[0].at_most == 1.05


def test_meshes(monkeypatch):
    """Simulated ranks, time and memory, and real ones, time and requests."""
    monkeypatch.setattr(bench_mesh, "SIMULATED", {(2, 2, 2): None, (2, 2, 4): 9.0, (2, 4, 4): None,
                                                  (4, 4, 4): None, (4, 4, 8): None})  # fmt: skip
    monkeypatch.setattr(bench_mesh, "REAL", ((2, 2),))
    monkeypatch.setattr(bench_mesh, "SEEN_IN_MEMORY", 10**9)
    found = bench_mesh.main(2)
    assert complete(found.rows, 2)
    assert [row.at_most for row in found.rows] == [None, 9.0, None, None, None, 1.0, 1.0]
    assert found.rows[-1].question == "2-D mesh of 4 gloo ranks, requests of a rank"
    assert any("init_device_mesh grows with the power" in line for line in found.lines)


def test_a_rank_that_fails_ends_the_benchmark():
    """It is an error, not a wait for ever."""
    with pytest.raises(RuntimeError, match="a rank of 2 failed"):
        ranks.on_ranks(2, {}, _fail)


def _fail(environ, barrier):
    if environ["RANK"] == "1":
        raise ValueError
    barrier.wait()


def test_first_starts():
    """Both ways to serve a store."""
    for served in (False, True):
        assert complete([bench_rendezvous.first_starts(2, 1, served=served)], 1)


def test_further_tests():
    """The time of one test of four ranks, by the plugin's run and by hand."""
    plugin, by_hand = bench_pytest.run(bench_pytest._PLUGIN), bench_pytest.run(bench_pytest._SPAWN)
    assert (len(plugin[1]), len(by_hand[1])) == (20, 1)


def test_layouts_from_the_command_line():
    """The command and the script that it is held against both run."""
    assert bench_import.process(*bench_import._LAYOUT) > 0
    assert bench_import.timed("import torch", "import distctx")[1] > 0
