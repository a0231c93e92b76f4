"""Engines on tiny models that are watched while a test runs, and the originals that their tokens are held against."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest.mock import patch

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from mambacache import LLM, EngineConfig, SamplingParams
from mambacache.engine.outputs import RequestOutput
from mambacache.models.adapt import model_skeleton
from mambacache.plan import SequenceStep, StepPlan
from mambacache.report import CacheStats, RequestReport
from mambacache.runner.model_runner import Launched, RowOutput
from mambacache.runner.sizing import plan_memory
from mambacache.scheduler.drafts import DraftFunction
from state_watch import StateWatch
from tiny_models import VOCABULARY, save_tiny_model

TIE = 4e-4
"""Two tokens whose logits differ by less may change places when the order of additions changes: logits agree within
2e-4, and each of the two may move by as much."""

DRAFT_BYTES = 1 << 28
"""Of which a draft model's states and KV take a part."""

MODELS = (
    "qwen3_next",
    "qwen3_next_moe",
    "qwen3_5_text",
    "olmo_hybrid",
    "mamba",
    "falcon_mamba",
    "jamba",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "mamba2",
    "bamba",
    "granitemoehybrid",
    "nemotron_h",
    "falcon_h1",
    "zamba2",
)


def tokens_of(seed: int, count: int) -> list[int]:
    """Random tokens, none of them an end token of the tiny models."""
    return torch.randint(2, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def greedy(max_tokens: int = 6, **params: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens, **params})


def floor(tokens: int) -> int:
    """The last boundary."""
    return tokens // 64 * 64


def answer(output: RequestOutput, index: int = 0) -> list[int]:
    return output.outputs[index].token_ids


def hits(outputs: Iterable[RequestOutput]) -> list[int]:
    return [report_of(output).hit for output in outputs]


def report_of(output: RequestOutput) -> RequestReport:
    assert output.cache is not None
    return output.cache


def ask(
    llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams], together: bool = True
) -> list[RequestOutput]:
    """Answers prompts, submitted together or one after the other."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    if together:
        return llm.generate(prompts, each, use_tqdm=False)
    return [
        llm.generate(prompt, its_params, use_tqdm=False)[0] for prompt, its_params in zip(prompts, each, strict=True)
    ]


def run_until_idle(llm: LLM, outputs: dict[str, RequestOutput] | None = None) -> dict[str, RequestOutput]:
    """Steps until every request has ended; gives their outputs by id."""
    outputs = {} if outputs is None else outputs
    while not llm.idle:
        outputs |= {output.request_id: output for output in llm.step()}
    return outputs


CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}<assistant>"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that makes a token of each byte, so that its tokens give any text back. Token 256 is <eos>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: token for token, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", chat_template=CHAT_TEMPLATE)


def save_text_model(directory: Path) -> Path:
    """A tiny model with `byte_tokenizer`; <eos> ends its answers."""
    save_tiny_model("qwen3_next", directory, vocab_size=257, eos_token_id=256)
    byte_tokenizer().save_pretrained(directory)
    return directory


def speak(llm: LLM, *texts: str) -> None:
    """Has an engine's model answer with these texts, each request with the next one, and then with the end token."""
    upcoming = iter(texts)
    scripts: dict[str, Iterator[int]] = {}

    def spoken(step: SequenceStep, row: RowOutput) -> None:
        if row.tokens and step.request_id not in scripts:
            scripts[step.request_id] = iter(llm.tokenizer.encode(next(upcoming)))
        row.tokens = [next(scripts[step.request_id], llm.tokenizer.eos_token_id) for _ in row.tokens]

    change_rows(llm, spoken)


def change_rows(llm: LLM, change: Callable[[SequenceStep, RowOutput], None]) -> None:
    """Has what an engine's model gives for a row be changed when it is read."""
    launch = llm.runner.launch

    def launching(plan: StepPlan, *args: Any) -> Launched:
        launched = launch(plan, *args)
        read = launched.read

        def reading() -> list[RowOutput]:
            rows = read()
            for step, row in zip(plan.steps, rows, strict=True):
                change(step, row)
            return rows

        launched.read = reading  # type: ignore[method-assign]
        return launched

    llm.runner.launch = launching  # type: ignore[method-assign]


class Engines:
    """Make engines with pools that begin full of NaN. When the test ends, only ops of `mambacache.kernels` have touched
    the pools. Every report adds up, and blocks that no request holds are free.

    Args:
        directory: of a tiny model, by its name.
        device: where they run.
    """

    def __init__(self, directory: Callable[[str], Path], device: str) -> None:
        self.reports: list[RequestReport] = []
        self.watch = StateWatch()
        self._directory = directory
        self.device = device
        self._made: list[LLM] = []
        self._add = patch.object(CacheStats, "add", autospec=True, side_effect=self._note(CacheStats.add))

    def __call__(
        self,
        model: str | Path = "qwen3_next",
        *,
        draft: DraftFunction | None = None,
        num_checkpoints: int = 64,
        num_kv_blocks: int = 128,
        **options: Any,
    ) -> LLM:
        """Make an engine with `num_checkpoints` cached states and `num_kv_blocks` KV blocks."""
        directory = model if isinstance(model, Path) else self._directory(model)
        options = {"device": self.device, "max_num_seqs": 16, "seed": 0, **options}
        config = EngineConfig(directory, **options)
        one = plan_memory(config, model_skeleton(directory, config.dtype), free_bytes=1 << 40)
        budgets = {
            "checkpoint_budget_bytes": num_checkpoints * one.state_bytes,
            "kv_cache_bytes": num_kv_blocks * one.kv_block_bytes,
        }
        llm = LLM(directory, draft=draft, **{**budgets, **options})
        for pool in filter(None, (llm.runner.states, llm.runner.pages)):
            pool.buffer.fill_(0xFF)
        self.watch.add(llm.runner.states.buffer)
        self._made.append(llm)
        return llm

    def __enter__(self) -> Engines:
        self._add.start()
        self.watch.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.watch.__exit__(kind, error, trace)
        self._add.stop()

    def check(self) -> None:
        """Check the conditions that hold after every test."""
        assert not self.watch.offences
        if self.device == "cpu":  # ops in Triton pass the dispatcher by
            assert bool(self.reports) == bool(self.watch.kernel_accesses)
        for report in self.reports:
            assert sum(report.losses.values()) == report.ceiling - report.hit
            assert all(tokens > 0 for tokens in report.losses.values())
            assert 0 <= report.hit <= report.ceiling < report.prompt
        for llm in self._made:
            assert llm.idle
            while (tier := llm._step_loop._tier) is not None and tier.under_way:
                tier.wait()
                llm.step()
            for blocks in filter(None, (llm.stats.state_blocks, llm.stats.kv_blocks)):
                assert blocks["writing"] == 0 and blocks["committed"] == blocks["evictable"]

    def _note(self, add: Callable[[CacheStats, RequestReport], None]) -> Callable[[CacheStats, RequestReport], None]:
        def noting(stats: CacheStats, report: RequestReport) -> None:
            self.reports.append(report)
            add(stats, report)

        return noting


class Original:
    """Run the Hugging Face model, in an uncached forward pass over all tokens.

    Its greedy tokens are checked by one pass over prompt and answer: each answer token must be the most likely one
    after those before it. Nothing is compared after a tie, and ties are rare.
    """

    def __init__(self, directory: Path) -> None:
        self._module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self._logits: dict[tuple[int, ...], torch.Tensor] = {}
        self._requests = self._ties = 0

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """[n, vocabulary] of the n tokens."""
        key = tuple(tokens)
        if key not in self._logits:
            self._logits[key] = self._module(torch.tensor([key]), use_cache=False).logits[0]
        return self._logits[key]

    def after(self, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        """Return the logits [m, vocabulary] that choose the m tokens of an answer."""
        return self.logits([*prompt, *answer[:-1]])[len(prompt) - 1 :]

    def check(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Fails unless an answer is the greedy one."""
        self._requests += 1
        top = self.after(prompt, answer).topk(2)
        for token, best, logits in zip(answer, top.indices.tolist(), top.values, strict=True):
            if token != best[0]:
                assert token == best[1] and logits[0] - logits[1] < TIE, f"{answer} is not what comes after {prompt}"
                self._ties += 1
                break
        assert self._ties <= 1 + self._requests // 1000

    def check_all(self, prompts: Sequence[Sequence[int]], outputs: Sequence[RequestOutput]) -> None:
        """`check` for every answer of every output."""
        for prompt, output in zip(prompts, outputs, strict=True):
            for completion in output.outputs:
                self.check(prompt, completion.token_ids)
