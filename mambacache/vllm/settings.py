"""Read `--additional-config '{"mambacache": {...}}'`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from mambacache.config import CacheConfig
from mambacache.units import parse_bytes


@dataclass(frozen=True)
class Settings:
    """Holds the plugin's settings.

    Args:
        state_bytes: memory of states and token logs on each GPU; None for half of the memory left by the weights.
        num_state_blocks: number of states, in place of `state_bytes`; token logs take memory on top.
        state_host_bytes: host memory for states that the GPUs evict, all ranks together; None for none.
        state_disk_dir: folder of files behind `state_host_bytes`; None for none.
        checkpoint_interval: tokens between extra states, a multiple of 64; 0 for none.
        kv_event_groups: 2 for KV events of pages and states, 1 for pages up to the deepest state.
    """

    state_bytes: int | None = None
    num_state_blocks: int | None = None
    state_host_bytes: int | None = None
    state_disk_dir: str | None = None
    checkpoint_interval: int = 0
    kv_event_groups: int = 2

    @classmethod
    def of(cls, vllm_config: Any) -> Settings:
        """Return a configuration's settings.

        Raises:
            ValueError: a name or value is invalid.
        """
        given = (vllm_config.additional_config or {}).get("mambacache", {})
        names = [field.name for field in fields(cls)]
        if isinstance(given, Mapping) and "host_cache_bytes" in given:
            raise ValueError(
                "mambacache: vLLM keeps the KV: give state_host_bytes in place of host_cache_bytes in "
                "--additional-config"
            )
        if not isinstance(given, Mapping) or not set(given) <= set(names):
            raise ValueError(f"mambacache takes {', '.join(names)} in --additional-config, and got {given!r}")
        values = {name: value for name, value in given.items() if value is not None}
        for name in values.keys() & {"state_bytes", "state_host_bytes"}:
            try:
                values[name] = parse_bytes(values[name])
            except ValueError as error:
                given_bytes = f"{name} is {values[name]!r} in --additional-config"
                raise ValueError(f'mambacache: {given_bytes}: give bytes, or "20GiB"') from error
        folder = values.get("state_disk_dir", "unset")
        if not isinstance(folder, str) or not folder:
            raise ValueError(f"mambacache: state_disk_dir is {folder!r} in --additional-config: give a folder")
        if "state_disk_dir" in values and "state_host_bytes" not in values:
            raise ValueError(
                "mambacache: state_disk_dir in --additional-config needs state_host_bytes, through which its files go: "
                "set it to a few states at least"
            )
        for name, value in values.items():
            if name == "state_disk_dir":
                continue
            if type(value) is not int or value < (0 if name == "checkpoint_interval" else 1):
                raise ValueError(f"mambacache: {name} is {value!r} in --additional-config: give a positive integer")
        if values.get("kv_event_groups", 2) > 2:
            raise ValueError("mambacache: kv_event_groups in --additional-config is 2 for pages and states, or 1")
        for name in ("state_bytes", "state_host_bytes"):
            if name in values and "num_state_blocks" in values:
                raise ValueError(f"mambacache: give {name} or num_state_blocks in --additional-config, not both")
        settings = cls(**values)
        CacheConfig(  # checks values before a model is loaded
            num_state_blocks=settings.num_state_blocks or 2, checkpoint_interval=settings.checkpoint_interval
        )
        return settings
