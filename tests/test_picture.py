"""Pictures of layouts and runtimes: text and HTML of the same, static, escaped, bounded."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from distctx import DistributedRuntime, LayoutError, MeshLayout
from distctx.picture import draw
from launch import lacks

SHAPES = {
    (2, 4): ("dp", "tp"),
    (2, 2, 2, 2): ("pp", "dp", "cp", "tp"),
    (64, 32, 8): ("pp", "dp", "tp"),
}


class Reader(HTMLParser):
    """Tags, attributes and words of a piece of HTML; every tag must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.words += data.split()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mark", ["dp", "tp"])
def test_the_html_holds_what_the_text_holds(shape, mark):
    """The same content, as static elements: no script, no link, no style sheet."""
    layout = MeshLayout(shape, SHAPES[shape])
    picture = draw(layout, layout.world_size // 3, (mark,))
    html = Reader(picture.html())
    assert set(html.words) == set(str(picture).split())
    assert html.tags == {"div", "table", "tr", "th", "td"}
    assert html.attributes == {"style"}
    assert len(picture.html()) < 60_000


def test_every_word_is_escaped():
    """A dim's name is text, whatever it holds."""
    evil = "<script>alert('dp')</script>"
    with DistributedRuntime.simulate(1, 4, mesh_shape=(2, 2), mesh_dim_names=(evil, "t&p")) as rt:
        for shown in (rt._repr_html_(), rt.layout._repr_html_()):
            assert "<script" not in shown
            assert {"script", "a", "img"}.isdisjoint(Reader(shown).tags)
            assert evil.split()[0] in "".join(Reader(shown).words)
    open_layout = MeshLayout((-1,), (evil,))
    assert "<script" not in open_layout._repr_html_()


def test_colours_suit_a_light_and_a_dark_page():
    """Words have the page's own colour, and what is marked is only tinted."""
    html = draw(MeshLayout((2, 4)), 5, (0,)).html()
    assert set(re.findall(r"[;\"]color:(\w+)", html)) <= {"inherit"}
    colours = re.findall(r"(?:background|border):[^;\"]*", html)
    assert all("rgba(" in colour or "none" in colour for colour in colours)
    assert "#" not in html


def test_a_runtime_draws_itself(monkeypatch):
    """``draw`` marks this rank and its group, within the terminal; before opening too."""
    monkeypatch.setenv("COLUMNS", "60")
    rt = DistributedRuntime.simulate(
        5, 65536, mesh_shape=(-1, 64), mesh_dim_names=("dp", "tp"), dp_mesh_dim="dp"
    )
    lines = rt.draw("tp").splitlines()
    assert "[5]" in rt.draw()
    assert "(63)" in rt.draw("tp")
    assert max(map(len, lines)) <= 60
    with pytest.raises(LayoutError, match="is not a dim of this mesh"):
        rt.draw("cp")


def test_html_of_a_runtime_says_where_it_is(monkeypatch):
    """The HTML has the repr and the grid with this rank marked; without a place, the repr."""
    rt = DistributedRuntime.simulate(5, 8, mesh_shape=(-1, 2), mesh_dim_names=("dp", "tp"))
    html = Reader(rt._repr_html_())
    assert " ".join(html.words).startswith(repr(rt))
    assert "[5]" in html.words
    monkeypatch.setenv("RANK", "1")  # half a launch
    broken = DistributedRuntime()
    assert " ".join(Reader(broken._repr_html_()).words) == repr(broken)


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def dom_of(file: Path, folder: Path) -> str:
    """What a browser makes of a page.

    A browser that hangs before it shows anything, as one in some hundred did on a busy machine, is
    started once more; what it shows is judged alike.
    """
    quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    for attempt in range(2):
        command = [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
            "--no-first-run", *quiet, f"--user-data-dir={folder / f'profile-{attempt}'}",
            "--window-size=1000,800", "--dump-dom", file.as_uri(),
        ]  # fmt: skip
        browser = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            dom, _ = browser.communicate(timeout=45)
        except subprocess.TimeoutExpired:
            os.killpg(browser.pid, signal.SIGKILL)  # its helpers too
            browser.communicate()
            continue
        assert browser.returncode == 0
        return dom
    pytest.fail("the browser hung twice")


@pytest.mark.parametrize("page", ["#ffffff", "#111111"])
def test_a_browser_shows_it(tmp_path, page):
    """A headless browser lays out the grid: the words are readable on the page's own colour, the
    cells stand in columns, and the own rank is the one in bold."""
    if CHROMIUM is None:
        lacks("a browser: chromium")
    shown = "".join(
        draw(MeshLayout(shape, names), 5, ("tp",)).html() for shape, names in SHAPES.items()
    )
    ink = "#eeeeee" if page == "#111111" else "#222222"
    probe = """
      const cells = [...document.querySelectorAll('td')];
      const box = e => e.getBoundingClientRect();
      document.title = JSON.stringify({
        colours: [...new Set(cells.map(e => getComputedStyle(e).color))],
        bold: cells.filter(e => getComputedStyle(e).fontWeight >= 600).map(e => e.textContent),
        tables: [...document.querySelectorAll('table')].map(t => [...t.rows]
          .filter(r => r.cells.length > 1).map(r => [...r.cells].map(c => box(c).right))),
        wide: document.documentElement.scrollWidth,
      });
    """
    file = tmp_path / "page.html"
    file.write_text(
        f"<!doctype html><meta charset=utf-8><body style='background:{page};color:{ink}'>{shown}"
        f"<script>{probe}</script>"
    )
    seen = json.loads(unescape(re.search(r"<title>(.*?)</title>", dom_of(file, tmp_path))[1]))
    red, green, blue = (int(ink[i : i + 2], 16) for i in (1, 3, 5))
    assert seen["colours"] == [f"rgb({red}, {green}, {blue})"]
    assert seen["bold"] == ["[5]"] * len(SHAPES)
    assert seen["wide"] <= 1000
    assert len(seen["tables"]) == 1 + 4 + 2
    for rows in seen["tables"]:
        assert len(rows) > 1
        assert all(row == rows[0] for row in rows)  # each column ends at one place
