"""A transformer with experts, divided over a cluster: what one device holds, computes and sends.

Counts from dimensions (parameters, operators, saved activations, network bytes), layer by layer,
for one of many devices that all do the same.

[Note: the division]  Attention, the dense feed-forward layers and the embedding are divided over
`Division.tensor` devices, and what lies between them by sequence (Korthikanti et al. 2022): saved
activations and checkpoints are divided too, each block gathers its input and scatters its output,
and backward gathers the input once more for the gradient of the weights. Each expert is cut into
`Division.slices` parts along its inner dimension: a token goes to all parts and their results are
added. Tokens spread evenly over the experts, and none is dropped. Norms, biases and the gate's
weights, less than a thousandth of the parameters, are left out.

[Note: what is saved]  Bytes per token as Korthikanti et al. count them, at two bytes an element:
inputs of both norms 4h; attention, not fused, 11h and 5as for a heads and sequences of s tokens;
dense feed-forward 19h. An expert saves the input and two inner tensors of the rows routed to it; of
each own token remain its result, for the gradient of the gate, and a dropout mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from dynoffload.errors import ConfigError
from dynoffload.simulation.roofline import Matmul, Operator, elementwise


@dataclass(frozen=True)
class MoeTransformer:
    """Dimensions of the network.

    Attributes:
        layers: attention and feed-forward each.
        hidden: width.
        heads: of attention.
        experts: of a layer that has them; one for each token.
        moe_every: each layer whose number is a multiple of it has experts in place of the dense
            feed-forward.
        inner: width of a feed-forward, in units of ``hidden``.
        vocabulary: rows of the embedding, which is also the head; 0 leaves it out.
    """

    layers: int
    hidden: int
    heads: int
    experts: int
    moe_every: int = 2
    inner: int = 4
    vocabulary: int = 0

    @property
    def moe_layers(self) -> int:
        """How many layers have experts."""
        return self.layers // self.moe_every

    @property
    def base_parameters(self) -> int:
        """Of all layers, had none experts: what each token is multiplied with."""
        return self.layers * (4 + 2 * self.inner) * self.hidden**2

    @property
    def parameters(self) -> int:
        """Of all layers, without the embedding."""
        more = self.moe_layers * (self.experts - 1)
        return self.base_parameters + more * 2 * self.inner * self.hidden**2


@dataclass(frozen=True)
class Division:
    """How the network and the batch are divided; see [Note: the division].

    Attributes:
        tensor: devices that divide a dense layer.
        data: groups of ``tensor`` devices, each with its own sequences.
        expert: groups that the experts are spread over.
        slices: devices that divide an expert.
    """

    tensor: int
    data: int
    expert: int
    slices: int = 1

    @property
    def devices(self) -> int:
        """All of them."""
        return self.tensor * self.data

    @property
    def replicas(self) -> int:
        """How many devices hold the same part of an expert."""
        return self.devices // (self.expert * self.slices)


@dataclass(frozen=True)
class Batch:
    """Sequences of one data-parallel group, and their length in tokens."""

    sequences: int
    length: int

    @property
    def tokens(self) -> int:
        """Of all sequences."""
        return self.sequences * self.length


@dataclass(frozen=True)
class Precision:
    """Bytes of an element or a parameter.

    Attributes:
        element: of a weight, an activation, and a gradient as backward makes it.
        gradient: of a gradient that is kept: a part of ``state``.
        state: of master weight, two moments and the gradient that is kept.
        mask: of an element of a dropout mask.
    """

    element: int = 2
    gradient: int = 4
    state: int = 16
    mask: int = 1


@dataclass(frozen=True)
class Layer:
    """What one device has to do with one layer, or with the head.

    Attributes:
        dense: parameters that all data-parallel groups have.
        expert: parameters of experts.
        saved: bytes of activations kept for backward.
        forward, backward: operators, recomputation not included.
        forward_network, backward_network: bytes received.
        reduced: bytes received to add up gradients over groups.
    """

    dense: float
    expert: float
    saved: float
    forward: tuple[Operator, ...]
    backward: tuple[Operator, ...]
    forward_network: float
    backward_network: float
    reduced: float

    @property
    def parameters(self) -> float:
        """All that the device has of the layer."""
        return self.dense + self.expert


@dataclass(frozen=True)
class Block:
    """Half a layer: operators; bytes saved, and bytes received in both passes."""

    forward: list[Operator]
    backward: list[Operator]
    saved: float
    forward_network: float
    backward_network: float


@dataclass(frozen=True)
class MoeShard:
    """One device's part of a training step.

    Raises:
        ConfigError: the network cannot be divided so.
    """

    model: MoeTransformer
    division: Division
    batch: Batch
    precision: Precision = Precision()

    def __post_init__(self) -> None:
        model, cut = self.model, self.division
        inner = model.inner * model.hidden
        for what, whole, parts in (
            ("heads", model.heads, cut.tensor),
            ("hidden width", model.hidden, cut.tensor),
            ("vocabulary", model.vocabulary, cut.tensor),
            ("experts", model.experts, cut.expert),
            ("inner width of an expert", inner, cut.slices),
            ("devices", cut.devices, cut.expert * cut.slices),
        ):
            if whole % parts:
                raise ConfigError(f"{whole} {what} cannot be divided into {parts} equal parts")

    @property
    def own(self) -> float:
        """Bytes of one activation of the device's own tokens, which is also a checkpoint."""
        elements = self.batch.tokens * self.model.hidden / self.division.tensor
        return self.precision.element * elements

    @property
    def gathered(self) -> float:
        """Bytes of one activation of all tokens of the group."""
        return self.own * self.division.tensor

    @property
    def routed_rows(self) -> float:
        """Tokens that reach the device's experts."""
        return (
            self.batch.tokens * self.division.data / self.division.replicas / self.division.expert
        )

    @property
    def routed(self) -> float:
        """Bytes of one activation of those tokens."""
        return self.precision.element * self.routed_rows * self.model.hidden

    @property
    def sent(self) -> float:
        """Bytes of the device's own tokens on their way to all slices of their experts."""
        return self.own * self.division.slices

    def state_bytes(self, layer: Layer) -> float:
        """Return the device's bytes of optimizer state and gradients.

        Those of parameters that other devices hold too are divided among them (ZeRO).
        """
        owned = layer.dense / self.division.data + layer.expert / self.division.replicas
        return self.precision.state * owned

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """All layers in the order of forward."""
        every = self.model.moe_every
        dense, moe = self._layer(moe=False), self._layer(moe=True)
        return tuple(dense if number % every else moe for number in range(1, self.model.layers + 1))

    @cached_property
    def head(self) -> Layer:
        """The embedding as it is used last: logits, the loss, and their gradients."""
        columns = self.model.vocabulary / self.division.tensor
        logits = Matmul("logits", self.batch.tokens, self.model.hidden, columns)
        loss = elementwise("loss", 2 * self.logits)
        element, parameters = self.precision.element, columns * self.model.hidden
        gather = self._ring(self.gathered) if columns else 0.0
        return Layer(
            dense=parameters,
            expert=0.0,
            saved=0.0,
            forward=(logits.forward(element), loss),
            backward=logits.backward(element),
            forward_network=gather,
            backward_network=2 * gather,
            reduced=self._reduced(parameters, self.division.data),
        )

    @property
    def logits(self) -> float:
        """Bytes of the device's logits."""
        columns = self.model.vocabulary / self.division.tensor
        return self.precision.element * self.batch.tokens * columns

    def _layer(self, *, moe: bool) -> Layer:
        model, cut = self.model, self.division
        attention, feed = self.attention, self._experts() if moe else self.feed_forward
        square = model.hidden**2
        pair = 2 * model.inner * square
        held = model.experts / cut.expert / cut.slices
        dense = (4 * square + (0 if moe else pair)) / cut.tensor
        expert = held * pair if moe else 0.0
        reduced = self._reduced(dense, cut.data) + self._reduced(expert, cut.replicas)
        return Layer(
            dense=dense,
            expert=expert,
            saved=attention.saved + feed.saved,
            forward=(*attention.forward, *feed.forward),
            backward=(*feed.backward, *attention.backward),
            forward_network=attention.forward_network + feed.forward_network,
            backward_network=attention.backward_network + feed.backward_network,
            reduced=reduced,
        )

    @cached_property
    def attention(self) -> Block:
        """The first half of each layer."""
        model, tokens, tensor = self.model, self.batch.tokens, self.division.tensor
        length, width = self.batch.length, model.hidden / model.heads
        maps = self.batch.sequences * model.heads / tensor
        products = [
            Matmul("query, key, value", tokens, model.hidden, 3 * model.hidden / tensor),
            Matmul("scores", length, width, length, maps),
            Matmul("mixture", length, length, width, maps),
            Matmul("projection", tokens, model.hidden / tensor, model.hidden),
        ]
        element, mask, scores = self.precision.element, self.precision.mask, maps * length**2
        between = (
            elementwise("softmax, dropout", (3 * element + mask) * scores),
            elementwise("softmax, dropout backward", (3 * element + mask) * scores),
        )
        # Input, query, key, value, mixture and a mask: 11h. Softmax, a mask, what it leaves: 5as.
        saved = 5 * self.own + self._mask + (2 * element + mask) * scores
        return self._divided(products, between, saved)

    @cached_property
    def feed_forward(self) -> Block:
        """The second half of a layer without experts."""
        model, tokens, tensor = self.model, self.batch.tokens, self.division.tensor
        columns = model.inner * model.hidden / tensor
        products = [
            Matmul("up", tokens, model.hidden, columns),
            Matmul("down", tokens, columns, model.hidden),
        ]
        inner = self.precision.element * tokens * columns
        between = (
            elementwise("activation", 2 * inner),
            elementwise("activation backward", 3 * inner),
        )
        return self._divided(products, between, self.own + 2 * inner + self._mask)

    @cached_property
    def around_experts(self) -> Block:
        """What of the second half of a layer with experts is neither theirs nor on the network."""
        nothing = elementwise("", 0.0)
        block = self._block([], (nothing, nothing), 0.0)
        forward, backward = ([*part, self._travel] for part in (block.forward, block.backward))
        return Block(forward, backward, block.saved, 0.0, 0.0)

    @property
    def _travel(self) -> Operator:
        return elementwise("dispatch, combine", 2 * (self.own + self.sent))

    def _experts(self) -> Block:
        model, cut = self.model, self.division
        held = model.experts / cut.expert
        rows, columns = self.routed_rows / held, model.inner * model.hidden / cut.slices
        products = [
            Matmul("expert up", rows, model.hidden, columns, held),
            Matmul("expert down", rows, columns, model.hidden, held),
        ]
        inner = self.precision.element * self.routed_rows * columns
        between = (
            elementwise("activation", 2 * inner),
            elementwise("activation backward", 3 * inner),
        )
        block = self._block(products, between, self.routed + 2 * inner + self.own + self._mask)
        # Dispatch and combine, there and back: what a device sends it also receives.
        exchanged = 2 * self.sent * (1 - 1 / cut.expert)
        return Block(
            [*block.forward, self._travel],
            [*block.backward, self._travel],
            block.saved,
            exchanged,
            exchanged,
        )

    def _divided(
        self, products: list[Matmul], between: tuple[Operator, Operator], saved: float
    ) -> Block:
        """Return a block whose input is gathered and whose output is scattered."""
        block = self._block(products, between, saved)
        ring = self._ring(self.gathered)
        return Block(block.forward, block.backward, block.saved, 2 * ring, 3 * ring)

    def _block(
        self, products: list[Matmul], between: tuple[Operator, Operator], saved: float
    ) -> Block:
        """Return a norm, ``products`` with an operator ``between``, dropout and residual."""
        element = self.precision.element
        norm, norm_back = elementwise("norm", 2 * self.own), elementwise("norm dx", 3 * self.own)
        dropout = elementwise("dropout, residual", 3 * self.own + self._mask)
        dropout_back = elementwise("dropout, residual dx", 2 * self.own + self._mask)
        forward = [norm, *(p.forward(element) for p in products), between[0], dropout]
        gradients = [g for product in products for g in product.backward(element)]
        backward = [dropout_back, *gradients, between[1], norm_back]
        return Block(forward, backward, self.own + saved, 0.0, 0.0)

    @property
    def _mask(self) -> float:
        return self.own * self.precision.mask / self.precision.element

    def _ring(self, whole: float) -> float:
        """Return the bytes that a device receives to gather ``whole``, or to scatter its sum."""
        return whole * (1 - 1 / self.division.tensor)

    def _reduced(self, parameters: float, holders: int) -> float:
        """Return the bytes received to scatter the sum of gradients over ``holders``."""
        return self.precision.element * parameters * (1 - 1 / holders)
