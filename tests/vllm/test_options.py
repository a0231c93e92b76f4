"""Every option that concerns recurrent states works, is refused, or is said to have no effect, in each spelling.

The options go through vLLM's own parser into its own configuration, which calls the hook.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import vllm
from simulation import MODEL, make_scheduler
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, MambaModelConfig
from vllm.utils.argparse_utils import FlexibleArgumentParser
from watched import run

from mambacache.vllm import config, scheduler
from mambacache.vllm.settings import Settings

ARCHITECTURE = "LlamaForCausalLM"  # the simulation's; the hook asks nothing of a model
Configure = Callable[..., Any]
KERNELS = [*Path(vllm.__file__).parent.glob("_C*.so")]


@pytest.fixture
def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Configure:
    """Return a function from a command line to vLLM's configuration, settled by the hook."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))

    def configured(*words: str, has_attention: bool = True) -> Any:
        monkeypatch.delitem(MODELS_CONFIG_MAP, ARCHITECTURE, raising=False)
        if not has_attention:  # vLLM's own hook of such models
            monkeypatch.setitem(MODELS_CONFIG_MAP, ARCHITECTURE, MambaModelConfig)
        config.hook(ARCHITECTURE, has_attention=has_attention)
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        parser.set_defaults(additional_config={})  # vLLM writes into its default
        base = f"--model {tmp_path} --skip-tokenizer-init --dtype bfloat16 --max-model-len 4096 --max-num-seqs 8"
        return EngineArgs.from_cli_args(parser.parse_args([*base.split(), *words])).create_engine_config()

    return configured


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the plugin's warnings."""
    lines: list[str] = []
    monkeypatch.setattr(config.logger, "warning", lambda text, *values: lines.append(text % values))
    return lines


UNUSED = {
    "--mamba-block-size": ["--mamba-block-size 128", "--mamba_block_size=128"],
    "--prefix-match-unit": ["--prefix-match-unit 16", "--prefix_match_unit=16", "--prefix-match-unit 64"],
    "--prefix-cache-retention-interval": ["--prefix-cache-retention-interval 512"],
    "--enable-mamba-shared-prefix-checkpoint": ["--enable-mamba-shared-prefix-checkpoint"],
    "--mamba-backend": ["--mamba-backend flashinfer", "--mamba_backend=FLASHINFER"],
    "--mamba-ssu-algorithm": ["--mamba-backend flashinfer --mamba-ssu-algorithm horizontal"],
    "--enable-mamba-cache-stochastic-rounding": [
        "--enable-mamba-cache-stochastic-rounding --mamba-ssm-cache-dtype float16"
    ],
    "--mamba-cache-philox-rounds": ["--mamba-cache-philox-rounds 5"],
    "--gdn-prefill-backend": [
        "--gdn-prefill-backend triton",
        "--additional-config.gdn_prefill_backend triton",
        '--additional-config {"gdn_prefill_backend":"triton"}',
    ],
    "--kda-prefill-backend": ["--kda-prefill-backend triton"],
    "--kda-decode-backend": ["--kda-decode-backend triton"],
}


@pytest.mark.parametrize(("option", "words"), [(option, each) for option, all_ in UNUSED.items() for each in all_])
@pytest.mark.parametrize("has_attention", [True, False])
def test_an_option_for_vllms_own_states_is_warned_of_and_has_no_effect(
    option: str, words: str, has_attention: bool, configure: Configure, said: list[str]
) -> None:
    alone = configure(has_attention=has_attention)
    assert not said
    settled = configure(*words.split(), has_attention=has_attention)
    assert sum(line.startswith(f"mambacache: {option} has no effect: ") for line in said) == 1, said
    assert {line.split(" ")[1] for line in said} <= {option, *words.replace("=", " ").split()}
    assert config.serves(settled)
    assert repr(settled.mamba_config) == repr(alone.mamba_config)
    for name in vars(settled.cache_config).keys() - {"mamba_ssm_cache_dtype"}:
        assert getattr(settled.cache_config, name) == getattr(alone.cache_config, name), name


def test_an_option_at_its_default_gives_no_warning(configure: Configure, said: list[str]) -> None:
    configure("--mamba-backend", "triton", "--mamba-cache-dtype", "auto", "--mamba-cache-philox-rounds", "0")
    assert not said


@pytest.mark.parametrize("setting", sorted(config._NO_EFFECT_OF_ENVIRONMENT))
def test_a_variable_for_vllms_own_states_is_warned_of(
    setting: str, configure: Configure, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _, value = setting.partition("=")
    monkeypatch.delenv(name, raising=False)
    configure()
    assert not said
    monkeypatch.setenv(name, value or "0")
    configure()
    (line,) = said
    assert line.startswith(f"mambacache: {setting} has no effect: ")


def test_the_default_layout_gives_no_warning(
    configure: Configure, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(config.LAYOUT, "SD")
    configure()
    assert not said


CONNECTOR = '{"kv_connector":"OffloadingConnector","kv_role":"kv_both"}'
NIXL = CONNECTOR.replace("Offloading", "Nixl")
DRAFTS = '{"method":"ngram","num_speculative_tokens":8}'
REFUSED = {
    "NixlConnector (kv_connector in --kv-transfer-config": [
        f"--kv-transfer-config {NIXL}",
        "--kv-transfer-config.kv_connector NixlConnector --kv-transfer-config.kv_role kv_both",
    ],
    "kv_role in --kv-transfer-config": [f"--kv-transfer-config {CONNECTOR.replace('both', 'producer')}"],
    "--kv-offloading-backend": ["--kv-offloading-size 1 --kv-offloading-backend lmcache"],
    "ExampleConnector (--kv-transfer-config) beside OffloadingConnector (--kv-offloading-size)": [
        f"--kv-offloading-size 1 --kv-transfer-config {CONNECTOR.replace('Offloading', 'Example')}",
    ],
    "kv_event_groups 1 in --additional-config beside a KV connector": [
        "--kv-offloading-size 1 --additional-config.mambacache.kv_event_groups 1",
    ],
    "--enable-dbo, --ubatch-size": ["--enable-dbo", "--ubatch-size 2", "--ubatch-size=4"],
    "--decode-context-parallel-size": ["-tp 2 -dcp 2", "-tp 2 --decode-context-parallel-size 2"],
    "--scheduler-cls": ["--scheduler-cls other.Scheduler"],
    "--worker-cls": ["--worker-cls other.Worker"],
    "--enable-prompt-embeds": ["--enable-prompt-embeds"],
    "--use-replayssm": ["--use-replayssm"],
    "--mamba-cache-dtype": ["--mamba-cache-dtype float32", "--mamba_cache_dtype=float16"],
    "--enable-return-routed-experts": ["--enable-return-routed-experts"],
    "num_speculative_tokens": [
        f"--speculative-config {DRAFTS}",
        f"-sc {DRAFTS}",
        "--speculative-config.method ngram --speculative-config.num_speculative_tokens 8",
        "--spec-method ngram --spec-tokens 8",
    ],
}


@pytest.mark.parametrize(("option", "words"), [(option, each) for option, all_ in REFUSED.items() for each in all_])
def test_an_option_that_does_not_work_is_refused_in_each_spelling(
    option: str, words: str, configure: Configure
) -> None:
    with pytest.raises(ValueError, match="mambacache does not work with ") as raised:
        configure(*words.split())
    assert option in str(raised.value) and "leave that out, or set MAMBACACHE=0" in str(raised.value)


def test_batch_invariance_is_refused(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM asks each layer's backend whether it is batch invariant, and our layers have no backend to ask."""
    made = configure()
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    config.refuse(made)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(ValueError, match="VLLM_BATCH_INVARIANT"):
        config.refuse(made)


def test_vllms_simple_offloading_is_refused(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_SIMPLE_KV_OFFLOAD", "1")
    with pytest.raises(ValueError, match="does not work with SimpleCPUOffloadConnector"):
        configure("--kv-offloading-size", "1")


WORKS = [
    "--mamba-ssm-cache-dtype float32",
    "--mamba-ssm-cache-dtype bfloat16",
    "--mamba-ssm-cache-dtype float16",
    "--mamba-cache-dtype bfloat16",
    "--kv-cache-dtype fp8",
    "--enable-prefix-caching",
    "--no-enable-prefix-caching",
    "--no-enable-prefix-caching --mamba-cache-dtype auto",
    "--no-enable-chunked-prefill --max-num-batched-tokens 4096",
    "--block-size 128",
    "--disable-hybrid-kv-cache-manager",
    "--no-disable-hybrid-kv-cache-manager",
    "--async-scheduling",
    "--no-async-scheduling",
    "--scheduling-policy priority",
    "--max-num-seqs 16",
    "--ubatch-size 1",
    f"--kv-transfer-config {CONNECTOR}",
    "--kv-transfer-config.kv_connector ExampleConnector --kv-transfer-config.kv_role kv_both",
    "--kv-offloading-size 1",
    "--kv_offloading_size=0",
    '--kv-offloading-size 1 --kv-transfer-config {"kv_connector_extra_config":{"block_size":256}}',
    '--speculative-config {"method":"ngram","num_speculative_tokens":7,"prompt_lookup_max":3}',
]


@pytest.mark.parametrize("words", WORKS)
def test_an_option_that_works_gives_no_warning(words: str, configure: Configure, said: list[str]) -> None:
    settled = configure(*words.split())
    assert config.serves(settled) and not said


TIERS = '"kv_connector_extra_config":{"spec_name":"TieringOffloadingSpec","secondary_tiers":%s}}'
FILES, PEERS = TIERS % '[{"type":"fs"}]', TIERS % '[{"type":"p2p"}]'
DISK = '--additional-config {"mambacache":{"state_host_bytes":"1GB","state_disk_dir":"states"}}'


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--kv-offloading-size 1",
        f"--kv-transfer-config {CONNECTOR}",
        f"--kv-transfer-config {CONNECTOR[:-1]},{PEERS}",
        f"--kv-transfer-config {CONNECTOR[:-1]},{FILES.replace('Tiering', 'CPU')}",
        *(f"--kv-transfer-config {CONNECTOR[:-1]},{TIERS % wrong}" for wrong in ("null", '["fs"]', '{"type":"fs"}')),
        f"--kv-offloading-size 1 --kv-transfer-config {{{PEERS}",
    ],
)
def test_states_on_disk_without_their_kv_are_refused(words: str, configure: Configure) -> None:
    with pytest.raises(ValueError, match="needs KV on disk too: give a connector that keeps it in --kv-transfer-confi"):
        configure(*DISK.split(), *words.split())


@pytest.mark.parametrize(
    "transfer",
    [
        CONNECTOR.replace("Offloading", "Example"),
        f"{CONNECTOR[:-1]},{FILES}",
        f"{{{FILES} --kv-offloading-size 1",
        CONNECTOR.replace("Offloading", "Faulty").replace("}", ',"kv_connector_module_path":"connectors"}'),
    ],
)
def test_states_on_disk_beside_kv_on_disk(transfer: str, configure: Configure, said: list[str]) -> None:
    settled = configure(*DISK.split(), "--kv-transfer-config", *transfer.split())
    assert config.serves(settled) and not said


def test_states_on_disk_of_a_model_without_kv(configure: Configure, said: list[str]) -> None:
    assert config.serves(configure(*DISK.split(), has_attention=False)) and not said


def test_vllms_own_offloading_has_its_connector_after_the_hook(configure: Configure) -> None:
    """The scheduler has failed loads computed, since vLLM makes the connector's configuration late."""
    settled = configure("--kv-offloading-size", "1")
    transfer = settled.kv_transfer_config
    assert (transfer.kv_connector, transfer.kv_role) == ("OffloadingConnector", "kv_both")
    config.settle_connector(settled)
    assert transfer.kv_load_failure_policy == "recompute"


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ('--additional-config {"mambacache":{"num_state_blocks":9}}', Settings(num_state_blocks=9)),
        ("--additional-config.mambacache.num_state_blocks 9", Settings(num_state_blocks=9)),
        ("--additional-config.mambacache.state_bytes 20GiB", Settings(state_bytes=20 << 30)),
        ("--additional-config.mambacache.state_bytes=5000", Settings(state_bytes=5000)),
        ("--additional_config.mambacache.checkpoint_interval 128", Settings(checkpoint_interval=128)),
    ],
)
def test_a_setting_is_read_in_each_spelling(words: str, settings: Settings, configure: Configure) -> None:
    assert Settings.of(configure(*words.split())) == settings


def test_the_scheduler_refuses_a_connector_that_came_after_the_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_config = make_scheduler().vllm_config
    vllm_config.kv_transfer_config = KVTransferConfig(kv_connector="SimpleCPUOffloadConnector", kv_role="kv_both")
    with pytest.raises(ValueError, match="SimpleCPUOffloadConnector"):
        scheduler.make(vllm_config=vllm_config)


@pytest.mark.skipif(not KERNELS, reason="of the next vLLM there are Python files alone")
def test_options_of_vllms_own_states_leave_tokens_and_hits_as_they_are(tmp_path: Path) -> None:
    run("options_run.py", "recall", tmp_path)
