"""Exceptions of a request that ends without a result."""


class ReplicaDied(RuntimeError):
    """Death of a replica: a rank ended, or no longer answers. The replica must be restarted."""


class RequestFailed(RuntimeError):
    """Failure of a request: the pipeline refused it, or failed with it, on every rank. The replica stays usable."""


class RequestCancelled(RuntimeError):
    """Cancellation of a request: all ranks stopped after the same step."""
