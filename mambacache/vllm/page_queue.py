"""Have vLLM evict KV pages in the cache's order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mambacache.cache.prefix_cache import PrefixCache


class PageQueue:
    """Stands in for vLLM's queue of free pages. Pages without a hash stay in that queue, and go first."""

    def __init__(self, manager: Any, prefix_cache: PrefixCache) -> None:
        pool = manager.block_pool
        self._blocks, self._prefix_cache = pool.blocks, prefix_cache
        self._empty, pool.free_block_queue = pool.free_block_queue, self
        self._cached: set[int] = set()
        self._sizes = [group.kv_cache_spec.block_size for group in manager.kv_cache_config.kv_cache_groups]
        self._pages_of = manager.get_block_ids
        self._free, manager.free = manager.free, self._free_request

    def _free_request(self, request: Any) -> None:
        name = request.request_id
        if self._prefix_cache.knows(name):
            pages = {
                page: (i + 1) * size
                for size, group in zip(self._sizes, self._pages_of(name), strict=True)
                for i, page in enumerate(group)
                if self._blocks[page].block_hash is not None
            }
            self._prefix_cache.kv_released(name, pages)
        self._free(request)

    @property
    def num_free_blocks(self) -> int:
        return self._empty.num_free_blocks + len(self._cached)

    def popleft(self) -> Any:
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Any]:
        empty = self._empty.popleft_n(min(n, self._empty.num_free_blocks))
        return empty + self._evict(n - len(empty))

    def _evict(self, count: int) -> list[Any]:
        pages = self._prefix_cache.evict_kv(count) if count else []
        self._cached.difference_update(pages)
        return [self._blocks[page] for page in pages]

    def remove(self, block: Any) -> None:
        page = block.block_id
        if page in self._cached:
            self._cached.remove(page)
            self._prefix_cache.kv_used(page)
        else:
            self._empty.remove(block)

    def append(self, block: Any) -> None:
        self.append_n([block])

    def append_n(self, blocks: Sequence[Any]) -> None:
        pages = [block.block_id for block in blocks if block.block_hash is not None]
        self._prefix_cache.kv_unused(pages)
        self._cached.update(pages)
        self.prepend_n([block for block in blocks if block.block_hash is None])

    def prepend_n(self, blocks: Sequence[Any]) -> None:
        """Put back pages without a hash, which may have had one."""
        self._prefix_cache.kv_dropped([block.block_id for block in blocks])
        self._empty.prepend_n(blocks)

    def get_all_free_blocks(self) -> list[Any]:
        return self._empty.get_all_free_blocks() + [self._blocks[page] for page in self._cached]

    def start_over(self) -> None:
        """Empty the order after all hashes are lost."""
        self._empty.append_n(self._evict(len(self._cached)))
