"""What a model file holds, in numbers: the facts that `potok inspect` prints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from potok.model.config import ModelConfig
from potok.model.precision import Activation, activation_of, kv_bytes_per_token
from potok.weights.gguf import GGUFFile, Tensor
from potok.weights.model_config import read_config

#: Groups of tensors in the order in which they are listed, by a part of the name; the last takes what is left.
_GROUPS = (
    ("embedding", ("token_embd.",)),
    ("attention q k v", ("attn_q.", "attn_k.", "attn_v.")),
    ("attention output", ("attn_output.",)),
    ("feed-forward gate up", ("ffn_gate.", "ffn_up.")),
    ("feed-forward down", ("ffn_down.",)),
    ("output", ("output.weight",)),
    ("norms and factors", ("",)),
)
_ACTIVATIONS = {Activation.A8: "8-bit", Activation.A16: "16-bit", Activation.F32: "float32"}
WIDER = 1.1  # times as large in memory as in the file: worth saying
PANEL_ROWS = 16  # packed weights are padded to whole panels of output columns
#: Measured over English prose: docs/numerics.md.
FIDELITY = "mean KL from the float model: 1.4e-3 nats on the default model; --activation-bits 16: 4.1e-7"


@dataclass(frozen=True, slots=True)
class FormatUse:
    """How many tensors of one group are stored in one format. nbytes: in the file. memory: once packed.

    activation: what goes into their linears by default; None where they are in no linear.
    """

    group: str
    format: str
    tensors: int
    elements: int
    nbytes: int
    memory: int
    activation: Activation | None

    def __str__(self) -> str:
        text = f"{self.format} x {self.tensors}, {_size(self.nbytes)}"
        return text if self.memory < WIDER * self.nbytes else f"{text}, {_size(self.memory)} in memory"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes in bytes."""

    name: str
    file: str
    file_bytes: int
    config: ModelConfig
    parameters: int
    formats: tuple[FormatUse, ...]
    tokenizer: str  # kind/pre-tokenizer, as the file spells them
    has_template: bool
    weights_memory: int
    kv_bytes_per_token: int

    @property
    def kv_bytes_full_context(self) -> int:
        return self.kv_bytes_per_token * self.config.context_length

    def rows(self) -> list[tuple[str, str]]:
        """(label, value) lines for people."""
        c = self.config
        tied = "tied" if c.tied_embeddings else "separate"
        rows = [
            ("file", f"{self.file} ({_size(self.file_bytes)})"),
            ("name", self.name),
            ("architecture", f"{c.architecture}, {self.parameters / 1e6:.1f} M parameters"),
            ("layers", f"{c.num_layers} of width {c.dim}, feed-forward {c.ffn_dim}"),
            ("heads", f"{c.num_heads} query, {c.num_kv_heads} key-value, {c.head_dim} wide"),
            ("vocabulary", f"{c.vocab_size} tokens, output projection {tied}"),
            ("context", f"{c.context_length} tokens"),
            ("tokenizer", self.tokenizer),
            ("chat template", "yes" if self.has_template else "none: chat needs one, completions do not"),
        ]
        rows += [(use.group, str(use)) for use in self.formats]
        rows += zip(("activations", "", ""), self._activations(), strict=False)
        if any(use.activation is Activation.A8 for use in self.formats):
            rows.append(("", FIDELITY))
        rows.append(("memory: weights", _size(self.weights_memory)))
        rows.append(("memory: KV", f"{_size(self.kv_bytes_per_token)} a token"))
        rows.append(("", f"{_size(self.kv_bytes_full_context)} for one request of the whole context"))
        return rows

    def _activations(self) -> list[str]:
        """A sentence for each precision, with the groups of linears that take it."""
        sentences = []
        for activation, bits in _ACTIVATIONS.items():
            groups: dict[str, list[str]] = {}
            for use in self.formats:
                if use.activation is activation:
                    groups.setdefault(use.group.replace("embedding", "output"), []).append(use.format)
            if groups:
                names = [f"{group} ({' '.join(formats)})" for group, formats in groups.items()]
                sentences.append(f"{bits} into {', '.join(names)}")
        return sentences


def describe(file: GGUFFile, packed_bits: Mapping[str, float]) -> ModelFacts:
    """Raises LoadError where read_config does.

    packed_bits: bits of an element, scales included, in memory, of every format.
    """
    config = read_config(file)
    metadata = file.metadata
    uses = _format_uses(file, packed_bits, config.tied_embeddings)
    kind, pre = metadata.get("tokenizer.ggml.model", "none"), metadata.get("tokenizer.ggml.pre", "default")
    return ModelFacts(
        name=str(metadata.get("general.name", file.path.stem)),
        file=str(file.path),
        file_bytes=file.size,
        config=config,
        parameters=sum(use.elements for use in uses),
        formats=uses,
        tokenizer=f"{kind}/{pre}",
        has_template="tokenizer.chat_template" in metadata,
        weights_memory=sum(use.memory for use in uses),
        kv_bytes_per_token=kv_bytes_per_token(config, "f16"),
    )


def _group(name: str) -> str:
    return next(group for group, parts in _GROUPS if any(part in name for part in parts))


def _memory(tensor: Tensor, packed_bits: Mapping[str, float]) -> int:
    """Bytes once loaded. Vectors become float32."""
    if len(tensor.shape) == 1:
        return 4 * tensor.shape[0]
    rows = -(-tensor.shape[0] // PANEL_ROWS) * PANEL_ROWS
    return int(rows * tensor.shape[1] * packed_bits[tensor.type.name] / 8)


def _activation(tensor: Tensor, tied_embeddings: bool) -> Activation | None:
    in_linear = len(tensor.shape) > 1 and (tied_embeddings or not tensor.name.startswith("token_embd."))
    return activation_of(tensor.name, tensor.type.name, activation_bits=8) if in_linear else None


def _format_uses(file: GGUFFile, packed_bits: Mapping[str, float], tied_embeddings: bool) -> tuple[FormatUse, ...]:
    members: dict[tuple[int, str], list[Tensor]] = {}
    order = [group for group, _ in _GROUPS]
    for tensor in file.tensors.values():
        members.setdefault((order.index(_group(tensor.name)), tensor.type.name), []).append(tensor)
    return tuple(
        FormatUse(
            group=order[index],
            format=format,
            tensors=len(tensors),
            elements=sum(math.prod(t.shape) for t in tensors),
            nbytes=sum(t.data.nbytes for t in tensors),
            memory=sum(_memory(t, packed_bits) for t in tensors),
            activation=_activation(tensors[0], tied_embeddings),
        )
        for (index, format), tensors in sorted(members.items())
    )


def _size(nbytes: int) -> str:
    """Decimal units with three digits."""
    value, units = float(nbytes), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"
