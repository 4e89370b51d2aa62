"""Hazard: processes made while updates wait and pages are away.

The graph: a small network fed by `torch.utils.data.DataLoader` workers, forked or spawned, made
anew each epoch or kept; a forked child whose data set holds the managed model itself. A child has
none of the parent's paged memory and none of its threads; nothing of it may reach the parent, and
what it lacks it is told by an error, and not by its death. Views that it has inherited are not
shown.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness import HOME, Samples, only, small, small_loss
from hazards import Mlp, Side, batch, compared, each_backend_in_time, each_paged, loss_of, stepwise
from torch import nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset

from dynoffload.errors import BackendError

pytestmark = pytest.mark.timeout(300)


@compared(each_backend_in_time)
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kept", [False, True], ids=["anew", "kept"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_data_loader_workers(side: Side, backend: str, kept: bool, method: str) -> None:
    if method == "spawn" and backend != "pager":
        pytest.skip("a spawned child shares nothing with the parent: one backend will do")
    model = small()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(7)

    def loader() -> DataLoader[Any]:
        return DataLoader(
            Samples(),
            shuffle=True,
            num_workers=1,
            collate_fn=only,
            multiprocessing_context=method,
            generator=generator,
            persistent_workers=kept,
        )

    with side.offload(model, optimizer):
        samples = loader()
        for epoch in range(2 if method == "fork" or kept else 1):
            if epoch and not kept:
                samples = loader()
            for number, sample in enumerate(samples):
                tokens, targets = (part.to(HOME) for part in sample)
                side.step(small_loss(model, (tokens, targets)), optimizer)
                if number == 5:
                    break


class Rows(Dataset[torch.Tensor]):
    """Its samples are rows of a weight of the managed model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.model.layers[0].weight.detach()[index].clone()


def loader_of(rows: Rows) -> DataLoader[torch.Tensor]:
    """Return a loader with one forked worker, which draws no number of the global generator."""
    generator = torch.Generator().manual_seed(7)
    return DataLoader(rows, num_workers=1, multiprocessing_context="fork", generator=generator)


@stepwise(each_paged)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_worker_that_reads_the_model_is_told(
    side: Side, model: Any, optimizer: Any, step: int
) -> None:
    """Training goes on: a clone that is made before the worker starts is what it can read."""
    side.step(loss_of(model, step), optimizer)
    rows = Rows(model)
    if step == 1 and side.backend is not None:
        loader = loader_of(rows)
        with pytest.raises(BackendError, match="clone what a worker reads before"):
            next(iter(loader))
    if step == 2:
        rows.model = copy.deepcopy(model)
        side.see("rows", list(loader_of(rows)))


ACCESSES: dict[str, Callable[[nn.Module, AdamW], Any]] = {
    "parameter": lambda model, optimizer: model.layers[0].weight.sum(),
    "in a list": lambda model, optimizer: torch.stack([model.layers[0].weight]),
    "array": lambda model, optimizer: model.layers[0].weight.detach().numpy(),
    "gradient": lambda model, optimizer: model.layers[0].weight.grad.sum(),
    "state": lambda model, optimizer: optimizer.state[model.layers[0].weight]["exp_avg"].sum(),
    "buffer": lambda model, optimizer: model.table.sum(),
    "state dict": lambda model, optimizer: model.state_dict(),
    "forward": lambda model, optimizer: model(batch(0)[0]),
}


def told(access: Callable[[], Any]) -> bool:
    """Return whether ``access`` fails in a forked child with the error that says why."""
    child = os.fork()
    if not child:
        code = 1
        with contextlib.suppress(BaseException):
            try:
                access()
            except BackendError as error:
                code = 0 if "forked from" in str(error) else 2
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@each_paged
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_every_access_in_a_forked_child_is_told(backend: str) -> None:
    """Also while updates wait, and shapes are told as ever. A child that leaves the block, or
    collects its garbage, does not disturb its parent."""
    side = Side(backend)
    model = Mlp()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    with side.offload(model, optimizer) as session:
        model.register_buffer("table", torch.ones(64, 64))
        for step in range(2):
            side.step(loss_of(model, step), optimizer, zero=step == 0)
        for name, access in ACCESSES.items():
            assert told(lambda access=access: access(model, optimizer)), name

        def described() -> None:
            weight = model.layers[0].weight
            assert weight.shape == (64, 64)
            assert weight.numel() == weight.size(0) * weight.size(1)
            assert weight.dtype is torch.float32
            assert weight.requires_grad
            assert isinstance(weight, nn.Parameter)
            raise BackendError("forked from")

        def leaves() -> None:
            gc.collect()
            session.close()  # type: ignore[union-attr]
            raise BackendError("forked from")

        assert told(described)
        assert told(leaves)
        side.step(loss_of(model, 2), optimizer)


@each_paged
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_made_after_the_block_reads_as_ever(backend: str) -> None:
    side = Side(backend)
    with side.block() as (model, optimizer):
        side.step(loss_of(model, 0), optimizer)

    def reads() -> None:
        model(batch(0)[0]).sum().backward()
        raise BackendError("forked from")

    assert told(reads)
