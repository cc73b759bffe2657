"""Pages in a headless Chromium: several at once, each in a frame of its own width."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--allow-file-access-from-files",
)  # fmt: skip

BREAKS = """
const broken = [], range = document.createRange();
for (const walk = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT); walk.nextNode();) {
  const node = walk.currentNode;
  if (node.parentElement.closest("details:not([open]), svg")) continue;
  for (const word of node.data.matchAll(/\\p{L}+/gu)) {
    range.setStart(node, word.index); range.setEnd(node, word.index + word[0].length);
    if (new Set([...range.getClientRects()].map(r => Math.round(r.top))).size > 1) broken.push(word[0]);
  }
}
told({broken, wide: document.documentElement.scrollWidth - innerWidth});
"""
"""Tells the words of a page that are broken over two lines, and by how many pixels it is wider than its window."""

AXE = "axe.run(document).then(r => told([r.violations.map(v => [v.id, v.nodes[0].target]), r.passes.length]));"
"""Tells the violations that axe-core finds, and how many of its checks pass."""


def chromium() -> str:
    """The browser; skips the test where there is none."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no Chromium on this machine")
    return found


def axe() -> str:
    """The script of axe-core; skips the test where it is not installed."""
    package = pytest.importorskip("axe_core_python")
    return (Path(package.__path__[0]) / "axe.min.js").read_text(encoding="utf-8") + AXE


def in_browser(
    pages: Mapping[str, str], folder: Path, script: str, *, widths: Sequence[int] = (1280,), dark: bool = False
) -> dict[tuple[str, int], Any]:
    """What ``script`` tells of each page at each width. Headless windows have a least width, so the pages are in frames."""
    browser = chromium()
    tell = (
        "const told = what => { const p = document.createElement('p'); p.id = 'told'; p.textContent = JSON.stringify(what);"
    )
    tell += " document.body.append(p); };"
    frames = []
    for name, page in pages.items():
        whole = page.replace("</body>", f"<script>{tell}{script}</script></body>")
        (folder / f"{name}.html").write_text(whole, encoding="utf-8")
        frames += [
            f'<iframe title="{name} {w}" src="{name}.html" style="width:{w}px;height:900px;border:0"></iframe>'
            for w in widths
        ]
    collect = (
        "onload = () => { const all = [...document.querySelectorAll('iframe')], look = setInterval(() => {"
        "const found = all.map(f => [f.title, f.contentDocument.getElementById('told')]);"
        "if (found.every(([, p]) => p)) { clearInterval(look); o.textContent = 'TOLD' + "
        "JSON.stringify(found.map(([t, p]) => [t, p.textContent])) + 'END'; } }, 200); }"
    )
    frame = folder / "frame.html"
    frame.write_text(f'{"".join(frames)}<pre id="o"></pre><script>{collect}</script>', encoding="utf-8")
    mode = ["--blink-settings=preferredColorScheme=0"] * dark
    done = subprocess.run(
        [browser, *FLAGS, *mode, "--virtual-time-budget=60000", f"--user-data-dir={folder / 'profile'}", "--dump-dom",
         frame.as_uri()],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    found = re.search(r'<pre id="o">TOLD(.*)END</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-500:]
    told = json.loads(html.unescape(found[1]))
    return {(title.rpartition(" ")[0], int(title.rpartition(" ")[2])): json.loads(text) for title, text in told}
