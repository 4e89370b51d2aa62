"""Hazard: the user's hooks, which must run as often, in the order and with the values as plainly.

The graph: linear layers with forward, pre-forward, backward and pre-backward hooks, hooks on
parameters and activations, after accumulation (where some loops step and free the gradient at
once), on the optimizer's step, on ``state_dict``; added before the block or inside it, and removed.
"""

from __future__ import annotations

from typing import Any

import torch
from hazards import Mlp, Side, compared, each_backend, each_backend_in_time, loss_of, prepared
from torch import Tensor, nn
from torch.optim import SGD, AdamW


@prepared(each_backend)
def test_hooks_of_modules(side: Side, model: Any) -> None:
    """They read the weights that are about to run, and change inputs, outputs and gradients."""
    for index, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(
            lambda m, x, i=index: side.see(f"pre {i}", m.weight.norm()) or (x[0] * 1.01,)
        )
        layer.register_forward_hook(
            lambda m, x, y, i=index: side.see(f"post {i}", m.bias.sum()) or y + 0.01
        )
        layer.register_full_backward_pre_hook(
            lambda m, g, i=index: side.see(f"pre back {i}", m.weight[0]) or (g[0] * 0.9,)
        )
        layer.register_full_backward_hook(
            lambda m, gi, go, i=index: side.see(f"back {i}", go[0].norm())
        )
    model.register_forward_pre_hook(lambda m, x: side.see("root", m.head.weight.sum()))


@prepared(each_backend_in_time)
def test_hooks_of_tensors(side: Side, model: Any) -> None:
    """On parameters, which change the gradient on its way, and after it has arrived."""
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda g: g * 0.5 + 1e-4)
        parameter.register_post_accumulate_grad_hook(lambda p, n=name: side.see(n, p.grad.norm()))


@prepared(each_backend)
def test_a_step_in_backward(model: Any) -> None:
    """Each parameter has an optimizer of its own, which steps as soon as its gradient is there and
    frees it; the managed one never has one."""
    own = {p: SGD([p], lr=1e-2, momentum=0.9) for p in model.parameters()}

    def step_now(parameter: Tensor) -> None:
        own[parameter].step()
        own[parameter].zero_grad()

    for parameter in own:
        parameter.register_post_accumulate_grad_hook(step_now)


@compared(each_backend)
def test_hooks_of_activations_and_nodes(side: Side) -> None:
    class Watched(Mlp):
        seen: Any = None

        def forward(self, x: Tensor) -> Tensor:
            for index, layer in enumerate(self.layers):
                x = torch.tanh(layer(x))
                x.register_hook(lambda g, i=index: self.seen(f"{i}", g.norm()) or g * 1.1)
                x.grad_fn.register_prehook(lambda g, i=index: self.seen(f"node {i}", g[0]))
                x.retain_grad()
                self.last = x
            return self.head(x)

    model = Watched()
    model.seen = side.see
    optimizer = AdamW(model.parameters(), lr=1e-2)
    with side.offload(model, optimizer):
        for step in range(4):
            side.step(loss_of(model, step), optimizer)
            side.see("retained", model.last.grad)


@prepared(each_backend_in_time)
def test_hooks_of_the_optimizer(side: Side, optimizer: Any) -> None:
    """They see all groups, and the values before and after the step."""

    def look(what: str) -> Any:
        def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            side.see(what, [p.norm() for g in optimizer.param_groups for p in g["params"]])
            side.see(f"{what} states", len(optimizer.state))

        return hook

    optimizer.register_step_pre_hook(look("before"))
    optimizer.register_step_post_hook(look("after"))
    optimizer.register_state_dict_post_hook(lambda o, d: side.see("saved", len(d["state"])))


@compared(each_backend)
def test_hooks_that_are_removed(side: Side) -> None:
    """Once, from within themselves and from another hook of the same call."""
    with side.block() as (model, optimizer):

        def once(module: nn.Module, args: Any) -> None:
            handle.remove()
            side.see("once", module.weight.sum())

        handle = model.layers[2].register_forward_pre_hook(once)
        side.train(model, optimizer, range(4))


@compared(each_backend)
def test_global_hooks(side: Side) -> None:
    """On every module's call, of this process."""
    model = Mlp()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    calls: list[str] = []
    handle = nn.modules.module.register_module_forward_pre_hook(
        lambda m, x: calls.append(type(m).__name__)
    )
    try:
        with side.offload(model, optimizer):
            side.train(model, optimizer, range(4))
    finally:
        handle.remove()
    side.see("calls", calls)
