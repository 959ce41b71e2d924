"""vLLM on a CPU for compare.py. It reads no GGUF file on CPUs: name the same model in its own format in the settings.

Settings: arguments of vllm.LLM, "model" among them.
"""

from __future__ import annotations

import json
import sys

import vllm
from lines import answer


def main(descriptor: str, _: str, settings: str) -> None:
    llm = vllm.LLM(**json.loads(settings))

    def generate(prompts: list[list[int]], output_tokens: int) -> int:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)
        results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return sum(len(result.outputs[0].token_ids) for result in results)

    answer(descriptor, {"version": vllm.__version__, "notes": []}, generate)


if __name__ == "__main__":
    main(*sys.argv[1:])
