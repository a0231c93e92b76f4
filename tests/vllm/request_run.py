"""Send requests of every kind to a tiny model in vLLM with the plugin: `python request_run.py CASE DIRECTORY [ahead]`.

The pool of states is watched in each step. Every token is compared with Hugging Face's uncached forward.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from family_run import OPTIONS  # sets the environment
from pool_watch import PoolWatch
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from watched import LAST_ANSWER

from engine_driver import Original, tokens_of
from mambacache.report import Loss
from tiny_models import save_tiny_model

SEEDS = 6 if os.environ.get("MAMBACACHE_FAMILIES") == "all" else 2
MODEL = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_only_layers": [1, 2],
}
TOLERANCE = 1e-3
"""Log-probabilities may differ by less from Hugging Face's."""


def schedule_ahead() -> None:
    """Let vLLM schedule one step ahead on a CPU, by stand-ins for streams and events. vLLM does it on a GPU only."""
    from vllm.platforms.cpu import CpuPlatform

    settle = CpuPlatform.check_and_update_config

    def settled_ahead(vllm_config: Any) -> None:
        settle(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(settled_ahead)
    for name in ("Stream", "Event", "stream", "current_stream"):
        setattr(torch.cuda, name, MagicMock())


class Served:
    """Serve a model, watch its pool, and compare it with its original."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.llm = LLM(str(directory), **OPTIONS | options)
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.original = Original(directory)
        self.watch = PoolWatch(self.core)

    def ask(self, prompts: Sequence[Sequence[int]], max_tokens: int = 4, salt: str | None = None, **params: Any) -> Any:
        """Answer prompts in one call, and check each token."""
        given = [{"prompt_token_ids": list(prompt), **({"cache_salt": salt} if salt else {})} for prompt in prompts]
        outputs = self.llm.generate(given, greedy(max_tokens, **params), use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            for answer in output.outputs:
                assert len(answer.token_ids) == max_tokens
                if params.get("temperature", 0) == 0:
                    self.original.check(prompt, answer.token_ids)
        return outputs

    def hits(self, prompts: Sequence[Sequence[int]], max_tokens: int = 4, **params: Any) -> list[int]:
        return [output.num_cached_tokens for output in self.ask(prompts, max_tokens, **params)]

    def hits_one_by_one(self, prompts: Sequence[Sequence[int]], **params: Any) -> list[int]:
        return [hit for prompt in prompts for hit in self.hits([prompt], **params)]

    def reset(self) -> None:
        """Reset both caches, and check that they are empty."""
        assert self.llm.reset_prefix_cache()
        assert not self.scheduler.prefix_cache.stats.state_blocks["committed"]

    def submit(self, name: str, prompt: Sequence[int], max_tokens: int) -> str:
        """Return the id by which the scheduler knows the request."""
        return self.engine.add_request(name, {"prompt_token_ids": list(prompt)}, greedy(max_tokens))

    def step(self) -> dict[str, Any]:
        return {output.request_id: output for output in self.engine.step()}


def greedy(max_tokens: int, **params: Any) -> SamplingParams:
    params = {"temperature": 0, "ignore_eos": True, "detokenize": False, **params}
    return SamplingParams(max_tokens=max_tokens, **params)


# --- hits, computed by hand ---


def hits(served: Served) -> None:
    for case in (shared_document, junction, junction_together, chat, samples, prompt_logprobs, salts, short_prompts):
        case(served)
        served.watch.check_idle()
        served.reset()


def with_own(shared: list[int], own: int) -> list[list[int]]:
    """Return four prompts that share their beginning."""
    return [shared + tokens_of(seed, own) for seed in range(10, 14)]


def shared_document(served: Served) -> None:
    """The first prompt's tail, before its last token, is where the shared part ends."""
    prompts = with_own(tokens_of(1, 4096), 64)
    assert served.hits_one_by_one(prompts[:2]) == [0, 4096]
    assert served.hits(prompts[2:] + prompts[:1]) == [4096, 4096, 4096]


def junction(served: Served) -> None:
    """The second prompt finds where it leaves the first, and stores a state at the last boundary before."""
    assert served.hits_one_by_one(with_own(tokens_of(2, 1000), 300)) == [0, 0, 960, 960]


def junction_together(served: Served) -> None:
    """The first prompt stores that state for the prompts that wait for it."""
    assert served.hits(with_own(tokens_of(2, 1000), 300)) == [0, 960, 960, 960]


def chat(served: Served) -> None:
    """A turn hits the last boundary of prompt and answer before it: of 259, 359 and 459 known tokens.

    An answer's last token has not run.
    """
    conversation, found = tokens_of(3, 200), []
    for turn in range(4):
        (output,) = served.ask([conversation], 60)
        found.append(output.num_cached_tokens)
        conversation = [*conversation, *output.outputs[0].token_ids, *tokens_of(20 + turn, 40)]
    assert found == [0, 256, 320, 448]


def samples(served: Served) -> None:
    """Two of three answers to a prompt wait for the first, and hit its tail."""
    prompt, before = tokens_of(4, 1050), served.scheduler.prefix_cache.stats
    (output,) = served.ask([prompt], 8, n=3, temperature=1.0, seed=0, logprobs=0)
    after = served.scheduler.prefix_cache.stats
    assert after.prompt_tokens - before.prompt_tokens == 3 * 1050
    assert after.hit_tokens - before.hit_tokens == 2 * 1024
    answers = [list(answer.token_ids) for answer in output.outputs]
    assert len({tuple(answer) for answer in answers}) == 3
    for answer, given in zip(answers, output.outputs, strict=True):
        wanted = served.original.after(prompt, answer)
        check_log_probabilities(wanted, answer, given.logprobs)


def prompt_logprobs(served: Served) -> None:
    """They need all tokens to be computed, whether or not some are cached. Later prompts hit these tokens."""
    prompt = tokens_of(5, 300)
    for _ in range(2):
        (output,) = served.ask([prompt], prompt_logprobs=0)
        assert output.num_cached_tokens == 0
        check_log_probabilities(served.original.logits(prompt)[:-1], prompt[1:], output.prompt_logprobs[1:])
    assert served.scheduler.prefix_cache.stats.losses[Loss.NOT_ASKED] == 299
    assert served.hits([prompt]) == [256]


def check_log_probabilities(logits: torch.Tensor, tokens: Sequence[int], given: Sequence[Any]) -> None:
    wanted = logits.log_softmax(-1)[torch.arange(len(tokens)), tokens]
    found = torch.tensor([each[token].logprob for token, each in zip(tokens, given, strict=True)])
    torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)


def salts(served: Served) -> None:
    prompt = tokens_of(6, 200)
    found = [served.hits([prompt], salt=salt)[0] for salt in ("a", "a", "b", None, None, "b")]
    assert found == [0, 192, 0, 0, 192, 192]


def short_prompts(served: Served) -> None:
    """At least one token is left to compute."""
    assert served.hits_one_by_one([tokens_of(7, 65)] * 2) == [0, 64]
    assert served.hits_one_by_one([tokens_of(8, 64)] * 2) == [0, 0]


# --- little memory ---

ANSWER = 20
CHANCES = {"waiting": 0.02, "prefilling": 0.2, "decoding": 0.05}
"""In each phase a request is aborted in a step with this probability."""
SHARED = tokens_of(9, 150)
PROMPTS = [
    *[SHARED + tokens_of(seed, own) for seed, own in ((30, 1), (31, 50), (32, 130))],
    *[tokens_of(seed, own) for seed, own in ((33, 1), (34, 64), (35, 120), (36, 200), (37, 290))],
]


def few_pages(served: Served) -> None:
    answer_all(served)
    assert served.scheduler.prefix_cache.stats.preemptions > 0


def few_states(served: Served) -> None:
    answer_all(served)
    assert served.watch.most_rows <= 5


def few_of_both(served: Served) -> None:
    few_pages(served)
    assert served.watch.most_rows <= 5
    aborts(served)
    refused(served)


def answer_all(served: Served) -> None:
    served.ask(PROMPTS, 50)
    served.watch.check_idle()
    assert served.watch.mixed


# --- requests that end before their answers do ---


def aborts(served: Served) -> None:
    """Abort requests at random steps, waiting, prefilling or decoding. Then the same prompts get their answers."""
    phases: set[str] = set()
    for seed in range(SEEDS):
        phases |= abort_some(served, random.Random(seed))
        served.watch.check_idle()
    assert phases == set(CHANCES)
    served.ask(PROMPTS)
    served.reset()
    assert served.hits_one_by_one([PROMPTS[-1]] * 2) == [0, 256]
    served.watch.check_idle()


def abort_some(served: Served, rng: random.Random) -> set[str]:
    """Submit prompts at random, and again if they are aborted. Return the phases of aborted requests."""
    coming, prompts, aborted, phases = list(PROMPTS), {}, set(), set()
    names: dict[str, str] = {}  # from the scheduler's own ids
    outputs: dict[str, Any] = {}
    while coming or served.engine.has_unfinished_requests():
        if coming and rng.random() < 0.5:
            name = str(len(prompts))
            prompts[name] = coming.pop(rng.randrange(len(coming)))
            names[served.submit(name, prompts[name], ANSWER)] = name
        outputs |= served.step()
        for request in [each for each in served.scheduler.requests.values() if each.request_id in names]:
            if rng.random() < CHANCES[phase(request)]:
                phases.add(phase(request))
                served.engine.abort_request([request.request_id], internal=True)
                name = names.pop(request.request_id)
                aborted.add(name)
                coming.append(prompts[name])
    for name, prompt in prompts.items():
        answer = outputs[name].outputs[0].token_ids if name in outputs else []
        assert name in aborted or len(answer) == ANSWER
        if answer:
            served.original.check(prompt, answer)
    return phases


def phase(request: Any) -> str:
    if request.num_output_tokens:
        return "decoding"
    return "prefilling" if request.num_computed_tokens else "waiting"


def refused(served: Served) -> None:
    """Streaming input and embeddings end with an error, alone and beside other requests, which go on."""
    embeddings = torch.zeros(70, 64)
    for number, changes in enumerate(
        [
            {"resumable": True},
            {"prompt_token_ids": None, "prompt_embeds": embeddings},
            {"prompt_embeds": embeddings, "prompt_is_token_ids": [False] * 70},  # beside ids that stand for nothing
        ]
    ):
        for others in ([], PROMPTS[:3]):
            for i, prompt in enumerate(others):
                served.submit(str(i), prompt, ANSWER)
                served.step()
            name = f"refused {number} {len(others)}"
            submit_changed(served, name, changes)
            outputs = {}
            while len(outputs) <= len(others):
                outputs |= {name: output for name, output in served.step().items() if ended(output)}
            assert outputs.pop(name).outputs[0].finish_reason == "error"
            for i, prompt in enumerate(others):
                served.original.check(prompt, outputs[str(i)].outputs[0].token_ids)
            if changes.get("resumable"):
                submit_changed(served, name, {})  # the front end sends this at the end of a stream
                assert not served.scheduler.has_unfinished_requests()
            served.watch.check_idle()


def ended(output: Any) -> bool:
    return output.outputs[0].finish_reason is not None


def submit_changed(served: Served, name: str, changes: dict[str, Any]) -> None:
    """Submit a request as a front end that accepts more might send it."""
    prompt = {"prompt_token_ids": tokens_of(40, 70)}
    request = served.engine.input_processor.process_inputs(name, prompt, greedy(ANSWER), ("generate",))
    request.external_req_id = name
    for key, value in changes.items():
        setattr(request, key, value)
    served.engine.output_processor.add_request(request, None, None, 0)
    served.engine.engine_core.add_request(request)


# --- states in host memory ---


def host_states(served: Served) -> None:
    """The pool holds a few of the states, and host memory all of them; vLLM keeps the KV."""
    prompts = [tokens_of(seed, 200) for seed in range(100, 124)]
    assert served.scheduler.prefix_cache.config.num_state_blocks < 16
    assert served.hits_one_by_one(prompts) == [0] * 24
    assert served.hits_one_by_one(prompts) == [192] * 24
    stats = served.scheduler.prefix_cache.stats
    assert served.watch.loaded == stats.loads > 8 and not stats.failed_transfers
    served.watch.check_idle()
    assert served.hits(prompts[:6]) == [192] * 6, "loads and rows of others share steps"
    for seed in range(SEEDS):
        abort_some(served, random.Random(seed))
        served.watch.check_idle()
    served.reset()
    assert not served.scheduler.prefix_cache.stats.host_states["committed"]
    assert served.hits_one_by_one(prompts[:2]) == [0, 0]


# --- a KV connector ---


def connector(served: Served) -> None:
    """Few states and few pages are on the device. vLLM's ExampleConnector keeps the KV of whole prompts."""
    prompts = [tokens_of(seed, 200) for seed in range(100, 116)]
    assert served.hits_one_by_one(prompts) == [0] * 16
    assert served.hits_one_by_one(prompts) == [192] * 16
    assert served.watch.loaded > 8
    assert served.hits(prompts[:4]) == [192] * 4
    served.watch.check_idle()


def failing_connector(served: Served) -> None:
    """The tokens of requests are right whatever comes back of their KV."""
    prompts = [tokens_of(seed, 200) for seed in range(100, 112)]
    served.ask(prompts)
    for _ in range(3):
        found = served.hits_one_by_one(prompts[:6]) + served.hits(prompts[6:])
        assert set(found) <= {0, 192}
        served.watch.check_idle()
    for seed in range(SEEDS):
        abort_some(served, random.Random(seed))
        served.watch.check_idle()
    assert get_kv_transfer_group().failures > 5


def connecting(name: str, **chances: Any) -> dict[str, Any]:
    own = {"kv_connector_module_path": "example_connectors"} if name.startswith("Faulty") else {}
    transfer = KVTransferConfig(
        kv_connector=name, kv_role="kv_both", **own,
        kv_connector_extra_config={"shared_storage_path": tempfile.mkdtemp(), **chances},
    )  # fmt: skip
    # The connector believes that a prompt runs in one step.
    return HOST_STATES | FEW_PAGES | {"kv_transfer_config": transfer, "max_num_batched_tokens": 4096}


HOST_STATES = {"additional_config": {"mambacache": {"state_bytes": "700KB", "state_host_bytes": "20MB"}}}
FEW_STATES = {"additional_config": {"mambacache": {"num_state_blocks": 5}}}
FEW_PAGES = {"max_model_len": 512, "num_gpu_blocks_override": 14}
# Steps are long, so that a state is where the cache puts it, and not where a step ends.
CASES: dict[str, tuple[Callable[[Served], None], dict[str, Any]]] = {
    "hits": (hits, {"max_model_len": 8192, "max_num_batched_tokens": 2048}),
    "few_pages": (few_pages, FEW_PAGES),
    "few_states": (few_states, FEW_STATES),
    "few_of_both": (few_of_both, FEW_STATES | FEW_PAGES),
    "host_states": (host_states, HOST_STATES),
    "connector": (connector, connecting("ExampleConnector")),
    "connector_between_steps": (connector, connecting("FaultyExampleConnector", between_steps=True)),
    "connector_failing": (failing_connector, connecting("FaultyExampleConnector", failing=0.5)),
    "connector_failing_between_steps": (
        failing_connector,
        connecting("FaultyExampleConnector", failing=0.5, between_steps=True),
    ),
}


def main(name: str, directory: Path, ahead: bool) -> None:
    torch._dynamo.config.disable = True  # vLLM compiles a count of log-probabilities, eager or not
    if ahead:
        schedule_ahead()
    save_tiny_model("qwen3_next_moe", directory, **MODEL)
    case, options = CASES[name]
    served = Served(directory, **options)
    assert (served.core.batch_queue is not None) == ahead
    case(served)
    print(LAST_ANSWER, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), "ahead" in sys.argv[3:])
