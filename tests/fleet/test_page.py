"""The pages of the server in a headless browser, over a replica that is a stand-in."""

import contextlib
import http.client
import http.server
import io
import re
import shutil
import threading

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from diffusers import FluxPipeline, StableDiffusion3Img2ImgPipeline
from PIL import Image
from playwright import sync_api
from playwright.sync_api import expect

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


def test_page_shows_steps_and_image_and_cancels(page):
    with serving(Painter(0.2)) as (port, backend):
        page.goto(f"http://127.0.0.1:{port}/")
        page.fill("#prompt", "a red square")
        generate(page, "5")
        expect(page.locator("#said")).to_have_text(re.compile("^step [1-5] of 5"))
        image = page.wait_for_selector("#results img")
        expect(page.locator("#results img")).to_have_js_property("naturalWidth", 128)
        assert image.get_attribute("alt") == "a red square"
        assert page.get_attribute("#results a", "download").endswith(".png")
        with page.expect_download() as download:
            page.click("#results a")
        assert Image.open(download.value.path()).getpixel((5, 5)) == (255, 0, 0)
        assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
        generate(page, "100")
        expect(page.locator("#said")).to_have_text(re.compile("^step 1"))
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
        expect(page.locator("#history li")).to_have_count(2)
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


def test_empty_seed_is_random_and_the_one_that_was_used_can_be_used_again(page):
    with serving(Painter(), pipeline=FluxPipeline) as (port, backend):
        page.goto(f"http://127.0.0.1:{port}/")
        page.wait_for_selector("#steps:visible")
        for number in range(2):
            generate(page)
            expect(page.locator("#history li")).to_have_count(number + 1)
        page.click(".reuse")
        shown = page.inner_text(".seed")
        generate(page)
        expect(page.locator("#history li")).to_have_count(3)
        first, second, third = [request.seed for _, request in backend.ran]
        assert first != second
        assert second == third == int(page.input_value("#seed")) == int(shown.removeprefix("seed "))


def test_warnings_are_shown(page):
    with serving(Painter(), pipeline=FluxPipeline) as (port, _):
        page.goto(f"http://127.0.0.1:{port}/")
        page.wait_for_selector("#negative_prompt:visible")
        page.fill("#negative_prompt", "text")
        generate(page)
        assert "true_cfg_scale" in page.wait_for_selector(".warning").inner_text()


def test_defaults_of_the_model_are_shown(page):
    with serving(Painter(), pipeline=FluxPipeline) as (port, _):
        page.goto(f"http://127.0.0.1:{port}/")
        expect(page.locator("#model")).to_have_text(re.compile("FluxPipeline"))
        expect(page.locator("#steps")).to_have_attribute("placeholder", "28")
        assert page.input_value("#prompt")


def test_result_is_beside_the_form_on_a_wide_window_only(page):
    with serving(Painter(), pipeline=FluxPipeline) as (port, _):
        page.goto(f"http://127.0.0.1:{port}/")
        form, output = page.locator("#form").bounding_box(), page.locator("#output").bounding_box()
        assert (output["x"] >= form["x"] + form["width"]) == (page.viewport_size["width"] >= 900)


@contextlib.contextmanager
def proxy(port, prefix):
    """Yield the port of a reverse proxy that shows the server at ``port`` below ``prefix``."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def forward(self):
            if not self.path.startswith(f"{prefix}/"):
                self.send_error(404)
                return
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                own = {"Host": f"127.0.0.1:{port}", "X-Forwarded-Prefix": prefix, "Connection": "close"}
                headers = {name: value for name, value in self.headers.items() if name != "Origin"}
                connection.request(self.command, self.path.removeprefix(prefix), body, {**headers, **own})
                answer = connection.getresponse()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("transfer-encoding", "connection"):
                        self.send_header(name, value)
                self.end_headers()
                self.wfile.write(answer.read())

        do_GET = do_POST = do_DELETE = forward

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_pages_work_below_a_prefix(page):
    with serving(Painter(), pipeline=FluxPipeline) as (port, _), proxy(port, "/a/b") as public:
        page.goto(f"http://127.0.0.1:{public}/a/b/")
        generate(page)
        page.wait_for_selector("#results img")
        page.goto(f"http://127.0.0.1:{public}/a/b/docs")
        page.click("#operations-default-_list_models_v1_models_get, [id*=list_models]")
        page.click("button.try-out__btn")
        page.click("button.execute")
        assert "FluxPipeline" in page.wait_for_selector(".live-responses-table .microlight").inner_text()


def test_pages_load_nothing_from_elsewhere(page):
    urls = []
    page.on("request", lambda request: urls.append(request.url))
    with serving(Painter(), pipeline=FluxPipeline) as (port, _):
        here = f"http://127.0.0.1:{port}/"
        for name in ("", "docs"):
            page.goto(here + name)
            page.wait_for_load_state("networkidle")
        page.wait_for_selector(".opblock")
    assert len(urls) > 5
    assert not [url for url in urls if not url.startswith((here, "data:", "blob:"))]
