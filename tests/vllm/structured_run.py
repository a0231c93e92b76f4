"""Run structured outputs of a tiny model in vLLM with the plugin: `python structured_run.py NAME DIRECTORY [BACKEND]`.

Requests with a grammar and without run in one batch on one shared prefix. A NAME that ends in "+ngram" or "+mtp" has
the model verify drafts, many of which a grammar rejects. Each token must be the most likely token that the constraint
allows.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import patch

from constrained import END, check_constrained
from family_run import CHANGES, DRAFTS, OPTIONS, count_drafts, options_of  # sets the environment
from real_shapes import add_predictor
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from watched import LAST_ANSWER, check_idle

from engine_driver import Original, floor, tokens_of
from tiny_models import VOCABULARY, save_tiny_model

ASCII = [chr(code) for code in range(32, 127)]
TEXTS = ["<unk>", "<end>", *ASCII, *[f"{number:02}" for number in range(VOCABULARY - 2 - len(ASCII))]]
"""Each token has this text. Two digits are one token or two."""
SHARED = tokens_of(1, 200)
ANSWER = 24
"""An answer has this many tokens at most."""
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
CHOICE = ["the quick brown fox jumps", "the lazy dog sleeps all day", "no answer at all to that"]
Constraint = tuple[dict[str, Any], str] | None
CONSTRAINTS: list[Constraint] = [  # vLLM's constraint of each prompt, and a pattern with the same words
    None,
    ({"regex": "[0-9]{12,20}"}, "[0-9]{12,20}"),
    ({"choice": CHOICE}, "|".join(CHOICE)),
    None,
    ({"json": SCHEMA}, r'\{"n":(0|-?[1-9][0-9]*)\}'),
    ({"grammar": 'root ::= pair pair+\npair ::= [a-c] "-" [x-z] ";"'}, "([a-c]-[x-z];){2,}"),
    ({"regex": "(yes|no|maybe)( or (yes|no|maybe)){2,3}"}, "(yes|no|maybe)( or (yes|no|maybe)){2,3}"),
]
PROMPTS = [SHARED + tokens_of(10 + number, own) for number, own in enumerate((100, 50, 53, 49, 50, 52, 51))]
HITS = ([0, 192, 192, 192, 192, 192, 192], [256, 192, 192, 192, 192, 192, 192])
"""The other prompts wait for the first. The second time the first prompt finds its tail, at 256."""
AFTER = tokens_of(30, 20)
HITS_AFTER = [320, 256, 256, 256, 256, 256, 256]
"""Prompt, answer and these 20 tokens have these hits: each answer goes beyond the next multiple of 64."""


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with these texts, which grammars take from its vocabulary."""
    words = {text.replace(" ", "\u0120"): token for token, text in enumerate(TEXTS)}  # as vocabularies write bytes
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", unk_token="<unk>")


def check(original: Original, prompt: list[int], constraint: Constraint, answer: list[int]) -> None:
    """Fail unless each token of an answer is the most likely token that its constraint allows."""
    if constraint is None:
        assert len(answer) == ANSWER
        original.check(prompt, answer)
    else:
        assert len(answer) == ANSWER or answer[-1] == END
        check_constrained(original, prompt, constraint[1], TEXTS, answer)


@contextmanager
def bad_drafts(core: Any, answers: dict[tuple[int, ...], list[int]]) -> Iterator[dict[str, int]]:
    """Draft the known answers with faults, a token of any kind or a digit.

    Yields:
        The counts of wrong drafts of constrained requests: drafts that a grammar rejects, and drafts that it allows.
    """
    scheduler, rng = core.scheduler, random.Random(0)
    update, manager = scheduler.update_draft_token_ids, scheduler.structured_output_manager
    validate, counts = manager.validate_tokens, {"rejected": 0, "allowed": 0}

    def rest(tokens: list[int]) -> list[int]:
        return next(
            answer[len(tokens) - len(prompt) :]
            for prompt, answer in answers.items()
            if tuple(tokens[: len(prompt)]) == prompt
        )

    def guess(name: str) -> list[int]:
        faults = rng.randrange(2, VOCABULARY), TEXTS.index(rng.choice("0123456789"))
        right = rest(scheduler.requests[name].all_token_ids)[: scheduler.num_spec_tokens]
        return [rng.choice(faults) if rng.random() < 0.4 else token for token in right]

    def replaced(drafts: Any) -> None:
        there = [name for name in drafts.req_ids if name in scheduler.requests]
        drafts.req_ids, drafts.draft_token_ids = there, [guess(name) for name in there]
        update(drafts)

    def validated(request: Any, drafts: list[int]) -> list[int]:
        kept = validate(request, drafts)
        if request.use_structured_output:
            counts["rejected"] += len(kept) < len(drafts)
            counts["allowed"] += kept != rest(request.all_token_ids)[: len(kept)]
        return kept

    with (
        patch.object(scheduler, "update_draft_token_ids", replaced),
        patch.object(manager, "validate_tokens", validated),
    ):
        yield counts


def params(constraint: Constraint) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    structured = constraint and StructuredOutputsParams(**constraint[0])
    return SamplingParams(
        temperature=0, max_tokens=ANSWER, ignore_eos=not constraint, structured_outputs=structured, detokenize=False
    )


def ask(llm: Any, original: Original, hits: list[int]) -> list[list[int]]:
    """Return the checked answers to all prompts in one batch."""
    given = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(given, [params(constraint) for constraint in CONSTRAINTS], use_tqdm=False)
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    assert [output.num_cached_tokens for output in outputs] == hits
    for prompt, constraint, answer in zip(PROMPTS, CONSTRAINTS, answers, strict=True):
        check(original, prompt, constraint, answer)
    return answers


def go_on(llm: Any, original: Original, answers: list[list[int]]) -> None:
    """Ask for more after each answer: states and pages must hold its own tokens alone, and none of its drafts."""
    prompts = [prompt + answer + AFTER for prompt, answer in zip(PROMPTS, answers, strict=True)]
    assert [floor(len(prompt) - len(AFTER) - 1) for prompt in prompts] == HITS_AFTER, list(map(len, prompts))
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params(None), use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == HITS_AFTER
    for prompt, output in zip(prompts, outputs, strict=True):
        check(original, prompt, None, list(output.outputs[0].token_ids))


def wait_for_a_grammar(llm: Any, original: Original) -> None:
    """Hold back a grammar: a request behind it, with the same prefix, does not wait. Then let it fail."""
    engine, manager = llm.llm_engine, llm.llm_engine.engine_core.engine_core.structured_output_manager
    create, ready, fail = manager._create_grammar, Event(), [False]

    def created(request: Any) -> Any:
        ready.wait()
        if fail[0]:
            raise ValueError("a grammar that does not compile")
        return create(request)

    monkey = patch.object(manager, "_create_grammar", created)
    monkey.start()
    for fail[0] in (False, True):
        shared, ended = tokens_of(40 + fail[0], 200), {}
        prompts = {"constrained": shared + tokens_of(50, 30), "free": shared + tokens_of(51, 40)}
        constraints = {"constrained": CONSTRAINTS[1], "free": None}
        ready.clear()
        for name, prompt in prompts.items():
            engine.add_request(name, {"prompt_token_ids": prompt}, params(constraints[name]))
        while engine.has_unfinished_requests():
            ended |= {output.request_id: output for output in engine.step() if output.finished}
            if "free" in ended:
                ready.set()
            else:
                assert "constrained" not in ended
        answers = {name: list(output.outputs[0].token_ids) for name, output in ended.items()}
        assert ended["free"].num_cached_tokens == 0
        check(original, prompts["free"], None, answers["free"])
        if fail[0]:
            assert ended["constrained"].outputs[0].finish_reason == "error" and not answers["constrained"]
        else:
            assert ended["constrained"].num_cached_tokens == 192
            check(original, prompts["constrained"], constraints["constrained"], answers["constrained"])
    monkey.stop()


def main(name: str, directory: Path, backend: str) -> None:
    from vllm import LLM

    name, _, drafts = name.partition("+")
    save_tiny_model(name, directory, **CHANGES.get(name, {}))
    if drafts == "mtp":
        add_predictor(directory, large=1.0)
    tokenizer().save_pretrained(directory)
    structured = {"backend": backend, "disable_any_whitespace": True}
    own = {"skip_tokenizer_init": False, "structured_outputs_config": structured}
    llm = LLM(str(directory), **OPTIONS | options_of(name) | DRAFTS[drafts] | own)
    core, original = llm.llm_engine.engine_core.engine_core, Original(directory)
    answers = ask(llm, original, HITS[0])
    if drafts:
        counts = count_drafts(core.scheduler.prefix_cache)
        with bad_drafts(core, dict(zip(map(tuple, PROMPTS), answers, strict=True))) as wrong:
            assert ask(llm, original, HITS[1]) == answers
        assert min(counts.values()) > 20 and wrong["rejected"] > 10 and wrong["allowed"] > 3, (counts, wrong)
    else:
        assert ask(llm, original, HITS[1]) == answers
    go_on(llm, original, answers)
    wait_for_a_grammar(llm, original)
    check_idle(core.scheduler.prefix_cache)
    print(LAST_ANSWER, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *(sys.argv[3:] or ["xgrammar"]))
