"""Adapters on a model from the meta device: the base is paged from its files."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from clients import assert_paged
from emulated import DEVICE, accelerated
from exactness import SMALL_PAGES, assert_same, least_budget, needs_pager
from fused_networks import paging_of
from safetensors.torch import load_file, save_file
from test_materialize_paged import IDS, paged, trains
from test_materialize_saved import built, saved
from torch.optim import AdamW
from trainers import EVERYTHING, assert_same_outcome, trainer

import dynoffload
from dynoffload.errors import ConfigError, SpillError
from dynoffload.integrations.transformers import OffloadCallback, materialize
from dynoffload.memory.pager import Pager

peft = pytest.importorskip("peft")

CONFIG: dict[str, Any] = {**SMALL_PAGES, "step_aside": False}
ATTENTION = {"target_modules": ["q_proj", "v_proj"]}
EXPERTS = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
ADAPTERS: dict[str, Any] = {
    "lora": lambda: peft.LoraConfig(r=4, **ATTENTION),
    "gaussian": lambda: peft.LoraConfig(r=4, init_lora_weights="gaussian", **ATTENTION),
    "lora, a copy of the head": lambda: peft.LoraConfig(
        r=4, modules_to_save=["lm_head"], **ATTENTION
    ),
    "lora on embeddings": lambda: peft.LoraConfig(r=4, target_modules=["embed_tokens", "o_proj"]),
    "lora on experts": lambda: peft.LoraConfig(r=4, **ATTENTION, **EXPERTS),
    "ia3": lambda: peft.IA3Config(**ATTENTION, feedforward_modules=[]),
}


def trained(model: Any) -> dict[str, Any]:
    """Return copies of what trains."""
    named = model.named_parameters()
    return {name: p.detach().clone() for name, p in named if p.requires_grad}


@needs_pager
@pytest.mark.parametrize(
    ("name", "network"),
    [(name, "qwen3-moe" if "experts" in name else "llama") for name in ADAPTERS],
)
def test_adapters_train_as_on_a_loaded_base(
    name: str, network: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of the base is written; adapters begin as PEFT lets them."""
    stock, config = saved(network, tmp_path, torch.bfloat16, tie_word_embeddings=False)
    model = peft.get_peft_model(built(stock, config, torch.bfloat16), ADAPTERS[name]()).train()
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with caplog.at_level("WARNING"):
        materialize(model, tmp_path)
    assert "begin anew" in caplog.text
    nbytes = sum(p.nbytes for p in model.parameters())
    budget, _ = least_budget(model, optimizer, nbytes // 2, CONFIG)
    with dynoffload.offload(model, optimizer, budget=budget, config=CONFIG) as session:
        assert session.paging
        first = trained(model)
        losses = trains(model, optimizer)
        device, regions = paging_of(session).device, paged(session, model)
        assert isinstance(device, Pager)
        assert len(regions) > 8
        assert all(map(device.is_sourced, regions))
    loaded = stock.from_pretrained(tmp_path, dtype=torch.bfloat16)
    loaded = peft.get_peft_model(loaded, ADAPTERS[name]()).train()
    begun = trained(loaded)
    assert begun.keys() == first.keys()
    for key, value in begun.items():
        if value.unique().numel() == 1 or "head" in key:  # zeros, ones, copies of the base
            assert_same(first[key], value, key)
        else:  # other draws of the same
            assert 0.5 < float(first[key].float().std() / value.float().std()) < 2.0
    its = dict(loaded.named_parameters())
    with torch.no_grad():
        for key, value in first.items():
            its[key].copy_(value)
    by = AdamW([p for p in loaded.parameters() if p.requires_grad], lr=1e-2)
    assert trains(loaded, by) == losses
    assert_same(dict(model.named_parameters()), its, "after")


def saved_adapter(stock: Any, base: Path, adapter: Any, path: Path) -> Any:
    """Train an adapter on a loaded base, save it, and return the model."""
    loaded = peft.get_peft_model(stock.from_pretrained(base), adapter).train()
    trains(loaded, AdamW([p for p in loaded.parameters() if p.requires_grad], lr=1e-1))
    loaded.save_pretrained(path)
    return loaded


SAVED: dict[str, Any] = {
    **ADAPTERS,
    "dora": lambda: peft.LoraConfig(r=4, use_dora=True, **ATTENTION),
    "with biases": lambda: peft.LoraConfig(r=4, lora_bias=True, **ATTENTION),
    "lora on tied embeddings": ADAPTERS["lora on embeddings"],
    "lora on a tied head": lambda: peft.LoraConfig(r=4, target_modules=["lm_head", "q_proj"]),
}


@pytest.mark.parametrize("backend", [pytest.param("pager", marks=needs_pager), "mapped", DEVICE])
@pytest.mark.parametrize(
    ("name", "network"), [(name, "qwen3-moe" if "experts" in name else "llama") for name in SAVED]
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of PEFT, that nothing is copied
def test_saved_adapters_train_on(name: str, network: str, backend: Any, tmp_path: Path) -> None:
    """As PEFT's on a loaded base, from the same numbers, which no memory of their own keeps."""
    stock, config = saved(network, tmp_path / "base", tie_word_embeddings="tied" in name)
    saved_adapter(stock, tmp_path / "base", SAVED[name](), tmp_path / "adapter")
    sides = []
    for base in (built(stock, config), stock.from_pretrained(tmp_path / "base")):
        low = "embed" not in name and "head" not in name
        model = loaded_by_peft(base, tmp_path / "adapter", low=low)
        sides.append((model, AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)))
    (model, optimizer), (loaded, its) = sides
    materialize(model, tmp_path / "base", adapters={"default": tmp_path / "adapter"})
    options: dict[str, Any] = {"config": CONFIG}
    below: Any = contextlib.nullcontext()
    if backend == DEVICE:
        options["device"], below = DEVICE, accelerated()
    else:
        options["config"] = {**CONFIG, "backend": backend}
    wanted = sum(p.nbytes for p in model.parameters()) // (1 if backend == DEVICE else 2)
    budget, _ = least_budget(model, optimizer, wanted, options["config"])
    with below, dynoffload.offload(model, optimizer, budget=budget, **options) as session:
        assert session.paging
        assert "adapter_model.safetensors" not in Path("/proc/self/maps").read_text()
        assert_same(trained(model), trained(loaded), "first")
        assert trains(model, optimizer) == trains(loaded, its)
    assert_same(dict(model.named_parameters()), dict(loaded.named_parameters()), "after")


def test_several_saved_adapters(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also one that was loaded to be used as it is."""
    stock, config = saved("llama", tmp_path / "base")
    for number, name in enumerate(("one", "other")):
        adapter = peft.LoraConfig(r=4 + number, **ATTENTION)
        saved_adapter(stock, tmp_path / "base", adapter, tmp_path / name)
    sides = []
    for base in (built(stock, config), stock.from_pretrained(tmp_path / "base")):
        model = peft.PeftModel.from_pretrained(base, tmp_path / "one", "one")
        model.load_adapter(tmp_path / "other", "other", is_trainable=True)
        sides.append(model.eval())
    model, loaded = sides
    directories = {name: tmp_path / name for name in ("one", "other")}
    materialize(model, tmp_path / "base", adapters=directories)
    assert "begin anew" not in caplog.text
    budget = sum(p.nbytes for p in model.parameters())
    with dynoffload.offload(model, budget=budget, config=CONFIG), torch.no_grad():
        for name in ("one", "other"):
            for side in sides:
                side.set_adapter(name)
            assert_same(model(input_ids=IDS).logits, loaded(input_ids=IDS).logits, name)


@pytest.mark.parametrize("first", [True, False])
def test_a_saved_adapter_that_has_other_tensors_by_the_block_is_refused(
    first: bool, tmp_path: Path
) -> None:
    """With embeddings at first, and without them later, or the other way round."""
    stock, config = saved("llama", tmp_path / "base")
    loaded = saved_adapter(stock, tmp_path / "base", ADAPTERS["lora"](), tmp_path / "adapter")
    loaded.save_pretrained(tmp_path / "adapter", save_embedding_layers=first)
    model = peft.PeftModel.from_pretrained(built(stock, config), tmp_path / "adapter")
    materialize(model, tmp_path / "base", adapters={"default": tmp_path / "adapter"})
    loaded.save_pretrained(tmp_path / "adapter", save_embedding_layers=not first)
    words = r"other tensors than when materialize\(\) was called"
    with pytest.raises(ConfigError, match=words):
        dynoffload.offload(model, budget="64MB", config=CONFIG).start()
    assert all(p.is_meta for p in model.parameters())


def test_shared_modules_are_known_by_each_name(tmp_path: Path) -> None:
    stock, config = saved("llama", tmp_path)
    loaded, model = stock.from_pretrained(tmp_path), built(stock, config)
    for one in (loaded, model):
        one.model.layers[1].self_attn = one.model.layers[0].self_attn
    state = {name: value.clone() for name, value in loaded.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    model = peft.get_peft_model(model, ADAPTERS["lora"]())
    materialize(model, tmp_path)
    with dynoffload.offload(model, budget="64MB", config=CONFIG):
        held = {n: p for n, p in model.named_parameters() if "lora" not in n}
        for name, parameter in held.items():
            plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
            assert_same(parameter, state[plain], plain)


def change(file: Path, how: str) -> None:
    """Change a file without other bytes, with others, or with fewer."""
    if how == "touched":
        os.utime(file)
    elif how == "written":
        file.write_bytes(file.read_bytes()[::-1])
    else:
        os.truncate(file, file.stat().st_size - 100)


def loaded_by_peft(model: Any, path: Path, *, low: bool = True) -> Any:
    """Add an adapter that trains on; on the meta device, if ``low``, without PEFT's warnings."""
    low = low and next(model.parameters()).is_meta
    return peft.PeftModel.from_pretrained(model, path, is_trainable=True, low_cpu_mem_usage=low)


@needs_pager
@pytest.mark.parametrize("how", ["touched", "written", "cut off"])
@pytest.mark.parametrize("when", ["between steps", "in forward", "in backward", "in evaluation"])
def test_adapters_can_be_saved_when_a_file_of_the_base_changes(
    when: str, how: str, tmp_path: Path
) -> None:
    """The next module that reads from there raises an error with the tensor and the file."""
    stock, config = saved("mixtral", tmp_path / "base", shard="20KB")
    model = peft.get_peft_model(built(stock, config), ADAPTERS["lora"]()).train()
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    materialize(model, tmp_path / "base")
    budget, _ = least_budget(model, optimizer, 1, CONFIG)
    shard = max((tmp_path / "base").glob("*-of-*"))
    layer = model.get_base_model().model.layers[1]
    words = rf"cannot read base_model.model.*{shard.name}, where .* has changed"
    session = dynoffload.offload(model, optimizer, budget=budget, config=CONFIG).start()
    trains(model, optimizer)
    expected = trained(model)
    if when == "in forward":
        layer.register_forward_pre_hook(lambda *_: change(shard, how))
    elif when == "in backward":
        layer.register_full_backward_pre_hook(lambda *_: change(shard, how))
    else:
        change(shard, how)
    with pytest.raises(SpillError, match=words), torch.set_grad_enabled("eval" not in when):
        trains(model, optimizer, 1)
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(SpillError, match=words):
        session.close()  # reads the base back
    held = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert_same({name.replace(".default", ""): one for name, one in expected.items()}, held, how)


@needs_pager
def test_the_error_that_leaves_the_block_is_shown_beside_that_of_its_end(tmp_path: Path) -> None:
    stock, config = saved("llama", tmp_path)
    model = peft.get_peft_model(built(stock, config), ADAPTERS["lora"]()).train()
    materialize(model, tmp_path)
    mine = KeyError("mine")

    def leave() -> None:
        budget, _ = least_budget(model, None, 1, CONFIG)
        with dynoffload.offload(model, budget=budget, config=CONFIG):
            change(tmp_path / "model.safetensors", "touched")
            raise mine

    with pytest.raises(SpillError, match="what trains can still be saved") as caught:
        leave()
    assert caught.value.__context__ is mine


@pytest.mark.parametrize("backend", [pytest.param("pager", marks=needs_pager), "mapped"])
def test_optimizer_state_is_loaded_in_the_block(backend: str, tmp_path: Path) -> None:
    """Before it, torch moves the state to the meta device, which is refused."""
    stock, config = saved("llama", tmp_path / "base")
    loaded = peft.get_peft_model(stock.from_pretrained(tmp_path / "base"), ADAPTERS["lora"]())
    optimizer = AdamW([p for p in loaded.train().parameters() if p.requires_grad], lr=1e-2)
    trains(loaded, optimizer)
    loaded.save_pretrained(tmp_path / "adapter")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    model = loaded_by_peft(built(stock, config), tmp_path / "adapter").train()
    materialize(model, tmp_path / "base", adapters={"default": tmp_path / "adapter"})
    its = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    its.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    options = {**CONFIG, "backend": backend}
    budget = sum(p.nbytes for p in model.parameters()) // 2
    with (
        pytest.raises(ConfigError, match=r"'exp_avg'.* meta device.*: load it inside the block"),
        dynoffload.offload(model, its, budget=budget, config=options),
    ):
        pass
    its = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with dynoffload.offload(model, its, budget=budget, config=options) as session:
        assert session.paging
        its.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
        assert trains(model, its) == trains(loaded, optimizer)
    assert_same(dict(model.named_parameters()), dict(loaded.named_parameters()), "after")


@pytest.mark.filterwarnings("ignore::FutureWarning", "error:.*is a no-op")
def test_a_trainer_goes_on_with_a_saved_adapter(tmp_path: Path) -> None:
    stock, config = saved("llama", tmp_path / "base", vocab_size=512)
    saved_adapter(stock, tmp_path / "base", ADAPTERS["lora"](), tmp_path / "adapter")
    sides: list[Any] = []
    for base in (stock.from_pretrained(tmp_path / "base"), built(stock, config)):
        model = loaded_by_peft(base, tmp_path / "adapter")
        calls = []
        if sides:
            materialize(model, tmp_path / "base", adapters={"default": tmp_path / "adapter"})
            nbytes = sum(p.nbytes for p in model.parameters())
            calls = [OffloadCallback(budget=nbytes // 2, config=CONFIG)]
        sides.append(trainer(model, tmp_path / str(len(sides)), *calls, **EVERYTHING))
        sides[-1].train()
    assert_paged(calls[0].session, steps=4)
    assert_same_outcome(sides[1], sides[0])

    last = tmp_path / "0" / "checkpoint-2"  # which it resumes inside a block
    model = loaded_by_peft(built(stock, config), last)
    materialize(model, tmp_path / "base", adapters={"default": last})
    optimizer = trainer(model, tmp_path).create_optimizer()
    with dynoffload.offload(model, optimizer, budget=nbytes // 2, config=CONFIG):
        optimizers = (optimizer, None)
        resumed = trainer(model, tmp_path / "resumed", optimizers=optimizers, **EVERYTHING)
        resumed.train(resume_from_checkpoint=str(last))
    for side in (resumed, sides[0]):
        del side.state.log_history[-1]["train_loss"]  # of the steps since it was resumed
    assert_same_outcome(resumed, sides[0])


def test_a_head_that_is_tied_is_copied(tmp_path: Path) -> None:
    """The files have it under the name of the embedding alone."""
    stock, config = saved("llama", tmp_path, tie_word_embeddings=True)
    adapter = {"r": 4, "modules_to_save": ["lm_head"], **ATTENTION}
    loaded = peft.get_peft_model(stock.from_pretrained(tmp_path), peft.LoraConfig(**adapter))
    model = peft.get_peft_model(built(stock, config), peft.LoraConfig(**adapter))
    materialize(model, tmp_path)
    with dynoffload.offload(model, budget="1MB", config=CONFIG):
        for name, value in loaded.named_parameters():
            if "lora" not in name:
                assert_same(model.get_parameter(name), value, name)


def test_saved_adapters_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    stock, config = saved("llama", tmp_path / "base")
    saved_adapter(stock, tmp_path / "base", ADAPTERS["lora"](), tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    right = load_file(file)
    first, *_ = right

    def refused(words: str, model: Any = None, name: str = "default") -> None:
        if model is None:
            model = peft.get_peft_model(built(stock, config), ADAPTERS["lora"]())
        with pytest.raises(ConfigError, match=words):
            materialize(model, tmp_path / "base", adapters={name: tmp_path / "adapter"})
        assert all(p.is_meta for p in model.parameters())

    refused("adapters= names 'mine', and this PeftModel has 'default'", name="mine")
    refused("adapters= was given, and the LlamaForCausalLM has none", built(stock, config))
    plain: Any = str(tmp_path / "adapter")
    with pytest.raises(ConfigError, match=r"adapters='/.* is no mapping: .*\{'default': direc"):
        materialize(loaded_by_peft(built(stock, config), plain), tmp_path / "base", adapters=plain)
    wide = peft.get_peft_model(built(stock, config), peft.LoraConfig(r=8, **ATTENTION))
    refused("cannot load the adapter 'default' from .*its r is 4, and the model's 8", wide)
    loud = peft.get_peft_model(
        built(stock, config), peft.LoraConfig(r=4, lora_alpha=64, **ATTENTION)
    )
    refused("its lora_alpha is 8, and the model's 64", loud)
    more = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"])
    refused("lacks '.*o_proj.lora_A.*', which the", peft.get_peft_model(built(stock, config), more))
    less = peft.LoraConfig(r=4, target_modules=["q_proj"])
    refused("has '.*v_proj.lora_A.*', which the", peft.get_peft_model(built(stock, config), less))
    head = peft.get_peft_model(built(stock, config), ADAPTERS["lora, a copy of the head"]())
    refused("cannot load the adapter 'default' from .*lm_head", head)
    save_file({name: one for name, one in right.items() if name != first}, file)
    refused("lacks '.*', which the adapter 'default' has")
    save_file({**right, first: right[first][:2].clone()}, file)
    refused("has a '.*' of shape .*, and that of the adapter 'default' is")
    file.write_bytes(b"")
    refused("cannot load the adapter 'default' from .*adapter_model.safetensors")
    file.unlink()
    refused("cannot load the adapter 'default' from .*adapter_model.safetensors")


def test_what_the_files_of_the_base_lack_is_named_as_there(tmp_path: Path) -> None:
    """And by whom they are read, if it is left to the generic function, or to none."""
    stock, config = saved("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    right = load_file(file)
    one = "model.layers.1.self_attn.q_proj.weight"
    for tensors, words in (
        ({name: value for name, value in right.items() if name != one}, f"has no tensor '{one}'"),
        ({**right, one: right[one][:8].clone()}, f"tensor '{one}' of .* has shape"),
    ):
        save_file(tensors, file)
        with pytest.raises(ConfigError, match=words):
            materialize(peft.get_peft_model(built(stock, config), ADAPTERS["lora"]()), tmp_path)
    remedy = r"call dynoffload\.integrations\.transformers\.materialize\(model"
    save_file(right, file)
    model = peft.get_peft_model(built(stock, config), ADAPTERS["lora"]())
    with pytest.raises(ConfigError, match=remedy):
        dynoffload.materialize(model, tmp_path)
    with pytest.raises(ConfigError, match=remedy), dynoffload.offload(model, budget="1MB"):
        pass


def test_saved_adapters_of_a_model_in_memory_are_refused(tmp_path: Path) -> None:
    """Before a value changes. There, an adapter's name may be part of a path."""
    stock, config = saved("llama", tmp_path / "base")
    saved_adapter(stock, tmp_path / "base", ADAPTERS["lora"](), tmp_path / "adapter")
    model = peft.get_peft_model(stock(config), ADAPTERS["lora"]())
    before = {name: one.clone() for name, one in model.state_dict().items()}
    with pytest.raises(ConfigError, match="is in memory: load its adapters by PEFT"):
        materialize(model, tmp_path / "base", adapters={"default": tmp_path / "adapter"})
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    model = peft.get_peft_model(built(stock, config), ADAPTERS["lora"](), adapter_name="model")
    materialize(model, tmp_path / "base", adapters={"model": tmp_path / "adapter"})


def test_an_adapter_that_was_loaded_to_the_meta_device_is_refused(tmp_path: Path) -> None:
    stock, config = saved("llama", tmp_path / "base")
    saved_adapter(stock, tmp_path / "base", ADAPTERS["lora"](), tmp_path / "adapter")
    model = peft.PeftModel.from_pretrained(built(stock, config), tmp_path / "adapter")
    words = r"the meta device has lost its values: pass materialize\(\) adapters=\{'default': "
    with pytest.raises(ConfigError, match=words):
        materialize(model, tmp_path / "base")
    with pytest.raises(ConfigError, match=words):
        materialize(loaded_by_peft(built(stock, config), tmp_path / "adapter"), tmp_path / "base")


def test_adapters_that_begin_anew_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """PEFT does not tell whether one with a type of task was loaded."""
    stock, config = saved("llama", tmp_path / "base")
    adapter = peft.LoraConfig(r=4, task_type="CAUSAL_LM", **ATTENTION)
    saved_adapter(stock, tmp_path / "base", adapter, tmp_path / "adapter")
    materialize(loaded_by_peft(built(stock, config), tmp_path / "adapter"), tmp_path / "base")
    assert "holds no values: 'default'; to go on" in caplog.text
    assert "pass materialize() adapters={'default': its directory}" in caplog.text


def twice(model: Any) -> Any:
    """Wrap a model in a PeftModel, and this in another."""
    return peft.get_peft_model(peft.get_peft_model(model, ADAPTERS["lora"]()), ADAPTERS["lora"]())


def injected(model: Any) -> Any:
    """Let transformers add an adapter."""
    model.add_adapter(ADAPTERS["lora"]())
    return model


@pytest.mark.parametrize(
    "wrap", [twice, injected, lambda m: peft.get_peft_model(m, ADAPTERS["lora"](), mixed=True)]
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_adapters_added_in_another_way_are_refused(wrap: Any, tmp_path: Path) -> None:
    stock, config = saved("llama", tmp_path)
    words = "the adapters of this .* were not added by one call of peft.get_peft_model: call it"
    with pytest.raises(ConfigError, match=words):
        materialize(wrap(built(stock, config)), tmp_path)


def test_tokens_that_are_trained_alone_are_refused(tmp_path: Path) -> None:
    stock, config = saved("llama", tmp_path)
    adapter = peft.LoraConfig(r=4, trainable_token_indices=[1, 5], **ATTENTION)
    model = peft.get_peft_model(built(stock, config), adapter)
    with pytest.raises(ConfigError, match="'default' has trainable_token_indices, whose rows"):
        materialize(model, tmp_path)


@pytest.mark.parametrize(
    "adapter",
    [
        lambda: peft.LoraConfig(use_dora=True, **ATTENTION),
        lambda: peft.LoraConfig(init_lora_weights="pissa", **ATTENTION),
        lambda: peft.LoHaConfig(**ATTENTION),
    ],
)
def test_adapters_that_begin_otherwise_are_refused(adapter: Any, tmp_path: Path) -> None:
    stock, config = saved("llama", tmp_path)
    model = built(stock, config)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    made = adapter()
    if getattr(made, "init_lora_weights", None) == "pissa":  # PEFT reads the base to begin it
        made.init_lora_weights = True
        model = peft.get_peft_model(model, made)
        made.init_lora_weights = "pissa"
    else:
        model = peft.get_peft_model(model, made)
    with pytest.raises(ConfigError, match="the adapter 'default' begins from the weights under it"):
        materialize(model, tmp_path)
