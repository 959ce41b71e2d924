"""Llama and its relatives: pre-norm blocks, grouped-query attention, SwiGLU. Tensor names as in GGUF files."""

from __future__ import annotations

from potok.model.builder import Builder
from potok.model.config import ModelConfig
from potok.model.plan import Plan, RopeKind


def record(config: ModelConfig, rope: RopeKind) -> Plan:
    b, c = Builder(config, rope), config
    x = b.embed("token_embd.weight")
    for i in range(c.num_layers):
        p = f"blk.{i}."
        h = b.rms_norm(x, p + "attn_norm.weight")
        biases = [p + f"attn_{n}.bias" for n in "qkv"] if c.qkv_bias else []
        qkv = b.linear(
            h,
            [p + f"attn_{n}.weight" for n in "qkv"],
            (c.num_heads + 2 * c.num_kv_heads) * c.head_dim,
            biases,
        )
        a = b.attention(b.rope_kv(qkv, i), i)
        x = b.linear(a, [p + "attn_output.weight"], c.dim, residual=x)
        h = b.rms_norm(x, p + "ffn_norm.weight")
        gate_up = b.linear(h, [p + "ffn_gate.weight", p + "ffn_up.weight"], 2 * c.ffn_dim)
        x = b.linear(b.swiglu(gate_up), [p + "ffn_down.weight"], c.dim, residual=x)
    h = b.rms_norm(b.gather(x), "output_norm.weight")
    b.linear(h, ["token_embd.weight" if c.tied_embeddings else "output.weight"], c.vocab_size)
    return b.plan()
