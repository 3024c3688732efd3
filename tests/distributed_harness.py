"""Runs a function on several processes that talk through gloo, and hands back what each returned."""

import os
import pickle
import socket
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

# Imported once, in the process that all ranks of all tests are forked from.
PRELOADED = ["nvfp4_train.experiment.train", "torch.distributed.tensor.parallel", "torch.distributed.fsdp"]


def _entry(rank: int, ranks: int, port: int, folder: str, cases: list[tuple[Callable, tuple]]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    results = []
    for case, arguments in cases:
        try:
            results.append(("returned", case(*arguments)))
        except Exception:
            results.append(("raised", traceback.format_exc()))
    Path(folder, str(rank)).write_bytes(pickle.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(ranks: int, cases: dict[str, tuple[Callable, tuple]]) -> dict[str, list[Any]]:
    """``{name: [what rank 0 returned, ...]}``; an exception comes back as an AssertionError with its traceback.

    The cases run one after another in one set of processes, because a process takes seconds to import torch.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, port, folder, list(cases.values()))
        get_context("forkserver").set_forkserver_preload(PRELOADED)
        multiprocessing.start_processes(_entry, arguments, nprocs=ranks, start_method="forkserver")
        outcomes = [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(ranks)]
    found: dict[str, list[Any]] = {}
    for index, name in enumerate(cases):
        found[name] = []
        for rank in range(ranks):
            how, value = outcomes[rank][index]
            found[name].append(AssertionError(f"rank {rank}: {value}") if how == "raised" else value)
    return found


def returned(values: list[Any]) -> list[Any]:
    """The values of a case; raises the first rank's error."""
    for value in values:
        if isinstance(value, AssertionError):
            raise value
    return values
