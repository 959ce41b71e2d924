"""potok run: answers a file of requests, as many at once as the engine takes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from potok.cli import options
from potok.cli.batch_file import BadLine, OutputFile, Request, count_requests, read_requests
from potok.config import MAX_UTILIZATION, EngineConfig
from potok.errors import EngineDead, LoadError, PotokError
from potok.frontend import FrontEnd
from potok.llm import AsyncLLM
from potok.server.dialects import openai, openai_errors

#: Requests in flight, as a multiple of what the engine runs at once: its queue never runs dry, memory stays bounded.
IN_FLIGHT = 2

OK, FAILED = 200, 500

ENDPOINTS: dict[str, Callable[[FrontEnd, dict[str, Any]], Awaitable[dict[str, Any]]]] = {
    "/v1/completions": openai.completion,
    "/v1/chat/completions": openai.chat_completion,
}


def register(app: typer.Typer) -> None:
    app.command(help="Answer a file of requests in OpenAI's batch format. Run it again to go on where it stopped.")(run)


def run(
    *,
    requests: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="One request a line.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="OUT.jsonl", help="One answer a line; appended to.")
    ],
    model: options.ModelOption = None,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    max_model_len: options.MaxModelLen = None,
    kv_cache_memory: options.KvCacheMemory = None,
    kv_cache_tokens: options.KvCacheTokens = None,
    enable_prefix_caching: options.EnablePrefixCaching = True,
    capacity_policy: options.CapacityPolicy = MAX_UTILIZATION,
    schedule_policy: options.SchedulePolicy = "fcfs",
    block_size: options.BlockSize = 32,
    threads: options.Threads = None,
    kv_cache_dtype: options.KvCacheDtype = "f16",
    activation_bits: options.ActivationBits = 8,
) -> int:
    if not requests.is_file():
        raise LoadError(f"{requests} does not exist; give a file with one request a line.")
    if output.exists() and output.samefile(requests):
        raise LoadError(f"{output} is the file of requests; give another name for the answers.")
    config = options.engine_config(
        options.model_path(None, model),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        kv_cache_memory=kv_cache_memory,
        kv_cache_tokens=kv_cache_tokens,
        enable_prefix_caching=enable_prefix_caching,
        capacity_policy=capacity_policy,
        schedule_policy=schedule_policy,
        block_size=block_size,
        threads=threads,
        kv_cache_dtype=kv_cache_dtype,
        activation_bits=activation_bits,
    )
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    tally = Tally()
    start = perf_counter()
    total = count_requests(requests)
    with OutputFile(output) as records, _bar(console, total) as show:
        try:
            if all(map(records.holds, read_requests(requests))):
                tally.kept = total  # no model is loaded for nothing
            else:
                asyncio.run(_run(config, requests, records, tally, show))
        except KeyboardInterrupt:
            console.print("stopped; run the same command to go on")
            raise
    console.print(tally.summary(perf_counter() - start))
    return 0


@dataclass(slots=True)
class Tally:
    """Lines so far. kept: had their record before. refused, failed: answered with status 4xx, 5xx. tokens: sampled."""

    kept: int = 0
    answered: int = 0
    refused: int = 0
    failed: int = 0
    no_requests: int = 0
    tokens: int = 0

    @property
    def done(self) -> int:
        return self.kept + self.answered + self.refused + self.failed + self.no_requests

    def summary(self, seconds: float) -> str:
        parts = {
            "answered": self.answered,
            "refused (status 4xx)": self.refused,
            "failed (status 5xx)": self.failed,
            "no requests (error records)": self.no_requests,
            "done before": self.kept,
        }
        counts = ", ".join(f"{count} {what}" for what, count in parts.items() if count) or "nothing to do"
        return f"{counts}; {self.tokens} tokens in {seconds:.1f} s, {self.tokens / max(seconds, 1e-9):.1f} tok/s"


async def _run(
    config: EngineConfig, requests: Path, records: OutputFile, tally: Tally, show: Callable[[Tally], None]
) -> None:
    async with AsyncLLM.for_config(config) as llm:
        await answer_file(llm.frontend, requests, records, tally, show)


async def answer_file(
    frontend: FrontEnd, requests: Path, records: OutputFile, tally: Tally, show: Callable[[Tally], None]
) -> None:
    """Appends a record for every line that has none; `show` is called after each.

    Whatever comes of one line, the others are answered. Raises EngineDead when the engine ended.
    """
    places = asyncio.Semaphore(IN_FLIGHT * frontend.engine.info.max_num_seqs)

    async def take(request: Request) -> None:
        try:
            status, body = await _answer(frontend, request)
        finally:
            places.release()
        records.answer(request, status, body)
        tally.answered += status == OK
        tally.refused += OK < status < FAILED
        tally.failed += status >= FAILED
        tally.tokens += body.get("usage", {}).get("completion_tokens", 0)
        show(tally)

    try:
        async with asyncio.TaskGroup() as tasks:
            for item in read_requests(requests):
                if isinstance(item, Request) and not records.holds(item):
                    await places.acquire()
                    tasks.create_task(take(item))
                    continue
                if records.holds(item):
                    tally.kept += 1
                elif isinstance(item, BadLine):
                    records.report(item)
                    tally.no_requests += 1
                show(tally)
    except* EngineDead as dead:
        raise EngineDead(f"{dead.exceptions[0]}; run the same command to go on.") from None


async def _answer(frontend: FrontEnd, request: Request) -> tuple[int, dict[str, Any]]:
    """HTTP status and body of one answer."""
    try:
        return OK, await ENDPOINTS[request.url](frontend, request.body)
    except EngineDead:
        raise
    except Exception as error:
        if not isinstance(error, PotokError):
            logging.getLogger(__name__).exception("line %d met a bug", request.number)
        return openai_errors.status_of(error), openai_errors.body_of(error)


@contextmanager
def _bar(console: Console, total: int) -> Iterator[Callable[[Tally], None]]:
    """A progress bar, where stderr is a terminal."""
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        start = perf_counter()

        def show(tally: Tally) -> None:
            rate = tally.tokens / max(perf_counter() - start, 1e-9)
            bar.update(task, completed=tally.done, description=f"{rate:.0f} tok/s")

        yield show
