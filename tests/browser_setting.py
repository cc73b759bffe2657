"""Pages in a headless Chromium: several at once, each in a frame of its own width."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import time
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


class Driven:
    """A headless Chromium at ``url``, driven over a pipe: for pages that go on after they are loaded."""

    def __init__(self, url: str, folder: Path) -> None:
        self.number = 0
        theirs_in, self.out = os.pipe()
        self.back, theirs_out = os.pipe()
        spare = [os.dup(theirs_in), os.dup(theirs_out)]  # so that neither is 3 or 4 when these are set

        def pipes() -> None:
            os.dup2(spare[0], 3)
            os.dup2(spare[1], 4)

        self.process = subprocess.Popen(
            [chromium(), *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={folder / 'driven'}", "about:blank"],
            preexec_fn=pipes, close_fds=False, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        for end in (theirs_in, theirs_out, *spare):
            os.close(end)
        self.rest, self.session = b"", ""
        target = self("Target.createTarget", url=url)["targetId"]
        self.session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def __call__(self, method: str, **parameters: Any) -> dict[str, Any]:
        """What the browser answers to a method of its debugging protocol."""
        self.number += 1
        about = {"sessionId": self.session} if self.session else {}
        os.write(self.out, json.dumps({"id": self.number, "method": method, "params": parameters, **about}).encode() + b"\0")
        while True:
            *whole, self.rest = self.rest.split(b"\0")
            for one in map(json.loads, whole):
                if one.get("id") == self.number:
                    assert "error" not in one, one
                    return dict(one["result"])
            more = os.read(self.back, 1 << 20)
            assert more, "the browser ended"
            self.rest += more

    def value(self, expression: str) -> Any:
        """The value of an expression in the page."""
        return self("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def until(self, expression: str, seconds: float = 240.0) -> None:
        """Wait until ``expression`` holds in the page."""
        ends = time.monotonic() + seconds
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < ends, self.value("document.body.innerText")
            time.sleep(0.1)

    def close(self) -> None:
        """End the browser."""
        self.process.terminate()
        self.process.wait(timeout=60)
        os.close(self.out)
        os.close(self.back)
