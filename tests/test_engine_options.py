"""Check vLLM's options, options that are refused before any weights are read, and settings of a checkpoint's files."""

from __future__ import annotations

import gc
import json
import warnings
import weakref
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest

import mambacache
from engine_driver import Engines, answer, ask, byte_tokenizer, greedy, hits, run_until_idle, tokens_of
from mambacache import LLM, EngineConfig, SamplingParams
from mambacache.engine.checkpoint import load_tokenizer
from mambacache.engine.options import NO_EFFECT, EngineOptions, Options, engine_config
from mambacache.models import adapt
from mambacache.runner.sizing import _position_limit, weight_bytes
from tiny_models import save_tiny_model

PROMPT = tokens_of(1, 70)


@pytest.fixture
def checkpoint(tmp_path: Path, tiny_model: Callable[[str], Path]) -> Path:
    """A copy of a checkpoint without its weights."""
    for path in tiny_model("qwen3_next").glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def set_in(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


# --- what is taken ---


def test_typed_options_are_the_fields() -> None:
    annotations = {option.name: option.type for option in fields(EngineConfig) if option.name != "model"}
    assert {name: hint for name, hint in get_type_hints(EngineOptions).items()} == {
        name: hint | str if "bytes" in name else hint  # sizes are taken as text too
        for name, hint in get_type_hints(EngineConfig).items()
        if name != "model"
    }
    assert list(EngineOptions.__annotations__) == list(annotations)
    assert set(get_type_hints(Options)) == set(annotations) | NO_EFFECT


def test_options_of_vllm_have_no_effect(
    engine: Engines, tiny_model: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """The configuration ignores them, and a warning names each."""
    assert engine_config("model", dict.fromkeys(NO_EFFECT, 2)) == EngineConfig("model")
    assert {record.message.partition("=")[0] for record in caplog.records} == NO_EFFECT
    caplog.clear()
    llm = LLM(tiny_model("qwen3_next"), device="cpu", max_num_seqs=2, quantization="fp8")
    assert "quantization='fp8' is an option of vLLM and has no effect here: remove it, or use the vLLM" in caplog.text
    assert answer(ask(llm, [PROMPT], greedy(5))[0]) == answer(ask(engine(), [PROMPT], greedy(5))[0])


# --- what is refused, and when ---

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_model_len": 600}, "max_model_len is 600 and .* takes 500 tokens: set it to 500 or less, or leave it out"),
    ({"max_draft_tokens": 3}, "max_draft_tokens is 3 and nothing proposes drafts: set speculative, give draft="),
    ({"speculative": "some/model"}, "speculative is 'some/model': set it to \"ngram\", or leave it out and give LLM's"),
    ({"max_draft_tokens": 9}, "max_draft_tokens is 9: set it between 0 and 7"),
    ({"draft": 5}, "draft is 5: give a function"),
    ({"tokenizer": "no/such/directory"}, "tokenizer 'no/such/directory' cannot be loaded, give .* Hub id: .*no/such"),
    ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5: set it above 0 and at most 1, or to None"),
    ({"gpu_memory_utilization": 1e-9}, "gpu_memory_utilization is 1e-09, which makes .* the weights .*: raise it"),
    ({"block_size": 96}, "block_size is 96: set it to a positive multiple of 64"),
    ({"checkpoint_interval": 100}, "checkpoint_interval is 100: set it to 0 or a multiple"),
    ({"kv_cache_bytes": 1000}, "one KV block takes 32,768 bytes: raise kv_cache_bytes"),
    ({"kv_cache_bytes": 1 << 60}, "are free: lower kv_cache_bytes"),
    ({"dtype": "int8"}, "dtype is 'int8': choose auto"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_refused_before_the_weights_are_read(checkpoint: Path, options: dict[str, Any], message: str) -> None:
    """There are none."""
    set_in(checkpoint / "config.json", max_position_embeddings=500)
    with pytest.raises(ValueError, match=message) as error:
        LLM(checkpoint, **{"device": "cpu", **options})
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"weights of .* cannot be read"), pytest.warns(match="no tokenizer"):
        LLM(checkpoint, device="cpu", max_model_len=500)


def test_options_that_nobody_knows(checkpoint: Path) -> None:
    with pytest.raises(TypeError, match="LLM has no option 'tensor_parallel': choose from tokenizer, revision, device"):
        LLM(checkpoint, tensor_parallel=1)  # type: ignore[call-arg]


def test_memory_is_warned_of_once(tiny_model: Callable[[str], Path], caplog: pytest.LogCaptureFixture) -> None:
    LLM(tiny_model("qwen3_next"), device="cpu", checkpoint_budget_bytes=5, kv_cache_bytes=1 << 20)
    assert caplog.text.count("checkpoint_budget_bytes is 5") == 1


def test_share_of_the_memory(tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and caches stay within it, and within what is free."""
    directory, megabyte = tiny_model("qwen3_next"), 1 << 20
    weights = weight_bytes(adapt.model_skeleton(directory))
    monkeypatch.setattr("mambacache.engine.parts.free_memory", lambda device: 60 * megabyte)
    monkeypatch.setattr("os.sysconf", lambda name: 100 * megabyte // 4096 if name == "SC_PHYS_PAGES" else 4096)
    taken = []
    for share in (None, 0.2, 0.4, 1.0):
        sizes = LLM(directory, device="cpu", gpu_memory_utilization=share).sizes
        taken.append(sizes.num_state_blocks * sizes.state_bytes + sizes.num_kv_blocks * sizes.kv_block_bytes)
        assert share is None or taken[-1] + weights <= share * 100 * megabyte
    assert taken[1] < taken[2] < taken[3] == taken[0] <= 60 * megabyte


# --- what a checkpoint's files set ---


@pytest.mark.parametrize("model", ["qwen3_next", "mamba", "olmo_hybrid"])
def test_no_tokenizer_files(engine: Engines, model: str) -> None:
    """Transformers makes up a tokenizer of special tokens for some types: texts would be empty without a word."""
    with pytest.warns(UserWarning, match="has no tokenizer that can be loaded: give prompts as token ids"):
        llm = engine(model)
    assert llm.get_tokenizer() is None
    with pytest.raises(ValueError, match="has no tokenizer: give the prompt as token ids"):
        llm.generate("text", use_tqdm=False)


@pytest.mark.parametrize(
    ("name", "text"),
    [("tokenizer.json", "[]"), ("tokenizer.json", "{"), ("tokenizer.json", "{}"), ("tokenizer_config.json", "[]")],
)
def test_damaged_tokenizer(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_next"}')
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.warns(match=r"has a damaged tokenizer \(\w+Error: .*\): give prompts as token ids$"):
        assert load_tokenizer(tmp_path, None, None) is None
    with pytest.raises(ValueError, match=r"tokenizer .* cannot be loaded, give a directory"):
        load_tokenizer("model", tmp_path, None)


def test_another_tokenizer(engine: Engines, tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    directory = save_tiny_model("qwen3_next", tmp_path / "model", vocab_size=257)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm = engine(directory, tokenizer=tmp_path)
    assert llm.generate("hello", greedy(1), use_tqdm=False)[0].prompt_token_ids == byte_tokenizer().encode("hello")


def test_revision(tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches whatever is read of the Hub."""
    seen = []
    for kind, name in (
        (adapt.PreTrainedConfig, "get_config_dict"),
        (adapt.AutoConfig, "from_pretrained"),
        (adapt.AutoModelForCausalLM, "from_pretrained"),
        (mambacache.engine.checkpoint.AutoTokenizer, "from_pretrained"),
    ):
        read = getattr(kind, name)

        def reading(*args: Any, read: Any = read, **given: Any) -> Any:
            seen.append(given.get("revision"))
            return read(*args, **given)

        monkeypatch.setattr(kind, name, reading)
    LLM(tiny_model("mamba"), device="cpu", revision="v2", max_num_seqs=2, checkpoint_budget_bytes=0)
    assert len(seen) >= 6 and [each for each in seen if each is not None].count("v2") >= 6


@pytest.mark.parametrize(
    ("given", "params"),
    [
        ({}, SamplingParams()),
        ({"temperature": 0.6, "top_p": 0.9, "top_k": 20, "do_sample": True}, SamplingParams(0.6, top_p=0.9, top_k=20)),
        ({"temperature": 0.6, "top_k": 20, "do_sample": False}, SamplingParams(0.0, top_k=20)),
        ({"repetition_penalty": 1.2, "max_new_tokens": 7}, SamplingParams(repetition_penalty=1.2, max_tokens=7)),
    ],
)
def test_sampling_of_the_checkpoint(
    engine: Engines, tmp_path: Path, given: dict[str, Any], params: SamplingParams
) -> None:
    """Check that prompts without parameters are sampled by the checkpoint's. Other prompts use their own parameters."""
    directory = save_tiny_model("qwen3_next", tmp_path)
    set_in(directory / "generation_config.json", **given)
    llm, plain = engine(directory), engine()
    assert llm.get_default_sampling_params() == params
    outputs = llm.generate(PROMPT, use_tqdm=False) + llm.generate(PROMPT, SamplingParams(), use_tqdm=False)
    expected = [plain.generate(PROMPT, each, use_tqdm=False)[0] for each in (params, SamplingParams())]
    assert [answer(output) for output in outputs] == [answer(output) for output in expected]


def test_sampling_of_the_checkpoint_that_makes_no_sense(engine: Engines, tmp_path: Path) -> None:
    directory = save_tiny_model("qwen3_next", tmp_path)
    set_in(directory / "generation_config.json", top_p=0.0)
    with pytest.warns(UserWarning, match="generation_config.json is not used: top_p is 0.0: set it above 0"):
        assert engine(directory).get_default_sampling_params() == SamplingParams()


# --- ids, outputs, the end ---


def test_ids_of_callers_are_not_given_again(engine: Engines) -> None:
    llm = engine()
    given = [llm.submit(PROMPT, greedy(1), request_id=name) for name in ("request-4", "request-7/1", "request-x", "7")]
    run_until_idle(llm)
    own = [llm.submit(PROMPT, greedy(1, n=2)) for _ in range(8)]
    assert not {f"{name}{end}" for name in own for end in ("", "/1")} & set(given)
    assert len(set(own)) == 8
    run_until_idle(llm)


def test_fields_of_outputs(engine: Engines, text_model: Path) -> None:
    llm = engine(text_model)
    first, second = (llm.generate("hello " * 20, greedy(3), use_tqdm=False)[0] for _ in range(2))
    assert (first.prompt, first.num_cached_tokens, second.num_cached_tokens) == ("hello " * 20, 0, 64)
    metrics = second.metrics
    assert metrics.first_token_time is not None and metrics.finished_time is not None
    assert first.metrics.arrival_time < metrics.arrival_time < metrics.first_token_time < metrics.finished_time
    assert second.time_to_first_token == pytest.approx(metrics.first_token_time - metrics.arrival_time, abs=1e-4)
    assert llm.generate(PROMPT, greedy(1), use_tqdm=False)[0].prompt is None
    assert llm.generate({"prompt": "hi"}, greedy(1), use_tqdm=False)[0].prompt == "hi"
    chat = llm.chat([{"role": "user", "content": "hi"}], greedy(1), use_tqdm=False)[0]
    assert chat.prompt == "<user>hi</><assistant>"


def test_losses_print_as_plain_text(engine: Engines, text_model: Path) -> None:
    llm = engine(text_model)
    _, second = (llm.generate("hello " * 20, greedy(1), use_tqdm=False)[0] for _ in range(2))
    assert second.cache is not None and f"{second.cache.losses}" == "{'granularity': 55}"
    assert "losses={'granularity': 55}" in repr(second.cache) and "<" not in repr(llm.stats)


def test_one_bad_prompt_among_a_thousand(engine: Engines, text_model: Path) -> None:
    llm = engine(text_model)
    encode = llm.tokenizer.encode

    def encoding(text: str, **options: Any) -> list[int]:
        if text == "bad":
            raise KeyError("planted")
        return encode(text, **options)

    llm.tokenizer.encode = encoding
    message = "prompt 17 cannot be encoded by the tokenizer .KeyError: 'planted'.: change it, or give token ids"
    with pytest.raises(ValueError, match=message):
        llm.generate(["good"] * 17 + ["bad"] + ["good"] * 982, greedy(1), use_tqdm=False)
    good, bad = [{"role": "user", "content": "hi"}], [{"role": "user"}]
    llm.tokenizer.chat_template = "{% for m in messages %}{{ m.content.strip() }}{% endfor %}"
    with pytest.raises(ValueError, match=r"conversation 2 makes no prompt \(.*\): change its messages, or the chat"):
        llm.chat([good, good, bad, good], greedy(1), use_tqdm=False)
    for wrong in ([*good, "hi"], [good, 5]):
        with pytest.raises(ValueError, match=r"^conversation \d is .*: give a list of messages, such as {'role': "):
            llm.chat(wrong, greedy(1), use_tqdm=False)  # type: ignore[arg-type]
    for wrong in ("hi", 5, good[0]):
        with pytest.raises(ValueError, match=r"^messages is .*: give a list of messages, or a list of such lists"):
            llm.chat(wrong, greedy(1), use_tqdm=False)  # type: ignore[arg-type]
    assert llm.idle


def test_progress(engine: Engines, capfd: pytest.CaptureFixture[str]) -> None:
    llm = engine()
    ask(llm, [PROMPT], greedy(1))
    llm.generate([PROMPT, PROMPT], greedy(4))
    err = capfd.readouterr().err
    assert "2/2" in err and " tokens/s, 91% of prompts hit" in err


def test_stats_are_a_table(engine: Engines) -> None:
    llm = engine()
    empty = llm.stats
    ask(llm, [PROMPT, PROMPT], greedy(1), together=False)
    table = dict(line.split("  ", 1) for line in str(llm.stats).replace("  lost", "lost").splitlines())
    table = {name.strip(): value.strip() for name, value in table.items()}
    assert (table["requests"], table["hit"], table["computed before"]) == ("2", "64 (45.7%)", "69 (49.3%)")
    assert table["lost: granularity"] == "5" and "lost: evicted" not in table
    assert "1 committed" in table["KV blocks"]
    assert empty.requests == 0 and "hit                     0" in str(empty)


def test_closed(engine: Engines) -> None:
    """Requests end with "abort", the memory is given back, and every call says that it is closed."""
    with engine() as llm:
        module = weakref.ref(llm.runner.model.module)
        pool = weakref.ref(llm.runner.states.buffer)
        by_hand = llm.submit(PROMPT, greedy(50))
        stream = llm.stream(PROMPT, greedy(50))
        output = next(stream)
        (stepped,) = llm.step()[:1]
    assert (output.outputs[0].finish_reason, stepped.outputs[0].finish_reason) == ("abort", "abort")
    assert by_hand and llm.idle and llm.stats.requests == 2
    engine.watch._storages.clear()  # other tensors may be at these places by now
    gc.collect()
    assert module() is None and pool() is None
    llm.close()
    for call in (llm.step, lambda: llm.submit(PROMPT), lambda: llm.generate(PROMPT), lambda: next(stream)):
        with pytest.raises(RuntimeError, match=r"^this LLM is closed: make a new one$"):
            call()
    assert next(stream, None) is None
    assert len(hits(ask(engine(), [PROMPT], greedy(1)))) == 1


def test_public_names() -> None:
    assert dir(mambacache) == sorted(mambacache.__all__)
    assert {"AsyncLLM", "RequestOutput", "Completion", "CacheStats"} <= set(mambacache.__all__)


# --- lengths ---


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({}, 500),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "factor": 4.0}}, 500),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}}, 1500),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 200}},
            800,
        ),
    ],
)
def test_scaled_rotations_reach_further(settings: dict[str, Any], limit: int) -> None:
    assert _position_limit(SimpleNamespace(max_position_embeddings=500, **settings)) == limit


def test_default_length_is_cut_to_the_room_that_is_left(engine: Engines, tmp_path: Path) -> None:
    directory = save_tiny_model("qwen3_next", tmp_path)
    set_in(directory / "generation_config.json", max_new_tokens=80)
    llm = engine(directory, max_model_len=100)
    assert len(llm.generate([[5] * 90], use_tqdm=False)[0].outputs[0].token_ids) <= 10
    with pytest.raises(ValueError, match="prompt 0 has 90 tokens and max_tokens is 80"):
        llm.generate([[5] * 90], SamplingParams(max_tokens=80), use_tqdm=False)
    with pytest.raises(
        ValueError, match="90 tokens, which leave room for 10, and min_tokens is 20: shorten the prompt"
    ):
        llm.generate([[5] * 90], SamplingParams(max_tokens=None, min_tokens=20), use_tqdm=False)
