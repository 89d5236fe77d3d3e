"""Each feature of a parallel pipeline is its own files and one line of a table, so that it can be deleted."""

from dataclasses import replace
from pathlib import Path

import pytest

from para_core.adapters.weights.feature import ChangeRequest
from para_core.adapters.weights.features import FEATURES, changes_for, features, require_method, shard_methods
from para_core.distributed.mesh import MeshDim, one_guided_rank
from tests.test_layers import FILES, imported_by

# The files of each feature, without the plans of models, which are data (tensor_plan.py, patch_plan.py).
FILES_OF_FEATURES = {
    "fsdp": ("adapters/weights/fsdp_weights.py", "para_core/weights/fsdp.py"),
    "tensor": (
        "adapters/weights/tensor_weights.py",
        "para_core/weights/tensor.py",
        "para_core/weights/tensor_checks.py",
    ),
    "stages": ("adapters/weights/staged_transformer.py", "para_core/weights/stages.py"),
    "pipefusion": (
        "adapters/weights/fused_pipe.py",
        "para_core/weights/pipefusion.py",
        "para_core/weights/patches.py",
        "para_core/weights/patch_hooks.py",
        "para_core/weights/stale_keys.py",
    ),
    "text_encoder_offload": ("adapters/weights/text_encoder_offload.py",),
    "vae_offload": ("adapters/weights/vae_offload.py",),
    "block_offload": ("adapters/weights/block_offload.py",),
    "quantize": ("adapters/weights/quantize.py",),
    "cfg": ("adapters/cfg/guided_calls.py", "adapters/cfg/output_form.py", "para_core/cfg/guidance.py"),
}
# The list of public names may name a function of a feature.
PUBLIC_NAMES = "adapters/api.py"


def test_table_has_the_module_of_each_feature():
    assert FEATURES.keys() == FILES_OF_FEATURES.keys()
    for name, module in FEATURES.items():
        assert FILES_OF_FEATURES[name][0] == f"adapters/{module.replace('.', '/')}.py"
        assert features()[name] is not None


def test_nobody_else_imports_a_feature():
    imports = []
    for name, files in FILES_OF_FEATURES.items():
        own = {Path(path) for path in files}
        assert own <= set(FILES.values()), name
        others = [path for path in FILES.values() if path not in own and str(path) != PUBLIC_NAMES]
        imports += [
            f"{path}:{line} imports {target}" for path in others for target, line in imported_by(path) if target in own
        ]
    assert not imports, "\n".join(imports)


TWO_BRANCHES = replace(one_guided_rank("cpu"), batch=MeshDim("batch", 2, 0, "", None))


@pytest.mark.parametrize(
    ("missing", "mesh", "options", "per_branch", "message"),
    [
        ("block_offload", one_guided_rank("cpu"), {"offload": "blocks"}, False, "offload= "),
        ("vae_offload", one_guided_rank("cpu"), {"vae_placement": "first"}, False, "vae_placement= "),
        ("cfg", TWO_BRANCHES, {}, True, "2 ranks along 'batch'"),
    ],
)
def test_missing_feature_is_refused(monkeypatch, missing, mesh, options, per_branch, message):
    others = {name: feature for name, feature in features().items() if name != missing}
    monkeypatch.setattr("para_core.adapters.weights.features.features", lambda: others)
    request = ChangeRequest(object(), {}, mesh, options, lambda module: lambda _: None, per_branch)
    with pytest.raises(ValueError, match=message):
        changes_for(request)


def test_missing_method_is_refused(monkeypatch):
    others = {name: feature for name, feature in features().items() if name != "fsdp"}
    monkeypatch.setattr("para_core.adapters.weights.features.features", lambda: others)
    assert "fsdp" not in shard_methods()
    with pytest.raises(ValueError, match=r"'fsdp'; expected 'tensor'"):
        require_method("fsdp")
