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
def blocking_transfers():
    """Block the host in each ``isend`` and ``irecv`` of an edge until the peer starts its counterpart.

    NCCL creates a communicator at the first use of an edge, and the host waits for it. A receive occupies the device
    until its tensor arrives, and the host waits for that as soon as it loads a kernel. All-to-alls and all-gathers of
    rows then end before the host continues.
    """
    store, counts = dist.distributed_c10d._get_default_store(), {}

    def meeting(start, is_sender):
        def start_and_meet(tensor, peer, group=None, tag=0):
            work = start(tensor, peer, group=group, tag=tag)
            edge = (dist.get_rank(), peer) if is_sender else (peer, dist.get_rank())
            number = counts[edge, group] = counts.get((edge, group), -1) + 1
            key = f"meet {edge} {group.group_name} {number}"
            store.set(f"{key} {is_sender}", "")
            store.wait([f"{key} {not is_sender}"], timedelta(seconds=15))
            return work

        return start_and_meet

    def finished(start):
        def start_and_wait(*args, **kwargs):
            travelling = start(*args, **kwargs)
            if travelling.work is not None:
                travelling.work.wait()
            return travelling._replace(work=None)

        return start_and_wait

    with (
        mock.patch.object(dist, "isend", meeting(dist.isend, True)),
        mock.patch.object(dist, "irecv", meeting(dist.irecv, False)),
        mock.patch.object(fetch, "start_all_to_all", finished(fetch.start_all_to_all)),
        mock.patch.object(spatial_fetch, "start_all_gather", finished(spatial_fetch.start_all_gather)),
    ):
        yield


def as_nccl():
    """Make links take every group for one of NCCL: a group per edge, no tags, and new groups after a failure."""
    return mock.patch.object(point_to_point, "nccl_device", lambda group: torch.device("cpu"))
