"""Every checkpoint of vLLM's own recipes, with its drafts and GPU, is served, refused or left as the pages say.

The page's tables say which architectures, drafts, options and devices are served. The hook gets vLLM's own
configuration of the recipe's options.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm.platforms
from devices import device
from vllm.config import CacheConfig, KVTransferConfig, MambaConfig, ParallelConfig, SchedulerConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.utils.argparse_utils import FlexibleArgumentParser

from mambacache.vllm import config, models

HERE = Path(__file__).resolve().parent
PAGE, OFFLOAD = ((HERE.parents[1] / "docs" / name).read_text() for name in ("vllm.md", "offload.md"))
RECIPES = [
    SimpleNamespace(**row)
    for row in csv.DictReader(
        (line for line in (HERE / "recipes.tsv").read_text().splitlines() if not line.startswith("#")), delimiter="\t"
    )
]
PARSER = EngineArgs.add_cli_args(FlexibleArgumentParser())
OTHER = {"amd": "RocmPlatform", "ascend": "NPUPlatform", "cpu": "CpuPlatform"}
CACHE = (
    "mamba_block_size",
    "mamba_cache_dtype",
    "mamba_cache_mode",
    "mamba_ssm_cache_dtype",
    "prefix_match_unit",
    "use_replayssm",
)


def section(title: str) -> str:
    """Return the text between a heading of the page and the next heading."""
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def first_column(title: str) -> list[str]:
    """Return the names in the first column of a section's tables."""
    cells = re.findall(r"^\| ([^|]*`[^|]*) \|", section(title), re.M)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


SERVED = {name for name in first_column("Models") if name.isidentifier()}
NEVER = "not run", "its layer alone"
REFUSED = {  # with any other options
    name
    for cell in re.findall(r"^\| (`[^`|]+`(?:, `[^`|]+`)*) \|", section("What is refused"), re.M)
    for name in re.findall(r"`([^`]+)`", cell)
}
CONNECTORS = set(re.findall(r"`(\w+Connector)`", OFFLOAD))
DRAFTS = set(re.findall(r"`(\w+)`", re.search(r"works with the methods (.*?), and", PAGE)[1]))


def test_the_page_names_every_architecture_and_option_that_the_code_names() -> None:
    assert models.ARCHITECTURES.keys() == SERVED
    assert {re.findall(r"`(\w+)`", line)[0] for line in re.findall(r"^- (.*)", section("Models"), re.M)} == set(
        models.LEFT
    )
    assert set(config.DRAFTS) == DRAFTS and set(config.CONNECTORS) == CONNECTORS
    unused = {*config._NO_EFFECT, *config._BACKENDS, *config._NO_EFFECT_OF_ENVIRONMENT}
    assert unused == {name for name in first_column("Options") if re.search(f"`{name}`.*no effect", PAGE)}


def by_the_page(recipe: Any) -> str:
    if recipe.architecture not in SERVED or recipe.capability in OTHER.keys() - {"cpu"}:
        return "left"
    method = recipe.drafts.split(" ")[0].replace("qwen3_next_mtp", "mtp").replace("qwen3_5_mtp", "mtp")
    given = [option.split(" ")[0] for option in recipe.options.split("|")]
    connectors = re.findall(r"--kv-transfer-config [^|]*?(\w+Connector)", recipe.options)
    unknown = method not in DRAFTS | {""} or not CONNECTORS.issuperset(connectors)
    return "refused" if REFUSED & set(given) or unknown else "served"


def platform_of(capability: str) -> Any:
    """Return the device of a recipe: a Hopper device where it lists none."""
    if capability in OTHER:
        return device(OTHER[capability])
    major, minor = (9, 0) if capability == "none listed" else map(int, capability.split("."))
    return device("CudaPlatform", (major, minor))


def configuration(recipe: Any) -> SimpleNamespace:
    """Make vLLM's own parts from a recipe's options, as its own parser reads them."""
    options = [option for option in recipe.options.split("|") if option.startswith("--")]
    arguments = PARSER.parse_args(
        [word for option in options for word in option.replace('"}', '", "kv_role": "kv_both"}').split(" ", 1)]
    )
    given = {name: getattr(arguments, name) for name in CACHE if getattr(arguments, name) is not None}
    mamba = MambaConfig()  # vLLM sets given options later too
    mamba.backend = arguments.mamba_backend
    mamba.ssu_algorithm = arguments.mamba_ssu_algorithm
    mamba.enable_stochastic_rounding = arguments.enable_mamba_cache_stochastic_rounding
    method, _, number = recipe.drafts.partition(" ")
    return SimpleNamespace(
        instance_id="recipe",
        additional_config=arguments.additional_config,
        kv_transfer_config=arguments.kv_transfer_config and KVTransferConfig(**vars(arguments.kv_transfer_config)),
        use_v2_model_runner=recipe.capability != "cpu",
        model_config=SimpleNamespace(
            dtype="torch.bfloat16",
            enable_prompt_embeds=arguments.enable_prompt_embeds,
            multimodal_config=None,
            max_model_len=4096,
        ),
        cache_config=CacheConfig(
            cache_dtype=arguments.kv_cache_dtype, kv_offloading_size=arguments.kv_offloading_size, **given
        ),
        mamba_config=mamba,
        parallel_config=ParallelConfig(),
        scheduler_config=SchedulerConfig(
            max_model_len=4096,
            is_encoder_decoder=False,
            max_num_seqs=8,
            async_scheduling=bool(arguments.async_scheduling),
        ),
        aux_output_config=arguments.aux_output_config,
        speculative_config=SimpleNamespace(
            method="mtp" if method.endswith("mtp") else method, num_speculative_tokens=int(number)
        )
        if method
        else None,
    )


def by_the_hook(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    made = configuration(recipe)
    with monkeypatch.context() as there:
        there.setattr(vllm.platforms, "current_platform", platform_of(recipe.capability))
        there.delitem(MODELS_CONFIG_MAP, recipe.architecture, raising=False)
        if recipe.architecture in models.LEFT:
            config.hook_left(recipe.architecture, models.LEFT[recipe.architecture])
        elif recipe.architecture in models.ARCHITECTURES:
            config.hook(recipe.architecture)
        hooked = MODELS_CONFIG_MAP.pop(recipe.architecture, None)
        try:
            if hooked is not None:
                hooked.verify_and_update_config(made)
        except ValueError as error:
            assert str(error).startswith("mambacache does not work with ")
            return "refused"
    return "served" if config.serves(made) else "left"


def name(recipe: Any) -> str:
    return f"{recipe.checkpoint}, {recipe.drafts or 'no drafts'}, {recipe.gpu}, {recipe.options}"


def test_the_page_tells_which_architectures_ran_on_a_gpu() -> None:
    rows = re.findall(r"^\| (`.*?) \| .* \| (.*) \|$", section("Models"), re.M)
    ran = {name for names, on_gpu in rows if on_gpu not in NEVER for name in re.findall(r"`(\w+)`", names)}
    assert ran & SERVED == models.RAN_ON_A_GPU


def test_the_hook_decides_on_every_recipe_as_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config.metrics, "show", lambda instance: None)
    monkeypatch.setenv("MAMBACACHE", "1")
    decided = {name(recipe): by_the_hook(recipe, monkeypatch) for recipe in RECIPES}
    assert len(decided) == len(RECIPES) == 447
    assert decided == {name(recipe): by_the_page(recipe) for recipe in RECIPES}
    total = Counter(decided.values())
    assert (total["served"], total["left"], total["refused"]) == (314, 118, 15)
    on_hopper = Counter(decided[name(recipe)] for recipe in RECIPES if recipe.capability == "9.0")
    assert on_hopper == {"served": 102, "left": 13, "refused": 4}
