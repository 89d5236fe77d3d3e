"""The pages of the server in a headless browser, over a replica that is a stand-in."""

import io
import re
import shutil

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from diffusers import FluxPipeline, StableDiffusion3Img2ImgPipeline
from PIL import Image
from playwright import sync_api
from playwright.sync_api import expect

from para_core.fleet.outputs import Output
from tests.fleet.test_server import StandIn, serving

pytestmark = pytest.mark.long
CHROMIUM = shutil.which("chromium")


class Painter(StandIn):
    """A replica that answers with a red image."""

    def outputs(self, request):
        buffer = io.BytesIO()
        Image.new("RGB", (128, 128), "red").save(buffer, "PNG")
        return (Output(".png", buffer.getvalue()),)


@pytest.fixture(params=[390, 1280])
def page(request):
    """Return a page whose console must stay without errors, such as violations of the page's policy."""
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    errors = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": request.param, "height": 900})
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        yield page
        browser.close()
    # A browser also reports each answer that is no success as an error.
    assert not [error for error in errors if "the server responded with a status of" not in error]


def generate(page, steps="2"):
    page.fill("#steps", steps)
    page.click("#go")


def test_page_shows_image_cancels_and_removes_what_is_old(page):
    with serving(Painter()) as (port, backend):
        page.goto(f"http://127.0.0.1:{port}/")
        page.fill("#prompt", "a red square")
        generate(page, "5")
        image = page.wait_for_selector("#results img")
        expect(page.locator("#results img")).to_have_js_property("naturalWidth", 128)
        assert image.get_attribute("alt") == "a red square"
        assert page.get_attribute("#results a", "download").endswith(".png")
        with page.expect_download() as download:
            page.click("#results a")
        assert Image.open(download.value.path()).getpixel((5, 5)) == (255, 0, 0)
        page.fill("#size", "99999x99999")
        generate(page)
        assert "9999800001 pixels" in page.wait_for_selector("#error:visible").inner_text()
        assert page.query_selector("#results img") is None
        assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
        page.fill("#size", "")
        generate(page)
        page.wait_for_selector("#results img")
        assert page.query_selector("#error:visible") is None
        page.fill("#prompt", "waits")
        generate(page, "100")
        expect(page.locator("#said")).to_have_text(re.compile("^step 1 of 100"))
        page.click("#cancel")
        assert page.wait_for_selector("#error:visible").inner_text().startswith("cancelled after step")
        assert len(backend.cancelled) == 1


def test_fields_follow_the_pipeline_have_names_and_history_restores_them(page, tmp_path):
    Image.new("RGB", (16, 8), "blue").save(tmp_path / "blue.png")
    with serving(Painter(), pipeline=StableDiffusion3Img2ImgPipeline, api_key="secret") as (port, backend):
        page.goto(f"http://127.0.0.1:{port}/")
        page.wait_for_selector("#key:visible")
        assert page.query_selector("#num_frames:visible") is None
        fields = {"key": "secret", "prompt": "first", "negative_prompt": "text", "guidance_scale": "2.5", "seed": "7"}
        for name, value in fields.items():
            page.fill(f"#{name}", value)
        page.set_input_files("#image", tmp_path / "blue.png")
        generate(page)
        page.wait_for_selector("#history li")
        request = backend.ran[0][1]
        assert (request.fields["negative_prompt"], request.fields["guidance_scale"], request.seed) == ("text", 2.5, 7)
        assert Image.open(io.BytesIO(request.images["image"][0])).size == (16, 8)
        page.fill("#prompt", "second")
        generate(page)
        expect(page.locator("#history li")).to_have_count(2)
        page.click("#history li:last-child button")
        assert page.input_value("#prompt") == "first"
        unnamed = """() => [...document.querySelectorAll('input, textarea, img, video, progress')].filter(
            each => !(each.labels?.length || each.alt || each.ariaLabel)).map(each => each.outerHTML)"""
        assert page.evaluate(unnamed) == []


def test_defaults_seeds_and_warnings(page):
    with serving(Painter(), pipeline=FluxPipeline) as (port, backend):
        page.goto(f"http://127.0.0.1:{port}/")
        expect(page.locator("#model")).to_have_text(re.compile("FluxPipeline"))
        expect(page.locator("#steps")).to_have_attribute("placeholder", "28")
        assert page.input_value("#prompt")
        # The result is beside the form on a wide window only.
        form, output = page.locator("#form").bounding_box(), page.locator("#output").bounding_box()
        assert (output["x"] >= form["x"] + form["width"]) == (page.viewport_size["width"] >= 900)
        for number in range(2):
            generate(page)
            expect(page.locator("#history li")).to_have_count(number + 1)
        page.click(".reuse")
        shown = page.inner_text(".seed")
        page.fill("#negative_prompt", "text")
        generate(page)
        expect(page.locator("#history li")).to_have_count(3)
        first, second, third = [request.seed for _, request in backend.ran]
        assert first != second == third == int(page.input_value("#seed")) == int(shown.removeprefix("seed "))
        assert "true_cfg_scale" in page.wait_for_selector(".warning").inner_text()


def test_pages_work_below_a_prefix_and_load_nothing_from_elsewhere(page):
    urls = []
    page.on("request", lambda request: urls.append(request.url))
    with serving(Painter(), pipeline=FluxPipeline, mounted="/a/b") as (port, _):
        here = f"http://127.0.0.1:{port}/a/b/"
        page.goto(here)
        generate(page)
        page.wait_for_selector("#results img")
        page.goto(f"{here}docs")
        page.click("#operations-default-_list_models_v1_models_get, [id*=list_models]")
        page.click("button.try-out__btn")
        page.click("button.execute")
        assert "FluxPipeline" in page.wait_for_selector(".live-responses-table .microlight").inner_text()
    assert len(urls) > 5
    assert not [url for url in urls if not url.startswith((here, "data:", "blob:"))]
