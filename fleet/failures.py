"""How a request ends without a result."""


class ReplicaDied(RuntimeError):
    """A rank of the replica died, or no longer answers: all of it has to be made again."""


class RequestFailed(RuntimeError):
    """The pipeline refused the request, or failed at it, on all ranks alike: the replica is as good as before."""


class RequestCancelled(RuntimeError):
    """The request was cancelled: all ranks stopped after the same step."""
