"""Blocks that went to host memory and came back are bitwise the same."""

from __future__ import annotations

import pytest
import torch
import triton

from mambacache.kernels import StatePool, StateTensor
from mambacache.plan import Transfer
from mambacache.runner import host_tier
from mambacache.runner.host_tier import HostTier

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def pools(device: str) -> list[StatePool]:
    """Return pools of states and of pages, full of random bytes."""
    layers = (
        [[StateTensor((5, 7), torch.float32), StateTensor((3,), torch.float16)]],
        [[StateTensor((64, 2, 8), torch.float16)]],
    )
    made = [StatePool(each, count, device) for each, count in zip(layers, (4, 9), strict=True)]
    for pool in made:
        pool.buffer.copy_(torch.randint(256, pool.buffer.shape, dtype=torch.uint8))
    return made


def run(tier: HostTier, *transfers: Transfer) -> dict[Transfer, bool]:
    tier.launch(transfers)
    ended: dict[Transfer, bool] = {}
    while tier.under_way:
        tier.wait()
        over = tier.ended()
        tier.forget(over)
        ended |= over
    return ended


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_copied_there_and_back_are_equal(device: str) -> None:
    states, pages = pools(device)
    tier = HostTier([states, pages], (3, 6))
    before = states.slabs.clone(), pages.slabs.clone()
    out = Transfer(1, True, ((2, 3), (4, 1)), ((9, 6), (1, 1), (5, 2)))
    assert run(tier, out) == {out: False}
    for pool in (states, pages):
        pool.buffer.zero_()
    back = Transfer(2, False, ((1, 3), (3, 1)), ((2, 6), (7, 2)))
    assert run(tier, back) == {back: False}
    expected = torch.zeros_like(before[0]), torch.zeros_like(before[1])
    expected[0][[1, 3]] = before[0][[2, 4]]
    expected[1][[2, 7]] = before[1][[9, 5]]
    assert torch.equal(states.slabs, expected[0]) and torch.equal(pages.slabs, expected[1])
    tier.close()


@pytest.mark.gpu
def test_no_transfer_compiles_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda *, fn, **rest: compiled.append(fn.name))
    pools = [StatePool([[StateTensor((count,), torch.float32)]], 4, "cuda") for count in (412, 636)]
    tier = HostTier(pools, (3, 3))
    assert len(compiled) == 2
    out, back = (Transfer(number, number == 1, ((2, 3),), ((1, 2), (3, 1))) for number in (1, 2))
    assert run(tier, out) == {out: False} and run(tier, back) == {back: False}
    assert len(compiled) == 2
    tier.close()


@pytest.mark.parametrize("device", DEVICES)
def test_a_transfer_is_launched_once_and_reported_until_forgotten(device: str) -> None:
    states, pages = pools(device)
    tier = HostTier([states, pages], (3, 6))
    transfer = Transfer(7, True, ((1, 1),), ())
    tier.launch([transfer])
    tier.wait()
    states.buffer.zero_()
    tier.launch([transfer])
    assert tier.ended() == tier.ended() == {transfer: False} and tier.under_way
    tier.forget({transfer: False})
    assert not tier.under_way and tier.ended() == {}
    run(tier, Transfer(8, False, ((2, 1),), ()))
    assert states.slabs[2].any(), "launched again, it would have copied zeros"
    tier.close()


def test_a_failed_transfer_is_reported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    tier = HostTier(pools("cpu"), (3, 6))
    wrong = Transfer(1, True, ((1, 99),), ())
    right = Transfer(2, True, ((1, 1),), ((2, 2),))
    assert run(tier, wrong, right) == {wrong: True, right: False}
    assert run(tier, wrong._replace(number=3)) == {wrong._replace(number=3): True}
    assert caplog.text.count("a transfer between device and host failed") == 1


@pytest.mark.parametrize("device", DEVICES)
def test_a_transfer_that_an_interrupt_breaks_off_has_failed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, transfer = HostTier(pools(device), (3, 6)), Transfer(1, True, ((1, 1),), ())

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(host_tier, "copy_blocks", interrupt)
        tier.launch([transfer])
    assert run(tier, transfer) == {transfer: True}
    tier.close()


@pytest.mark.gpu
def test_a_transfer_without_an_event_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt a transfer between its copy and its event: no caller could tell when it ends."""
    tier, transfer = HostTier(pools("cuda"), (3, 6)), Transfer(1, True, ((1, 1),), ())

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch.cuda, "Event", interrupt)
        tier.launch([transfer])
    assert run(tier, transfer) == {transfer: True}
    tier.close()


@pytest.mark.gpu
def test_a_copy_waits_for_the_steps_before_it() -> None:
    """Report a copy as over no sooner than it is."""
    states = StatePool([[StateTensor((1 << 24,), torch.float32)]], 3, "cuda")
    tier = HostTier([states], (1,))
    x = torch.randn(8192, 8192, device="cuda")
    for _ in range(50):
        x = x @ x / 100
    states.layers[0][0][1] = 3
    transfer = Transfer(1, True, ((1, 1),), ())
    tier.launch([transfer])
    assert tier.ended() == {}
    states.layers[0][0][2] = 5
    tier.wait()
    assert tier.ended() == {transfer: False}
    run(tier, Transfer(2, False, ((2, 1),), ()))
    assert states.layers[0][0][2].eq(3).all()
    tier.close()
