"""The site of mkdocs.yml builds strictly, which checks its links, and opens on a wide and on a narrow screen (`make
docs`).
"""

import functools
import http.server
import importlib.util
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="the extra `docs` is not installed"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium on this machine")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()


def test_the_reference_has_every_public_name(site):
    import para_core
    from para_core import adapters

    for package in (para_core, adapters):
        page = (site / f"api/{package.__name__}.html").read_text()
        missing = [name for name in package.__all__ if f'id="{package.__name__}.{name}"' not in page]
        assert not missing


@pytest.mark.parametrize("width", [1400, 420])
def test_pages_open_without_errors_and_search_finds_words(site, browser, width):
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    errors, urls = [], []
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: urls.append(request.url))
    here = f"http://127.0.0.1:{server.server_address[1]}"
    for name in ("which_option", "measured/cache_quality", "api/para_core", "index"):
        page.goto(f"{here}/{name}.html")
        # Tables and code may scroll, but never the page.
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
    if width < 1000:
        page.click("label[for=__search].md-header__button")
    page.fill("input.md-search__input", "Attention2D")
    page.wait_for_selector(".md-search-result__link", timeout=20_000)
    page.close()
    server.shutdown()
    server.server_close()
    assert not errors
    # Nothing is fetched from elsewhere. blob: and data: belong to the page.
    assert not [url for url in urls if not url.startswith((here, "blob:", "data:"))]
