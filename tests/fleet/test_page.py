"""The page that tries the server, in a headless browser, over a replica that is a stand-in."""

import io
import shutil

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from diffusers import StableDiffusion3Img2ImgPipeline
from PIL import Image
from playwright import sync_api

from para_core.fleet.outputs import Output, Result
from tests.fleet.test_server import StandIn, serving

pytestmark = pytest.mark.long
CHROMIUM = shutil.which("chromium")


class Painter(StandIn):
    """A replica that answers with a red image."""

    async def generate(self, id_, request, progress):
        await super().generate(id_, request, progress)
        buffer = io.BytesIO()
        Image.new("RGB", (128, 128), "red").save(buffer, "PNG")
        return Result((Output(".png", buffer.getvalue()),), {"seconds": 0.5})


@pytest.fixture(params=[360, 800])
def page(request):
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser.new_page(viewport={"width": request.param, "height": 900})
        browser.close()


def generate(page, steps="2"):
    page.fill("#steps", steps)
    page.click("#go")


def test_page_shows_steps_and_image_and_cancels(page):
    with serving(Painter(0.2)) as (port, backend):
        page.goto(f"http://127.0.0.1:{port}/")
        page.fill("#prompt", "a red square")
        generate(page, "5")
        page.wait_for_function("document.querySelector('#said').textContent.startsWith('step 2')")
        image = page.wait_for_selector("#results img")
        page.wait_for_function("document.querySelector('#results img').naturalWidth == 128")
        assert image.get_attribute("alt") == "a red square"
        assert page.get_attribute("#results a", "download").endswith(".png")
        with page.expect_download() as download:
            page.click("#results a")
        assert Image.open(download.value.path()).getpixel((5, 5)) == (255, 0, 0)
        assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
        generate(page, "100")
        page.wait_for_function("document.querySelector('#said').textContent.startsWith('step 1')")
        page.click("#cancel")
        error = page.wait_for_selector("#error:visible")
        assert error.inner_text().startswith("cancelled after step")
        assert len(backend.cancelled) == 1


def test_error_removes_the_old_image(page):
    with serving(Painter()) as (port, _):
        page.goto(f"http://127.0.0.1:{port}/")
        generate(page)
        page.wait_for_selector("#results img")
        page.fill("#size", "99999x99999")
        generate(page)
        assert "9999800001 pixels" in page.wait_for_selector("#error:visible").inner_text()
        assert page.query_selector("#results img") is None
        assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
        page.fill("#size", "")
        generate(page)
        page.wait_for_selector("#results img")
        assert page.query_selector("#error:visible") is None


def test_fields_follow_the_pipeline_and_history_restores_them(page, tmp_path):
    Image.new("RGB", (16, 8), "blue").save(tmp_path / "blue.png")
    with serving(Painter(), pipeline=StableDiffusion3Img2ImgPipeline) as (port, backend):
        page.goto(f"http://127.0.0.1:{port}/")
        page.wait_for_selector("#negative_prompt:visible")
        assert page.query_selector("#num_frames:visible, #key:visible") is None
        assert "StableDiffusion3Img2ImgPipeline" in page.inner_text("#model")
        page.fill("#prompt", "first")
        page.fill("#negative_prompt", "text")
        page.fill("#guidance_scale", "2.5")
        page.fill("#seed", "7")
        page.set_input_files("#image", tmp_path / "blue.png")
        generate(page)
        page.wait_for_selector("#history li")
        request = backend.ran[0][1]
        assert (request.fields["negative_prompt"], request.fields["guidance_scale"], request.seed) == ("text", 2.5, 7)
        assert Image.open(io.BytesIO(request.images["image"][0])).size == (16, 8)
        page.fill("#prompt", "second")
        generate(page)
        page.wait_for_function("document.querySelectorAll('#history li').length == 2")
        page.click("#history li:last-child button")
        assert page.input_value("#prompt") == "first"


def test_everything_has_a_name(page):
    with serving(Painter(), pipeline=StableDiffusion3Img2ImgPipeline, api_key="secret") as (port, _):
        page.goto(f"http://127.0.0.1:{port}/")
        page.wait_for_selector("#key:visible")
        page.fill("#key", "secret")
        generate(page)
        page.wait_for_selector("#history li")
        unnamed = """() => [...document.querySelectorAll('input, textarea, img, video, progress')].filter(
            each => !(each.labels?.length || each.alt || each.ariaLabel)).map(each => each.outerHTML)"""
        assert page.evaluate(unnamed) == []
