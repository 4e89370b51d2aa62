"""The Child-Sum Tree-LSTM: one cell call per node, the paper's equations, it learns."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from dynoffload.datasets.trees import KINDS, Tree, trees
from dynoffload.experiments import zoo
from dynoffload.experiments.zoo import tree_lstm
from dynoffload.experiments.zoo.tree_lstm import ChildSumCell, TreeLSTM


def _tree(*children: tuple[int, ...]) -> Tree:
    kinds = torch.arange(1, len(children) + 1)
    return Tree(kinds, kinds.flip(0), children, "f", "f.py")


def _arities(model: TreeLSTM, tree: Tree) -> list[int]:
    """Return the arity of each cell call of one forward pass, in order."""
    called: list[int] = []
    handle = model.cell.register_forward_pre_hook(lambda _, args: called.append(len(args[1])))
    model(tree)
    handle.remove()
    return called


def test_it_learns() -> None:
    model = tree_lstm.build("tiny")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for tree in islice(trees(max_nodes=48, seed=0), 80):
        loss = model(tree).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[:5]) / 5 > 3.5
    assert sum(losses[-20:]) / 20 < 2.2


def test_the_cell_runs_once_per_node_children_first() -> None:
    model = tree_lstm.build("tiny")
    assert _arities(model, _tree((), (), (0, 1), (), (2, 3))) == [0, 0, 2, 0, 2]
    for tree in islice(trees(max_nodes=64), 3):
        assert _arities(model, tree) == [len(below) for below in tree.children]


def test_untied_cells_run_by_the_kind_of_the_node() -> None:
    """Each node's by its kind; with equal weights in all cells the network is the tied one."""
    model = tree_lstm.build("tiny-untied")
    tied = tree_lstm.build("tiny-untied", cells=1)
    cells = list(model.cell)
    assert len(cells) == 12
    tree = next(islice(trees(max_nodes=64), 1))
    called: list[int] = []
    for number, cell in enumerate(cells):
        cell.register_forward_pre_hook(lambda _, args, number=number: called.append(number))
        cell.load_state_dict(tied.cell.state_dict())
    for name in ("embedding", "head"):
        getattr(model, name).load_state_dict(getattr(tied, name).state_dict())
    assert torch.equal(model(tree).logits, tied(tree).logits)
    assert called == [kind % 12 for kind in tree.kinds.tolist()]
    assert 2 < len(set(called)) <= 12
    with pytest.raises(ValueError, match="cells=0"):
        tree_lstm.build("tiny", cells=0)


def test_no_tensor_of_the_untied_network_is_large() -> None:
    """A sixteenth of its weights, gradients and optimizer state holds any update of AdamW."""
    sizes = [parameter.nbytes for parameter in tree_lstm.build("tiny-untied").parameters()]
    assert max(sizes) * 24 <= sum(sizes)


def test_samples_take_different_paths() -> None:
    model = tree_lstm.build("tiny")
    paths = {tuple(_arities(model, tree)) for tree in islice(trees(max_nodes=64, seed=1), 8)}
    assert len(paths) >= 7


def test_the_cell_is_the_papers() -> None:
    torch.manual_seed(0)
    cell = ChildSumCell(embedding=3, hidden=4)
    x, child_h, child_c = torch.randn(1, 3), torch.randn(2, 4), torch.randn(2, 4)
    h, c = cell(x, child_h, child_c)
    wi, wo, wu, wf = cell.input.weight.chunk(4)
    bi, bo, bu, bf = cell.input.bias.chunk(4)
    ui, uo, uu = cell.gates.weight.chunk(3)
    total = child_h[0] + child_h[1]
    i = torch.sigmoid(wi @ x[0] + ui @ total + bi)
    o = torch.sigmoid(wo @ x[0] + uo @ total + bo)
    u = torch.tanh(wu @ x[0] + uu @ total + bu)
    expected = i * u
    for k in range(2):
        f = torch.sigmoid(wf @ x[0] + cell.forget.weight @ child_h[k] + bf)
        expected = expected + f * child_c[k]
    torch.testing.assert_close(c[0], expected)
    torch.testing.assert_close(h[0], o * torch.tanh(expected))


def test_order_among_children_does_not_matter_but_depth_does() -> None:
    model = tree_lstm.build("tiny")
    kinds = torch.tensor([5, 9, 7])
    flat = Tree(kinds, kinds, ((), (), (0, 1)), "f", "f.py")
    swapped = Tree(kinds[[1, 0, 2]], kinds, ((), (), (0, 1)), "f", "f.py")
    chain = Tree(kinds, kinds, ((), (0,), (1,)), "f", "f.py")
    root = model(flat).logits[-1]
    torch.testing.assert_close(root, model(swapped).logits[-1])
    assert not torch.allclose(root, model(chain).logits[-1], atol=1e-4)


def test_a_state_is_a_summary_of_its_own_subtree_only() -> None:
    model = tree_lstm.build("tiny")
    small = model(_tree((), (), (0, 1))).logits
    large = model(_tree((), (), (0, 1), (), (2, 3))).logits
    torch.testing.assert_close(large[:3], small)


def test_a_deep_chain_needs_no_recursion() -> None:
    depth = 3_000
    kinds = torch.ones(depth, dtype=torch.int64)
    chain = Tree(kinds, kinds, ((), *((node,) for node in range(depth - 1))), "f", "f.py")
    with torch.no_grad():
        assert torch.isfinite(tree_lstm.build("tiny")(chain).loss)


def test_weights_follow_from_the_seed_also_by_way_of_meta() -> None:
    plain = tree_lstm.build("tiny", seed=3)
    meta = tree_lstm.build("tiny", seed=3, device="meta")
    assert all(parameter.is_meta for parameter in meta.parameters())
    real = meta.to_empty(device="cpu")
    torch.manual_seed(3)
    for module in real.modules():
        if list(module.parameters(recurse=False)):
            module.reset_parameters()
    for (name, one), two in zip(real.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, two), name


def test_a_sample_shows_the_nodes_in_the_order_of_the_cell_calls() -> None:
    model = tree_lstm.build("tiny")
    sample = model.sample_features(_tree((), (), (0, 1)))
    assert sample.elements.tolist() == [[0, 1, 3], [0, 2, 2], [2, 3, 1]]
    assert sample.values == {"nodes": 3.0, "leaves": 2.0, "widest": 2.0}


def test_the_zoo_finds_it_by_name() -> None:
    model = zoo.build("tree", "tiny", hidden=8)
    assert isinstance(model, TreeLSTM)
    sample = next(zoo.samples("tree", "held-out", max_nodes=32))
    output = model(*sample.args)
    assert output.loss.ndim == 0
    assert output.logits.shape == (len(sample.args[0]), len(KINDS))
    with pytest.raises(ValueError, match="no preset 'huge'"):
        zoo.build("tree", "huge")
