"""Define settings that validate themselves."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mambacache.field_types import hold_to_annotations, require
from mambacache.plan import CHUNK, MAX_DRAFT_TOKENS

LEAST_STATES = 2  # one request reads a state and writes another
DEFAULT_DRAFTS = 3
STATE_DTYPES = ("float32", "bfloat16", "float16")
KV_TOKENS_PER_STATE = 7000
"""Default division of memory, near the best for simulated chats."""

KV_TOKENS_PER_HOST_STATE = 10_000
"""Default division of host memory, which receives fewer states."""

DTYPE_NAMES = {"half": "float16", "float": "float32"}

MAX_STOPS, MAX_STOP_LENGTH = 64, 1024
"""Most stop strings in a request, and characters in each; each token is compared with all."""

NO_LIMIT = sys.maxsize
"""`SamplingParams.max_tokens` for None."""

LARGEST_TOP_K = (1 << 31) - 1
"""Largest int32, above every vocabulary."""

MAX_ANSWERS = 1 << 14
"""Most answers to a prompt; creating them delays other requests."""

HOST_BYTES_PER_TOKEN = 1 << 18
"""PCIe 5 moves these bytes in about 5 us, in which an H200 prefills a token with 1 B active parameters."""

DISK_BYTES_PER_TOKEN = 1 << 15
"""An x86 core reads and checks these bytes from the page cache in 43 us, in which an H200 prefills a token with 8 B
active parameters."""


def _check_blocks(config: CacheConfig | EngineConfig) -> None:
    size, interval, drafts = config.block_size, config.checkpoint_interval, config.max_draft_tokens
    require(size > 0 and size % CHUNK == 0, f"block_size is {size}: set it to a positive multiple of {CHUNK}")
    require(
        interval >= 0 and interval % size == 0,
        f"checkpoint_interval is {interval}: set it to 0 or a multiple of {size}",
    )
    require(0 <= drafts <= MAX_DRAFT_TOKENS, f"max_draft_tokens is {drafts}: set it between 0 and {MAX_DRAFT_TOKENS}")


@dataclass(frozen=True)
class CacheConfig:
    """Configures a `PrefixCache`; a wrong value raises ValueError. Numbers exclude the null block, id 0.

    Args:
        num_state_blocks: Blocks of the state pool, at least 2; ids 1 to this number without `slab`.
        num_kv_blocks: Blocks of the KV pool; 0 if the host engine keeps the KV or the model has no attention.
        num_log_slots: Token logs, with ids from 1 on, one for each decoding request; None for num_state_blocks.
        slab: Pair (states, pages) held by a slab, one of the two 1; None for separate memories. Slab i holds state ids
            from i * states on and page ids from i * pages on; slab 0 holds the null blocks. Pages take at most
            num_kv_blocks / pages of num_state_blocks / states slabs, and leave the rest to running states.
        block_size: Tokens in a block, a multiple of 64, for hashes, KV pages and states.
        max_draft_tokens: Draft tokens that a row may verify, 0 to 7.
        model_key: Identifies everything that states depend on, as weights and dtypes.
        has_attention: False for a model without attention, whose hits need no KV.
        max_checkpoints: Most cached states; None for the size of the pool, 0 for none.
        checkpoint_interval: As in `EngineConfig`.
        strict_reuse: As in `EngineConfig`.
        max_seen_blocks: Remembered hashes, which find junctions after their KV is evicted.
        record_tokens: Tokens remembered for ceilings, at 4 to 5 bytes each and about 400 per branch.
        accounting: False leaves out ceilings, losses, counters and events.
        num_host_states: Slots for states in host memory, filled by `PrefixCache.transfers`; 0 for no such tier.
        num_host_pages: Slots for KV pages in host memory.
        state_bytes: Bytes of a state, to weigh transfers; 0 to ignore.
        page_bytes: Bytes of a KV page.
        host_bytes_per_token: As in `EngineConfig`.
        disk_bytes_per_token: As in `EngineConfig`.
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
        """Tells whether the host engine keeps the model's KV."""
        return self.has_attention and not self.num_kv_blocks

    @property
    def num_state_ids(self) -> int:
        """Count state ids, null blocks included."""
        return self.num_state_blocks + (self.slab[0] if self.slab is not None else 1)

    @property
    def num_page_ids(self) -> int:
        """Count page ids, null blocks included."""
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
            f"num_log_slots is {self.num_log_slots}: set it to 1 or more, or to None for num_state_blocks",
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
            (self.num_host_pages > 0) == (self.num_host_states > 0 and self.num_kv_blocks > 0),
            f"num_host_states is {self.num_host_states} and num_host_pages is {self.num_host_pages}: set both, or only "
            "num_host_states in a cache without KV pages",
        )


@dataclass(frozen=True)
class SamplingParams:
    """Configures sampling and stopping of one request; a wrong value raises ValueError. None stands for a default.

    Args:
        temperature: Divides the logits; 0 is greedy.
        top_k: Keep the k most likely tokens; 0 or -1 for all. Above 1,024 each token sorts the vocabulary.
        top_p: Keep the smallest set of tokens with this probability. Below 1, without top_k, it sorts too.
        min_p: Drop tokens less likely than min_p times the most likely token.
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt or answer, above 0; 1
            for none.
        presence_penalty: Subtracted from the logits of the answer's tokens, -2 to 2.
        frequency_penalty: Subtracted once for each occurrence in the answer, -2 to 2.
        logit_bias: Number to add to a token's logit, -100 to 100, before penalties and temperature.
        seed: Integer that makes draws repeatable in any batch; None for a fresh seed.
        max_tokens: Most answer tokens; None for the limit of model and KV pool.
        min_tokens: Answer tokens before any end token, stop token or stop string.
        stop: String or strings that end the answer and are cut off, at most 64 of 1,024 characters.
        stop_token_ids: Tokens that end the answer, beside the model's end tokens.
        include_stop_str_in_output: Keep the stop string, or the stop token's text.
        skip_special_tokens: Leave special tokens out of the text.
        ignore_eos: Continue after the model's end tokens.
        n: Number of answers, at most 16,384, which share the prompt's state and KV.
        logprobs: Number of most likely tokens with log probabilities beside each answer token, at most the engine's
            `max_logprobs`; None for no log probabilities.
        prompt_logprobs: The same for prompt tokens, which forces a full prefill.
        checkpoint_at: Token positions, rounded down to blocks, with a state worth caching.
        read_cache: False ignores cached blocks.
        store_cache: False caches no block of the request.
        salt: Requests with different salts share no cached blocks.
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
        """Tells whether answer tokens change later logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def adjusts(self, num_answered: int) -> bool:
        """Return whether logits after `num_answered` answer tokens are adjusted before temperature."""
        return self.penalizes or bool(self.logit_bias) or num_answered < self.min_tokens


@dataclass(frozen=True)
class EngineConfig:
    """Configures an `LLM`; a wrong value raises ValueError. None stands for a default.

    Bytes may be text, such as "20GiB" or "500MB".

    Args:
        model: Directory of a checkpoint, or a Hub id.
        tokenizer: Directory or Hub id; None for the checkpoint's tokenizer.
        revision: Branch, tag or commit on the Hub; None for the newest.
        device: "cpu", "cuda", "cuda:1", or "auto" for cuda if available; or a torch.device.
        dtype: Dtype of weights and activations: "auto" (the checkpoint's; float32 on a CPU), "float32" or "float",
            "bfloat16", "float16" or "half", or a torch.dtype.
        state_dtype: Dtype of recurrent states, as `dtype` but without "auto".
        block_size: Tokens in a block, a multiple of 64.
        max_num_batched_tokens: Most tokens computed in a step.
        max_num_seqs: Most running requests.
        max_model_len: Most tokens in prompt and answer together; None for the model's limit.
        max_logprobs: Most `logprobs` and `prompt_logprobs`; -1 for no limit.
        long_prefill_token_threshold: Most tokens of a prompt in a step; 0 for no limit.
        enable_prefix_caching: False caches nothing.
        checkpoint_budget_bytes: Memory for cached states, beside running states, 0 for none; None for the rest of the
            share that `plan` prints. If kv_cache_bytes is None too, states and KV may share one memory.
        kv_cache_bytes: Memory for KV pages; None for about 7,000 tokens for each cached state, or for shared memory.
        host_cache_bytes: Host memory for states and KV that the device evicts, pinned for a GPU; 0 for none.
        host_bytes_per_token: Most bytes loaded from host memory for each token saved; a larger hit is computed.
        disk_cache_dir: Directory of files that keep the cache over a restart, for one engine at a time; needs
            host_cache_bytes; None for none.
        disk_cache_bytes: Most bytes in these files, at least a state and a KV block; the least recently used go first.
            None for half of present and free bytes.
        disk_bytes_per_token: Most bytes read from files for each token saved.
        gpu_memory_utilization: Share of the device's memory for weights and caches, above 0, at most 1; None for all
            free memory.
        checkpoint_interval: Also cache a state at multiples of this number of tokens, a multiple of block_size; 0 for
            none.
        strict_reuse: Reuse only blocks computed exactly as in a cold prefill.
        speculative: "ngram" drafts the tokens behind an earlier copy of a request's last tokens; None for LLM's `draft`
            or no drafts.
        max_draft_tokens: Draft tokens that a row may verify, 0 to 7. With `speculative` 0 means 3. LLM's `draft` needs
            1 or more.
        enforce_eager: Run decode steps without CUDA graphs; loads faster.
        seed: Seed for requests without a seed; None for a fresh seed.
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
                dtype = str(given).removeprefix("torch.")  # avoids an import of torch
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
