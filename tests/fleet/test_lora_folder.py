"""The folder of LoRAs that requests to the server may name."""

import pytest

from para_core.fleet.http.lora_folder import LoraFolder
from para_core.fleet.request import Lora


def test_lora_folder_names_files_in_it_only(tmp_path):
    folder = tmp_path / "loras"
    folder.mkdir()
    (folder / "style.safetensors").touch()
    (tmp_path / "secret.safetensors").touch()
    loras = LoraFolder(folder)
    assert loras.names() == ["style"]
    assert loras.find("style:0.5") == Lora(str(folder / "style.safetensors"), 0.5)
    for name in ("../secret", "", ".", "/etc/passwd", "style:nan2", "style:inf", "secret", "a" * 500):
        with pytest.raises(ValueError, match="expected one of style"):
            loras.find(name)
