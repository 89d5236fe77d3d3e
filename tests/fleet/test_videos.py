"""Asynchronous videos over a replica that is a stand-in, by OpenAI's own client."""

import errno
import json
import time

import openai
import pytest
from diffusers import WanImageToVideoPipeline, WanPipeline
from openai.types import Video, VideoDeleteResponse

from para_core.fleet.http import videos as videos_module
from para_core.fleet.request import Delivery
from tests.fleet.test_openai import picture, strict
from tests.fleet.test_server import StandIn, ask, serving, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
PIXELS = 1280 * 720 * 129


def videos(folder, backend=None, pipeline=WanPipeline, **options):
    options = {"pipeline": pipeline, "delivery": Delivery("mp4"), "pixels": PIXELS, "videos": folder, **options}
    return serving(backend or StandIn(), **options)


def ended(client, id_):
    deadline = time.monotonic() + 20
    while (video := client.videos.retrieve(id_)).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return video


def test_video_is_made_and_survives_a_restart(tmp_path, client):
    with videos(tmp_path, seed=0) as (port, backend):
        started = client(port).videos.create(prompt="a", size="1280x720", seconds="4")
        assert started.status == "queued"
        done = ended(client(port), started.id)
        for video in (started, done):
            strict(Video, video)
        assert (done.status, done.progress, done.prompt) == ("completed", 100, "a")
        assert done.expires_at - done.completed_at == 24 * 3600
        assert backend.ran[0][1].fields["num_frames"] == 65
        assert client(port).videos.download_content(started.id).read() == b"a 0"
    with videos(tmp_path) as (port, _):
        assert [video.id for video in client(port).videos.list()] == [started.id]
        assert client(port).videos.download_content(started.id).read() == b"a 0"
        strict(VideoDeleteResponse, client(port).videos.delete(started.id))
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(openai.NotFoundError):
            client(port).videos.retrieve(started.id)


def test_input_reference_is_the_image(tmp_path, client):
    with videos(tmp_path, pipeline=WanImageToVideoPipeline) as (port, backend):
        started = client(port).videos.create(prompt="a", size="64x32", input_reference=picture())
        assert ended(client(port), started.id).status == "completed"
        assert len(backend.ran[0][1].images["image"]) == 1


def test_running_video_shows_progress_and_is_cancelled_by_delete(tmp_path, client):
    with videos(tmp_path, StandIn(0.1)) as (port, backend):
        id_ = ask(port, {"prompt": "a", "size": "64x32", "frames": 17, "steps": 50}, path="/v1/videos")[2]["id"]
        until(lambda: client(port).videos.retrieve(id_).progress > 0)
        video = client(port).videos.retrieve(id_)
        assert video.status == "in_progress"
        assert 0 < video.progress < 100
        with pytest.raises(openai.ConflictError):
            client(port).videos.download_content(id_)
        client(port).videos.delete(id_)
        until(lambda: backend.cancelled == {id_})
        assert backend.ran == []
        assert list(tmp_path.iterdir()) == []


def test_no_time_limit_and_no_client(tmp_path, client):
    with videos(tmp_path, StandIn(0.1), seconds=0.2) as (port, _):
        id_ = client(port).videos.create(prompt="a", size="64x32", seconds="1", extra_body={"steps": 6}).id
        assert ended(client(port), id_).status == "completed"


def test_failed_video_has_its_reason(tmp_path, client):
    with videos(tmp_path) as (port, _):
        video = ended(client(port), client(port).videos.create(prompt="refused", size="64x32", seconds="1").id)
        assert video.status == "failed"
        assert video.error.message == "the pipeline says no."


def test_videos_are_listed_in_pages(tmp_path, client):
    with videos(tmp_path) as (port, _):
        ids = {client(port).videos.create(prompt="a", size="64x32", seconds="1").id for _ in range(5)}
        assert {video.id for video in client(port).videos.list(limit=2)} == ids
        page = client(port).videos.list(limit=2)
        assert len(page.data) == 2
        assert page.has_more


@pytest.mark.parametrize(
    ("change", "status"),
    [({}, "completed"), ({"status": "in_progress", "expires_at": None}, "failed"), ({"expires_at": 1}, None)],
)
def test_records_of_an_earlier_server(tmp_path, change, status):
    id_ = "video_" + "0" * 32
    record = {"id": id_, "object": "video", "created_at": 1, "status": "completed", "expires_at": 2**40, "files": []}
    (tmp_path / f"{id_}.json").write_text(json.dumps({**record, **change}))
    (tmp_path / "video_other.json").write_text("no record")
    with videos(tmp_path) as (port, _):
        answer, _, body = ask(port, None, method="GET", path=f"/v1/videos/{id_}")
        assert (body.get("status"), answer) == (status, 404 if status is None else 200)
        assert (tmp_path / f"{id_}.json").exists() == (status is not None)


def test_full_disk_is_told(tmp_path, monkeypatch, client):
    def full(path, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    fields = {"prompt": "a", "size": "64x32", "frames": 9}
    with videos(tmp_path) as (port, _):
        monkeypatch.setattr(videos_module, "write_atomically", full)
        status, _, body = ask(port, fields, path="/v1/videos")
        assert (status, str(tmp_path) in body["error"]["message"]) == (507, True)
        monkeypatch.undo()
        started = ask(port, {**fields, "steps": 3}, path="/v1/videos")[2]
        monkeypatch.setattr(videos_module, "write_atomically", full)
        assert ended(client(port), started["id"]).status in ("failed", "completed")


@pytest.mark.parametrize("query", ["?limit=many", "?limit=-1", "?limit=99999999999999999999", "?order=%00"])
def test_bad_parameters_of_a_list(tmp_path, query):
    with videos(tmp_path) as (port, _):
        status, _, body = ask(port, None, method="GET", path=f"/v1/videos{query}")
        assert status == (400 if "many" in query else 200)
        assert ("error" in body) == (status == 400)


@pytest.mark.parametrize("path", ["/v1/videos/..%2f..%2fetc", "/v1/videos/none/content", "/v1/videos?after=none"])
def test_unknown_videos_are_not_found(tmp_path, path):
    with videos(tmp_path) as (port, _):
        assert ask(port, None, method="GET", path=path)[0] == 404
