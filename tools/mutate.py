"""Breaks the scheduler's memory by hand, one line at a time, and sees whether tests/core notices.

    python tools/mutate.py                  all mutations, two at a time
    python tools/mutate.py prefix radix     those of some files
    python tools/mutate.py "a big request"  those that are described so
    python tools/mutate.py --list

Each mutation is made in a copy of src; tests/core runs against the copy and stops at the first failure. Exit code 1
when a mutation survives: then a test is missing. Those that no behaviour could show are not in the list.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CORE = Path("potok") / "core"
#: A mutation that makes the scheduler run for ever is caught as well.
TIMEOUT_S = 120
#: Of the unchanged source, on a busy machine.
SLOWEST_S = 900


class Mutation(NamedTuple):
    """In `file` of potok.core, `old`, which is there once, becomes `new`. breaks: what is wrong then."""

    file: str
    old: str
    new: str
    breaks: str


class Outcome(NamedTuple):
    """caught_by: the test that failed, or None."""

    mutation: Mutation
    caught_by: str | None
    seconds: float


MUTATIONS = (
    # -- blocks ---------------------------------------------------------------------------------------------------
    Mutation("blocks", "                self._idle += 1", "                pass", "idle blocks are not counted"),
    Mutation("blocks", "        self._idle -= self.is_idle(block)\n", "", "a block that is taken again stays idle"),
    Mutation("blocks", "len(self._free) + self._idle", "len(self._free)", "cached blocks are never to be had"),
    Mutation("blocks", "        self._idle -= 1\n", "", "dropped blocks stay idle"),
    Mutation(
        "blocks",
        "        self._refs[block] += 1\n        self._cached[block] = True",
        "        self._cached[block] = True",
        "the prefix cache does not hold what it caches",
    ),
    Mutation("blocks", "        del self._free[start:]\n", "", "free blocks are given twice"),
    Mutation(
        "blocks",
        "        self._cached[block] = False\n        self._refs[block] -= 1\n",
        "        self._cached[block] = False\n",
        "a dropped block keeps its count",
    ),
    # -- radix ----------------------------------------------------------------------------------------------------
    Mutation("radix", "        tokens.byteswap()\n", "", "keys do not sort as tokens do"),
    Mutation("radix", "differing.bit_length() + 7", "differing.bit_length()", "a differing token counts as common"),
    Mutation("radix", "at + width <= len(key)", "at + width < len(key)", "a last whole block is not found"),
    Mutation("radix", "max(0, i - 1) : i + 1", "i : i + 1", "the neighbour on the left is not looked at"),
    Mutation("radix", "max(0, i - 1) : i + 1", "max(0, i - 1) : i", "the neighbour on the right is not looked at"),
    Mutation("radix", "blake2b(parent + key,", "blake2b(key,", "the same block after two prefixes has one name"),
    Mutation("radix", "repr(tuple(domain))", '"".join(map(str, domain))', "fields of a domain are joined"),
    Mutation(
        "radix",
        "self._roots.setdefault(domain, Root(domain))",
        "self._roots.setdefault(domain._replace(epoch=0), Root(domain))",
        "a domain of another model is linked under the old one",
    ),
    Mutation(
        "radix",
        "        del parent.order[bisect_left(parent.order, node.key)]",
        "        parent.order.pop()",
        "another child is forgotten in its place",
    ),
    Mutation("radix", "        del self._by_block[node.block]", "        pass", "a removed block is still known"),
    Mutation("radix", "        insort(parent.order, key)", "        parent.order.append(key)", "children are unsorted"),
    # -- prefix ---------------------------------------------------------------------------------------------------
    Mutation(
        "prefix",
        "        limit = min(known - 1, request.reusable)\n        if not",
        "        limit = min(known, request.reusable)\n        if not",
        "no token is left to compute",
    ),
    Mutation(
        "prefix",
        "        limit = min(known - 1, request.reusable)\n        if not",
        "        limit = known - 1\n        if not",
        "tokens that must be rated are not computed",
    ),
    Mutation("prefix", "total - len(blocks) + reused", "total - len(blocks)", "idle blocks are promised twice"),
    Mutation("prefix", "for block in match.blocks:\n            pool.share(block)", "pass", "hits are not held"),
    Mutation(
        "prefix",
        "while node.end + size <= request.computed:",
        "while node.end + size <= len(request.tokens):",
        "blocks are published that are not computed",
    ),
    Mutation(
        "prefix",
        "                self.pool.share(child.block)\n                self.pool.release((request.blocks[i],))\n"
        "                request.blocks[i] = child.block\n",
        "                pass\n",
        "the same tokens are kept twice",
    ),
    Mutation(
        "prefix",
        "        self._leave(request)\n        self._settle(request, node)",
        "        self._settle(request, node)",
        "a request is filling two blocks",
    ),
    Mutation(
        "prefix",
        "            self.transfers.note(node)\n            self._leave(request)",
        "            self.transfers.note(node)\n            request.node = None",
        "a request that left is still filling",
    ),
    Mutation(
        "prefix",
        "            else:\n                self._offer(node)\n\n    def end_copies",
        "\n    def end_copies",
        "blocks of who left are never dropped",
    ),
    Mutation(
        "prefix",
        "            if node is not None:\n                self._offer(node)\n",
        "",
        "a block that was copied from is never dropped",
    ),
    Mutation(
        "prefix",
        "            self.pool.release((block,))\n            node",
        "            node",
        "a block that was copied from is held for ever",
    ),
    Mutation(
        "prefix",
        "min(other.computed - node.end, self._block_size)",
        "min(len(other.tokens) - node.end, self._block_size)",
        "tokens are copied before they are computed",
    ),
    Mutation(
        "prefix",
        ">= WORTH_WAITING:\n                    return True",
        ">= WORTH_WAITING:\n                    return False",
        "nobody waits for a prefix that is being computed",
    ),
    Mutation(
        "prefix",
        "                if n - max(head if other.loading else readable, other.computed - node.end) >= WORTH_WAITING",
        "                if n >= WORTH_WAITING",
        "a request waits for what it could have now",
    ),
    Mutation(
        "prefix",
        "        if request.joins:\n            return\n",
        "",
        "requests that come back count as queries",
    ),
    Mutation(
        "prefix",
        "self._order.touch(node, not request.joins)",
        "self._order.touch(node, True)",
        "a preempted request protects itself",
    ),
    Mutation("prefix", "            used.append(copied)\n", "            pass\n", "who is copied from earns nothing"),
    Mutation("prefix", "        self._remember(node)\n", "", "nobody knows what was evicted"),
    Mutation(
        "prefix",
        "self._order.touch(child, self._dropped.pop(child.digest, 0))",
        "self._order.touch(child, 0)",
        "a prefix that comes back has lost its merits",
    ),
    Mutation("prefix", "if node.children or", "if", "a prefix loses its middle"),
    Mutation(
        "prefix",
        "            self._forget(parent)\n        else:\n            self._offer(parent)",
        "            self._forget(parent)",
        "a prefix that lost its tail is never dropped",
    ),
    Mutation("prefix", "match.cost - self.pool.is_idle(match.source)", "match.cost - 1", "a block too few is asked"),
    Mutation("prefix", "            self._dropped.popitem(last=False)", "            pass", "memory of drops grows"),
    Mutation(
        "prefix",
        "if not root.children and root not in self._filling:",
        "if not root.children:",
        "a root is forgotten while a request fills it",
    ),
    Mutation(
        "prefix",
        "            if isinstance(node, Root):\n                self._forget(node)\n            else:",
        "            if not isinstance(node, Root):",
        "domains that came once stay",
    ),
    # -- eviction -------------------------------------------------------------------------------------------------
    Mutation("eviction", "self.clock + 1 + REUSE * node.hits", "self.clock + 1", "reuse earns nothing"),
    Mutation("eviction", "min(MOST_HITS, node.hits + hits)", "node.hits + hits", "merit lasts for ever"),
    Mutation("eviction", "                self.clock = value\n", "", "nothing ages"),
    Mutation("eviction", "if node.value == value and droppable(node)", "if droppable(node)", "old values count"),
    Mutation("eviction", "if node.value == value and droppable(node)", "if node.value == value", "needed blocks go"),
    Mutation("eviction", "if len(self._heap) > limit:", "if len(self._heap) > limit * limit:", "stale entries pile up"),
    Mutation(
        "prefix",
        "self._order.compact(self._is_droppable, 2 * self.pool.num_blocks)",
        "self._order.compact(self._is_droppable, 0)",
        "each block that becomes idle costs a look at all of them",
    ),
    # -- admission ------------------------------------------------------------------------------------------------
    Mutation("admission", "len(running) * (1 + request.preemptions)", "len(running)", "no patience after a preemption"),
    Mutation("admission", "len(running) * (1 + request.preemptions)", "0", "no headroom"),
    Mutation(
        "admission",
        "sum([limits.still_needed(r) for r in running]) + limits.still_needed(request)",
        "sum([limits.still_needed(r) for r in running])",
        "no_evict forgets the request's own needs",
    ),
    Mutation(
        "admission",
        "        if any(r.overtaken >= policy.patience for r in older):\n            return\n",
        "",
        "a big request starves",
    ),
    Mutation("admission", "                other.overtaken += 1", "                pass", "nobody counts the passed"),
    Mutation(
        "admission",
        "            del left[request.id]\n            continue",
        "            continue",
        "who waits for a prefix counts as passed",
    ),
    Mutation(
        "admission",
        "        if match.wait:\n            del left[request.id]\n            continue\n",
        "",
        "nobody waits for a prefix that is being computed",
    ),
    Mutation(
        "admission",
        "    need = limits.blocks_for(limits.last_len(request) - 1)\n    if",
        "    need = limits.blocks_for(limits.last_len(request))\n    if",
        "a request that just fits is refused",
    ),
    Mutation("admission", "    if need > num_blocks:", "    if need > num_blocks + 1:", "what never fits is accepted"),
    Mutation("admission", "if prompt >= context:", "if prompt > context:", "a prompt without room for an answer"),
    # -- scheduler ------------------------------------------------------------------------------------------------
    Mutation("scheduler", "youngest = self.running.pop()", "youngest = self.running.pop(0)", "the oldest is preempted"),
    Mutation(
        "scheduler",
        "        self.cache.release(request)\n        request.computed = 0\n",
        "        self.cache.release(request)\n",
        "a preempted request goes on without its KV",
    ),
    Mutation(
        "scheduler",
        "        insort(self.waiting, request, key=BY_AGE)\n",
        "        self.waiting.append(request)\n",
        "a preempted request goes to the end of the queue",
    ),
    Mutation("scheduler", "        request.preemptions += 1\n", "", "a preempted request does not know it"),
    Mutation(
        "scheduler",
        "        if not preempted:\n            self._join",
        "        self._join",
        "some join in a step that preempts others",
    ),
    Mutation(
        "scheduler",
        "decoding = sorted(decoding, key=LEAST_RECENTLY_SERVED)[:share]",
        "decoding = decoding[:share]",
        "decoding requests starve",
    ),
    Mutation(
        "scheduler",
        "budget - min(self._prompt_share(), sum(r.pending for r in prompts))",
        "budget",
        "prompts starve",
    ),
    Mutation("scheduler", "n = min(n, MOST_RATED)", "pass", "a step rates more rows than there is memory for"),
    Mutation("scheduler", "        self._copies.clear()\n", "", "copies are made again in the next step"),
    Mutation(
        "scheduler",
        "                self._copies.append(Copy(source, request.blocks[len(match.blocks)]))",
        "                pass",
        "the head of a block is not copied",
    ),
    Mutation(
        "scheduler",
        "            if request.finish is not None:  # cancelled while the step ran\n                continue\n",
        "",
        "a cancelled request gets a token",
    ),
    Mutation(
        "scheduler",
        "        if self._flight is None:\n            self.cache.release(request)\n        else:\n    ",
        "        self.cache.release(request)\n        if self._flight is not None:\n    ",
        "blocks go while a step writes them",
    ),
    Mutation("scheduler", "        self.leaving = []\n", "", "blocks of who left are let go twice"),
    Mutation("scheduler", "            request.rated += len(segment.rate)\n", "", "tokens are rated twice"),
    Mutation("scheduler", "max(start, request.rated - 1)", "start", "tokens are rated again after a preemption"),
    Mutation(
        "scheduler",
        "elif len(request.tokens) >= request.last_len:",
        "elif len(request.tokens) > request.last_len:",
        "one token too many",
    ),
    Mutation(
        "scheduler",
        "            request.blocks += self.cache.alloc(1)",
        "            request.blocks += self.pool.alloc(1)",
        "nothing is dropped when a running request needs a block",
    ),
    Mutation(
        "scheduler",
        "        while len(short) > self.pool.available:",
        "        while len(short) > self.pool.free:",
        "requests are preempted where idle blocks would do",
    ),
    # -- the second tier ------------------------------------------------------------------------------------------
    Mutation(
        "tier",
        "                del self._slots[transfer.digest]\n                self._spoilt.add(slot)",
        "                pass",
        "a block that cannot be read stays in the tier",
    ),
    Mutation(
        "tier",
        "if slot not in self._readers), None)",
        "), None)",
        "a slot is overwritten while it is read",
    ),
    Mutation(
        "tier",
        "            self.counters.failed += 1\n            self._free.append(slot)",
        "            self.counters.failed += 1",
        "a failed write loses its slot",
    ),
    Mutation(
        "transfers",
        "        self._pool.share(transfer.block)\n",
        "",
        "a transfer does not hold its block",
    ),
    Mutation(
        "transfers",
        "                load.good = min(load.good, i)",
        "                pass",
        "a read that failed counts as good",
    ),
    Mutation(
        "transfers",
        "                load.good = min(load.good, i)",
        "                load.good = i",
        "the last failure counts, and not the first",
    ),
    Mutation(
        "transfers",
        "            if digest not in self.tier:\n                break\n",
        "            if digest not in self.tier:\n                continue\n",
        "a gap in what is stored is passed over",
    ),
    Mutation(
        "transfers",
        "            digest = digest_of(digest, rest[at : at + width])",
        "            digest = digest_of(b\"\", rest[at : at + width])",
        "blocks are named without what is before them",
    ),
    Mutation(
        "transfers",
        "if node is None or node.digest != digest or",
        "if node is None or",
        "what is in a block now is stored as what was noted",
    ),
    Mutation(
        "transfers",
        "or digest in tier or tier.is_writing(digest)",
        "or digest in tier",
        "a block is written twice at a time",
    ),
    Mutation(
        "transfers",
        "        return not self._is_stuck() and",
        "        return",
        "others read while reads were given up",
    ),
    Mutation(
        "transfers",
        "        self._use(written)\n",
        "",
        "stored prefixes lose their heads first",
    ),
    Mutation(
        "prefix",
        "        load.good = min([load.good, *load.left.values()])\n",
        "",
        "blocks count that have not been read when a request gives up",
    ),
    Mutation(
        "prefix",
        "== 1 + self.transfers.is_written(node.block)",
        "== 1",
        "a block that is written keeps those above it from being dropped",
    ),
    Mutation(
        "prefix",
        "leave(request)\n        if load is not None",
        "_loads.get(-1)\n        if load is not None",
        "who is cancelled while it is loading is waited for",
    ),
    Mutation(
        "prefix",
        "        end = min(end, len(request.tokens) - 1, request.reusable)\n",
        "",
        "nothing is left to compute after a read",
    ),
    Mutation(
        "scheduler",
        "            if not request.loading:\n                (decoding",
        "            if True:\n                (decoding",
        "a request computes while it is loading",
    ),
    Mutation(
        "scheduler",
        "            self.cache.give_up(request)\n",
        "",
        "what was read in time is lost when a request gives up",
    ),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", help="files of potok.core without their ending, or words of descriptions")
    parser.add_argument("--list", action="store_true", help="show the mutations and do nothing")
    parser.add_argument("--jobs", type=int, default=2, help="mutations at a time")
    arguments = parser.parse_args()
    check_places(MUTATIONS)
    chosen = [m for m in MUTATIONS if not arguments.which or any(w == m.file or w in m.breaks for w in arguments.which)]
    if arguments.list:
        for mutation in chosen:
            print(f"{mutation.file + '.py':14} {mutation.breaks}")
        return 0
    caught_by = run_tests({})
    if caught_by is not None:
        print(f"the tests fail without any mutation: {caught_by}")
        return 2
    with ThreadPoolExecutor(arguments.jobs) as workers:
        outcomes = []
        for outcome in workers.map(attempt, chosen):
            outcomes.append(outcome)
            print(line(outcome), flush=True)
    survivors = [o for o in outcomes if o.caught_by is None]
    print(f"{len(outcomes) - len(survivors)} of {len(outcomes)} mutations caught")
    return bool(survivors)


def check_places(mutations: Sequence[Mutation]) -> None:
    """Each mutation has exactly one place in the source as it is now."""
    for m in mutations:
        times = source(m.file).read_text().count(m.old)
        assert times == 1, f"{m.file}.py has {times} places for the mutation {m.breaks!r}; repair the list"


def source(file: str) -> Path:
    return ROOT / "src" / CORE / f"{file}.py"


def attempt(mutation: Mutation) -> Outcome:
    started = time.monotonic()
    text = source(mutation.file).read_text().replace(mutation.old, mutation.new)
    caught_by = run_tests({CORE / f"{mutation.file}.py": text})
    return Outcome(mutation, caught_by, time.monotonic() - started)


def run_tests(changes: dict[Path, str]) -> str | None:
    """Runs tests/core on a copy of src with these files changed. Returns the first test that fails."""
    with tempfile.TemporaryDirectory(prefix="potok-mutation-") as folder:
        copy = Path(folder) / "src"
        shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        for path, text in changes.items():
            (copy / path).write_text(text)
        # -S: an editable installation puts its own finder before PYTHONPATH, from a .pth file that -S leaves unread.
        packages = [path for path in sys.path if path.endswith("-packages")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(copy), *packages]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",
        }
        command = [sys.executable, "-S", "-m", "pytest", "-x", "--tb=no", "-rfE", "-p", "no:cacheprovider"]
        command += [f"--timeout={TIMEOUT_S}", "--rootdir", str(ROOT), str(ROOT / "tests" / "core")]
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SLOWEST_S, check=False
            )
        except subprocess.TimeoutExpired:
            return f"no end within {SLOWEST_S} s"
    if done.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if found is None:
        found = re.search(r"(Timeout)", done.stdout + done.stderr)
    assert found, f"pytest ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return found[1].removeprefix("tests/core/")


def line(outcome: Outcome) -> str:
    verdict = "SURVIVES" if outcome.caught_by is None else f"caught by {outcome.caught_by}"
    return f"{outcome.mutation.file + '.py':14} {outcome.mutation.breaks:55} {verdict}  ({outcome.seconds:.0f} s)"


if __name__ == "__main__":
    sys.exit(main())
