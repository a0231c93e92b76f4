"""What the books come to, whether they balance, and how torn ones are rebuilt."""

from __future__ import annotations

from mambacache.cache.books import Books
from mambacache.report import CacheStats


def totals(books: Books) -> CacheStats:
    """See `PrefixCache.stats`."""
    stats, pools = books.ledger.stats(), (books.pool, books.pages.pool, books.tier.states, books.tier.pages)
    counts = [pool.counts() if pool.num_blocks else {} for pool in pools]
    free = len(books.states.free_logs)
    stats.log_slots = {"free": free, "held": books.states.num_logs - free}
    stats.state_blocks, stats.kv_blocks, stats.host_states, stats.host_pages = counts
    return stats


def check(books: Books) -> None:
    """See `PrefixCache.check`."""
    requests = list(books.requests.values())
    running = [request.life for request in requests if request.life is not None]
    leaving = [row.life for row in books.rows.values() if row.life.ended and not row.issue]
    lives, states, tier = [*running, *leaving], books.states, books.tier
    held = [lease.block for life in lives for lease in states.held(life, life.row)]
    books.pool.check([*held, *tier.held(books.pool)])
    books.pages.check(lives, running, tier.held(books.pages.pool))
    if books.slabs is not None:
        books.slabs.check()
    books.lookup.check(requests)
    tier.check(requests)
    for block_hash, (chain, depth) in zip(books.pool.hashes, states.prefix, strict=True):
        assert block_hash is None or chain[depth] == block_hash, "the prefix of a state"
    logs = [*states.free_logs, *(life.log_slot for life in lives if life.log_slot)]
    assert sorted(logs) == [*range(1, len(logs) + 1)] and len(logs) == books.states.num_logs, "slots of token logs"
    unwritten = sum(len(life.row.checkpoints) for life in lives if life.row is not None)
    assert states.checkpoints.unwritten == unwritten, "checkpoints that are not written yet"
    rows = [row for request in requests for row in request.issued]
    rows += [life.row for life in lives if life.row is not None]
    assert {row.step.row: row for row in rows} == books.rows, "rows under way"


def mend(books: Books) -> None:
    """Rebuilds torn books: what was cached is given up, nothing else. Transfers under way keep their blocks."""
    for row, known, tokens in books.accepting:
        row.life.request.tokens[known:] = tokens
    accepted = [row for row, _, _ in books.accepting]
    num_issued = books.states.num_issued
    books.set_up([move.transfer for move in books.tier.moves.values()])
    books.states.num_issued = num_issued
    books.ledger.start_over()
    for request in books.requests.values():
        request.life = request.leaving = request.load = None
        request.resumed = 0
        request.loads_anew()
        request.issued, request.in_flight = [], 0
        books.rehash(request)
        books.lookup.wait(request)
    for row in sorted(books.rows.values(), key=lambda row: row.issue):
        request = row.life.request
        row.life.ended = True
        if row.issue and row not in accepted and books.requests.get(request.request_id) is request:
            request.issued.append(row)
            request.in_flight += row.step.samples
        elif not row.issue:
            books.rows.lost.add(row.step.row)
    rows = [row for request in books.requests.values() for row in request.issued]
    books.rows.clear()
    books.rows.freed.clear()  # nothing that they wrote is cached any more
    books.rows.update((row.step.row, row) for row in rows)
    books.accepting = []
    books.torn = False
