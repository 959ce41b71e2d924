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
        "        if any(r.overtaken >= policy.patience for r in before):\n            return\n",
        "",
        "a big request starves",
    ),
    Mutation("admission", "                other.overtaken += 1", "                pass", "nobody counts the passed"),
    Mutation(
        "admission",
        "        if match.wait:\n            del left[request.id]\n",
        "        if match.wait:\n",
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
    Mutation("scheduler", "last = self.running.pop()", "last = self.running.pop(0)", "the first in rank is preempted"),
    Mutation(
        "scheduler",
        "        self.cache.release(request)\n        request.computed = 0\n",
        "        self.cache.release(request)\n",
        "a preempted request goes on without its KV",
    ),
    Mutation(
        "scheduler",
        "        insort(self.waiting, request, key=BY_RANK)\n",
        "        self.waiting.append(request)\n",
        "a preempted request goes to the end of the queue",
    ),
    Mutation("scheduler", "        request.preemptions += 1\n", "", "a preempted request does not know it"),
    Mutation(
        "scheduler",
        "        if not preempted and self.waiting:",
        "        if self.waiting:",
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
        "self.limits.max_num_batched_tokens - min(self._budget.prompt_share, pending)",
        "self.limits.max_num_batched_tokens",
        "prompts starve",
    ),
    Mutation("budget", "n = min(n, MOST_RATED)", "pass", "a step rates more rows than there is memory for"),
    Mutation("scheduler", "        self._copies.clear()\n", "", "copies are made again in the next step"),
    Mutation(
        "scheduler",
        "                self._copies.append(Copy(source, request.blocks[len(match.blocks)]))",
        "                pass",
        "the head of a block is not copied",
    ),
    Mutation(
        "scheduler",
        "            if request.finish is not None:  # cancelled while the step ran, or a ghost\n"
        "                continue\n",
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
    Mutation("scheduler", "            request.rated += len(rate)\n", "", "tokens are rated twice"),
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
    # -- gates ----------------------------------------------------------------------------------------------------
    Mutation(
        "gate",
        "        if members or running or not waiting:",
        "        if members or not waiting:",
        "a running batch is joined",
    ),
    Mutation(
        "gate",
        "        if members or running or not waiting:",
        "        if running or not waiting:",
        "the rest of a batch is left behind",
    ),
    Mutation(
        "gate",
        "        return any(r.batch == self._batch for r in waiting)",
        "        return False",
        "a batch ends before a member that was preempted",
    ),
    Mutation(
        "gate",
        "        if not full and now_us < self._due(waiting):\n            return ()\n",
        "",
        "nobody waits for a batch to gather",
    ),
    Mutation("gate", "        if not full and now_us", "        if now_us", "a full batch waits all the same"),
    Mutation(
        "gate",
        "            if gathered and 0 < self._max_tokens < tokens:\n                return gathered, True\n",
        "",
        "a batch takes more tokens than it may",
    ),
    Mutation(
        "gate",
        "            if gathered and 0 <",
        "            if 0 <",
        "a prompt above the limit of a batch never runs",
    ),
    Mutation(
        "gate",
        "        return gathered, 0 < self._max_tokens <= tokens",
        "        return gathered, False",
        "a batch of just enough tokens waits",
    ),
    Mutation(
        "gate",
        "            if len(gathered) == self._size:\n                return gathered, True\n",
        "",
        "a batch takes more members than it may",
    ),
    Mutation(
        "gate",
        "min([r.arrived_us for r in waiting]) + self._max_wait_us",
        "max([r.arrived_us for r in waiting]) + self._max_wait_us",
        "each arrival makes the first of a batch wait longer",
    ),
    Mutation(
        "gate",
        "        return self._due(waiting) if waiting and",
        "        return None if waiting and",
        "nobody wakes an engine that gathers",
    ),
    Mutation(
        "gate",
        " if waiting and not self.is_open(waiting) else None",
        " if waiting else None",
        "an engine without free blocks asks again and again",
    ),
    Mutation(
        "gate",
        "if self._delay_factor and running and now_us",
        "if self._delay_factor and now_us",
        "prompts are held although nobody runs",
    ),
    Mutation("gate", "oldest = min([", "oldest = max([", "each arrival holds all prompts longer"),
    Mutation(
        "gate",
        "        if prompts:\n            self._last_prompt_us",
        "        if True:\n            self._last_prompt_us",
        "prompts are held for the time of any step",
    ),
    Mutation(
        "scheduler",
        "        if self.gate.padding:\n",
        "        if False:\n",
        "members that have ended are not computed on",
    ),
    Mutation(
        "scheduler",
        "        if self.gate.padding:\n",
        "        if True:\n",
        "finished rows are not skipped where they should be",
    ),
    Mutation(
        "scheduler",
        "        if self.gate.batched and request.whole:",
        "        if self.gate.batched:",
        "the end of a streamed answer is held back",
    ),
    Mutation(
        "scheduler",
        "        if self.gate.batched and request.whole:",
        "        if request.whole:",
        "ends are held back although there is no batch",
    ),
    Mutation(
        "scheduler",
        "        if self.running or self.gate.is_open(self.waiting):",
        "        if self.gate.is_open(self.waiting):",
        "held ends are told before the batch has ended",
    ),
    Mutation(
        "scheduler",
        "        held, self._held = self._held, []",
        "        held = self._held",
        "held ends are told twice",
    ),
    Mutation(
        "scheduler",
        "        for request in held:\n            del self._live[request.id]\n",
        "",
        "whose held end was told can still be cancelled",
    ),
    Mutation(
        "scheduler",
        "        self._ended += self._end_batch()\n",
        "",
        "a batch whose last member leaves never ends",
    ),
    Mutation(
        "scheduler",
        "            if not self.running:  # who is left of the batch may need the ghosts' blocks to join\n"
        "                self._drop_ghosts()\n",
        "",
        "a preempted member waits for ever for the blocks of ghosts",
    ),
    Mutation(
        "scheduler",
        "            if self.ghosts:  # nobody needs what they compute\n"
        "                self._let_go(self.ghosts.pop())\n                continue\n",
        "",
        "somebody is preempted for the sake of ghosts",
    ),
    Mutation(
        "scheduler",
        "            if request.phase is Phase.GHOST:\n                self.ghosts.remove(request)\n"
        "                self._let_go(request)\n",
        "            pass\n",
        "a ghost whose caller left goes on",
    ),
    Mutation("scheduler", "        decoding += self.ghosts\n", "", "ghosts are not computed"),
    Mutation(
        "scheduler",
        "ghost.id, end - 1, ghost.tokens[end - 1 : end]",
        "ghost.id, end, ghost.tokens[end : end + 1]",
        "a ghost writes a place of its own",
    ),
    Mutation(
        "scheduler",
        "        counters.padding_rows += self._num_padding\n",
        "",
        "rows of padding are not counted",
    ),
    Mutation(
        "scheduler",
        "sum([r.phase is Phase.GHOST for r in decoding]) if self.ghosts else 0",
        "len(self.ghosts)",
        "ghosts beyond the budget count as rows",
    ),
    Mutation(
        "scheduler",
        "            times.append(self.gate.wake_at(self.waiting))",
        "            pass",
        "the engine sleeps while a batch gathers",
    ),
    Mutation(
        "scheduler",
        " and request.phase is not Phase.GHOST:\n                prompts",
        ":\n                prompts",
        "rows of padding count as prompts",
    ),
    # -- policies -------------------------------------------------------------------------------------------------
    Mutation(
        "policy",
        "request.arrived_us + request.priority * self.AGEING_US, request.order",
        "request.priority * self.AGEING_US, request.order",
        "priorities do not age",
    ),
    Mutation(
        "policy",
        "request.arrived_us + request.priority * self.AGEING_US, request.order",
        "request.arrived_us, request.order",
        "priorities do nothing",
    ),
    Mutation(
        "policy",
        "if r.priority > newcomer.priority and r.rank > newcomer.rank]",
        "if r.priority > newcomer.priority]",
        "who has waited long enough to run is preempted",
    ),
    Mutation(
        "policy",
        "if r.priority > newcomer.priority and r.rank > newcomer.rank]",
        "if r.rank > newcomer.rank]",
        "equals make way",
    ),
    Mutation(
        "policy",
        "[r for r in reversed(running) if r.priority",
        "[r for r in running if r.priority",
        "the highest of the lower makes way first",
    ),
    Mutation(
        "policy",
        "request.arrived_us + request.last_len * self.AGEING_US",
        "request.arrived_us",
        "short requests are not preferred",
    ),
    Mutation(
        "policy",
        "request.arrived_us + request.last_len * self.AGEING_US",
        "request.last_len * self.AGEING_US",
        "long requests starve",
    ),
    Mutation(
        "policy",
        "request.arrived_us + request.last_len * self.AGEING_US",
        "request.arrived_us + request.prompt_len * self.AGEING_US",
        "the answer counts for nothing",
    ),
    Mutation(
        "policy",
        "            if request.overtaken >= self.patience:\n                return False, request.order\n",
        "",
        "who shares nothing starves",
    ),
    Mutation(
        "policy",
        "-cache.match(request).num_tokens",
        "cache.match(request).num_tokens",
        "the shortest prefix is first",
    ),
    Mutation(
        "policy",
        "return waiting[:WINDOW]\n\n    def yields",
        "return waiting\n\n    def yields",
        "each step looks at the whole queue",
    ),
    Mutation(
        "policy",
        "            least = min([self._charged[other] for other in self._live if other != name], default=0)\n",
        "            least = 0\n",
        "a key that comes back has saved up",
    ),
    Mutation("policy", "max(self._charged.get(name, 0), least)", "least", "a key that leaves for a moment is forgiven"),
    Mutation(
        "policy",
        "        if not self._live[name]:\n            least",
        "        if True:\n            least",
        "each request of a key lifts it",
    ),
    Mutation("policy", "len(segment.tokens) + segment.sample", "len(segment.tokens)", "sampled tokens are free"),
    Mutation("policy", "len(segment.tokens) + segment.sample", "1", "prompts are free"),
    Mutation(
        "policy",
        "after = charged + len(request.tokens)",
        "after = charged",
        "one key's whole queue joins at once",
    ),
    Mutation(
        "policy",
        "        if taken[newcomer.domain.namespace] >= share:\n            return []\n",
        "",
        "a key takes more than its part of the seats",
    ),
    Mutation(
        "policy",
        "        above = taken[most] - share",
        "        above = taken[most]",
        "a key is left with less than its part",
    ),
    Mutation(
        "policy",
        "[r for r in reversed(running) if r.domain.namespace == most]",
        "[r for r in running if r.domain.namespace == most]",
        "the oldest of a key makes way",
    ),
    Mutation(
        "policy",
        "max(1, seats // len(self._live))",
        "seats // len(self._live)",
        "with more keys than seats nobody has a part",
    ),
    Mutation("policy", "heap = [(taken[name] >= share, self", "heap = [(False, self", "seats are given and taken away"),
    Mutation(
        "policy",
        "heapq.heappush(heap, (taken[name] >= share, after",
        "heapq.heappush(heap, (False, after",
        "a key gets more than its part while others wait",
    ),
    Mutation(
        "policy",
        "            return ()  # nobody would yield; and all who wait are looked at below\n",
        "            pass\n",
        "all who wait are looked at though all seats are taken",
    ),
    Mutation("policy", "min(share, n) for name, n", "min(share, 0) for name, n", "no key is given a seat of another"),
    Mutation(
        "policy",
        "        if not self._live[name]:\n            del self._live[name]\n",
        "",
        "keys that left have a part of the seats",
    ),
    Mutation(
        "policy",
        "            self._charged.clear()",
        "            pass",
        "charges are kept although nobody is there",
    ),
    Mutation(
        "scheduler",
        "        self.policy.leave(request)\n        if self.gate.padding",
        "        if self.gate.padding",
        "a key whose answers are complete stays",
    ),
    Mutation(
        "scheduler",
        "        request.finish = finish\n        self.policy.leave(request)\n"
        "        self._let_go(request)\n\n    def _let_go",
        "        request.finish = finish\n        self._let_go(request)\n\n    def _let_go",
        "a key whose requests are cancelled stays",
    ),
    Mutation("scheduler", "        self.policy.account(batch.segments, self._flying)\n", "", "nobody is charged"),
    Mutation(
        "scheduler",
        "        if self.policy.preempts and not self.limits.no_evict:",
        "        if self.policy.preempts:",
        "somebody makes way although no_evict",
    ),
    Mutation(
        "scheduler",
        "        if full and not self.policy.preempts:",
        "        if full:",
        "nobody makes way for a seat",
    ),
    Mutation(
        "scheduler",
        "                    for some in (self.running, decoding, prompts):",
        "                    for some in (self.running, prompts):",
        "who made way is computed all the same",
    ),
    Mutation(
        "scheduler",
        "                    for some in (self.running, decoding, prompts):",
        "                    for some in (self.running, decoding):",
        "whose prompt made way is computed all the same",
    ),
    Mutation(
        "scheduler",
        "                if request.phase is Phase.WAITING:\n                    break\n",
        "",
        "later ones take the place that the next needs",
    ),
    Mutation(
        "scheduler",
        "        if match.wait or not room.admits(head):\n            return []\n",
        "",
        "somebody makes way who need not",
    ),
    Mutation(
        "scheduler",
        "            if fits():\n                return yielding\n        return []",
        "            if fits():\n                return yielding\n        return yielding",
        "somebody makes way in vain",
    ),
    Mutation(
        "scheduler",
        "            held = [b for b in request.blocks if b not in kept]",
        "            held = request.blocks",
        "blocks that the newcomer shares count as gained",
    ),
    Mutation(
        "scheduler",
        "pool.refs(b) - pool.is_cached(b) == let_go[b]",
        "pool.refs(b) - pool.is_cached(b) == 1",
        "blocks that two let go count for nothing",
    ),
    Mutation(
        "scheduler",
        "            return len(running) < limits.max_num_seqs and fit",
        "            return fit",
        "nobody makes way for want of a seat",
    ),
    # -- room for prompts -----------------------------------------------------------------------------------------
    Mutation(
        "admission",
        "        if not room.admits(request):\n            del left[request.id]\n",
        "        if not room.admits(request):\n",
        "who finds no room counts as passed",
    ),
    Mutation(
        "admission",
        "        if not room.admits(request):\n            del left[request.id]\n            continue\n",
        "",
        "prompts are begun that get nothing for long",
    ),
    Mutation(
        "admission",
        "return len(request.tokens) <= self.short or self.is_open(request)",
        "return self.is_open(request)",
        "short prompts wait for a long one",
    ),
    Mutation(
        "admission",
        "return len(request.tokens) <= self.short or self.is_open(request)",
        "return len(request.tokens) <= self.short",
        "no long prompt is ever begun",
    ),
    Mutation("admission", "r.rank < request.rank or not self.by_rank", "True", "an urgent prompt waits for a long one"),
    Mutation(
        "admission",
        "r.rank < request.rank or not self.by_rank",
        "r.rank < request.rank",
        "older ones pass a prompt",
    ),
    Mutation(
        "admission",
        "            self.short -= tokens",
        "            pass",
        "short prompts are begun without end",
    ),
    Mutation(
        "admission",
        "            room.take(len(request.tokens) - fitting.num_tokens)\n",
        "",
        "short prompts are begun that the step has no room for",
    ),
    Mutation(
        "budget",
        "        half = total // 2\n",
        "        half = total\n",
        "short prompts leave the long one nothing",
    ),
    Mutation(
        "budget",
        "passing(prompts, room // 2)",
        "passing(prompts, room)",
        "short prompts take all from the long one",
    ),
    Mutation("budget", "passing(prompts, room // 2)", "[]", "short prompts do not pass"),
    Mutation(
        "budget",
        "        if pending > room:\n",
        "        if pending > tokens:\n",
        "short prompts do not pass where the target is what bounds",
    ),
    Mutation(
        "budget",
        "            tokens -= request.pending\n    return passing",
        "            pass\n    return passing",
        "more pass than there is room for",
    ),
    # -- the target -----------------------------------------------------------------------------------------------
    Mutation(
        "budget",
        "            return 2 * target_us",
        "            return target_us",
        "prompts alone take short steps",
    ),
    Mutation(
        "budget",
        "self._target_us / self._cost.spread",
        "self._target_us",
        "noise takes the gaps beyond the target",
    ),
    Mutation(
        "budget",
        "self._cost.step_us(alone), self._cost.idle_us())",
        "self._cost.step_us(alone), 0.0)",
        "prompts advance a token a step when decoding takes all",
    ),
    Mutation(
        "budget",
        "- self._cost.step_us(alone), self._cost",
        ", self._cost",
        "prompts take the whole target beside those who decode",
    ),
    Mutation(
        "budget",
        "max(self._cost.tokens_in(us, request.computed), not portions)",
        "self._cost.tokens_in(us, request.computed)",
        "a prompt gets nothing when time is short",
    ),
    Mutation(
        "budget",
        "            us -= self._cost.prompt_us(request.computed, n)\n",
        "",
        "each prompt gets the whole time",
    ),
    Mutation(
        "budget",
        "return 0 < self._target_us < self._cost.step_us(alone) and alone.rows > 0",
        "return self._target_us > 0",
        "each step counts as slow",
    ),
    Mutation(
        "scheduler",
        "        self.counters.slow_steps += self._budget.is_slow(alone)",
        "        pass",
        "slow decoding is not told",
    ),
    Mutation(
        "budget",
        "            total = min(total, self._tokens_in(self._time(alone), prompts))",
        "            pass",
        "prompts join that the target leaves no time for",
    ),
    Mutation(
        "scheduler",
        "        self.cost.observe(self._work, step_us)\n",
        "",
        "nothing is learnt of what steps take",
    ),
    Mutation(
        "scheduler",
        "work.plus(n, segment.num_rows, prompt_context(request.computed, n))",
        "work.plus(n, segment.num_rows, 0)",
        "the depth of a prompt is not learnt",
    ),
    # -- what steps cost ------------------------------------------------------------------------------------------
    Mutation(
        "cost",
        "            self._follow(expected, step_us)\n",
        "            pass\n",
        "a machine that changes its speed is followed slowly",
    ),
    Mutation("cost", "min(us / expected, MOST_FOLLOWED)", "us / expected", "one hiccup makes all look slow"),
    Mutation("cost", "SOLVE_SOONER if surprise else SOLVE_EVERY", "SOLVE_EVERY", "surprises are learnt from late"),
    Mutation(
        "cost",
        "        if expected > 0:  # a fit may find that all the cost is in what this step did not do\n",
        "        if True:\n",
        "a step that costs nothing by the fit ends the engine",
    ),
    Mutation(
        "cost",
        "                step_us = int(MOST * expected)",
        "                pass",
        "steps that surprise greatly teach little",
    ),
    Mutation(
        "cost",
        "                row[j] = decay * row[j] + fsum",
        "                row[j] = row[j] + fsum",
        "old steps count as much as new ones",
    ),
    Mutation(
        "cost",
        "(QUANTILE if ratio > self.spread else QUANTILE - 1)",
        "(1 - QUANTILE if ratio > self.spread else -QUANTILE)",
        "the spread is what one of four stays below",
    ),
    Mutation(
        "cost",
        "            self.spread = min(max(self.spread, SPREADS[0]), SPREADS[1])\n",
        "",
        "the spread has no bounds",
    ),
    Mutation(
        "cost",
        "self._c[4] * (start + 0.5))",
        "self._c[4] * start)",
        "a little more is computed than there is time for",
    ),
    Mutation(
        "cost",
        "        if x[worst] >= 0:\n            return x\n",
        "        return x\n",
        "costs may be negative",
    ),
    Mutation(
        "cost",
        "worst = min(used, key=lambda i: x[i] * sqrt(lower[i][i]))",
        "worst = used[0]",
        "what is dropped from the fit is what comes first",
    ),
    Mutation("cost", "        if us <= 0:\n            return 0\n", "", "tokens are computed in no time"),
    Mutation(
        "cost",
        "        for work, us in self._recent:\n            self._follow(self.step_us(work), us)\n",
        "",
        "each fit forgets how fast the machine is of late",
    ),
    Mutation(
        "cost",
        "            self._add([(work, self._fixed(work)) for work in (Work(1, 1, 0, 0), Work(64, 1, 0, 0))], "
        "FIRST_GUESS)\n",
        "            pass\n",
        "the first steps unlearn what a token costs",
    ),
    # -- deadlines ------------------------------------------------------------------------------------------------
    Mutation(
        "deadlines",
        "request.first_by_us - int(CERTAIN * self._prompt_us(request))",
        "request.first_by_us",
        "a prompt is computed that comes too late",
    ),
    Mutation(
        "deadlines",
        "int(CERTAIN * self._prompt_us(request))",
        "int(self._prompt_us(request))",
        "who might just make it is ended",
    ),
    Mutation(
        "deadlines",
        "            at = self._last_chance(request) if due.first else due.at\n",
        "            at = due.at\n",
        "what the cache holds and what is computed counts for nothing",
    ),
    Mutation(
        "deadlines",
        " or (due.first and len(request.tokens) > request.prompt_len):",
        ":",
        "whose first token came in time is ended",
    ),
    Mutation(
        "deadlines",
        "            if request.id not in self._live or (due",
        "            if (due",
        "a request that has ended misses its deadline",
    ),
    Mutation(
        "deadlines",
        "                heapq.heappush(self._heap, due._replace(at=at))",
        "                pass",
        "a deadline is looked at once",
    ),
    Mutation(
        "deadlines",
        "        if request.ends_by_us:\n"
        "            heapq.heappush(self._heap, _Due(request.ends_by_us, request.order, False, request))\n",
        "",
        "answers are never cut",
    ),
    Mutation("deadlines", "            heapq.heapify(self._heap)", "            pass", "deadlines are seen late"),
    Mutation(
        "deadlines",
        "        if len(self._heap) > 4 * len(self._live) + 64:",
        "        if False:",
        "deadlines of ended requests pile up",
    ),
    Mutation(
        "scheduler",
        "            self._deadlines.forget_ended()\n",
        "",
        "deadlines of ended requests are never forgotten",
    ),
    Mutation(
        "scheduler",
        "self._deadlines.wake_at() if self._live else None",
        "None",
        "a deadline does not wake the engine",
    ),
    Mutation(
        "scheduler",
        "            done = match.num_tokens + match.read *",
        "            done = match.read *",
        "what the cache holds of a prompt is expected to take time",
    ),
    Mutation(
        "scheduler",
        "done = match.num_tokens + match.read * len(match.stored) * self.limits.block_size",
        "done = match.num_tokens",
        "a prompt that would be read is ended as hopeless",
    ),
    Mutation(
        "scheduler",
        "        if request.loading:\n            done = len(request.tokens)\n",
        "",
        "a prompt that is being read is ended as hopeless",
    ),
    Mutation("scheduler", "            self.counters.timeouts += 1\n", "", "timeouts are not counted"),
    Mutation(
        "scheduler",
        "            self._ended.append(Delta(request.id, None, request.finish))\n",
        "",
        "who misses a deadline is not told",
    ),
    Mutation(
        "scheduler",
        "            if request in self._held:  # complete",
        "            if False:  # complete",
        "a complete answer that is held is ended as if it still ran",
    ),
    Mutation(
        "budget",
        "self._cost.step_us(alone) and alone.rows > 0",
        "self._cost.step_us(alone)",
        "steps without anybody who decodes count as slow",
    ),
    Mutation(
        "scheduler",
        "        for request in self._deadlines.missed(now_us):\n            del self._live[request.id]\n",
        "        for request in self._deadlines.missed(now_us):\n",
        "who missed a deadline can still be cancelled",
    ),
    # -- accounts -------------------------------------------------------------------------------------------------
    Mutation(
        "scheduler",
        "        self.waiting_tokens -= len(request.tokens)",
        "        pass",
        "tokens that wait are only added up",
    ),
    Mutation(
        "scheduler",
        "counters.mean_step_us * counters.mean_answer / max(1, len(self.running))",
        "counters.mean_step_us * counters.mean_answer",
        "a place among many is expected as late as among few",
    ),
    Mutation(
        "scheduler",
        "return value if mean == 0 else mean + FOLLOW * (value - mean)",
        "return mean + FOLLOW * (value - mean)",
        "means begin at nothing",
    ),
    Mutation(
        "scheduler",
        "follow(self.counters.mean_answer, len(request.tokens) - request.prompt_len)",
        "follow(self.counters.mean_answer, len(request.tokens))",
        "prompts count as answers",
    ),
    Mutation(
        "scheduler",
        "            if end // block_size > start // block_size:\n                self.cache.publish(request)\n",
        "",
        "what runs is not published",
    ),
    Mutation(
        "scheduler",
        "            if end // block_size > start // block_size:",
        "            if end // block_size > start // block_size + 1:",
        "a block is published late",
    ),
    Mutation(
        "scheduler",
        "        ended, self._ended = self._ended, []",
        "        ended = self._ended",
        "ends without a step are told again",
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
