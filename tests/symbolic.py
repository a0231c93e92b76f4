"""Run step plans on a symbolic model with real pools of block ids: exact, fast, no rounding.

A state is the digest of the tokens that its sequence has consumed. Each token enters through its conv window. A KV
slot holds a token and the digest after it. The next token is a function of the state and of all KV in the block table.
So a wrong src, dst, log, slot or page raises or changes tokens, as does a stale, early or overwritten block.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch

from mambacache.kernels import StateIndices, place_decodes
from mambacache.plan import CHUNK, FOLD, PLACEHOLDER, SequenceStep, StepPlan
from mambacache.scheduler.drafts import agreed

VOCAB = 40
WINDOW = 3  # inputs in a conv window: the convolution has width 4
UNWRITTEN = -7  # an entry of a log that no op has written
FRESH = np.uint64(0x9E3779B97F4A7C15)  # the digest of no tokens

_MASK = (1 << 64) - 1
_FACTOR = 0xD1342543DE82EF95
_TAPS = np.array([0xA0761D6478BD642F, 0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3, 1], dtype=np.uint64)  # newest input last
_LIMIT = 1 << 13  # tokens of one sequence, at most


def _powers(base: int) -> np.ndarray:
    values = [1]
    for _ in range(_LIMIT):
        values.append(values[-1] * base & _MASK)
    return np.array(values, dtype=np.uint64)


_POWERS, _INVERSES = _powers(_FACTOR), _powers(pow(_FACTOR, -1, 1 << 64))


def _digests(before: np.uint64, inputs: np.ndarray) -> np.ndarray:
    """Return the digest after each token; `inputs` begins with the `WINDOW` conv inputs before the first token.

    d' = factor * d + sum of taps * inputs, modulo 2^64.
    """
    values = np.lib.stride_tricks.sliding_window_view(inputs.astype(np.uint64), WINDOW + 1) @ _TAPS
    count = len(values)
    sums = np.cumsum(values * _INVERSES[1 : count + 1]) + before
    return sums * _POWERS[1 : count + 1]


def next_token(digest: int, kv_sum: int, branch: int = 0) -> int:
    mixed = (digest ^ (kv_sum * 3 & _MASK)) + branch * 0x2545F4914F6CDD1D & _MASK
    mixed = (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 & _MASK
    return (mixed >> 40) % VOCAB


def _inputs(tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the conv inputs of tokens from position 0, after `WINDOW` zeros."""
    return np.concatenate([np.zeros(WINDOW, dtype=np.int64), np.asarray(tokens, dtype=np.int64) + 1])


@lru_cache(maxsize=512)
def _true_digests(tokens: bytes) -> np.ndarray:
    return _digests(FRESH, _inputs(np.frombuffer(tokens, dtype=np.int32)))


def true_state(tokens: bytes, position: int) -> tuple[int, list[int]]:
    """Return the digest and the conv window after the first `position` of these int32 tokens."""
    digests = _true_digests(tokens)
    window = _inputs(np.frombuffer(tokens[: 4 * position], dtype=np.int32))[-WINDOW:]
    return int(digests[position - 1]), window.tolist()


def true_page(tokens: bytes, start: int, end: int) -> np.ndarray:
    """Return the digests that the KV slots of these positions hold."""
    return _true_digests(tokens)[start:end]


def answer(
    prompt: Sequence[int], max_tokens: int, *, attention: bool, stop: Sequence[int] = (), branch: int = 0
) -> list[int]:
    """Return the answer to a prompt that runs alone; `branch` k gives the k-th answer."""
    digests = _digests(FRESH, _inputs(prompt))
    digest, kv_sum = int(digests[-1]), int(digests.sum()) if attention else 0
    tokens, taps = list(prompt), [int(tap) for tap in _TAPS]
    output = [next_token(digest, kv_sum, branch)]
    while len(output) < max_tokens and output[-1] not in stop:
        tokens.append(output[-1])
        last = [token + 1 for token in tokens[-WINDOW - 1 :]]
        digest = digest * _FACTOR + sum(t * x for t, x in zip(taps[-len(last) :], last, strict=True)) & _MASK
        kv_sum = kv_sum + digest & _MASK if attention else 0
        output.append(next_token(digest, kv_sum))
    return output


def text(length: int, seed: int = 0) -> list[int]:
    """Return random tokens. Texts of one seed begin alike; the first token is the seed modulo `VOCAB`."""
    return [seed % VOCAB, *random.Random(seed).choices(range(VOCAB), k=length)][:length]


class StepFailed(Exception):
    """Raised by a step that fails."""


def pages_of(arrays: dict[str, np.ndarray], row: int) -> np.ndarray:
    """Return the row's part of the block table."""
    starts = arrays["block_table_start"]
    return arrays["block_table"][starts[row] : starts[row + 1]]


@dataclass
class RowOfStep:
    """Hold one sequence's part of a step, read from the arrays."""

    flat: slice  # the row's tokens in the flat batch, without padding
    start: int
    src: int
    ends: list[int]  # tokens consumed when each dst is written
    dst: list[int]
    decode: bool
    log: tuple[int, int, int] = (0, 0, 0)  # slot, first entry, end
    paths: list[list[int]] = field(default_factory=list)  # for each token of a draft tree, the tokens on its path
    before: np.uint64 = FRESH
    exact: bool = False
    window: np.ndarray = field(default_factory=lambda: np.zeros(WINDOW, dtype=np.int64))
    digests: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))

    @property
    def num_tokens(self) -> int:
        return self.flat.stop - self.flat.start


Written = tuple[list[RowOfStep], dict[str, np.ndarray], list[int]]
"""The rows and arrays of a step, and the pages that it copied to."""


class SymbolicRunner:
    """Execute `StepPlan.arrays`, and raise AssertionError where they break the rules of a step.

    Args:
        may_write_state, may_write_page: called before a block or page is written; return False if others read it.
    """

    def __init__(
        self,
        num_state_blocks: int,
        num_kv_blocks: int,
        *,
        num_log_slots: int | None = None,
        block_size: int = CHUNK,
        may_write_state: Callable[[int], bool] = lambda block: True,
        may_write_page: Callable[[int], bool] = lambda block: True,
    ) -> None:
        self._size = block_size
        self._may_write_state, self._may_write_page = may_write_state, may_write_page
        self.written = np.zeros(num_state_blocks + 1, dtype=bool)  # False: poisoned
        self.states = np.zeros(num_state_blocks + 1, dtype=np.uint64)
        self.exact = np.zeros(num_state_blocks + 1, dtype=bool)
        self.ends = np.zeros(num_state_blocks + 1, dtype=np.int64)  # tokens that a state has consumed
        self.windows = np.zeros((num_state_blocks + 1, WINDOW), dtype=np.int64)
        self.logs = np.full(((num_log_slots or num_state_blocks) + 1, FOLD), UNWRITTEN, dtype=np.int64)
        slots = (num_kv_blocks + 1) * block_size
        self.kv_written = np.zeros(slots, dtype=bool)
        self.kv_tokens = np.zeros(slots, dtype=np.int64)
        self.kv_digests = np.zeros(slots, dtype=np.uint64)
        self.kv_exact = np.zeros(slots, dtype=bool)
        self._sampled: dict[str, int] = {}  # the last token of each request, for placeholders
        self._begins: dict[str, int] = {}  # start of each request's next row, after accepted drafts
        self.propose: Callable[[str, int, int], Sequence[int]]  # drafts, by request id, position and count

    def poison_state(self, block: int) -> None:
        self.written[block] = False

    def poison_page(self, block: int) -> None:
        self.kv_written[block * self._size : (block + 1) * self._size] = False

    def execute(self, plan: StepPlan, answers: Sequence[int | range], fail: bool = False) -> list[list[int]]:
        """Run a step, and return the sampled tokens of each row.

        Args:
            answers: for each row, 0 samples no token and 1 samples a token. A decode row samples after each of its
                tokens. At the end of a prompt, a range selects branches of the answer.
            fail: poison all blocks that the step writes, and raise StepFailed.
        """
        arrays = self._placed(plan) if any(step.unplaced_by for step in plan.steps) else plan.arrays
        attention = "kv_slot" in arrays
        tokens = arrays["tokens"].astype(np.int64)
        rows = self._decode_rows(arrays) + self._prefill_rows(arrays)
        assert len(rows) == len(answers) == len(plan.steps)
        self._check_dsts(rows)
        for source, target in plan.kv_copies:
            assert self._may_write_page(target)
            for pool in (self.kv_written, self.kv_tokens, self.kv_digests, self.kv_exact):
                pages = pool.reshape(-1, self._size)
                pages[target] = pages[source]
        self._keep_paths(plan)
        self.wrote = rows, arrays, [target for _, target in plan.kv_copies]
        if fail:
            self.tear(self.wrote)
            raise StepFailed("the step fails")

        ids = [step.request_id for step in plan.steps]
        for row, request_id in zip(rows, ids, strict=True):
            if tokens[row.flat.start] < 0:
                tokens[row.flat.start] = self._sampled[request_id]
            mine = tokens[row.flat]
            if (mine < 0).any():
                mine[1:] = self.propose(request_id, row.start + 1, len(mine) - 1)
            self._read_state(row, tokens)
        if attention:
            self._write_kv(rows, arrays, tokens)
        outputs = []
        branches = [each if isinstance(each, range) else range(each) for each in answers]
        for index, (row, wanted) in enumerate(zip(rows, branches, strict=True)):
            exact_until = row.start + row.num_tokens
            sums = np.zeros(row.num_tokens, dtype=np.uint64)
            if attention:
                own = arrays["kv_slot"][row.flat]
                sums, exact_until = self._read_kv(row, self._pages(arrays, index), int(arrays["kv_len"][index]), own)
            exact = self._exact(row, exact_until, finishes=len(wanted) > 0)
            self._write_states(row, tokens, exact)
            if attention:
                self.kv_exact[own[own >= 0]] = exact[own >= 0]
            outputs.append(self.sample(row, sums, wanted))
            if outputs[-1]:
                taken = self.accepted(plan.steps[index], tokens[row.flat], outputs[-1])
                self._sampled[ids[index]] = taken[-1]
                self._begins[ids[index]] = row.start + (len(taken) if row.decode else row.num_tokens)
                outputs[-1] = taken if row.decode and PLACEHOLDER in plan.steps[index].drafts else outputs[-1]
        self._check_logits(arrays["logits_index"], plan, rows, branches)
        return outputs

    @staticmethod
    def accepted(step: SequenceStep, fed: Sequence[int] | np.ndarray, sampled: Sequence[int]) -> list[int]:
        """Return the sampled tokens up to the first wrong draft; `fed` is a token and then the drafts."""
        if step.parents and sampled:
            return [sampled[place] for place in agreed(step, sampled)]
        count = 1
        while count < min(len(fed), len(sampled)) and fed[count] == sampled[count - 1]:
            count += 1
        return list(sampled[:count])

    def _keep_paths(self, plan: StepPlan) -> None:
        """Move the accepted entries of draft trees in logs and KV, and poison the entries after them."""
        for slot, first, *places in plan.log_paths if plan.log_paths is not None else ():
            places = [place for place in places if place >= 0]
            self.logs[slot, first : first + len(places)] = self.logs[slot, places]
            self.logs[slot, first + len(places) :] = UNWRITTEN
        for page, first, *places in plan.kv_paths if plan.kv_paths is not None else ():
            assert page and self._may_write_page(page)
            from_, to = (page * self._size + np.array([p for p in places if p >= 0]), page * self._size + first)
            for pool in (self.kv_written, self.kv_tokens, self.kv_digests, self.kv_exact):
                pool[to : to + len(from_)] = pool[from_]
            self.kv_written[to + len(from_) : (page + 1) * self._size] = False

    # --- the rows ---

    def _placed(self, plan: StepPlan) -> dict[str, np.ndarray]:
        """Return the arrays of the plan with each late row placed where it really begins."""
        rows = plan.steps[: plan.num_decodes]
        indices = StateIndices.from_arrays(plan.arrays, "cpu")
        starts = [self._begins[row.request_id] if row.unplaced_by else row.start for row in rows]
        assert all(row.start <= start <= row.start + row.unplaced_by for row, start in zip(rows, starts, strict=True))
        place_decodes(indices, torch.tensor(starts), self._size if "kv_slot" in plan.arrays else None)
        arrays = {name: getattr(indices, name).numpy() for name in plan.arrays}
        if "kv_slot" not in plan.arrays:
            width, ends = plan.tokens_per_decode, arrays["decode_len"]
            for i, start in enumerate(starts):
                arrays["positions"][i * width : i * width + ends[i]] = range(start, start + ends[i])
        return arrays

    def _decode_rows(self, arrays: dict[str, np.ndarray]) -> list[RowOfStep]:
        rows = []
        count = len(arrays["decode_src"])
        width = int(arrays["query_start_loc"][0]) // max(count, 1)
        positions = arrays["positions"]
        for i in range(count):
            src, dst, *log, used = (
                int(arrays[name][i])
                for name in ("decode_src", "decode_dst", "log_slot", "log_start", "log_end", "decode_len")
            )
            slot, first, last = log
            flat = slice(i * width, i * width + used)
            start = int(positions[flat.start])
            bits = arrays["ancestors"][flat].tolist() if "ancestors" in arrays else []
            paths = [[t for t in range(used) if mask >> t & 1] for mask in bits]
            depths = [len(path) - 1 for path in paths] or range(used)
            assert positions[flat].tolist() == [start + depth for depth in depths]
            assert slot and 0 <= first <= last == start % FOLD, "the log does not end where the row begins"
            assert last + used <= FOLD, "the row passes the end of its log"
            assert dst or last + used < FOLD, "a log is full, and there is no dst"
            if "kv_slot" in arrays:
                assert (arrays["kv_slot"][flat] >= 0).all(), "a decode token has no KV slot"
                assert (arrays["kv_slot"][flat.stop : (i + 1) * width] == -1).all(), "padding writes KV"
            rows.append(RowOfStep(flat, start, src, [used], [dst], True, (slot, first, last), paths))
        slots = [row.log[0] for row in rows]
        assert len(set(slots)) == len(slots), "two rows share a log"
        assert int(arrays["query_start_loc"][0]) == count * width
        return rows

    def _prefill_rows(self, arrays: dict[str, np.ndarray]) -> list[RowOfStep]:
        rows = []
        starts, chunks = arrays["query_start_loc"].tolist(), arrays["seq_chunk_start"].tolist()
        assert chunks[-1] == len(arrays["chunk_seq"]) == len(arrays["chunk_start"]) == len(arrays["chunk_dst"])
        for i, (begin, end) in enumerate(pairwise(starts)):
            start = int(arrays["context_len"][i])
            assert arrays["positions"][begin:end].tolist() == list(range(start, start + end - begin))
            mine = slice(chunks[i], chunks[i + 1])
            assert (arrays["chunk_seq"][mine] == i).all()
            cuts = [*(arrays["chunk_start"][mine] - begin).tolist(), end - begin]
            grid = range(start // CHUNK * CHUNK + CHUNK, start + end - begin, CHUNK)
            assert cuts == [0, *(p - start for p in grid), end - begin], "chunks end at absolute multiples of CHUNK"
            dst = arrays["chunk_dst"][mine].tolist()
            assert dst[-1], "a prefill row without dst"
            rows.append(RowOfStep(slice(begin, end), start, int(arrays["src"][i]), cuts[1:], dst, False))
        return rows

    def _check_dsts(self, rows: Sequence[RowOfStep]) -> None:
        owner: dict[int, RowOfStep] = {}
        for row in rows:
            for block in filter(None, row.dst):
                assert block not in owner, f"block {block} is a dst twice"
                assert self._may_write_state(block), f"block {block} is committed or shared, and a dst"
                owner[block] = row
        for row in rows:
            assert row.src not in owner or (owner[row.src] is row and row.dst == [row.src] and row.decode)

    def tear(self, wrote: Written) -> None:
        """Poison all that a step wrote."""
        rows, arrays, copied = wrote
        for block in (b for row in rows for b in row.dst if b):
            self.poison_state(block)
        for row in rows:
            slot, _, last = row.log
            self.logs[slot, last : last + row.num_tokens if row.decode else last] = UNWRITTEN
        for page in copied:
            self.poison_page(page)
        if "kv_slot" in arrays:
            slots = arrays["kv_slot"]
            self.kv_written[slots[slots >= 0]] = False

    # --- states ---

    def _read_state(self, row: RowOfStep, tokens: np.ndarray) -> None:
        slot, first, last = row.log
        assert (row.src == 0) == (row.start == last - first), "only position 0 begins with a fresh state"
        row.exact = True
        if row.src:
            assert self.written[row.src], f"block {row.src} is read and holds no state"
            assert self.ends[row.src] + last - first == row.start, "the log does not follow its state"
            row.before, row.exact = self.states[row.src], bool(self.exact[row.src])
            row.window = self.windows[row.src].copy()
        if last > first:
            inputs = np.concatenate([row.window, self.logs[slot, first:last]])
            assert UNWRITTEN not in inputs, "the row reads a log entry that was never written"
            row.before, row.window = _digests(row.before, inputs)[-1], inputs[-WINDOW:]
        if row.decode:
            self.logs[slot, last : last + row.num_tokens] = tokens[row.flat] + 1
        inputs = tokens[row.flat] + 1
        row.digests = _digests(row.before, np.concatenate([row.window, inputs]))
        for token, path in enumerate(row.paths):
            row.digests[token] = _digests(row.before, np.concatenate([row.window, inputs[path]]))[-1]

    def _exact(self, row: RowOfStep, exact_until: int, finishes: bool) -> np.ndarray:
        """Return a flag for each token of a row: its KV and the state after it equal a cold prefill's."""
        exact = np.zeros(row.num_tokens, dtype=bool)
        first = 0
        for last in row.ends if not row.decode else ():
            whole = (row.start + first) % CHUNK == 0 and ((row.start + last) % CHUNK == 0 or finishes)
            if not (row.exact and whole and row.start + last <= exact_until):
                break
            exact[first:last] = True
            first = last
        return exact

    def _write_states(self, row: RowOfStep, tokens: np.ndarray, exact: np.ndarray) -> None:
        inputs = np.concatenate([row.window, tokens[row.flat] + 1])
        for end, block in zip(row.ends, row.dst, strict=True):
            if block:
                self.written[block] = True
                self.states[block], self.ends[block] = row.digests[end - 1], row.start + end
                self.exact[block] = exact[end - 1]
                self.windows[block] = inputs[end : end + WINDOW]

    # --- KV ---

    def _write_kv(self, rows: Sequence[RowOfStep], arrays: dict[str, np.ndarray], tokens: np.ndarray) -> None:
        readers: dict[int, int] = {}
        for index, length in enumerate(arrays["kv_len"].tolist()):
            for page in self._pages(arrays, index)[: -(-length // self._size)].tolist():
                readers[page] = index if readers.get(page, index) == index else -1
        for index, row in enumerate(rows):
            slots = arrays["kv_slot"][row.flat]
            mine = slots >= 0
            slots = slots[mine]
            for page in set((slots // self._size).tolist()):
                assert page and self._may_write_page(page), f"page {page} is committed or shared, and written"
                assert readers.get(page) == index, f"page {page} is written by one row and read by another"
            self.kv_written[slots] = True
            self.kv_tokens[slots] = tokens[row.flat][mine]
            self.kv_digests[slots] = row.digests[mine]

    def _pages(self, arrays: dict[str, np.ndarray], index: int) -> np.ndarray:
        """Return a row's part of the block table."""
        start, end = arrays["block_table_start"][index : index + 2]
        return arrays["block_table"][start:end]

    def _read_kv(self, row: RowOfStep, table: np.ndarray, length: int, own: np.ndarray) -> tuple[np.ndarray, int]:
        """Return the sum of the KV digests that each token of a row reads, and the end of their exact part."""
        assert length == row.start + row.num_tokens
        pages = table[: -(-length // self._size)].astype(np.int64)
        assert (pages > 0).all() and len(set(pages.tolist())) == len(pages)
        slots = (pages[:, None] * self._size + np.arange(self._size)).ravel()[:length]
        assert (own[own >= 0] == slots[row.start :][own >= 0]).all(), "KV is written where the row does not read it"
        assert self.kv_written[slots].all(), "the row reads KV that was never written"
        digests = self.kv_digests[slots]
        known = row.start if row.paths else length
        assert (digests == _digests(FRESH, _inputs(self.kv_tokens[slots])))[:known].all(), "KV of another prefix"
        assert (digests[row.start :] == row.digests).all(), "KV of other tokens than the row's own"
        assert not row.start or digests[row.start - 1] == row.before, "KV and state of different prefixes"
        near = ~self.kv_exact[slots]
        near[row.start :] &= own < 0  # the row's own slots get their flags from this step
        sums = np.cumsum(digests)[row.start :]
        for token, path in enumerate(row.paths):
            sums[token] = np.concatenate([digests[: row.start], row.digests[path]]).sum()
        return sums, int(near.argmax()) if near.any() else length

    # --- tokens ---

    def sample(self, row: RowOfStep, sums: np.ndarray, wanted: range) -> list[int]:
        if not wanted:
            return []
        if row.decode:
            return [next_token(int(d), int(s)) for d, s in zip(row.digests, sums, strict=True)]
        return [next_token(int(row.digests[-1]), int(sums[-1]), branch) for branch in wanted]

    def _check_logits(
        self, offsets: np.ndarray, plan: StepPlan, rows: Sequence[RowOfStep], answers: Sequence[range]
    ) -> None:
        expected: list[int] = []
        for step, row, wanted in zip(plan.steps, rows, answers, strict=True):
            first = row.flat.start if row.decode or step.prompt_logits else row.flat.stop - bool(wanted)
            expected += range(first, first + step.num_tokens if step.unplaced_by else row.flat.stop)
        assert offsets.tolist() == expected
