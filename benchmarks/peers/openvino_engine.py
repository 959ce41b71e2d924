"""OpenVINO GenAI's ContinuousBatchingPipeline for compare.py and goodput.py; it loads the GGUF file itself.

Settings: fields of its SchedulerConfig, and under "properties" those of the CPU device.
"""

from __future__ import annotations

import json
import sys
from itertools import count

import numpy as np
import openvino as ov
import openvino_genai as genai
from lines import Arrivals, answer


def main(descriptor: str, model: str, settings: str) -> None:
    fields = json.loads(settings)
    properties = fields.pop("properties", {})
    scheduler = genai.SchedulerConfig()
    for name, value in fields.items():
        setattr(scheduler, name, value)
    pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)

    ids = count(1)

    def generate(prompts: list[list[int]], output_tokens: int) -> int:
        results = pipeline.generate([tensor(prompt) for prompt in prompts], [greedy(output_tokens)] * len(prompts))
        return sum(len(result.m_generation_ids[0]) for result in results)

    def serve(arrivals: Arrivals) -> None:
        open_requests = {}
        while not arrivals.over:
            for index, prompt, output_tokens in arrivals.due():
                open_requests[index] = pipeline.add_request(next(ids), tensor(prompt), greedy(output_tokens))
            if not open_requests:
                arrivals.wait()
                continue
            pipeline.step()
            for index, request in list(open_requests.items()):
                while request.can_read():
                    arrivals.tokens(index, sum(len(output.generated_ids) for output in request.read().values()))
                status = request.get_status().name
                if status == "FINISHED":
                    arrivals.ended(index)
                    del open_requests[index]
                elif status != "RUNNING":
                    raise SystemExit(f"a request is {status}; give it more memory with cache_size")
        for request in open_requests.values():
            request.cancel()
        while pipeline.has_non_finished_requests():
            pipeline.step()

    answer(descriptor, {"version": genai.__version__, "notes": []}, generate, serve)


def tensor(prompt: list[int]) -> ov.Tensor:
    return ov.Tensor(np.array([prompt], np.int64))


def greedy(output_tokens: int) -> genai.GenerationConfig:
    return genai.GenerationConfig(max_new_tokens=output_tokens, ignore_eos=True, do_sample=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
