"""While a pipeline is loaded, warnings about it are shown, and those of imports are not."""

import logging
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from para_core.launcher.import_warnings import hide_import_warnings
from para_core.launcher.report_loading import report_loading_to
from para_core.progress import component_bytes, report_components


@pytest.fixture
def shown(monkeypatch, caplog):
    """Return the texts that handlers of diffusers and accelerate show."""
    texts, handler = [], logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    for name in ("diffusers", "accelerate"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [handler])
        caplog.set_level(logging.WARNING, name)  # A command in this process may have raised it.
    return texts


@pytest.mark.parametrize(("lines", "components"), [(True, False), (False, True), (True, True)])
def test_warnings_of_diffusers_are_shown_once(shown, lines, components):
    sent, diffusers = [], logging.getLogger("diffusers.pipelines.pipeline_utils")
    connection = SimpleNamespace(rank=0 if lines else 1, channel=SimpleNamespace(send=sent.append))
    inner = report_components("no/model", ["vae"]) if components else nullcontext()
    with report_loading_to(connection), inner:
        diffusers.warning("arguments are ignored")
        diffusers.info("Loaded vae as VAE from `vae` subfolder of no/model.")
    assert shown == ["arguments are ignored"]
    assert sum("vae" in line for _, line, *_ in sent) == lines
    # The model is on no disk, so its size is unknown.
    assert not any("bytes" in line for _, line, *_ in sent)


@pytest.mark.parametrize(
    ("module", "variable", "hidden"),
    [("accelerate.a", "OTHER", True), ("accelerate.a", "ACCELERATE_LOG_LEVEL", False), ("users_own", "OTHER", False)],
)
def test_only_warnings_of_imports_are_hidden(shown, monkeypatch, module, variable, hidden):
    monkeypatch.setenv(variable, "warning")
    body = compile("import logging; logging.getLogger('accelerate.own').warning('missing')", module, "exec")
    with hide_import_warnings():
        exec(body, {"__name__": module})
        logging.getLogger("accelerate.own").warning("newly initialized")
    exec(body, {"__name__": module})
    assert shown == [*["missing"][hidden:], "newly initialized", "missing"]


def test_bytes_are_those_of_the_largest_format_unless_a_file_cannot_be_read(tmp_path):
    for file in ("unet/1.bin", "unet/2.bin", "unet/1.fp16.bin", "unet/1.safetensors", "vae/1.bin"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(b"123")
    (tmp_path / "vae" / "linked.bin").symlink_to(tmp_path / "nothing")
    assert component_bytes(tmp_path) == {"unet": 6} and component_bytes(tmp_path, ["vae"]) == {}
