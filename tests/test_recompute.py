"""Recomputation in place of paging: the bits of plain PyTorch under budgets that drop activations.

Budgets lie between what a step holds at least (parameters, gradients, optimizer state) and what it
takes if nothing is dropped, as the policy's own ledger counts it in a run with room for all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import Loop, Twin, assert_same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_exact_transformers import mixtral, t5, tokens
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

import dynoffload
from dynoffload.cli.app import app
from dynoffload.config import clear_defaults
from dynoffload.errors import BudgetError, ConfigError, ThreadError
from dynoffload.experiments import zoo
from dynoffload.runtime.counting import whole_bytes
from dynoffload.runtime.telemetry import RunLog

transformers = pytest.importorskip("transformers")

DTR = {"policy": "dtr"}
SGD_ = partial(SGD, lr=1e-2, momentum=0.9)


def zoo_samples(network: str, count: int) -> list[Any]:
    """Return samples of real source text whose activations outweigh a tiny network."""
    shapes: dict[str, dict[str, int]] = {
        "moe": {"rows": 2, "length": 96},
        "tree": {"min_nodes": 24, "max_nodes": 64},
    }
    stream = zoo.samples(network, seed=3, **shapes[network])
    return [sample for sample, _ in zip(stream, range(count), strict=False)]


def zoo_loss(model: nn.Module, sample: Any) -> Tensor:
    """Return the loss of one sample."""
    loss: Tensor = model(*sample.args).loss
    return loss


def language_loss(model: nn.Module, seed: int) -> Tensor:
    """Return the loss of one sample of a stock model."""
    ids = tokens(seed, rows=4, length=40 + seed % 9)
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def bert() -> nn.Module:
    """Return a BERT with dropout in attention and in its layers."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=128,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    return transformers.BertForMaskedLM(config).train()


class Pictures(nn.Module):
    """Convolutions with batch normalization, in-place ReLU, in-place sums, and a checkpoint."""

    def __init__(self, width: int = 16, layers: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
                nn.Dropout2d(0.1),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[rows, 10]`` for ``[rows, 3, height, width]``."""
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            y = checkpoint(block, x, use_reentrant=False) if number == 1 else block(x)
            y += x
            x = F.relu(y, inplace=True)
        return self.head(x.mean((2, 3)))


def pictures_loss(model: nn.Module, seed: int) -> Tensor:
    """Return the loss of random pictures."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 3, 12 + seed % 5, 12, generator=generator)
    return F.cross_entropy(model(x), torch.randint(0, 10, (4,), generator=generator))


class Layers(nn.Module):
    """Layers over ``[64, 64]``, with something done between them."""

    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor], count: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(count))
        self.scale = nn.Parameter(torch.ones(64))
        self.register_buffer("count", torch.ones(64))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[64, 64]`` for the same."""
        for layer in self.layers:
            x = self.between(self, torch.sigmoid(layer(x)))
        return x


class Case:
    """A network, its samples, and its peak with room for all."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        loss_of: Callable[[nn.Module, Any], Tensor],
        samples: Sequence[Any],
        optimizer: Any = SGD_,
    ) -> None:
        self.build, self.loss_of, self.samples = build, loss_of, samples
        self.optimizer = optimizer
        self.least, self.peak = 0, 0

    def measure(self) -> None:
        """Find out, once, what a step takes."""
        if not self.peak:
            session = self.run(1 << 40, Loop(steps=len(self.samples)))
            assert session.stats["recomputed"].sum() == 0
            self.peak = int(session.stats["peak_fast_bytes"].max())

    def run(self, budget: int, loop: Loop, config: dict[str, Any] | None = None) -> Any:
        """Train under ``budget`` and without, and compare every bit; return the session."""
        torch.manual_seed(1)
        twin = Twin(self.build(), self.optimizer)
        self.least = whole_bytes(twin.model, twin.optimizer)
        torch.manual_seed(0)
        expected = loop.run(twin.reference, twin.its, self.samples, self.loss_of)
        drawn = torch.get_rng_state()
        torch.manual_seed(0)
        with dynoffload.offload(
            twin.model, twin.optimizer, budget=budget, config={**DTR, **(config or {})}
        ) as session:
            losses = loop.run(twin.model, twin.optimizer, self.samples, self.loss_of)
            assert_same(torch.get_rng_state(), drawn, "state of the random numbers")
        assert_same(losses, expected, "losses")
        twin.assert_same()
        assert (session.stats["peak_fast_bytes"] <= budget).all()
        assert len(session.stats) == loop.steps
        return session

    def budget(self, share: float) -> int:
        """Return a budget so far between the least and what is taken with room for all."""
        self.measure()
        return int(self.least + share * (self.peak - self.least))


CASES = {
    "moe": Case(lambda: zoo.build("moe", "tiny"), zoo_loss, zoo_samples("moe", 3)),
    "tree": Case(lambda: zoo.build("tree", "tiny"), zoo_loss, zoo_samples("tree", 3)),
    "mixtral": Case(mixtral, language_loss, range(3)),
    "t5": Case(t5, language_loss, range(3), partial(AdamW, lr=1e-3, foreach=True)),
    "bert": Case(bert, language_loss, range(3), partial(AdamW, lr=1e-3, fused=True)),
    "pictures": Case(Pictures, pictures_loss, range(4)),
}
BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("network", "share", "autocast"),
    [
        ("moe", 0.2, None),
        ("tree", 0.7, None),
        ("tree", 0.3, BF16),
        ("mixtral", 0.2, None),
        ("mixtral", 0.3, BF16),
        ("t5", 0.2, BF16),
        ("bert", 0.2, None),
        ("bert", 0.3, BF16),
        ("pictures", 0.4, None),
        ("pictures", 0.2, BF16),
        *(
            pytest.param(network, share, autocast, marks=pytest.mark.slow)
            for network in CASES
            for share in (0.9, 0.5)
            for autocast in (None, BF16)
            if (network, share) not in (("tree", 0.5), ("pictures", 0.5))
        ),
    ],
)
def test_the_bits_are_those_of_plain_training(
    network: str, share: float, autocast: torch.dtype | None
) -> None:
    """Losses, gradients, weights, state, buffers and the stream of random numbers; the peak stays
    within the budget, and what was dropped had the same checksum when it was made again."""
    case = CASES[network]
    loop = Loop(steps=3, autocast=autocast)
    stats = case.run(case.budget(share), loop, {"debug": True}).stats
    if share < 0.9:
        assert stats["recomputed"].sum() > 0, "nothing was made again"
        assert stats["dropped_bytes"].sum() > 0
        assert stats["recompute_s"].sum() > 0


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    network=st.sampled_from(["bert", "pictures", "mixtral"]),
    share=st.floats(0.05, 1.0),
    accumulate=st.sampled_from([1, 2]),
    clip=st.sampled_from([None, 0.5]),
)
def test_any_budget_is_kept_or_refused(
    network: str, share: float, accumulate: int, clip: float | None
) -> None:
    """A budget too small for what cannot be dropped is refused, and says what would do."""
    case = CASES[network]
    budget = case.budget(share)
    loop = Loop(steps=1, accumulate=accumulate, clip=clip)
    refusal: BudgetError | None = None
    try:
        case.run(budget, loop)
    except BudgetError as error:
        refusal = error
    if refusal is not None:
        assert refusal.lacking > 0
        assert "raise it by" in str(refusal)
        assert share < 0.8


def test_states_that_do_not_fit_are_refused_before_anything_is_touched() -> None:
    model = bert()
    optimizer = AdamW(model.parameters())
    need = whole_bytes(model, optimizer)
    with pytest.raises(BudgetError, match=r"policy='dtr' moves nothing.*raise it") as raised:
        dynoffload.offload(model, optimizer, budget=need - 1, config=DTR).__enter__()
    assert raised.value.lacking == 1
    assert not optimizer.state


def test_what_cannot_be_dropped_is_refused_where_it_is_made() -> None:
    """The site, need and have; the next sample, a smaller one, trains on as if nothing was."""
    torch.manual_seed(0)
    twin = Twin(Pictures(), SGD_)
    need, large = whole_bytes(twin.model, twin.optimizer), torch.zeros(64, 3, 32, 32)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        torch.manual_seed(5)
        pictures_loss(model, 0).backward()
        optimizer.step()

    with dynoffload.offload(
        twin.model, twin.optimizer, budget=need + 250_000, config=DTR
    ) as session:
        with pytest.raises(BudgetError, match=r"in or after module 'stem'.*smaller sample"):
            twin.model(large)
        train(twin.model, twin.optimizer)
        assert (session.stats["peak_fast_bytes"] <= need + 250_000).all()
    train(twin.reference, twin.its)
    twin.assert_same()


@pytest.mark.parametrize(
    ("options", "words"),
    [({"page_activations": False}, "leaves it nothing"), ({"rollback": True}, "no images")],
)
def test_options_that_it_lacks_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        dynoffload.offload(bert(), budget="1GB", config={**DTR, **options}).__enter__()


def test_a_compiled_module_is_refused() -> None:
    model = Pictures()
    model.head.compile()
    with pytest.raises(ConfigError, match="'head' is compiled, and policy='dtr' makes"):
        dynoffload.offload(model, budget="1GB", config=DTR).__enter__()


def test_nothing_is_counted_or_kept_beyond_its_life() -> None:
    """After each step only the model's tensors are counted, though the results are kept."""
    case = CASES["bert"]
    torch.manual_seed(0)
    model = case.build()
    optimizer = SGD_(model.parameters())
    kept = []
    with dynoffload.offload(model, optimizer, budget=case.budget(0.3), config=DTR) as session:
        for seed in range(4):
            logits = model(input_ids=tokens(seed, rows=4, length=40)).logits
            logits.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            kept.append(logits.detach())
            del logits
            session._ledger.settle()
            held = sum(one.nbytes for one in kept)
            states = sum(p.nbytes for p in model.parameters())
            momenta = sum(s["momentum_buffer"].nbytes for s in optimizer.state.values())
            buffers = sum(b.nbytes for b in model.buffers())
            assert session._ledger.live == states + momenta + buffers + held
            assert not list(session._making.savers)
            assert len(session._ledger._known) < 4 * len(list(model.parameters()))


def test_the_names_and_columns_of_a_session(tmp_path: Path) -> None:
    """A report says by which policy and what was made again; a run is saved and goes on."""
    case = CASES["bert"]
    torch.manual_seed(0)
    model = case.build()
    optimizer = SGD_(model.parameters())
    with dynoffload.offload(model, optimizer, budget=case.budget(0.3), config=DTR) as session:
        for seed in range(2):
            language_loss(model, seed).backward()
            optimizer.step()
            optimizer.zero_grad()
        session.save(tmp_path / "run")
        expected = {name: p.detach().clone() for name, p in model.named_parameters()}
        language_loss(model, 2).backward()
        optimizer.step()
        session.load(tmp_path / "run")
        assert_same(dict(model.named_parameters()), expected, "what was loaded")
        assert (session.backend, session.paging) == ("recompute", False)
        files = session.report(tmp_path / "run.html")
    page = files.page.read_text(encoding="utf-8")
    assert "by the policy" in page
    assert "dtr" in page
    assert "operators were called again" in page
    log = RunLog.load(files.log)
    assert log.policy == "dtr"
    assert sum(step.recomputed for step in log.steps) == session.stats["recomputed"].sum() > 0


def test_a_script_is_run_by_it(tmp_path: Path) -> None:
    """`dynoffload run --policy dtr`, with a budget that drops, and one that it refuses."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, dynoffload\n"
        "layers = [torch.nn.Tanh() for _ in range(20)] + [torch.nn.Linear(8, 8)]\n"
        "model = torch.nn.Sequential(*layers)\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "x = torch.linspace(-1, 1, 80_000).reshape(10_000, 8).requires_grad_()\n"
        "with dynoffload.offload(model, optimizer):\n"
        "    model(x).sum().backward()\n"
        "    optimizer.step()\n"
    )
    runner = CliRunner()
    try:
        done = runner.invoke(app, ["run", "--policy", "dtr", "--budget", "3MB", str(script)])
        assert done.exit_code == 0, done.output
        assert "by policy dtr" in " ".join(done.output.split())
        done = runner.invoke(app, ["run", "--policy", "dtr", "--budget", "100B", str(script)])
        assert done.exit_code == 1
        assert "policy='dtr' moves nothing" in done.output
    finally:
        clear_defaults()


class Numbers(torch.utils.data.Dataset[Tensor]):
    """Samples that a worker makes of larger tensors than any budget of these tests."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.arange(4_000_000.0).reshape(64, -1)[:, :64] * 0 + index


def test_a_loaders_workers_are_not_watched() -> None:
    """They are copies of the process, and what they make is not in its memory."""
    torch.manual_seed(0)
    model = Layers(lambda model, x: torch.tanh(x), count=2)
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=None, num_workers=1)
    with dynoffload.offload(model, budget="1MB", config=DTR):
        for number, x in enumerate(loader):
            assert x[0, 0] == number
            model(x).sum().backward()


def test_a_forward_in_another_thread_is_refused() -> None:
    model = Layers(lambda model, x: torch.tanh(x), count=2)
    raised: list[BaseException] = []

    def work() -> None:
        try:
            model(torch.zeros(64, 64))
        except ThreadError as error:
            raised.append(error)

    with dynoffload.offload(model, budget="1MB", config=DTR):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        model(torch.zeros(64, 64)).sum().backward()
    assert "watches the thread that entered" in str(raised[0])
