"""Pinned memory has pages of its own, and is given back however its owner goes. A refusal leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mambacache.runner.host_memory import HostMemory

PAGE = 4096


class Driver:
    """Pin as CUDA's driver does: whole pages, and no page twice."""

    def __init__(self) -> None:
        self.pinned: dict[int, range] = {}
        self.waited = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        pages = range(address // PAGE, -(-(address + size) // PAGE))
        if any(page in other for page in (pages[0], pages[-1]) for other in self.pinned.values()):
            return 712
        self.pinned[address] = pages
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        assert self.waited, "copies may be under way"
        del self.pinned[address]
        return 0

    def synchronize(self, device: torch.device) -> None:
        self.waited += 1


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", driver.synchronize)
    return driver


def close(memory: list[HostMemory]) -> None:
    memory[0].close()


def forget(memory: list[HostMemory]) -> None:
    memory.clear()


@pytest.mark.parametrize("end", [close, forget])
def test_pinned_memory_is_given_back_once(driver: Driver, end: Callable[[list[HostMemory]], None]) -> None:
    memory = [HostMemory(torch.device("cuda"))]
    slots = [memory[0].slots(3, 1000), memory[0].slots(5, PAGE + 1)]
    assert len(driver.pinned) == 2 and [each.shape for each in slots] == [(3, 1000), (5, PAGE + 1)]
    end(memory)
    assert not driver.pinned
    end(memory)


def test_no_page_is_shared(driver: Driver) -> None:
    memory = HostMemory(torch.device("cuda"))
    slots = [memory.slots(1, 100) for _ in range(200)]
    assert len(driver.pinned) == len(slots)
    for number, each in enumerate(slots):
        each.fill_(number)
    assert all((each == number).all() for number, each in enumerate(slots))


@pytest.mark.parametrize("count", [1 << 20, 1 << 40])
def test_memory_that_cannot_be_had_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="bytes of host memory cannot be had: lower host_cache_bytes"):
        HostMemory(torch.device("cpu")).slots(count, 1 << 40)


@pytest.mark.gpu
def test_a_refusal_leaves_the_device_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = HostMemory(torch.device("cuda"))
    slots = memory.slots(3, 1000)
    monkeypatch.setattr(torch, "frombuffer", lambda *args, **kwargs: slots.view(-1))  # pages that are pinned
    with pytest.raises(ValueError, match="cannot be pinned: lower host_cache_bytes"):
        memory.slots(3, 1000)
    assert torch.ones(3, device="cuda").sum().item() == 3


@pytest.mark.gpu
def test_successive_engines_pin_their_memory() -> None:
    for size in (1 << 20, 1 << 25, 3 << 20, 3000, 100):
        for _ in range(3):
            memory = HostMemory(torch.device("cuda"))
            kept = [memory.slots(1, size), memory.slots(2, size)]
            assert all(each.is_pinned() for each in kept)
