import torch

current_loaded_models = []


def load_models_gpu(models, force_full_load=False):
    for model in models:
        for other in [x for x in current_loaded_models if x.model is model.model]:
            current_loaded_models.remove(other)
            if other is not model:
                other.detach(unpatch_all=False)
        model.partially_load(torch.device("cpu"), 1e32)
        current_loaded_models.insert(0, model)


def unload_all_models():
    while current_loaded_models:
        model = current_loaded_models.pop()
        if model.partially_unload(model.offload_device, 1e30) < 1e30:
            model.detach()
