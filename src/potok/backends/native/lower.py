"""From a recorded plan to what the native replay takes: places instead of values, indices instead of names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from potok.model.plan import Node, Op, Plan, Rows, Value
from potok.model.precision import Activation

#: Operations that can leave their output in integer form; the others write float rows.
_QUANTIZING = (Op.RMS_NORM, Op.ATTENTION, Op.SWIGLU)


@dataclass(slots=True)
class Place:
    """Memory for rows of `cols` elements, reused once the value in it has been read for the last time."""

    cols: int
    forms: set[Activation] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class NativeOp:
    """Fields in the order of the native tuple: place numbers, -1 for none."""

    kind: int
    input: int
    residual: int
    output: int
    sampled: bool
    layer: int
    weights: list[int]
    biases: list[int]


@dataclass(frozen=True, slots=True)
class Lowered:
    places: list[Place]
    ops: list[NativeOp]
    logits: int


def lower(
    plan: Plan,
    activation: Callable[[str], Activation],
    weight: Callable[[str], int],
    vector: Callable[[str], int],
) -> Lowered:
    """activation: how the linear of this tensor takes its input. weight, vector: native index of a tensor."""
    nodes = _fused(plan.nodes)
    forms = _forms(plan.values, nodes, activation)
    last_use = {i: at for at, node in enumerate(nodes) for i in node.inputs}
    logits = nodes[-1].output
    places: list[Place] = []
    free: list[int] = []
    place_of: dict[int, int] = {}
    ops: list[NativeOp] = []
    for at, node in enumerate(nodes):
        cols = plan.values[node.output].cols
        reusable = next((p for p in free if places[p].cols == cols), None) if node.output != logits else None
        if reusable is None:
            places.append(Place(cols))
            reusable = len(places) - 1
        else:
            free.remove(reusable)
        places[reusable].forms |= forms[node.output]
        place_of[node.output] = reusable
        ops.append(_native_op(plan, node, place_of, weight, vector))
        free += [place_of[i] for i in node.inputs if last_use[i] == at]
    return Lowered(places, ops, place_of[logits])


def _fused(nodes: Sequence[Node]) -> list[Node]:
    """Gate and up belong to the SwiGLU that reads them: what they write never leaves the first-level cache.

    At 100 rows of the default model it would be 1.2 MB a layer, written by one thread and read by the other.
    """
    read_by: dict[int, list[Node]] = {}
    for node in nodes:
        for value in node.inputs:
            read_by.setdefault(value, []).append(node)
    fused = []
    linear_of: dict[int, Node] = {}
    for node in nodes:
        if [reader.op for reader in read_by.get(node.output, [])] == [Op.SWIGLU]:
            assert node.op is Op.LINEAR and len(node.weights) == 2 and len(node.inputs) == 1, node
            linear_of[node.output] = node
        elif node.op is Op.SWIGLU:
            fused.append(replace(linear_of[node.inputs[0]], op=Op.SWIGLU, output=node.output))
        else:
            fused.append(node)
    return fused


def _forms(
    values: Sequence[Value], nodes: Sequence[Node], activation: Callable[[str], Activation]
) -> dict[int, set[Activation]]:
    """In which forms each value is read."""
    forms: dict[int, set[Activation]] = {v.id: set() for v in values}
    for node in nodes:
        for position, value in enumerate(node.inputs):
            if node.op in (Op.LINEAR, Op.SWIGLU) and position == 0:
                forms[value] |= {activation(w) for w in node.weights}
            else:
                forms[value].add(Activation.F32)
    for node in nodes:
        if node.op not in _QUANTIZING:
            assert forms[node.output] <= {Activation.F32}, f"{node.op.name} cannot write integer activations"
        if node.op not in (Op.RMS_NORM, Op.SWIGLU):
            forms[node.output].add(Activation.F32)
    return forms


def _native_op(
    plan: Plan, node: Node, place_of: dict[int, int], weight: Callable[[str], int], vector: Callable[[str], int]
) -> NativeOp:
    is_vector = node.op is Op.RMS_NORM
    return NativeOp(
        kind=int(node.op),
        input=place_of[node.inputs[0]] if node.inputs else -1,
        residual=place_of[node.inputs[1]] if len(node.inputs) > 1 else -1,
        output=place_of[node.output],
        sampled=plan.values[node.output].rows is Rows.S,
        layer=node.layer,
        weights=[vector(w) if is_vector else weight(w) for w in node.weights],
        biases=[vector(b) if b else -1 for b in node.biases],
    )
