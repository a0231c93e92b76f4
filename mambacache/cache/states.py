"""Choose src, dst and checkpoints of rows, and commit states."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from mambacache.cache.ledger import Ledger
from mambacache.cache.lookup import Lookup
from mambacache.cache.pages import Pages
from mambacache.cache.pool import BlockPool, Lease
from mambacache.cache.requests import CachedRequest, Commit, Residency, Row
from mambacache.cache.retention import LONG, SPARE, Chains, Kind, Marks, Policy, Turn, Wish
from mambacache.cache.values import Values
from mambacache.plan import CHUNK, FOLD, NO_CHECKPOINTS, PLACEHOLDER, Guess, SequenceStep


class Checkpoints:
    """Leases blocks for states inside prefill rows."""

    def __init__(self, pool: BlockPool, lookup: Lookup, policy: Policy, ledger: Ledger, block_size: int) -> None:
        self._pool = pool
        self._lookup = lookup
        self._policy = policy
        self._ledger = ledger
        self._size = block_size
        self.unwritten = 0  # blocks of rows not issued yet

    def plan(self, rows: Sequence[Row]) -> None:
        wanted: list[tuple[Wish, int, int]] = []
        for order, row in enumerate(rows):
            step, residency = row.step, row.residency
            end = step.start + step.num_tokens
            if end // self._size == step.start // self._size or not residency.request.store or residency.request.stale:
                continue
            self._promise(residency, step.start, end)
            if step.prefill:
                wanted += [(wish, order, p) for wish, p in self._policy.between(residency.wishes, step.start, end)]
        planned: dict[bytes, bool] = {}
        for wish, order, position in sorted(wanted):
            residency = rows[order].residency
            block_hash = residency.request.chain[position // self._size]
            exact = position <= residency.inexact_from
            held = self._pool.lookup(block_hash)
            if held is not None and (self._pool.exact[held] or not exact):
                continue
            if planned.get(block_hash, -1) >= exact:
                continue
            requested = self._policy.requested(wish)
            lease = self._pool.lease(requested) if self.has_room(requested) else None
            if lease is None:
                self._ledger.refused(block_hash)
                continue
            planned[block_hash] = exact
            rows[order].checkpoints[position] = lease
            self.unwritten += 1
        for row in rows:
            row.planned = True
            if row.checkpoints:
                checkpoints = {position: lease.block for position, lease in row.checkpoints.items()}
                row.step = row.step._replace(checkpoints=checkpoints)

    def _promise(self, residency: Residency, start: int, end: int) -> None:
        """Wish for states that waiting requests need."""
        if not self._policy.max_checkpoints:
            return
        chain, size = residency.request.chain, self._size
        for depth in self._lookup.awaited(chain, start // size + 1, min(end // size, len(chain) - 1)):
            if self._lookup.may_hit(residency, depth):
                self._policy.promise(residency.wishes, depth * size)

    def has_room(self, requested: bool = True) -> bool:
        """Tell whether the budget holds another checkpoint; evict if needed."""
        most = self._policy.max_checkpoints
        full = self._pool.num_committed + self.unwritten >= most
        return not full or (most > 0 and self._pool.evict(requested))

    def end(self, row: Row) -> None:
        self.unwritten -= len(row.checkpoints)
        for position in sorted(row.checkpoints, reverse=True):
            row.checkpoints[position].end()
        row.checkpoints = {}


class States:
    """Chooses all state blocks.

    A residency holds its running state, and a second block as dst of a row that is not issued or has drafts.

    A row allocated before earlier drafts are accepted is late: only the device knows its start (`place_decodes`). Both
    rows share a dst, as they pass at most one multiple of 16. If the first row passes it, the second row reads the dst;
    else it may overwrite it.
    """

    def __init__(
        self, pool: BlockPool, pages: Pages, lookup: Lookup, policy: Policy, chains: Chains, values: Values,
        ledger: Ledger, numbers: count[int], num_log_slots: int, num_issued: int,
    ) -> None:  # fmt: skip
        self._size = pages.block_size
        self._pool = pool
        self._pages = pages
        self._lookup = lookup
        self._policy = policy
        self._chains = chains
        self.values = values
        self._ledger = ledger
        self._numbers = numbers
        self.checkpoints = Checkpoints(pool, lookup, policy, ledger, pages.block_size)
        self.marks = Marks(policy.most_marks, policy.max_checkpoints)
        self.num_issued = num_issued  # rows
        self.num_logs, self.free_logs = num_log_slots, list(range(num_log_slots, 0, -1))

    # --- a residency begins ---

    def begin(self, residency: Residency, hit_block: int) -> None:
        if hit_block:
            residency.state = self._pool.share(hit_block)
            self.values.value(hit_block, turn=residency.request.turn)
        residency.reserve = self._pool.lease()

    def mark(self, residency: Residency, end: int) -> None:
        for position in sorted(residency.marks) if residency.request.store else ():
            if position <= end:
                self._mark(residency.request, position)

    def fork(self, parent: Residency, child: Residency) -> bool:
        if parent.state is None or not self._pages.fork(parent, child):
            return False
        child.inexact_from, child.published = parent.inexact_from, parent.published
        child.state, child.log_start = self._pool.share(parent.state.block), parent.log_start
        return True

    # --- before a step ---

    def allocate(self, residency: Residency, num_tokens: int, guess: Guess, decode: bool) -> Row | None:
        """Allocate a row; None, with nothing changed, without room."""
        start = residency.computed
        before = residency.drafted[-1] if residency.drafted else None
        late = before.step.num_tokens - 1 if before is not None else 0
        in_prompt = start < residency.prefill_end
        prefill = in_prompt and not decode
        drafts, parents = guess
        if drafts:
            if not late:  # a tree leaves out the log's last entry: a fold takes tokens in sequence
                drafts, parents = guess.cut(max(FOLD - 1 - start % FOLD - bool(parents), 0))
            if parents == (*range(len(parents)),):
                parents = ()
            num_tokens += len(drafts)
        end = start + late + num_tokens
        # Fold at a prompt's end too: the token log starts empty and forks can share the state.
        folds = in_prompt or start % FOLD + late + num_tokens >= FOLD
        shared = before.dst if before is not None else None
        in_place = folds and not (prefill or drafts or late)  # drafts must not enter the only state
        pages_before, inexact_before, had_reserve = (
            len(residency.pages),
            residency.inexact_from,
            residency.reserve is not None,
        )
        if not prefill and not residency.log_slot and not self.free_logs:
            return None
        if folds and not (in_place or shared or had_reserve) and not self._pool.num_available:
            return None
        if end > pages_before * self._size and not self._pages.grow(residency, end):
            return None
        src = residency.state.block if residency.state is not None else 0
        dst, fresh = 0, None
        if in_place and self._may_write_in_place(residency):
            dst = src
        elif shared is not None:
            dst = shared.block
        elif folds:
            fresh, residency.reserve = residency.reserve or self._pool.lease(), None
            if fresh is None:
                self._pages.shrink(residency, pages_before)
                return None
            dst = fresh.block
        if not prefill and not residency.log_slot:
            residency.log_slot = self.free_logs.pop()
        step = SequenceStep._make((  # hot path: faster than a call
            residency.request.request_id, residency.number, next(self._numbers), start, num_tokens, prefill,
            end >= residency.prefill_end, src, dst, residency.log_slot, residency.log_start, drafts, NO_CHECKPOINTS,
            False, late,
            parents, residency.kept,
        ))  # fmt: skip
        row = residency.row = Row(step, residency, fresh, inexact_before, pages_before, had_reserve)
        if inexact_before > start and (not prefill or start % CHUNK):
            residency.inexact_from = start  # decoded, or begun inside a chunk
        return row

    def _may_write_in_place(self, residency: Residency) -> bool:
        """Tell whether a decode row may write its src.

        If only a commit forbids it, lease a reserve; without room, take the commit back.
        """
        pool, state = self._pool, residency.state
        if state is None:
            return False
        block = state.block
        pending = bool(residency.pending) and any(commit.lease.block == block for commit in residency.pending)
        if pool.references[block] > 1 + pending:
            return False
        if pool.hashes[block] is None and not pending:
            return True
        if residency.reserve is not None:
            return False
        stands = residency.computed // FOLD * FOLD + residency.log_start
        lease = pool.lease(self._requested(residency, stands))
        if lease is not None:
            residency.reserve = lease
            return False
        if pending:
            for commit in [commit for commit in residency.pending if commit.lease.block == block]:
                commit.lease.end()
            residency.pending = [commit for commit in residency.pending if commit.lease.block]
        else:
            pool.withdraw(block)
        if stands <= len(residency.request.tokens):
            self._ledger.refused(residency.request.chain[stands // self._size])
        return True

    def drop(self, row: Row) -> None:
        """Take back an allocated row; evicted blocks stay evicted, and the log slot is kept."""
        residency = row.residency
        self.checkpoints.end(row)
        if row.had_reserve and residency.reserve is None:
            residency.reserve = row.dst
        elif row.dst is not None:
            row.dst.end()
        self._pages.shrink(residency, row.pages_before)
        residency.inexact_from = row.inexact_before
        residency.row = None

    # --- after a step ---

    def issued(self, row: Row) -> None:
        residency, step = row.residency, row.step
        end = step.start + step.num_tokens
        residency.row, residency.kept = None, ()
        self._pages.copied(residency)
        if row.dst is not None:
            self._end_unused(row)
        if step.drafts or step.unplaced_by:
            residency.drafted.append(row)
            if not step.unplaced_by:
                residency.computed = step.start + 1  # right whichever drafts are accepted
                self._ledger.computed(residency.trace, residency.computed)
            return
        if step.dst:
            self._folded(residency, row)
        else:
            residency.computed = end
        if row.checkpoints:
            for position, lease in sorted(row.checkpoints.items(), reverse=True):  # evicts chains from their ends
                if not residency.request.stale:
                    self._name(residency, position, lease.block)
            self.checkpoints.end(row)
        if end % self._size == 0 and residency.state is not None:
            self._commit(residency, end, residency.state)
        self._advance(residency)

    def _folded(self, residency: Residency, row: Row) -> None:
        step, fresh = row.step, row.dst
        residency.computed = step.start + step.num_tokens
        if fresh is not None:
            if residency.state is not None:
                residency.state.end()
            residency.state, row.dst = fresh, None
        if step.dst:
            residency.log_start = residency.computed % FOLD

    def accept(self, row: Row) -> None:
        residency = row.residency
        if row in residency.drafted:
            self._resolve_drafts(row)
        known = len(residency.request.tokens)
        while residency.pending and residency.pending[0].known <= known:
            _, position, lease = residency.pending.pop(0)
            self._commit(residency, position, lease)
            lease.end()
        self._advance(residency)

    def _resolve_drafts(self, row: Row) -> None:
        """Keep accepted tokens, and the dst if all were accepted."""
        residency, step = row.residency, row.step
        known = residency.request.tokens[step.start : step.start + step.num_tokens]
        given = len(residency.request.tokens) - step.start - 1
        path = step.followed(known[1 : given if PLACEHOLDER in step.drafts else None])  # a drafted stop included
        count = len(path)
        residency.drafted.remove(row)
        late = residency.drafted[0] if residency.drafted else residency.row
        if given > 0 and count == step.num_tokens:
            self._folded(residency, row)
            if residency.computed % self._size == 0 and residency.state is not None:
                self._commit(residency, residency.computed, residency.state)
        elif row.dst is not None:
            if late is None or late.step.dst != row.dst.block:
                row.dst.end()
            else:
                late.dst = row.dst
            row.dst = None
        if given > 0:  # else the request has stopped
            residency.computed = step.start + count
            residency.kept = tuple(step.start + place for depth, place in enumerate(path) if place != depth)
            if late is not None:
                self._place(residency, late)

    def _place(self, residency: Residency, row: Row) -> None:
        """Move a late row to its start, as `place_decodes` does."""
        start, step = residency.computed, row.step
        end = min(start + step.num_tokens, (start // FOLD + 1) * FOLD)
        src, dst = (0 if lease is None else lease.block for lease in (residency.state, row.dst))
        dst = dst if end % FOLD == 0 else 0
        row.step = SequenceStep(
            step.request_id, step.residency, step.row, start, end - start, False, True, src, dst, step.log_slot,
            residency.log_start, step.drafts[: end - start - 1],
        )  # fmt: skip
        if not row.issue:
            return  # keep the dst: after a stop the device may still write it
        self._end_unused(row)
        residency.computed = start + 1
        if not row.step.drafts:
            residency.drafted.remove(row)
            self._folded(residency, row)
            if residency.computed % self._size == 0 and residency.state is not None:
                # Commit with the next token: after a stop the device is further.
                lease = self._pool.share(residency.state.block)
                residency.pending.append(Commit(residency.computed + 1, residency.computed, lease))

    @staticmethod
    def _end_unused(row: Row) -> None:
        if row.dst is not None and not row.step.dst:
            row.dst.end()
            row.dst = None

    # --- end of a residency ---

    def end(self, residency: Residency, finished: bool) -> None:
        """End a residency, and release its blocks unless a planned row may still be issued."""
        residency.ended = True
        self._ledger.ended(residency.trace)
        self._lookup.wrote(residency, residency.request.chain, residency.announced)
        self._pages.unused(residency)
        if residency.row is None or not residency.row.planned:
            self.release(residency)
        if finished and residency.request.turn is not None:
            self._settle(residency, residency.request.turn)

    def _settle(self, residency: Residency, turn: Turn) -> None:
        """Follow the last states of a prompt and of its answer."""
        request, pool = residency.request, self._pool
        depth = residency.computed // self._size
        turn.answered = depth if self._lookup.may_hit(residency, depth) else 0
        end = residency.checkpoint[0] // self._size if residency.checkpoint is not None and turn.answered else 0
        kinds = {turn.tail: Kind.TAIL, end: Kind.TURN} if end > turn.tail else {turn.tail: Kind.TURN}
        for depth, kind in kinds.items():
            block = pool.lookup(request.chain[depth])
            if block and not pool.useless[block]:
                self._chains.reuse.begin(request.chain[depth], kind, turn)
                self.values.value(block)

    def release(self, residency: Residency) -> None:
        row, residency.row = residency.row, None
        if row is not None:
            self.checkpoints.end(row)
        for lease in self.held(residency, row):
            lease.end()
        residency.pending, residency.drafted, residency.state, residency.reserve = [], [], None, None
        if residency.log_slot:
            self.free_logs.append(residency.log_slot)
            residency.log_slot = 0
        self._pages.end(residency)

    def held(self, residency: Residency, row: Row | None) -> list[Lease]:
        rows = residency.drafted if row is None else [row, *residency.drafted]
        leases = [residency.state, residency.reserve, *(each.dst for each in rows)]
        held = [commit.lease for commit in residency.pending] + [lease for lease in leases if lease is not None]
        return held if row is None else [*held, *row.checkpoints.values()]

    # --- commits ---

    def _commit(self, residency: Residency, position: int, lease: Lease) -> None:
        """Commit a state once its tokens are known."""
        request = residency.request
        if not request.store or request.stale:
            return
        if position > len(request.tokens):
            residency.pending.append(Commit(position, position, self._pool.share(lease.block)))
            return
        block_hash = request.chain[position // self._size]
        kind = self._kind(residency, position)
        if self._pool.lookup(block_hash) is None and not self.checkpoints.has_room(
            kind is Kind.STEP or self._requested(residency, position)
        ):
            self._ledger.refused(block_hash)
            return
        self._name(residency, position, lease.block)
        previous, residency.checkpoint = residency.checkpoint, (position, block_hash)
        if previous is not None and self._policy.gives_up(residency.wishes, previous[0], residency.prefill_end):
            held = self._pool.lookup(previous[1])
            if held is not None and not self._pool.references[held] and self._pool.group[held] == SPARE:
                self._pool.drop(previous[1])

    def _name(self, residency: Residency, position: int, block: int) -> None:
        block_hash = residency.request.chain[position // self._size]
        kind, turn = self._kind(residency, position), residency.request.turn
        exact, writer = position <= residency.inexact_from, residency.request.number
        prefix, born = (residency.request.chain, position // self._size), self.num_issued
        if self._pool.commit(
            block, block_hash, exact=exact, group=SPARE, born=born, writer=writer, prefix=prefix
        ):  # fmt: skip
            if kind not in (None, Kind.TURN) and turn is not None:
                self._chains.reuse.begin(block_hash, kind, turn)
            if kind is not None:
                self.values.value(block, kind, turn)
            self._ledger.stored("state", block_hash, position, residency.request.request_id)
        if position in residency.marks or self.marks.has(residency.request.salt, block_hash):
            self._mark(residency.request, position)

    def _requested(self, residency: Residency, position: int) -> bool:
        """Tell whether a state may evict states that have a value."""
        turn, depth = residency.request.turn, position // self._size
        ends_answer = turn is not None and depth > turn.tail and self._lookup.may_hit(residency, depth)
        requested = self._policy.requested(self._policy.wish(residency.wishes, position))
        return requested or (ends_answer and self._chains.go_on)

    def _kind(self, residency: Residency, position: int) -> Kind | None:
        kind = self._policy.kind(self._policy.wish(residency.wishes, position))
        if kind is not None or not LONG <= position <= residency.prefill_end:
            return kind
        chain, depth = residency.request.chain, position // self._size
        return Kind.STEP if (depth - self.values.needs.above(chain, depth)) * self._size >= LONG else None

    def _mark(self, request: CachedRequest, position: int) -> None:
        pool, block_hash, depth = self._pool, request.chain[position // self._size], position // self._size
        if (block := pool.lookup(block_hash)) is None:
            return
        lost = self.marks.add(request.salt, block_hash)
        self._chains.reuse.begin(block_hash, Kind.BRANCH, request.turn or Turn(depth))
        self.values.value(block)
        record, held = (self._chains.reuse.records.get(lost), pool.lookup(lost)) if lost is not None else (None, None)
        if held is not None and record is not None and not record.uses and pool.prefix[held][1] != record.turn.tail:
            pool.evict_first(held)

    def _advance(self, residency: Residency) -> None:
        """Commit pages full of known tokens."""
        request, size = residency.request, self._size
        self._ledger.computed(residency.trace, residency.computed)
        if residency.computed < (residency.published + 1) * size:
            return
        self._lookup.wrote(residency, request.chain, residency.computed // size)
        for depth in range(residency.published + 1, min(residency.computed, len(request.tokens)) // size + 1):
            residency.published = depth
            self._chains.now += 1
            if not request.store or request.stale:
                continue
            block_hash = request.chain[depth]
            self._lookup.add_computed(block_hash)
            if self._pages.commit(residency, depth, block_hash, self.num_issued):
                self._ledger.stored("kv", block_hash, depth * size, request.request_id)
