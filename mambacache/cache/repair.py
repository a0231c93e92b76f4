"""Count, check and rebuild the cache's records."""

from __future__ import annotations

from mambacache.cache.admission import Admission
from mambacache.report import CacheStats


def totals(admission: Admission) -> CacheStats:
    """See `PrefixCache.stats`."""
    stats, pools = (
        admission.ledger.stats(),
        (admission.pool, admission.pages.pool, admission.tier.states, admission.tier.pages),
    )
    counts = [pool.counts() if pool.num_blocks else {} for pool in pools]
    free = len(admission.states.free_logs)
    stats.log_slots = {"free": free, "held": admission.states.num_logs - free}
    stats.state_blocks, stats.kv_blocks, stats.host_states, stats.host_pages = counts
    return stats


def check(admission: Admission) -> None:
    """See `PrefixCache.check`."""
    requests = list(admission.requests.values())
    running = [request.residency for request in requests if request.residency is not None]
    leaving = [row.residency for row in admission.rows.values() if row.residency.ended and not row.issue]
    residencies, states, tier = [*running, *leaving], admission.states, admission.tier
    held = [lease.block for residency in residencies for lease in states.held(residency, residency.row)]
    admission.pool.check([*held, *tier.held(admission.pool)])
    admission.pages.check(residencies, running, tier.held(admission.pages.pool))
    if admission.slabs is not None:
        admission.slabs.check()
    admission.lookup.check(requests)
    admission.kv_order.check()
    states.values.check(admission.pages.pool)
    tier.check(requests)
    logs = [*states.free_logs, *(residency.log_slot for residency in residencies if residency.log_slot)]
    assert sorted(logs) == [*range(1, len(logs) + 1)] and len(logs) == admission.states.num_logs, "slots of token logs"
    unwritten = sum(len(residency.row.checkpoints) for residency in residencies if residency.row is not None)
    assert states.checkpoints.unwritten == unwritten, "checkpoints that are not written yet"
    rows = [row for request in requests for row in request.issued]
    rows += [residency.row for residency in residencies if residency.row is not None]
    assert {row.step.row: row for row in rows} == admission.rows, "rows under way"


def mend(admission: Admission) -> None:
    """Rebuild torn records, also after an interrupt of this. Requests are preempted; transfers keep their blocks."""
    for row, known, tokens in admission.accepting:
        row.residency.request.tokens[known:] = tokens
    accepted = [row for row, _, _ in admission.accepting]
    admission.set_up([move.transfer for move in admission.tier.moves.values()], admission.states.num_issued)
    admission.ledger.start_over()
    for request in admission.requests.values():
        request.residency = request.leaving = request.load = None
        request.resumed = 0
        request.loads_anew()
        request.issued, request.in_flight = [], 0
        admission.rehash(request)
        admission.lookup.wait(request)
    for row in sorted(admission.rows.values(), key=lambda row: row.issue):
        request = row.residency.request
        row.residency.ended = True
        if row.issue and row not in accepted and admission.requests.get(request.request_id) is request:
            request.issued.append(row)
            request.in_flight += row.step.samples
        elif not row.issue:
            admission.rows.lost.add(row.step.row)
    issued = {row.step.row for request in admission.requests.values() for row in request.issued}
    for number in admission.rows.keys() - issued:
        del admission.rows[number]
    admission.accepting = []
    admission.torn = False
