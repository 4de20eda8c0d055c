"""The HTML report in a real browser, at the widths of a phone and of a desk, light and dark; its colours by the rules of WCAG."""

from __future__ import annotations

import base64
import hashlib
import io
import re
import shutil
import tarfile
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fse_convert.report.inspection import pages

Made = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]
AXE = "4.14.1"
AXE_SHA512 = "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="
WIDTHS = (390, 1280)
SCHEMES = ("light", "dark")


@pytest.fixture(scope="session")
def axe(request: pytest.FixtureRequest) -> str:
    """axe-core from its npm package, downloaded once."""
    kept = request.config.cache.mkdir("axe") / f"axe-core-{AXE}.tgz"  # type: ignore[union-attr]
    if not kept.exists():
        try:
            with urllib.request.urlopen(f"https://registry.npmjs.org/axe-core/-/axe-core-{AXE}.tgz", timeout=60) as answer:
                kept.write_bytes(answer.read())
        except OSError as e:
            pytest.skip(f"axe-core cannot be downloaded: {e}")
    raw = kept.read_bytes()
    assert base64.b64encode(hashlib.sha512(raw).digest()).decode() == AXE_SHA512
    with tarfile.open(fileobj=io.BytesIO(raw)) as package:
        script = package.extractfile("package/axe.min.js")
        assert script
        return script.read().decode()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if not chromium:
        pytest.skip("chromium is not installed")
    with playwright.sync_playwright() as library:
        opened = library.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(params=["failed", "passed", "broken", "unknown", "plain"])
def page(request: pytest.FixtureRequest, source: Made, run: Run, tmp_path: Path) -> str:
    """A report of every sort."""
    root, path = source(), tmp_path / "report.html"
    required = {"failed": ["--require", "vllm-0.30"], "passed": ["--require", "vllm-0.33"]}.get(request.param, [])
    if request.param == "broken":
        sorted(root.glob("*.safetensors"))[-1].unlink()
    if request.param == "unknown":
        config = root / "config.json"
        config.write_text(re.sub('"deepseek_v41[a-z_]*"', '"newcomer"', config.read_text()))
    run("inspect", root, "--html", path, *required)
    return path.as_uri()


@pytest.mark.slow
def test_in_a_browser(page: str, browser: Any, axe: str) -> None:
    """Nothing is wider than the screen, nothing is fetched, and axe finds nothing, at both widths, light and dark, and printed."""
    for width in WIDTHS:
        for scheme in SCHEMES:
            context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
            shown, fetched = context.new_page(), list[str]()
            shown.on("request", lambda request, fetched=fetched: fetched.append(request.url))
            shown.goto(page)
            assert shown.evaluate("document.documentElement.scrollWidth") <= width
            outside = "[...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1)"
            assert shown.evaluate(f"{outside}.map(e => e.outerHTML)") == []
            answer = shown.locator(".verdict, .card").first.bounding_box()
            assert answer["y"] + answer["height"] < 900
            assert fetched == [page]
            shown.evaluate(axe)
            found = shown.evaluate("axe.run()")
            assert [(v["id"], [n["html"] for n in v["nodes"]]) for v in found["violations"]] == []
            assert len(found["passes"]) > 10
            shown.emulate_media(media="print")
            assert shown.evaluate("document.documentElement.scrollWidth") <= width
            context.close()


def luminance(color: str) -> float:
    digits = color.lstrip("#")
    digits = "".join(d * 2 for d in digits) if len(digits) == 3 else digits
    channels = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_contrast(scheme: str) -> None:
    """4.5 for text, 3.0 for marks, which are never told by colour alone."""
    css = (Path(pages.__file__).parent / "page.html.j2").read_text(encoding="utf-8")
    light, dark = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    colors = dict(re.findall(r"--(\w+): (#\w+)", light if scheme == "light" else dark))
    marks = {o.value for o in pages.LOOKS}
    assert marks < colors.keys()
    for ground in ("page", "card"):
        assert {n: c for n in ("text", "dim", "link") if (c := contrast(colors[n], colors[ground])) < 4.5} == {}
        assert {n: c for n in marks if (c := contrast(colors[n], colors[ground])) < 3} == {}
    assert {n for n in marks if f".mark.{n}::before" not in css} == set()
    assert {n for n in marks - {"fused"} if not re.search(rf"i\.{n}\b[^{{]*\{{ (height|clip-path|border-radius)", css)} == set()
