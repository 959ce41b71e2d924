"""OpenVINO GenAI's ContinuousBatchingPipeline for compare.py; it loads the GGUF file itself.

Settings: fields of its SchedulerConfig, and under "properties" those of the CPU device.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import openvino as ov
import openvino_genai as genai
from lines import answer


def main(descriptor: str, model: str, settings: str) -> None:
    fields = json.loads(settings)
    properties = fields.pop("properties", {})
    scheduler = genai.SchedulerConfig()
    for name, value in fields.items():
        setattr(scheduler, name, value)
    pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)

    def generate(prompts: list[list[int]], output_tokens: int) -> int:
        inputs = [ov.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        config = genai.GenerationConfig(max_new_tokens=output_tokens, ignore_eos=True, do_sample=False)
        results = pipeline.generate(inputs, [config] * len(prompts))
        return sum(len(result.m_generation_ids[0]) for result in results)

    answer(descriptor, {"version": genai.__version__, "notes": []}, generate)


if __name__ == "__main__":
    main(*sys.argv[1:])
