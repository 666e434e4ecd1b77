"""Two NCCL ranks on one GPU: `torchrun --nproc_per_node 2 share_gpu.py SCRIPT ...` runs SCRIPT as on two hosts.

NCCL refuses two ranks of one host on one GPU. Each rank is given a host name of its own here, so that NCCL takes its
network transport (TCP over the loopback interface): right and slow, as between hosts without a fast network.
"""

import os
import runpy
import sys


def share_gpu(rank: int) -> None:
    """Make this process the only one of its host, as far as NCCL and colossalai can see; before torch is imported."""
    os.environ.update(LOCAL_RANK="0", NCCL_HOSTID=f"host-{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")


def two_ranks() -> list[str]:
    """The start of a command that runs a script on two ranks, on one GPU each where there are two."""
    import torch
    from distributed import free_port

    shared = ["tests/gpu/share_gpu.py"] if torch.cuda.device_count() < 2 else []
    port = ["--master_port", str(free_port())]
    return [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", *port, *shared]


if __name__ == "__main__":
    share_gpu(int(os.environ["RANK"]))
    sys.argv = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
