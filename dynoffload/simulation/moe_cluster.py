"""A mixture-of-experts transformer on a cluster: what one device holds, computes and sends.

Parameters, operators, saved activations and network bytes are computed from dimensions, layer by
layer, for one of many devices that all do the same.

[Note: the division]  Attention, the dense feed-forward layers and the embedding are divided over
`Division.tensor` devices; the operators between them are divided by sequence (Korthikanti et al.
2022). So saved activations and checkpoints are divided too, each block gathers its input and
scatters its output, and backward gathers the input again for the gradient of the weights. Each
expert is cut into `Division.slices` parts along its inner dimension: a token goes to all parts and
their results are added. Tokens spread evenly over the experts; none is dropped. Norms, biases and
the gate's weights, less than a thousandth of the parameters, are left out.

[Note: what is saved]  Bytes per token as Korthikanti et al. count them, at two bytes an element:
inputs of both norms 4h; attention, not fused, 11h and 5as for a heads and sequences of s tokens;
dense feed-forward 19h. An expert saves the input and two inner tensors of the rows routed to it; of
each own token remain its result, for the gradient of the gate, and a dropout mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from dynoffload.errors import ConfigError
from dynoffload.simulation.roofline import ELEMENT, Operator, elementwise, matmul

GRADIENT = 4
"""Bytes of an element of a stored gradient, which are part of `STATE`."""
STATE = 16
"""Bytes of a parameter's master weight, two moments and stored gradient."""
MASK = 1
"""Bytes of an element of a dropout mask."""


@dataclass(frozen=True)
class MoeTransformer:
    """Dimensions of the network.

    Attributes:
        layers: number of layers, each attention and feed-forward.
        hidden: width of a row.
        heads: attention heads.
        experts: experts of a mixture-of-experts layer; each token uses one.
        moe_every: each layer whose number is a multiple of it has experts in place of the dense
            feed-forward.
        inner: inner width of a feed-forward, in units of ``hidden``.
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
        """Number of layers with experts."""
        return self.layers // self.moe_every

    @property
    def base_parameters(self) -> int:
        """Parameters of all layers if none had experts: those used by each token."""
        return self.layers * (4 + 2 * self.inner) * self.hidden**2

    @property
    def parameters(self) -> int:
        """Parameters of all layers, without the embedding."""
        more = self.moe_layers * (self.experts - 1)
        return self.base_parameters + more * 2 * self.inner * self.hidden**2


@dataclass(frozen=True)
class Division:
    """How the network and the batch are divided; see [Note: the division].

    Attributes:
        tensor: devices that share a dense layer.
        data: groups of ``tensor`` devices, each with its own sequences.
        expert: groups that the experts are distributed over.
        slices: devices that share an expert.
    """

    tensor: int
    data: int
    expert: int
    slices: int = 1

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.tensor * self.data

    @property
    def replicas(self) -> int:
        """Number of devices that hold the same part of an expert."""
        return self.devices // (self.expert * self.slices)


@dataclass(frozen=True)
class Batch:
    """The number of sequences of one data-parallel group, and their length in tokens."""

    sequences: int
    length: int

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.sequences * self.length


@dataclass(frozen=True)
class Layer:
    """One device's share of a layer, of half a layer, or of the head.

    Attributes:
        forward, backward: operators, without recomputation.
        saved: bytes of activations kept for backward.
        forward_network, backward_network: bytes received.
        dense: parameters that all data-parallel groups have.
        expert: parameters of experts.
        reduced: bytes received to sum gradients over groups.
    """

    forward: tuple[Operator, ...]
    backward: tuple[Operator, ...]
    saved: float = 0.0
    forward_network: float = 0.0
    backward_network: float = 0.0
    dense: float = 0.0
    expert: float = 0.0
    reduced: float = 0.0

    @property
    def parameters(self) -> float:
        """All parameters of the layer on the device."""
        return self.dense + self.expert

    def __add__(self, other: Layer) -> Layer:
        pairs = ((getattr(self, key), getattr(other, key)) for key in self.__dataclass_fields__)
        return Layer(*(one + two for one, two in pairs))


@dataclass(frozen=True)
class MoeShard:
    """One device's part of a training step.

    Raises:
        ConfigError: the network cannot be divided this way.
    """

    model: MoeTransformer
    division: Division
    batch: Batch

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
        return ELEMENT * elements

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
        """Bytes of one activation of the tokens that reach the device's experts."""
        return ELEMENT * self.routed_rows * self.model.hidden

    @property
    def sent(self) -> float:
        """Bytes of the device's own tokens sent to all slices of their experts."""
        return self.own * self.division.slices

    def state_bytes(self, layer: Layer) -> float:
        """Return the device's bytes of optimizer state and gradients.

        State of replicated parameters is divided among their devices (ZeRO).
        """
        owned = layer.dense / self.division.data + layer.expert / self.division.replicas
        return STATE * owned

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """All layers in the order of forward."""
        every = self.model.moe_every
        dense = self.attention + self.feed_forward
        moe = self.attention + self._experts
        return tuple(dense if number % every else moe for number in range(1, self.model.layers + 1))

    @cached_property
    def head(self) -> Layer:
        """The embedding used as the head: logits, the loss, and their gradients."""
        hidden = self.model.hidden
        columns = self.model.vocabulary / self.division.tensor
        logits = matmul(self.batch.tokens, hidden, columns)
        gather = self._ring if columns else 0.0
        return Layer(
            forward=(logits, elementwise(2 * self.logits)),
            backward=(logits, logits),
            forward_network=gather,
            backward_network=2 * gather,
            dense=columns * hidden,
            reduced=self._reduced(columns * hidden, self.division.data),
        )

    @property
    def logits(self) -> float:
        """Bytes of the device's logits."""
        columns = self.model.vocabulary / self.division.tensor
        return ELEMENT * self.batch.tokens * columns

    @cached_property
    def attention(self) -> Layer:
        """The first half of each layer."""
        model, tokens, tensor = self.model, self.batch.tokens, self.division.tensor
        hidden, length, width = model.hidden, self.batch.length, model.hidden / model.heads
        maps = self.batch.sequences * model.heads / tensor
        scores = maps * length**2
        products = [
            matmul(tokens, hidden, 3 * hidden / tensor),  # query, key, value
            matmul(length, width, length, maps),  # scores
            matmul(length, length, width, maps),  # mixture
            matmul(tokens, hidden / tensor, hidden),  # projection
        ]
        softmax = (3 * ELEMENT + MASK) * scores  # and dropout, in either pass
        # Input, query, key, value, mixture and a mask: 11h. Softmax, a mask, dropout's result: 5as.
        saved = 5 * self.own + self._mask + (2 * ELEMENT + MASK) * scores
        return self._divided(products, (softmax, softmax), saved, 4 * hidden**2 / tensor)

    @cached_property
    def feed_forward(self) -> Layer:
        """The second half of a layer without experts."""
        hidden, tokens, tensor = self.model.hidden, self.batch.tokens, self.division.tensor
        columns = self.model.inner * hidden / tensor
        product = matmul(tokens, hidden, columns)  # up; down costs as much
        inner = ELEMENT * tokens * columns
        saved = self.own + 2 * inner + self._mask
        return self._divided([product] * 2, (2 * inner, 3 * inner), saved, 2 * columns * hidden)

    @cached_property
    def around_experts(self) -> Layer:
        """The second half of a layer with experts, without their products and network traffic."""
        travel = Layer((self._travel,), (self._travel,))
        return self._block([], (0.0, 0.0), 0.0) + travel

    @property
    def _travel(self) -> Operator:
        return elementwise(2 * (self.own + self.sent))  # dispatch and combine

    @cached_property
    def _experts(self) -> Layer:
        """The second half of a layer with experts."""
        hidden, cut = self.model.hidden, self.division
        held, columns = self.model.experts / cut.expert, self.model.inner * hidden / cut.slices
        product = matmul(self.routed_rows / held, hidden, columns, held)
        inner = ELEMENT * self.routed_rows * columns
        saved = self.routed + 2 * inner + self.own + self._mask
        # Dispatch and combine: a device receives as much as it sends.
        exchanged = 2 * self.sent * (1 - 1 / cut.expert)
        parameters = held * 2 * hidden * columns
        return self._block([product] * 2, (2 * inner, 3 * inner), saved) + Layer(
            (self._travel,),
            (self._travel,),
            forward_network=exchanged,
            backward_network=exchanged,
            expert=parameters,
            reduced=self._reduced(parameters, cut.replicas),
        )

    def _divided(
        self, products: list[Operator], between: tuple[float, float], saved: float, dense: float
    ) -> Layer:
        """Return a block whose input is gathered and whose output is scattered."""
        return self._block(products, between, saved) + Layer(
            (),
            (),
            forward_network=2 * self._ring,
            backward_network=3 * self._ring,
            dense=dense,
            reduced=self._reduced(dense, self.division.data),
        )

    def _block(self, products: list[Operator], between: tuple[float, float], saved: float) -> Layer:
        """Return a norm, ``products`` with an operator between them that moves ``between`` bytes in
        forward and in backward, dropout and residual."""
        forward = (2 * self.own, between[0], 3 * self.own + self._mask)
        backward = (3 * self.own, between[1], 2 * self.own + self._mask)
        return Layer(
            (*products, *map(elementwise, forward)),
            (*products, *products, *map(elementwise, backward)),
            self.own + saved,
        )

    @property
    def _mask(self) -> float:
        return self.own * MASK / ELEMENT

    @property
    def _ring(self) -> float:
        """Bytes that a device receives to all-gather an activation of the group, or to
        reduce-scatter one."""
        return self.gathered * (1 - 1 / self.division.tensor)

    def _reduced(self, parameters: float, holders: int) -> float:
        """Return the bytes received to reduce-scatter gradients over ``holders``."""
        return ELEMENT * parameters * (1 - 1 / holders)
