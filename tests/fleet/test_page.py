"""The page that tries the server, in a headless browser, over a replica that is a stand-in."""

import base64
import io
import shutil

import pytest

pytest.importorskip("ray", reason="the extra fleet is not installed: make test-fleet")
pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from PIL import Image
from playwright import sync_api

from para_core.fleet.outputs import Output
from para_core.fleet.work import Result
from tests.fleet.test_server import StandIn, serving

pytestmark = pytest.mark.long
CHROMIUM = shutil.which("chromium")


class Painter(StandIn):
    """Answers with a red image."""

    async def generate(self, id_, request, progress):
        await super().generate(id_, request, progress)
        buffer = io.BytesIO()
        Image.new("RGB", (128, 128), "red").save(buffer, "PNG")
        return Result((Output(".png", buffer.getvalue()),), {"seconds": 0.5})


@pytest.fixture
def page():
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser.new_page(viewport={"width": 800, "height": 900})
        browser.close()


def test_page_shows_steps_and_image_and_cancels(page, tmp_path):
    with serving(Painter(0.2)) as (port, backend):
        page.goto(f"http://127.0.0.1:{port}/")
        page.fill("#prompt", "a red square")
        page.fill("#steps", "5")
        page.click("#go")
        page.wait_for_function("document.querySelector('#said').textContent.startsWith('step 2')")
        image = page.wait_for_selector("#results img")
        assert page.evaluate("document.querySelector('#results img').naturalWidth") == 128
        data = base64.b64decode(image.get_attribute("src").split(",")[1])
        assert Image.open(io.BytesIO(data)).getpixel((5, 5)) == (255, 0, 0)
        page.screenshot(path=tmp_path / "page.png")
        # Half of the width of the usual desktop: nothing is wider than a telephone.
        page.set_viewport_size({"width": 360, "height": 740})
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page.screenshot(path=tmp_path / "narrow.png")
        page.fill("#steps", "100")
        page.click("#go")
        page.wait_for_function("document.querySelector('#said').textContent.startsWith('step 1')")
        page.click("#cancel")
        page.wait_for_function("document.querySelector('#said').textContent.startsWith('cancelled after step')")
        assert len(backend.cancelled) == 1
