"""Runs of real processes in every layout, recorded once for all tests."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from parallel_models import LAYOUTS, llama, mixture, model, train, work

_TRIES = 4


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All layouts; gloo itself aborts now and then, and a new group of processes goes on with the next layout."""
    folder = tmp_path_factory.mktemp("parallel")
    for world in LAYOUTS:
        for attempt in range(_TRIES):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            try:
                mp.spawn(work, args=(world, str(folder), port), nprocs=world)
                break
            except mp.ProcessExitedException as error:
                if error.signal_name != "SIGABRT" or attempt == _TRIES - 1:
                    raise
                for name in LAYOUTS[world]:
                    done = [folder / f"{name}.{rank}" for rank in range(world)]
                    if not all(each.exists() for each in done):
                        shutil.rmtree(folder / name, ignore_errors=True)
                        for each in done:
                            each.unlink(missing_ok=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name, make in (("one", model), ("mixture", mixture), ("llama", llama)):
        train(make(), folder / name)
        train(make(), folder / f"{name}_summaries", keep="summary")
    torch.set_num_threads(threads)
    return folder
