"""The committed pipeline folders are small, in bfloat16, and need diffusers and transformers alone."""

import json

import pytest

from zoo import flux, video


@pytest.mark.parametrize(("folder", "megabytes"), [(flux.PIPELINE, 25), (video.PIPELINE, 12)])
def test_the_folder_is_small_and_bfloat16(folder, megabytes):
    index = json.loads((folder / "model_index.json").read_text())
    libraries = {value[0] for value in index.values() if isinstance(value, list)}
    assert libraries <= {None, "diffusers", "transformers"}
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= megabytes * 2**20
    for path in folder.rglob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        assert {entry["dtype"] for name, entry in header.items() if name != "__metadata__"} == {"BF16"}, path
