"""Makes tests/goldens/default_model.npz: what the default model means, computed by other people's code in float64.

    make goldens

The weights of the GGUF file are dequantised and given to transformers' Llama in float64. The prompts of prompts.json
are followed for 64 positions each: chats by the model's own greedy text, texts by their own last 64 tokens. The ids,
the 16 best logits and the logsumexp of every position are kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from potok.model.config import ModelConfig
from potok.text.chat import ChatTemplate
from potok.text.tokenizer import Tokenizer
from potok.weights.default_model import find_default_model
from potok.weights.formats import dequantize
from potok.weights.gguf import GGUFFile
from potok.weights.model_config import read_config

FOLDER = Path(__file__).parent.parent / "tests" / "goldens"
POSITIONS = 64
TOP = 16


class Float64Rotary(torch.nn.Module):
    """Rotation angles in float64; the library's own module computes them in float32."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        exponents = torch.arange(0, config.rope_dim, 2, dtype=torch.float64) / config.rope_dim
        self.frequencies = config.rope_theta**-exponents

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].to(torch.float64) * self.frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()


def split_halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q or k from GGUF's order, where neighbours turn together, to that of transformers, where halves do."""
    n, k = weight.shape
    return weight.reshape(num_heads, n // num_heads // 2, 2, k).swapaxes(1, 2).reshape(n, k)


def load_float64(file: GGUFFile, config: ModelConfig) -> LlamaForCausalLM:
    hf = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        intermediate_size=config.ffn_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.norm_eps,
        max_position_embeddings=config.context_length,
        tie_word_embeddings=config.tied_embeddings,
        attn_implementation="sdpa",  # stays in float64; the eager one goes through float32
    )
    torch.set_default_dtype(torch.float64)
    with torch.device("meta"):
        model = LlamaForCausalLM(hf)
    # These two would go through float32.
    for layer in model.model.layers:
        layer.input_layernorm = torch.nn.RMSNorm(config.dim, config.norm_eps, device="meta")
        layer.post_attention_layernorm = torch.nn.RMSNorm(config.dim, config.norm_eps, device="meta")
    model.model.norm = torch.nn.RMSNorm(config.dim, config.norm_eps, device="meta")
    model.model.rotary_emb = Float64Rotary(config)
    model.load_state_dict({name: torch.from_numpy(w) for name, w in state(file, config).items()}, assign=True)
    return model.eval()


def state(file: GGUFFile, config: ModelConfig) -> dict[str, np.ndarray]:
    """transformers' names -> float64 weights."""

    def weight(name: str) -> np.ndarray:
        tensor = file.tensors[name + ".weight"]
        return dequantize(tensor.type, tensor.data).astype(np.float64)

    names = {
        "attn_norm": "input_layernorm",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    out = {"model.embed_tokens.weight": weight("token_embd"), "model.norm.weight": weight("output_norm")}
    out["lm_head.weight"] = out["model.embed_tokens.weight"] if config.tied_embeddings else weight("output")
    for i in range(config.num_layers):
        for name, theirs in names.items():
            out[f"model.layers.{i}.{theirs}.weight"] = weight(f"blk.{i}.{name}")
        for name, heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
            rows = split_halves(weight(f"blk.{i}.attn_{name}"), heads)
            out[f"model.layers.{i}.self_attn.{name}_proj.weight"] = rows
    return out


@torch.inference_mode()
def continue_greedily(model: LlamaForCausalLM, prompts: list[list[int]]) -> list[list[int]]:
    """Each prompt and its next POSITIONS best ids, past any end of turn."""
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    out = model.generate(padded, attention_mask=mask, max_new_tokens=POSITIONS, do_sample=False)
    return [ids + row[longest:] for ids, row in zip(prompts, out.tolist(), strict=True)]


@torch.inference_mode()
def last_logits(model: LlamaForCausalLM, ids: list[int]) -> torch.Tensor:
    """float64 [POSITIONS, vocab]: the logits that predict the last POSITIONS ids."""
    logits = model(torch.tensor([ids[:-1]])).logits[0, -POSITIONS:]
    assert logits.dtype == torch.float64
    return logits


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the goldens of the default model.")
    parser.add_argument("--out", type=Path, default=FOLDER / "default_model.npz")
    args = parser.parse_args()

    file = GGUFFile.open(find_default_model())
    config = read_config(file)
    tokenizer = Tokenizer.from_metadata(file.metadata)
    chat = ChatTemplate(file.metadata["tokenizer.chat_template"], tokenizer)
    model = load_float64(file, config)

    given = json.loads((FOLDER / "prompts.json").read_text(encoding="utf-8"))
    prompts = continue_greedily(model, [chat.encode(messages) for messages in given["chats"]])
    prompts += [tokenizer.encode(text) for text in given["texts"]]
    assert all(len(ids) > POSITIONS for ids in prompts)
    top_ids, top_logits, logsumexp = [], [], []
    for i, ids in enumerate(prompts):
        logits = last_logits(model, ids)
        top = logits.topk(TOP)
        top_ids.append(top.indices.numpy())
        top_logits.append(top.values.numpy())
        logsumexp.append(logits.logsumexp(-1).numpy())
        print(f"{i + 1}/{len(prompts)}: {len(ids)} tokens, ...{tokenizer.decode(ids[-POSITIONS:])[:60]!r}")

    args.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        args.out,
        model_sha256=np.array(hashlib.sha256(file.path.read_bytes()).hexdigest()),
        lengths=np.array([len(ids) for ids in prompts], np.int32),
        ids=np.concatenate(prompts).astype(np.uint16),
        top_ids=np.array(top_ids).astype(np.uint16),
        top_logits=np.array(top_logits).astype(np.float32),
        logsumexp=np.array(logsumexp),
    )
    print(f"{args.out}: {args.out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
