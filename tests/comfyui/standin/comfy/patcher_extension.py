class CallbacksMP:
    ON_LOAD, ON_DETACH, ON_PRE_RUN = "on_load_after", "on_detach_after", "on_pre_run"


class WrappersMP:
    DIFFUSION_MODEL = "diffusion_model"


class WrapperExecutor:
    def __init__(self, function, wrappers):
        self.function, self.wrappers = function, wrappers

    def __call__(self, *args, **kwargs):
        return WrapperExecutor(self.function, self.wrappers[1:]).execute(*args, **kwargs)

    def execute(self, *args, **kwargs):
        if self.wrappers:
            return self.wrappers[0](self, *args, **kwargs)
        return self.function(*args, **kwargs)

    @classmethod
    def new_class_executor(cls, function, instance, wrappers):
        return cls(function, wrappers)


def get_all_wrappers(kind, options):
    return [wrapper for wrappers in options.get("wrappers", {}).get(kind, {}).values() for wrapper in wrappers]
