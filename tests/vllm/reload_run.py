"""Load new weights in a vLLM that runs, and reset its caches: `python reload_run.py NAME DIRECTORY [ahead]`.

The weights on disk change to weights from another seed and back. Tokens must equal those from Hugging Face's model with
the weights that computed them.
"""

from __future__ import annotations

import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from family_run import HITS, OPTIONS, PROMPTS, check, let_run_on_a_cpu, options_of, save  # sets the environment
from request_run import schedule_ahead
from watched import LAST_ANSWER

from engine_driver import Original, tokens_of
from tiny_models import save_tiny_model

ANSWER = 24
RUNNING = [tokens_of(20, 150), tokens_of(21, 90), tokens_of(22, 30)]
"""These prompts run during a reset."""
SLEEPS = [(level, mode) for level in (1, 2) for mode in ("abort", "keep")]


class Served:
    """Serve a model, and keep two sets of weights for it.

    Attributes:
        original: the model with the weights on disk.
    """

    def __init__(self, name: str, directory: Path) -> None:
        from vllm import LLM

        self._served = save(name, directory)
        self._others = directory.with_name("others")
        with patch("family_run.save_tiny_model", partial(save_tiny_model, seed=1)):
            save(name, self._others)
        self._originals = [Original(directory), Original(self._others)]
        self.llm = LLM(str(self._served), **OPTIONS | options_of(name))
        self.engine, self.core = self.llm.llm_engine, self.llm.llm_engine.engine_core.engine_core
        self.states = self.core.scheduler.prefix_cache
        self._path = self._others / self._served.relative_to(directory) / "model.safetensors"

    @property
    def original(self) -> Original:
        return self._originals[0]

    def reload(self) -> None:
        """Exchange the weights on disk, and have vLLM read them."""
        here, there = self._served / "model.safetensors", self._path
        shutil.copy(here, kept := here.with_suffix(".old"))
        os.replace(there, here)  # a copy over it would change memory that is mapped
        os.replace(kept, there)
        self._originals.reverse()
        self.llm.collective_rpc("reload_weights")

    def ask(self, prompts: list[list[int]]) -> list[Any]:
        return self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params(8), use_tqdm=False)

    def check(self, hits: list[int]) -> None:
        """Fail unless all prompts have these hits, and the tokens that the weights on disk give."""
        check(self.original, self.ask(PROMPTS), hits)

    def run(self) -> dict[str, list[int]]:
        """Start some requests, and step until the last request has two tokens. Return their tokens, by request."""
        for number, prompt in enumerate(RUNNING):
            self.engine.add_request(str(number), {"prompt_token_ids": prompt}, params(ANSWER))
        known: dict[str, list[int]] = {}
        while len(known.get(str(len(RUNNING) - 1), ())) < 2:
            for output in self.engine.step():
                known[output.request_id] = list(output.outputs[0].token_ids)
        return known

    def finish(self, known: dict[str, list[int]], before: Original) -> None:
        """Step to the end. Check known tokens against `before`, and later tokens against the weights on disk."""
        answers = {}
        while self.engine.has_unfinished_requests():
            answers |= {output.request_id: list(output.outputs[0].token_ids) for output in self.engine.step()}
        for name, answer in answers.items():
            prompt, old = RUNNING[int(name)], known[name]
            assert len(answer) == ANSWER and answer[: len(old)] == old
            before.check(prompt, old)
            self.original.check(prompt + old, answer[len(old) :])
        assert answers.keys() == known.keys()

    def check_empty(self) -> None:
        """Fail unless neither cache keeps anything."""
        assert not self.states.stats.state_blocks["committed"]
        assert not self.core.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache


def params(tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def without_a_reset_old_states_are_hit(served: Served) -> None:
    served.check(HITS[0])
    served.reload()
    outputs = served.ask(PROMPTS)
    assert [output.num_cached_tokens for output in outputs] == HITS[1]
    new = [
        served.original.after(prompt, output.outputs[0].token_ids).argmax(-1).tolist() == output.outputs[0].token_ids
        for prompt, output in zip(PROMPTS, outputs, strict=True)
    ]
    assert all(new[:2]) and not any(new[2:]), f"{new}: the first two hit nothing, and the others old states"


def after_a_reset_nothing_of_the_old_weights_is_hit(served: Served) -> None:
    assert served.llm.reset_prefix_cache()
    served.check_empty()
    for hits in HITS:
        served.check(hits)


def a_reset_while_requests_run_is_refused(served: Served) -> None:
    known = served.run()
    assert not served.llm.reset_prefix_cache()
    served.finish(known, served.original)
    served.check(HITS[1])


def a_reset_of_running_requests_has_them_computed_anew(served: Served) -> None:
    known, before = served.run(), served.original
    served.reload()
    assert served.llm.reset_prefix_cache(reset_running_requests=True)
    served.check_empty()
    served.finish(known, before)
    served.check(HITS[0])


def sleep_resets_both_caches(served: Served) -> None:
    """Check sleep from level 1 on. Running requests are aborted, or go on when the engine wakes up."""
    for level, mode in SLEEPS:
        known, before = served.run(), served.original
        served.llm.sleep(level, mode)
        served.check_empty()
        served.reload()
        served.llm.wake_up()
        if mode == "keep":
            served.finish(known, before)
        else:
            served.engine.abort_request([*known])  # vLLM does not tell a front end in its own process
            assert not served.engine.has_unfinished_requests() and not served.core.scheduler.requests
        served.check(HITS[0])


def a_pause_keeps_both_caches(served: Served) -> None:
    """A pause is level 0 of sleep."""
    known = served.run()
    served.llm.sleep(0, "keep")
    served.llm.wake_up(["scheduling"])
    served.finish(known, served.original)
    served.check(HITS[1])


def main(name: str, directory: Path, ahead: bool) -> None:
    let_run_on_a_cpu(name)
    if ahead:
        torch._dynamo.config.disable = True
        schedule_ahead()
    served = Served(name, directory)
    for case in (
        without_a_reset_old_states_are_hit,
        after_a_reset_nothing_of_the_old_weights_is_hit,
        a_reset_while_requests_run_is_refused,
        a_reset_of_running_requests_has_them_computed_anew,
        sleep_resets_both_caches,
        a_pause_keeps_both_caches,
    ):
        print(case.__name__, flush=True)
        case(served)
        served.states.check()
    print(LAST_ANSWER, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), "ahead" in sys.argv[3:])
