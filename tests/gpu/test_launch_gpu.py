"""Ranks on GPUs, started from a kernel that already uses one."""

import os
import signal
import time

import processes
import pytest
import torch
from live_kernel import kernel

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def test_ranks_start_beside_a_cuda_context(tmp_path):
    """D10: the kernel has touched CUDA; ranks are fresh processes, one a GPU, joined by NCCL."""
    with kernel() as made:
        made.run("import torch; held = torch.ones(1, device='cuda')")
        target, config = "wamlab.jupyter.roofline:allreduce", {"device": "cuda", "kib": [64, 65536]}
        made.run(f"job = launch({target!r}, {config}, 'auto', out={str(tmp_path)!r})")
        ran = made.run("records = job.result(); print(records[0].world_size, records[0].device)")
        assert ran.error is None, ran.error
        assert ran.text == f"{torch.cuda.device_count()} cuda\n"


def test_gpu_memory_is_free_after_the_kernel_was_killed(tmp_path):
    """D11: 4 GiB held by each rank are back within 10 s, and the next run starts."""
    free, _ = torch.cuda.mem_get_info(0)
    with kernel() as made:
        made.run(f"job = launch('rank_targets:hold_gpu', {{}}, 'auto', out={str(tmp_path)!r})")
        processes.wait_for(tmp_path / "up0")
        assert free - torch.cuda.mem_get_info(0)[0] > 3 * 2**30
        os.kill(made.manager.provisioner.pid, signal.SIGKILL)
        processes.wait_gone(tmp_path)
    end = time.monotonic() + 10
    while free - torch.cuda.mem_get_info(0)[0] > 2**28 and time.monotonic() < end:
        time.sleep(0.1)
    assert free - torch.cuda.mem_get_info(0)[0] <= 2**28
