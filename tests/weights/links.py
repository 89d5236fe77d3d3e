"""Stand-ins for NCCL in tests of point-to-point transfers, on gloo."""

from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist

from para_core.distributed import point_to_point
from para_core.layout import fetch
from para_core.spatial import fetch as spatial_fetch


@contextmanager
def blocking_transfers(*, always, seconds=15):
    """Block the host in the first ``isend`` and ``irecv`` of an edge (``always``: in each) until the peer starts its
    counterpart.

    NCCL creates a communicator at the first use of an edge, and the host waits for it. A receive occupies the device
    until its tensor arrives, and the host waits for that as soon as it loads a kernel. All-to-alls and all-gathers of
    rows then end before the host continues.
    """
    store, counts = dist.distributed_c10d._get_default_store(), {}
    isend, irecv = dist.isend, dist.irecv

    def meet(source, target, group, is_sender):
        number = counts[source, target, group] = counts.get((source, target, group), -1) + 1
        if number > 0 and not always:
            return
        key = f"meet {source} {target} {group.group_name} {number}"
        store.set(f"{key} {is_sender}", "")
        store.wait([f"{key} {not is_sender}"], timedelta(seconds=seconds))

    def send(tensor, dst, group=None, tag=0):
        work = isend(tensor, dst, group=group, tag=tag)
        meet(dist.get_rank(), dst, group, True)
        return work

    def receive(tensor, src, group=None, tag=0):
        work = irecv(tensor, src, group=group, tag=tag)
        meet(src, dist.get_rank(), group, False)
        return work

    def finished(start):
        def start_and_wait(*args, **kwargs):
            travelling = start(*args, **kwargs)
            if travelling.work is not None:
                travelling.work.wait()
            return travelling._replace(work=None)

        return start_and_wait

    with (
        mock.patch.object(dist, "isend", send),
        mock.patch.object(dist, "irecv", receive),
        mock.patch.object(fetch, "start_all_to_all", finished(fetch.start_all_to_all)),
        mock.patch.object(spatial_fetch, "start_all_gather", finished(spatial_fetch.start_all_gather)),
    ):
        yield


def as_nccl():
    """Make links take every group for one of NCCL in this context: a group per edge, no tags of gloo, and new groups
    after a failure.
    """
    return mock.patch.object(point_to_point, "nccl_device", lambda group: torch.device("cpu"))
