"""Check that a step ahead changes no answer, and that rows wait only where they must."""

from __future__ import annotations

from typing import Any

import pytest

from engine_driver import Engines, greedy, run_until_idle, tokens_of
from mambacache import LLM, SamplingParams
from mambacache.engine.outputs import RequestOutput
from mambacache.plan import PLACEHOLDER, StepPlan
from selection import full

STEM = tokens_of(1, 70)
ASKED: dict[str, SamplingParams] = {
    "greedy": greedy(20),
    "drawn": greedy(20, temperature=0.8, seed=3, logprobs=2),
    "least tokens": greedy(12, min_tokens=9, ignore_eos=False),
    "biased": greedy(12, logit_bias={5: 4.0, 9: -2.0}, logprobs=0),
    "repetition": greedy(15, repetition_penalty=1.3),
    "frequency": greedy(15, frequency_penalty=0.7, presence_penalty=0.2, temperature=0.5, seed=1),
    "several": greedy(10, n=3, temperature=1.0, seed=7, logprobs=1),
    "stops": greedy(30, temperature=1.0, seed=11, stop_token_ids=list(range(2, 30))),
    "one token": greedy(1),
    "prompt's": greedy(4, prompt_logprobs=1),
}


def answers(llm: LLM, ahead: int) -> dict[str, RequestOutput]:
    llm._step_loop.steps_ahead = ahead
    outputs: dict[str, RequestOutput] = {}
    for i, (name, params) in enumerate(ASKED.items()):
        llm.submit([*STEM[: 70 - 7 * i], *tokens_of(i, 9)], params, name)
        if i % 3 == 0:
            outputs |= {output.request_id: output for output in llm.step()}
    return run_until_idle(llm, outputs)


@pytest.mark.parametrize(
    "options", [*full({}, {"max_num_batched_tokens": 40}), {"num_kv_blocks": 8, "max_num_seqs": 4}]
)
def test_answers_are_the_same(engine: Engines, options: dict[str, Any]) -> None:
    alone, ahead = (answers(engine(**options), number) for number in (0, 1))
    assert alone.keys() == ahead.keys() == ASKED.keys()
    for name, output in alone.items():
        for one, other in zip(output.outputs, ahead[name].outputs, strict=True):
            assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason), name
            assert (one.logprobs is None) == (other.logprobs is None)
            for found, wanted in zip(one.logprobs or (), other.logprobs or (), strict=True):
                assert found == pytest.approx(wanted, abs=1e-3), name
        assert len(output.prompt_logprobs or ()) == len(ahead[name].prompt_logprobs or ())


@pytest.mark.parametrize(("name", "waits"), [("least tokens", False), ("biased", False), ("repetition", True)])
def test_rows_that_wait_for_tokens(engine: Engines, name: str, waits: bool) -> None:
    """Check that a row waits for tokens only if its logits depend on them."""
    llm = engine()
    llm._step_loop.steps_ahead = 1
    launch, unknown = llm.runner.launch, []

    def launching(plan: StepPlan, *args: Any) -> Any:
        unknown.append(int((plan.arrays["tokens"] == PLACEHOLDER).sum()))
        return launch(plan, *args)

    llm.runner.launch = launching  # type: ignore[method-assign]
    output = llm.generate(STEM, ASKED[name], use_tqdm=False)[0].outputs[0]
    assert len(output.token_ids) > 8
    assert unknown[1:] == [0 if waits else 1] * (len(unknown) - 1)


@pytest.mark.parametrize("params", [greedy(30, presence_penalty=1.0), greedy(30)], ids=["penalties", "plain"])
def test_requests_decode_together(engine: Engines, params: SamplingParams) -> None:
    """Check that requests decode together although their prompts end in different steps."""
    llm = engine(max_num_batched_tokens=128)
    llm._step_loop.steps_ahead = 1
    launch, rows = llm.runner.launch, []

    def launching(plan: StepPlan, *args: Any) -> Any:
        rows.append(plan.num_decodes)
        return launch(plan, *args)

    llm.runner.launch = launching  # type: ignore[method-assign]
    llm.generate([tokens_of(seed, 90) for seed in range(6)], params, use_tqdm=False)
    assert rows.count(6) > 20 and len(rows) < 45
