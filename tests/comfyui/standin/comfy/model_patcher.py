"""A patcher of weights: ``patches`` maps the name of a weight to (strength, tensor) pairs that are added to it."""

import uuid

from comfy.patcher_extension import CallbacksMP  # noqa: F401


class ModelPatcher:
    def __init__(self, model, load_device, offload_device, size=0):
        self.model, self.load_device, self.offload_device, self.size = model, load_device, offload_device, size
        self.patches, self.patches_uuid, self.backup = {}, uuid.uuid4(), {}
        self.object_patches, self.weight_wrapper_patches = {}, {}
        self.injections, self.hook_patches, self.additional_models = {}, {}, {}
        self.model_options = {"transformer_options": {}}
        if not hasattr(model, "model_loaded_weight_memory"):
            model.model_loaded_weight_memory, model.current_weight_patches_uuid = 0, None

    def clone(self):
        cloned = type(self)(self.model, self.load_device, self.offload_device, self.model_size())
        cloned.patches = {name: list(entries) for name, entries in self.patches.items()}
        cloned.patches_uuid, cloned.backup = self.patches_uuid, self.backup
        cloned.object_patches = dict(self.object_patches)
        cloned.injections, cloned.hook_patches = dict(self.injections), dict(self.hook_patches)
        options = self.model_options["transformer_options"]
        cloned.model_options = {"transformer_options": dict(options)}
        return cloned

    def add_patches(self, patches, strength=1.0):
        assert patches.keys() <= self.model.state_dict().keys()
        for name, tensor in patches.items():
            self.patches[name] = [*self.patches.get(name, []), (strength, tensor)]
        self.patches_uuid = uuid.uuid4()

    def add_object_patch(self, name, value):
        self.object_patches[name] = value

    def add_wrapper_with_key(self, kind, key, wrapper):
        wrappers = self.model_options["transformer_options"].setdefault("wrappers", {})
        wrappers.setdefault(kind, {}).setdefault(key, []).append(wrapper)

    def get_all_callbacks(self, kind):
        return []

    def model_size(self):
        return sum(x.numel() * x.element_size() for x in self.model.parameters())

    def loaded_size(self):
        return self.model.model_loaded_weight_memory

    def patch_model(self, device_to=None, load_weights=True):
        if load_weights:
            self.load(device_to)
        self.inject_model()

    def inject_model(self):
        pass

    def patch_weight_to_device(self, name, device_to=None):
        weight = self.model.state_dict()[name]
        self.backup[name] = weight.clone()
        for strength, tensor in self.patches[name]:
            weight += strength * tensor

    def load(self, device_to=None):
        for name in self.patches:
            self.patch_weight_to_device(name, device_to)
        self.model.current_weight_patches_uuid = self.patches_uuid
        self.model.model_loaded_weight_memory = self.model_size()

    def unpatch_model(self, device_to=None, unpatch_weights=True):
        if unpatch_weights:
            for name, weight in self.backup.items():
                self.model.state_dict()[name].copy_(weight)
            self.backup.clear()
            self.model.current_weight_patches_uuid, self.model.model_loaded_weight_memory = None, 0

    def partially_load(self, device_to, extra_memory=0):
        if self.model.current_weight_patches_uuid != self.patches_uuid:
            self.unpatch_model(self.offload_device)
            self.patch_model(device_to)

    def partially_unload(self, device_to, memory_to_free=0):
        return 0

    def detach(self, unpatch_all=True):
        self.unpatch_model(self.offload_device, unpatch_all)
        return self.model

    def pre_run(self):
        self.model.current_patcher = self
