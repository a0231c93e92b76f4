"""Configuration: dataclasses that validate themselves, with errors that name the setting to change."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mambacache.field_types import hold_to_annotations, require
from mambacache.plan import CHUNK, MAX_DRAFT_TOKENS

LEAST_STATES = 2  # of one request: what it reads, and what it writes
DEFAULT_DRAFTS = 3
STATE_DTYPES = ("float32", "bfloat16", "float16")
KV_TOKENS_PER_STATE = 7000
"""How caches are divided where nothing says otherwise: about what chats want, after simulations of a trace of them."""

KV_TOKENS_PER_HOST_STATE = 10_000
"""The same of the tier in host memory, to which fewer states go: none that nobody asked for, none that run."""

DTYPE_NAMES = {"half": "float16", "float": "float32"}

MAX_STOPS, MAX_STOP_LENGTH = 64, 1024
"""Stop strings of one request, and characters of each: every new token is compared with all of them."""

NO_LIMIT = sys.maxsize
"""What `SamplingParams.max_tokens` holds where None was given."""

LARGEST_TOP_K = (1 << 31) - 1
"""It goes to the device as an int32; no vocabulary is as large, so that more than this means the same."""

MAX_ANSWERS = 1 << 14
"""Answers for one prompt. The engine makes them in one go, and other requests wait for that."""

HOST_BYTES_PER_TOKEN = 1 << 18
"""PCIe 5 moves so many in about 5 us, in which an H200 prefills a token of a model with 1 B active parameters."""

DISK_BYTES_PER_TOKEN = 1 << 15
"""For these one x86 core took 43 us, at 0.77 GB/s read and checked from the page cache. By estimate an H200 prefills a
token in that with 8 B active parameters, at 400 TFLOP/s."""


def _check_blocks(config: CacheConfig | EngineConfig) -> None:
    """What a cache and an engine ask alike."""
    size, interval, drafts = config.block_size, config.checkpoint_interval, config.max_draft_tokens
    require(size > 0 and size % CHUNK == 0, f"block_size is {size}: set it to a positive multiple of {CHUNK}")
    require(
        interval >= 0 and interval % size == 0,
        f"checkpoint_interval is {interval}: set it to 0 or a multiple of {size}",
    )
    require(0 <= drafts <= MAX_DRAFT_TOKENS, f"max_draft_tokens is {drafts}: set it between 0 and {MAX_DRAFT_TOKENS}")


@dataclass(frozen=True)
class CacheConfig:
    """What a `PrefixCache` manages. Counts of blocks leave out the null block, id 0.

    Amounts of memory may be given as text, such as "20GiB" or "500MB".

    Args:
        num_state_blocks: blocks of the state pool, without `slab` ids 1 to this number; at least 2.
        num_kv_blocks: blocks of the KV pool; 0 where the host engine keeps the KV, or the model has none.
        num_log_slots: token logs, ids 1 to this number, of which each request that decodes has one; None for as many as
            there are states.
        slab: states and KV pages that a slab of one memory holds, one of the two is 1; slab i then holds those with ids
            from i times so many on, slab 0 the null blocks. States and pages share num_state_blocks / states slabs, of
            which pages take num_kv_blocks / pages at most: the others are the reserve of running requests' states. None
            for two memories.
        block_size: tokens in a block, a multiple of 64: the unit of hashing, of KV pages and of checkpoint positions.
        max_draft_tokens: draft tokens that a row may verify in one step, 0 to 7.
        model_key: identifies model, weights, state dtype and whatever else makes states incomparable.
        has_attention: False for models without attention; a hit then needs no KV coverage.
        max_checkpoints: committed states kept at a time; None for as many as the pool holds, 0 for none.
        checkpoint_interval: also store a state every so many tokens, a multiple of block_size; 0 for none.
        strict_reuse: reuse only blocks computed exactly as a cold prefill computes them.
        max_seen_blocks: hashes of computed blocks remembered, to find junctions after their KV is gone.
        record_tokens: tokens remembered for the report's ceiling, at 4 to 5 bytes each and some 400 a branch.
        accounting: False leaves out ceilings, losses, counters and events.
        num_host_states: slots for states in host memory, to which `PrefixCache.transfers` has copied what the device
            would evict; 0 for no such tier.
        num_host_pages: slots for KV pages there; 0 for a model without attention.
        state_bytes: of one state, which say how much a transfer moves; 0 if that shall not matter.
        page_bytes: of one KV page.
        host_bytes_per_token: bytes that may be loaded for each token that is not computed then: a hit in host memory
            that takes more is left alone.
        disk_bytes_per_token: the same of a hit in files.
    """

    num_state_blocks: int
    num_kv_blocks: int = 0
    num_log_slots: int | None = None
    slab: tuple[int, int] | None = None
    block_size: int = CHUNK
    max_draft_tokens: int = 0
    model_key: str = ""
    has_attention: bool = True
    max_checkpoints: int | None = None
    checkpoint_interval: int = 0
    strict_reuse: bool = False
    max_seen_blocks: int = 1 << 18
    record_tokens: int = 1 << 24
    accounting: bool = True
    num_host_states: int = 0
    num_host_pages: int = 0
    state_bytes: int = 0
    page_bytes: int = 0
    host_bytes_per_token: int = HOST_BYTES_PER_TOKEN
    disk_bytes_per_token: int = DISK_BYTES_PER_TOKEN

    @property
    def host_keeps_kv(self) -> bool:
        """Whether the model has KV, and its pages are not ours."""
        return self.has_attention and not self.num_kv_blocks

    @property
    def num_state_ids(self) -> int:
        """One more than the largest id of a state, which is 0 for the null block."""
        return self.num_state_blocks + (self.slab[0] if self.slab is not None else 1)

    @property
    def num_page_ids(self) -> int:
        """One more than the largest id of a KV page, which is 0 for the null block."""
        if self.slab is None:
            return self.num_kv_blocks + 1
        return self.num_state_ids // self.slab[0] * self.slab[1]

    def __post_init__(self) -> None:
        hold_to_annotations(self)
        _check_blocks(self)
        require(
            self.num_state_blocks >= LEAST_STATES,
            f"num_state_blocks is {self.num_state_blocks}: a request needs at least {LEAST_STATES}, raise it",
        )
        require(
            self.num_log_slots is None or self.num_log_slots > 0,
            f"num_log_slots is {self.num_log_slots}: set it to 1 or more, or to None for one a state",
        )
        require(self.num_kv_blocks >= 0, f"num_kv_blocks is {self.num_kv_blocks}: set it to 0 or more")
        require(self.has_attention or self.num_kv_blocks == 0, "num_kv_blocks must be 0 for a model without attention")
        require(
            self.max_checkpoints is None or self.max_checkpoints >= 0,
            f"max_checkpoints is {self.max_checkpoints}: set it to 0 or more, or to None for no limit",
        )
        require(
            self.max_seen_blocks >= 0 and self.record_tokens >= 0, "max_seen_blocks and record_tokens must be 0 or more"
        )
        if self.slab is not None:
            states, pages = self.slab
            reserve = self.num_state_blocks // states - self.num_kv_blocks // pages
            whole = self.num_state_blocks % states == self.num_kv_blocks % pages == 0 < self.num_kv_blocks
            require(
                min(self.slab) == 1 and whole and reserve >= LEAST_STATES,
                f"slab is {self.slab}, num_state_blocks {self.num_state_blocks}, num_kv_blocks {self.num_kv_blocks}: "
                f"let a slab hold one state or one page, fill slabs, and leave {LEAST_STATES} to running requests",
            )
        self._check_host_tier()

    def _check_host_tier(self) -> None:
        names = ("num_host_states", "num_host_pages", "state_bytes", "page_bytes")
        for name in (*names, "host_bytes_per_token", "disk_bytes_per_token"):
            value = getattr(self, name)
            require(value >= 0, f"{name} is {value}: set it to 0 or more")
        require(
            not (self.num_host_states and self.host_keeps_kv),
            f"num_host_states is {self.num_host_states} and the host keeps the KV: states are of use only where the KV "
            "before them is, set num_kv_blocks, or num_host_states to 0",
        )
        require(
            (self.num_host_pages > 0) == (self.num_host_states > 0 and self.num_kv_blocks > 0),
            f"num_host_states is {self.num_host_states} and num_host_pages is {self.num_host_pages}: a state is of use "
            "with the KV before it, set both, or for a model without attention num_host_states alone",
        )


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it stops. None stands for a default.

    Args:
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0, -1 or more than there are for all. Above 1,024 all are sorted for each
            token.
        top_p: keep the smallest set of tokens whose probability reaches top_p; below 1 without a top_k all are sorted
            for each token.
        min_p: drop tokens less likely than min_p times the most likely one.
        repetition_penalty: above 1 makes tokens of the prompt and the answer less likely: their logits are divided by
            it, or multiplied where they are negative.
        presence_penalty: taken from the logits of the answer's tokens, -2 to 2.
        frequency_penalty: taken from them once for each time that they occur, -2 to 2.
        logit_bias: what is added to the logits of these tokens, -100 to 100, before penalties and temperature.
        seed: any integer; makes draws repeatable whatever else runs. None draws a fresh seed for the request.
        max_tokens: answer tokens at most; None for as many as the model and its KV pool take.
        min_tokens: answer tokens that come before any end token, stop token or stop string.
        stop: a string or strings that end the answer, 64 of 1,024 characters at most; they are cut off from the text.
        stop_token_ids: tokens that end the answer, beside the model's own end tokens.
        include_stop_str_in_output: leave the stop string, or the text of the stop token, in the text.
        skip_special_tokens: leave special tokens out of the text.
        ignore_eos: go on after the model's own end tokens.
        n: answers for the prompt, 16,384 at most; they share its state and its KV.
        logprobs: give the log probabilities of each answer token and of so many most likely ones, at most the engine's
            `max_logprobs`; None for none.
        prompt_logprobs: the same for each prompt token; the prompt is then computed in full.
        checkpoint_at: token positions, rounded down to blocks, whose state is worth keeping.
        read_cache: whether the request may use what is cached.
        store_cache: whether what it computes is cached.
        salt: requests with different salts share nothing.

    Raises:
        ValueError: a value is of another type, or out of its range; the message says what to set.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop: Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    checkpoint_at: Sequence[int] = ()
    read_cache: bool = True
    store_cache: bool = True
    salt: str = ""

    def __post_init__(self) -> None:
        if self.max_tokens is None:
            object.__setattr__(self, "max_tokens", NO_LIMIT)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if isinstance(self.logit_bias, Mapping):  # the keys of a JSON object are strings
            bias = {int(key) if str(key).isdecimal() else key: value for key, value in self.logit_bias.items()}
            object.__setattr__(self, "logit_bias", bias)
        hold_to_annotations(self)
        require(
            0 <= self.temperature < math.inf,
            f"temperature is {self.temperature}: set it to 0 (greedy) or a number above",
        )
        require(self.top_k >= -1, f"top_k is {self.top_k}: set it to 1 or more, or to 0 or -1 for all tokens")
        object.__setattr__(self, "top_k", min(max(self.top_k, 0), LARGEST_TOP_K))
        require(0 < self.top_p <= 1, f"top_p is {self.top_p}: set it above 0 and at most 1")
        require(0 <= self.min_p <= 1, f"min_p is {self.min_p}: set it between 0 and 1")
        require(
            0 < self.repetition_penalty < math.inf,
            f"repetition_penalty is {self.repetition_penalty}: set it above 0, or to 1 for none",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            require(-2 <= getattr(self, name) <= 2, f"{name} is {getattr(self, name)}: set it between -2 and 2")
        wrong = next(
            (each for each in (self.logit_bias or {}).items() if each[0] < 0 or not -100 <= each[1] <= 100), None
        )
        require(wrong is None, f"logit_bias holds {wrong}: give token ids from 0 on, and numbers between -100 and 100")
        require(self.max_tokens >= 1, f"max_tokens is {self.max_tokens}: set it to 1 or more")
        require(
            0 <= self.min_tokens <= self.max_tokens,
            f"min_tokens is {self.min_tokens}: set it between 0 and max_tokens, which is {self.max_tokens}",
        )
        require(1 <= self.n <= MAX_ANSWERS, f"n is {self.n}: set it between 1 and {MAX_ANSWERS:,}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            require(value is None or value >= 0, f"{name} is {value}: set it to 0 or more, or to None")
        stops = self.stop or ()
        require(len(stops) <= MAX_STOPS, f"stop holds {len(stops):,} strings: set it to {MAX_STOPS} or fewer")
        longest = max(map(len, stops), default=0)
        require(
            longest <= MAX_STOP_LENGTH,
            f"stop holds a string of {longest:,} characters: shorten it to {MAX_STOP_LENGTH:,} or fewer",
        )
        require(all(stops), "stop holds an empty string: remove it")
        require(all(p >= 0 for p in self.checkpoint_at), "checkpoint_at holds a negative position: remove it")

    @property
    def penalizes(self) -> bool:
        """Whether the tokens of an answer change the logits of those that follow."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def adjusts(self, num_answered: int) -> bool:
        """Whether anything is done to the logits after so many answer tokens, before temperature."""
        return self.penalizes or bool(self.logit_bias) or num_answered < self.min_tokens


@dataclass(frozen=True)
class EngineConfig:
    """How an `LLM` runs. None stands for a default.

    Amounts of memory may be given as text, such as "20GiB" or "500MB".

    Args:
        model: directory of a checkpoint, or a Hub id.
        tokenizer: directory or Hub id of another tokenizer; None for the checkpoint's own.
        revision: branch, tag or commit of the Hub's repository; None for its newest.
        device: "cpu", "cuda", "cuda:1", or "auto" for cuda where there is one; or a torch.device.
        dtype: of weights and activations: "auto" (the checkpoint's own; float32 on a CPU), "float32" or "float",
            "bfloat16", "float16" or "half", or torch's dtypes.
        state_dtype: of the recurrent states, the same but for "auto".
        block_size: tokens in a block, a multiple of 64.
        max_num_batched_tokens: tokens that one step computes at most.
        max_num_seqs: requests that run at a time.
        max_model_len: tokens of prompt and answer together; None for the model's own limit.
        max_logprobs: the largest number that `logprobs` and `prompt_logprobs` of a request may have; -1 for no limit.
        long_prefill_token_threshold: tokens that one prompt may take of a step; 0 for no cap.
        enable_prefix_caching: False computes every prompt in full and keeps nothing.
        checkpoint_budget_bytes: memory for cached states, apart from those of running requests, 0 for none. None for
            what `kv_cache_bytes` leaves of the part of the device's memory that `plan` names; None for both for one
            memory that traffic divides between states and KV.
        kv_cache_bytes: memory for KV pages; None for that one memory or, beside a budget for states, for a default from
            the device's memory, as if there were 7,000 tokens for each cached state.
        host_cache_bytes: memory of the host for states and KV that the device has no room for, pinned where the device
            is a GPU; 0 for none.
        host_bytes_per_token: bytes that may be loaded from there for each token that is not computed then; what takes
            more is computed.
        disk_cache_dir: directory of files with states and KV, by which a restart begins with what was cached before;
            for one engine at a time, and only beside host_cache_bytes; None for none.
        disk_cache_bytes: what these files take at most, room for a state and a KV block at least; those used last stay.
            None for half of what is free there.
        disk_bytes_per_token: bytes that may be read from them for each token that is not computed then.
        gpu_memory_utilization: share of the device's memory that weights and caches may take, above 0 and at most 1;
            None for as much as is free.
        checkpoint_interval: also keep a state every so many tokens, a multiple of block_size; 0 for none.
        strict_reuse: reuse only what was computed exactly as a cold prompt is.
        speculative: "ngram" drafts the tokens that followed a request's last tokens where they stood before. None for
            no drafts, or for those of LLM's `draft`.
        max_draft_tokens: draft tokens that a row may verify in one step, 0 to 7. With `speculative` 0 means 3. LLM's
            `draft`, a function of a request and a limit that gives token ids or a `DraftTree` of them, needs 1 or more.
        enforce_eager: launch every kernel of a decode step on its own, in place of CUDA graphs; loads faster.
        seed: of the requests that bring none of their own; None for a fresh one.

    Raises:
        ValueError: a value is of another type, or out of its range; the message says what to set.
    """

    model: str | Path
    tokenizer: str | Path | None = None
    revision: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    state_dtype: str = "float32"
    block_size: int = CHUNK
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 64
    max_model_len: int | None = None
    max_logprobs: int = 20
    long_prefill_token_threshold: int = 0
    enable_prefix_caching: bool = True
    checkpoint_budget_bytes: int | None = None
    kv_cache_bytes: int | None = None
    host_cache_bytes: int = 0
    host_bytes_per_token: int = HOST_BYTES_PER_TOKEN
    disk_cache_dir: str | Path | None = None
    disk_cache_bytes: int | None = None
    disk_bytes_per_token: int = DISK_BYTES_PER_TOKEN
    gpu_memory_utilization: float | None = None
    checkpoint_interval: int = 0
    strict_reuse: bool = False
    speculative: str | None = None
    max_draft_tokens: int = 0
    enforce_eager: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        if type(self.device).__module__ == "torch":
            object.__setattr__(self, "device", str(self.device))
        for name in ("dtype", "state_dtype"):
            given = getattr(self, name)
            if given is not None:
                dtype = str(given).removeprefix("torch.")  # what torch calls its own: it is not imported here
                object.__setattr__(self, name, DTYPE_NAMES.get(dtype, dtype))
        hold_to_annotations(self)
        for name in ("model", "tokenizer", "disk_cache_dir"):
            unless = "" if name == "model" else ", or leave it out"
            require(getattr(self, name) != "", f"{name} is an empty string: set it to a directory{unless}")
        require(
            self.max_num_batched_tokens >= 1,
            f"max_num_batched_tokens is {self.max_num_batched_tokens}: set it to 1 or more",
        )
        require(self.max_num_seqs >= 1, f"max_num_seqs is {self.max_num_seqs}: set it to 1 or more")
        require(
            self.max_model_len is None or self.max_model_len >= 1,
            f"max_model_len is {self.max_model_len}: set it to 1 or more, or to None",
        )
        require(
            self.max_logprobs >= -1, f"max_logprobs is {self.max_logprobs}: set it to 0 or more, or to -1 for no limit"
        )
        require(
            self.long_prefill_token_threshold >= 0,
            f"long_prefill_token_threshold is {self.long_prefill_token_threshold}: set it to 0 (no cap) or more",
        )
        require(
            self.speculative in (None, "ngram"),
            f'speculative is {self.speculative!r}: set it to "ngram", or leave it out and give LLM\'s draft=',
        )
        if self.speculative and not self.max_draft_tokens:
            object.__setattr__(self, "max_draft_tokens", DEFAULT_DRAFTS)
        _check_blocks(self)
        for name in ("checkpoint_budget_bytes", "kv_cache_bytes", "disk_cache_bytes"):
            value = getattr(self, name)
            require(value is None or value >= 0, f"{name} is {value}: set it to 0 or more, or to None for a default")
        for name in ("host_cache_bytes", "host_bytes_per_token", "disk_bytes_per_token"):
            require(getattr(self, name) >= 0, f"{name} is {getattr(self, name)}: set it to 0 or more")
        require(
            self.disk_cache_dir is None or self.host_cache_bytes > 0,
            f"disk_cache_dir is {str(self.disk_cache_dir)!r} and needs host_cache_bytes, through which its files go: "
            "set it to a few states at least",
        )
        require(
            self.disk_cache_bytes is None or self.disk_cache_dir is not None,
            f"disk_cache_bytes is {self.disk_cache_bytes} and there is no disk_cache_dir: set it, or leave both out",
        )
        share = self.gpu_memory_utilization
        require(
            share is None or 0 < share <= 1,
            f"gpu_memory_utilization is {share}: set it above 0 and at most 1, or to None",
        )
        require(
            self.state_dtype in STATE_DTYPES, f"state_dtype is {self.state_dtype!r}: choose {', '.join(STATE_DTYPES)}"
        )
        require(
            self.dtype in ("auto", *STATE_DTYPES), f"dtype is {self.dtype!r}: choose auto, {', '.join(STATE_DTYPES)}"
        )
