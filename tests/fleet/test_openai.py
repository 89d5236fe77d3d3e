"""The server as OpenAI's own client uses it, over replicas that are stand-ins: images and asynchronous videos."""

import base64
import errno
import io
import json
from contextlib import ExitStack
from unittest import mock

import openai
import pytest
from diffusers import FluxImg2ImgPipeline, FluxInpaintPipeline, FluxPipeline, WanImageToVideoPipeline, WanPipeline
from openai import types
from PIL import Image

from para_core.fleet.http import videos as videos_module
from para_core.fleet.outputs import encode
from para_core.fleet.request import Delivery
from tests.fleet.test_server import ask, get, serving, until

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def strict(model, value):
    """Validate an answer by the client's own type, which the client itself does not do."""
    model.model_validate(value.to_dict(), strict=False)


def picture(mode="RGB", color="red", size=(16, 8)):
    return ("picture.png", encode([Image.new(mode, size, color)], Delivery())[0].data, "image/png")


@pytest.fixture
def client():
    """Return a function that makes clients of OpenAI's package. The clients are closed when the test ends."""
    with ExitStack() as clients:

        def connect(port):
            url = f"http://127.0.0.1:{port}/v1"
            return clients.enter_context(openai.OpenAI(base_url=url, api_key="none", max_retries=0))

        yield connect


def test_images_generate(served, client):
    port, backend = served(FluxPipeline)
    fields = {"model": "any", "prompt": "a", "size": "64x32", "n": 1, "quality": "high", "extra_body": {"seed": 0}}
    answer = client(port).images.generate(output_format="jpeg", output_compression=40, **fields)
    strict(types.ImagesResponse, answer)
    assert base64.b64decode(answer.data[0].b64_json) == b"a 0"
    assert answer.output_format == "jpeg"
    delivery = backend.ran[-1][1].delivery
    assert (delivery.format_, delivery.quality) == ("jpg", 40)


def test_images_generate_stream(served, client):
    images = client(served(FluxPipeline)[0]).images
    fields = {"prompt": "a", "size": "64x32", "partial_images": 2, "extra_body": {"seed": 0}}
    *partials, last = images.generate(stream=True, **fields)
    assert [event.partial_image_index for event in partials] == [0, 1]
    for event in partials:
        strict(types.ImageGenPartialImageEvent, event)
    strict(types.ImageGenCompletedEvent, last)
    assert (last.type, last.size) == ("image_generation.completed", "64x32")
    assert base64.b64decode(last.b64_json) == b"a 0"
    with pytest.raises(openai.APIError, match="the pipeline says no"):
        list(images.generate(prompt="refused", stream=True))


def test_images_edit_with_files(served, client):
    port, backend = served(FluxImg2ImgPipeline)
    edit = client(port).images.edit
    strict(types.ImagesResponse, edit(image=[picture(), picture(color="blue")], prompt="a", n=1, size="64x32"))
    request = backend.ran[-1][1]
    assert len(request.images["image"]) == 2
    assert (request.fields["width"], request.fields["num_images_per_prompt"]) == (64, 1)
    assert [event.type for event in edit(image=picture(), prompt="a", stream=True)] == ["image_edit.completed"]
    with pytest.raises(openai.BadRequestError, match="needs an image"):
        edit(image=[], prompt="a")
    port, backend = served(FluxInpaintPipeline)
    client(port).images.edit(image=picture(), mask=picture("RGBA", (0, 0, 0, 0)), prompt="a")
    # The transparent part is generated.
    data = backend.ran[-1][1].images["mask_image"][0]
    assert Image.open(io.BytesIO(data)).convert("RGB").getpixel((0, 0)) == (255, 255, 255)


def test_models(served, client):
    models = client(served(FluxPipeline)[0]).models
    (model,) = models.list().data
    strict(types.Model, model)
    assert models.retrieve(model.id).id == model.id == "tests"  # of the path …/tests/fleet/..
    with pytest.raises(openai.NotFoundError):
        models.retrieve("sora/2")


SMALL = {"prompt": "a", "size": "64x32", "seconds": "1"}


def videos(folder, pipeline=WanPipeline, **options):
    options = {"delivery": Delivery("mp4"), "pixels": 1280 * 720 * 129, "videos": folder, **options}
    return serving(pipeline=pipeline, **options)


def ended(client, id_):
    until(lambda: client.videos.retrieve(id_).status not in ("queued", "in_progress"))
    return client.videos.retrieve(id_)


def test_video_is_made_and_survives_a_restart(tmp_path, client):
    with videos(tmp_path, seed=0) as (port, backend):
        started = client(port).videos.create(prompt="a", size="1280x720", seconds="4")
        assert started.status == "queued"
        done = ended(client(port), started.id)
        for video in (started, done):
            strict(types.Video, video)
        assert (done.status, done.progress, done.prompt) == ("completed", 100, "a")
        assert done.expires_at - done.completed_at == 24 * 3600
        request = backend.ran[-1][1]
        assert (request.fields["num_frames"], request.seed) == (65, started.to_dict()["seed"])
        assert client(port).videos.download_content(started.id).read() == b"a 0"
        for path in ("/v1/videos", f"/v1/videos/{started.id}", f"/v1/videos/{started.id}/content", "/v1/videos/none"):
            assert ask(port, None, method="HEAD", path=path)[::2] == (get(port, path)[0], b"")
    with videos(tmp_path) as (port, _):
        assert [video.id for video in client(port).videos.list()] == [started.id]
        assert client(port).videos.download_content(started.id).read() == b"a 0"
        strict(types.VideoDeleteResponse, client(port).videos.delete(started.id))
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(openai.NotFoundError):
            client(port).videos.retrieve(started.id)


def test_running_video_shows_progress_has_no_time_limit_and_is_cancelled_by_delete(tmp_path, client):
    with videos(tmp_path, WanImageToVideoPipeline, seconds=0.2) as (port, backend):
        own = client(port).videos
        fields = {"prompt": "waits", "size": "64x32", "input_reference": picture()}
        first, second = (own.create(**fields, extra_body=extra).id for extra in ({}, {"steps": 4}))
        until(lambda: own.retrieve(first).progress > 0)
        assert (own.retrieve(first).status, own.retrieve(second).status) == ("in_progress", "queued")
        # One of 50 steps, and 81 frames: the defaults of the pipeline.
        assert (own.retrieve(first).progress, own.retrieve(first).seconds) == (2, "5.0625")
        with pytest.raises(openai.ConflictError):
            own.download_content(first)
        own.delete(first)
        until(lambda: backend.cancelled == {first} and own.retrieve(second).progress == 25)
        backend.open.set()
        assert ended(client(port), second).status == "completed"
        assert [(id_, len(request.images["image"])) for id_, request in backend.ran] == [(second, 1)]
        assert {path.stem for path in tmp_path.iterdir()} == {second}


def test_videos_fail_with_their_reason_and_are_listed_in_pages(tmp_path, client):
    with videos(tmp_path) as (port, _):
        own = client(port).videos
        failed = ended(client(port), own.create(**{**SMALL, "prompt": "refused"}).id)
        assert (failed.status, failed.error.message) == ("failed", "the pipeline says no.")
        ids = {failed.id, *(own.create(**SMALL).id for _ in range(4))}
        assert {video.id for video in own.list(limit=2)} == ids
        page = own.list(limit=2)
        assert (len(page.data), page.has_more) == (2, True)
        for query in ("?limit=many", "?limit=-1", "?limit=99999999999999999999", "?order=%00"):
            status, _, body = get(port, f"/v1/videos{query}")
            assert (status, "error" in body) == ((400, True) if "many" in query else (200, False))
        ascending = [video["id"] for video in get(port, "/v1/videos?order=asc")[2]["data"]]
        assert ascending == [video["id"] for video in get(port, "/v1/videos")[2]["data"]][::-1]
        for path in ("..%2f..%2fetc", "none/content", f"{failed.id}/content"):
            assert get(port, f"/v1/videos/{path}")[0] == get(port, "/v1/videos?after=none")[0] == 404


@pytest.mark.parametrize(
    ("change", "status"),
    [({}, "completed"), ({"status": "in_progress", "expires_at": None}, "failed"), ({"expires_at": 1}, None)],
)
def test_records_of_an_earlier_server(tmp_path, change, status):
    id_ = "video_" + "0" * 32
    record = {"id": id_, "object": "video", "created_at": 1, "status": "completed", "expires_at": 2**40, "files": []}
    (tmp_path / f"{id_}.json").write_text(json.dumps({**record, **change}))
    (tmp_path / "video_other.json").write_text("no record")
    (tmp_path / f".{id_}-1.mp4.0123abcd").touch()  # The server was killed while it wrote this file.
    with videos(tmp_path) as (port, _):
        answer, _, body = get(port, f"/v1/videos/{id_}")
        assert (body.get("status"), answer) == (status, 404 if status is None else 200)
        kept = [] if status is None else [f"{id_}.json"]
        assert sorted(path.name for path in tmp_path.iterdir()) == [*kept, "video_other.json"]


def test_full_disk_is_told(tmp_path, monkeypatch, client):
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with videos(tmp_path) as (port, backend):
        with monkeypatch.context() as patched:
            patched.setattr(videos_module, "write_atomically", full)
            status, _, body = ask(port, SMALL, path="/v1/videos")
            assert (status, str(tmp_path) in body["error"]["message"]) == (507, True)
            until(lambda: backend.server.unfinished == 0)
        id_ = ask(port, {**SMALL, "prompt": "waits"}, path="/v1/videos")[2]["id"]
        monkeypatch.setattr(videos_module, "write_atomically", full)
        backend.open.set()
        failed = ended(client(port), id_)
        assert (failed.status, str(tmp_path) in failed.error.message) == ("failed", True)
