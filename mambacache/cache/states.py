"""State blocks of running requests: src, dst and checkpoints of every row, and when what it writes becomes readable."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from mambacache.accounting.ledger import Ledger
from mambacache.cache.chains import Chains, Rank, Turn
from mambacache.cache.checkpoints import Checkpoints
from mambacache.cache.lookup import Lookup
from mambacache.cache.pages import Pages
from mambacache.cache.policy import Marks, Policy
from mambacache.cache.pool import BlockPool, Lease
from mambacache.cache.request import CachedRequest, Commit, Life, Row
from mambacache.plan import CHUNK, FOLD, NO_CHECKPOINTS, PLACEHOLDER, Guess, SequenceStep


class States:
    """The only place where state blocks are chosen; see `BlockPool` for theirs, and `Life` for what a request holds.

    A life holds at most two blocks, its running state and the dst of a row that is not issued yet or has drafts, and
    once it decodes a slot for its token log.

    One row may be allocated while the drafts of the one before it are not accepted yet. It begins `late` tokens later
    at most, which only the device knows when it runs (`place_decodes`). Both rows fold once at most, since two of 8
    tokens pass one multiple of 16 at most: they share one dst. If the first row has passed the multiple, the second
    reads that block; else it may write it, and nobody reads what the first one wrote.
    """

    def __init__(
        self, pool: BlockPool, pages: Pages, lookup: Lookup, policy: Policy, chains: Chains, ledger: Ledger,
        numbers: count[int], num_log_slots: int,
    ) -> None:  # fmt: skip
        self._size = pages.block_size
        self._pool = pool
        self._pages = pages
        self._lookup = lookup
        self._policy = policy
        self._chains = chains
        self._ledger = ledger
        self._numbers = numbers  # of rows
        self.checkpoints = Checkpoints(pool, lookup, policy, ledger, pages.block_size)
        self.marks = Marks(policy.most_marks, policy.max_checkpoints)
        self.num_issued = 0  # rows
        self.num_logs, self.free_logs = num_log_slots, list(range(num_log_slots, 0, -1))
        self.prefix: list[tuple[Sequence[bytes], int]] = [((), 0)] * len(pool.hashes)  # chain and depth of a state

    # --- a life begins ---

    def begin(self, life: Life, hit_block: int) -> None:
        """Takes a reference to the state that was hit, and a block for the first row's dst."""
        if hit_block:
            life.state = self._pool.share(hit_block)
            self._pool.promote(hit_block, max(self._pool.rank[hit_block], Rank.SECOND))
            self.marks.hit(life.request.salt, life.request.chain[life.hit // self._size])
        life.reserve = self._pool.lease()

    def mark(self, life: Life, end: int) -> None:
        """Mark the cached states at a life's marks, up to the position `end`."""
        for position in sorted(life.marks) if life.request.store else ():
            if position <= end:
                self._mark(life.request, position)

    def fork(self, parent: Life, child: Life) -> bool:
        """The child goes on from the parent's state; False, and nothing has changed, without room for a page."""
        if parent.state is None or not self._pages.fork(parent, child):
            return False
        child.inexact_from, child.published = parent.inexact_from, parent.published
        child.state, child.log_start = self._pool.share(parent.state.block), parent.log_start
        return True

    # --- before a step ---

    def allocate(self, life: Life, num_tokens: int, guess: Guess, decode: bool) -> Row | None:
        """A row of `num_tokens` (and drafts) tokens with its dst, if it has one; None, and nothing changed, without
        room. A tree of drafts ends before its log does: of a fold's tokens each comes after the one before it."""
        start = life.computed
        before = life.drafted[-1] if life.drafted else None
        late = before.step.num_tokens - 1 if before is not None else 0
        in_prompt = start < life.prefill_end
        prefill = in_prompt and not decode
        drafts, parents = guess
        if drafts:
            if not late:
                drafts, parents = guess.cut(max(FOLD - 1 - start % FOLD - bool(parents), 0))
            if parents == (*range(len(parents)),):
                parents = ()
            num_tokens += len(drafts)
        end = start + late + num_tokens
        # Where a prompt ends too, so that a log is empty there, and forks share its state.
        folds = in_prompt or start % FOLD + late + num_tokens >= FOLD
        shared = before.dst if before is not None else None
        in_place = folds and not (prefill or drafts or late)  # perhaps: rejected drafts must not be in the only state
        pages_before, near_before, had_reserve = len(life.pages), life.inexact_from, life.reserve is not None
        if not prefill and not life.log_slot and not self.free_logs:
            return None
        if folds and not (in_place or shared or had_reserve) and not self._pool.num_available:
            return None
        if end > pages_before * self._size and not self._pages.grow(life, end):
            return None
        src = life.state.block if life.state is not None else 0
        dst, fresh = 0, None
        if in_place and self._may_write_in_place(life):
            dst = src
        elif shared is not None:
            dst = shared.block
        elif folds:
            fresh, life.reserve = life.reserve or self._pool.lease(), None
            if fresh is None:
                self._pages.shrink(life, pages_before)
                return None
            dst = fresh.block
        if not prefill and not life.log_slot:
            life.log_slot = self.free_logs.pop()
        step = SequenceStep._make((  # in two thirds of the time of a call
            life.request.request_id, life.number, next(self._numbers), start, num_tokens, prefill,
            end >= life.prefill_end, src, dst, life.log_slot, life.log_start, drafts, NO_CHECKPOINTS, False, late,
            parents, life.kept,
        ))  # fmt: skip
        row = life.row = Row(step, life, fresh, near_before, pages_before, had_reserve)
        if near_before > start and (not prefill or start % CHUNK):
            life.inexact_from = start  # a step that is cut inside a chunk makes the next one start there
        return row

    def _may_write_in_place(self, life: Life) -> bool:
        """Whether a decode row may write the block that it reads: nobody else holds it, and it is not committed or soon
        to be; or it is, and there is no block to go on in (then that commit is taken back)."""
        pool, state = self._pool, life.state
        if state is None:
            return False
        block = state.block
        pending = bool(life.pending) and any(commit.lease.block == block for commit in life.pending)
        if pool.references[block] > 1 + pending:
            return False
        if pool.hashes[block] is None and not pending:
            return True
        if life.reserve is not None:
            return False
        stands = life.computed // FOLD * FOLD + life.log_start
        lease = pool.lease(self._policy.asked(self._policy.wish(life.wishes, stands)))
        if lease is not None:
            life.reserve = lease
            return False
        if pending:
            for commit in [commit for commit in life.pending if commit.lease.block == block]:
                commit.lease.end()
            life.pending = [commit for commit in life.pending if commit.lease.block]
        else:
            pool.withdraw(block)
        if stands <= len(life.request.tokens):
            self._ledger.refused(life.request.chain[stands // self._size])
        return True

    def drop(self, row: Row) -> None:
        """An allocated row is not run: the life is as before, but for what the row's blocks have evicted, and the slot
        of its log, which it keeps."""
        life = row.life
        self.checkpoints.end(row)
        if row.had_reserve and life.reserve is None:
            life.reserve = row.dst
        elif row.dst is not None:
            row.dst.end()
        self._pages.shrink(life, row.pages_before)
        life.inexact_from = row.near_before
        life.row = None

    # --- after it ---

    def issued(self, row: Row) -> None:
        """The row is on the stream: whatever is issued later finds its dst written and its src read."""
        life, step = row.life, row.step
        end = step.start + step.num_tokens
        life.row, life.kept = None, ()
        self._pages.copied(life)
        if row.dst is not None:
            self._end_unused(row)
        if step.drafts or step.late:
            life.drafted.append(row)
            if not step.late:
                life.computed = step.start + 1  # without a fold: this token is right, whatever is drafted after it
                self._ledger.computed(life.trace, life.computed)
            return
        if step.dst:
            self._folded(life, row)
        else:
            life.computed = end
        if row.checkpoints:
            for position, lease in sorted(row.checkpoints.items(), reverse=True):  # deepest first, as with pages
                if not life.request.stale:
                    self._name(life, position, lease.block)
            self.checkpoints.end(row)
        if end % self._size == 0 and life.state is not None:
            self._commit(life, end, life.state)
        self._advance(life)

    def _folded(self, life: Life, row: Row) -> None:
        """All of a row's tokens count: what is in its dst, if it has one, is the running state."""
        step, fresh = row.step, row.dst
        life.computed = step.start + step.num_tokens
        if fresh is not None:
            if life.state is not None:
                life.state.end()
            life.state, row.dst = fresh, None
        if step.dst:
            life.log_start = life.computed % FOLD

    def accept(self, row: Row) -> None:
        """The row's tokens that remain after stops are known by now."""
        life = row.life
        if row in life.drafted:
            self._resolve_drafts(row)
        known = len(life.request.tokens)
        while life.pending and life.pending[0].known <= known:
            _, position, lease = life.pending.pop(0)
            self._commit(life, position, lease)
            lease.end()
        self._advance(life)

    def _resolve_drafts(self, row: Row) -> None:
        """Keeps the tokens that were accepted, and the row's dst if these are all."""
        life, step = row.life, row.step
        known = life.request.tokens[step.start : step.start + step.num_tokens]
        given = len(life.request.tokens) - step.start - 1
        path = step.followed(known[1 : given if PLACEHOLDER in step.drafts else None])  # with a stop that was drafted
        count = len(path)  # tokens that are known to be right
        life.drafted.remove(row)
        late = life.drafted[0] if life.drafted else life.row
        if given > 0 and count == step.num_tokens:
            self._folded(life, row)
            if life.computed % self._size == 0 and life.state is not None:
                self._commit(life, life.computed, life.state)
        elif row.dst is not None:
            if late is None or late.step.dst != row.dst.block:
                row.dst.end()
            else:
                late.dst = row.dst
            row.dst = None
        if given > 0:  # else it has stopped, and where the device has the next row does not matter
            life.computed = step.start + count
            life.kept = tuple(step.start + place for depth, place in enumerate(path) if place != depth)
            if late is not None:
                self._place(life, late)

    def _place(self, life: Life, row: Row) -> None:
        """Where a row begins is known by now, and with that how far it goes, as `place_decodes` has it."""
        start, step = life.computed, row.step
        end = min(start + step.num_tokens, (start // FOLD + 1) * FOLD)
        src, dst = (0 if lease is None else lease.block for lease in (life.state, row.dst))
        dst = dst if end % FOLD == 0 else 0
        row.step = SequenceStep(
            step.request_id, step.life, step.row, start, end - start, False, True, src, dst, step.log_slot,
            life.log_start, step.drafts[: end - start - 1],
        )  # fmt: skip
        if not row.issue:
            return  # until then it keeps its dst: with a stop inside the drafts the device is further, and may write it
        self._end_unused(row)
        life.computed = start + 1
        if not row.step.drafts:
            life.drafted.remove(row)
            self._folded(life, row)
            if life.computed % self._size == 0 and life.state is not None:
                lease = self._pool.share(life.state.block)  # where tokens were cut off by a stop the device is further
                life.pending.append(Commit(life.computed + 1, life.computed, lease))

    @staticmethod
    def _end_unused(row: Row) -> None:
        if row.dst is not None and not row.step.dst:
            row.dst.end()
            row.dst = None

    # --- the end of a life ---

    def end(self, life: Life, finished: bool) -> None:
        """A life ends. What it holds is given back at once, or with its row if that is planned: that may be issued."""
        life.ended = True
        self._ledger.ended(life.trace)
        self._lookup.wrote(life, life.request.chain, life.announced)
        self._pages.unused(life)
        if life.row is None or not life.row.planned:
            self.release(life)
        if finished and life.request.turn is not None:
            self._settle(life, life.request.turn)

    def _settle(self, life: Life, turn: Turn) -> None:
        """Of the states that a finished request leaves, those that its next turn does not need are evicted first."""
        request, pool = life.request, self._pool
        turn.answered = life.computed // self._size
        end = life.checkpoint[0] // self._size if life.checkpoint is not None else 0
        useless = self._chains.useless(turn, end)
        if end > turn.tail and end not in useless and (last := pool.lookup(request.chain[end])):
            pool.promote(last, max(pool.rank[last], turn.rank))
        unmarked = [request.chain[d] for d in useless if not self.marks.has(request.salt, request.chain[d])]
        for block in filter(None, map(pool.lookup, unmarked)):
            if not pool.references[block]:
                pool.evict_first(block)

    def release(self, life: Life) -> None:
        """Gives back all that an ended life holds; what is committed stays."""
        row, life.row = life.row, None
        if row is not None:
            self.checkpoints.end(row)
        for lease in self.held(life, row):
            lease.end()
        life.pending, life.drafted, life.state, life.reserve = [], [], None, None
        if life.log_slot:
            self.free_logs.append(life.log_slot)
            life.log_slot = 0
        self._pages.end(life)

    def held(self, life: Life, row: Row | None) -> list[Lease]:
        """The leases of a life and of its row that is not issued."""
        rows = life.drafted if row is None else [row, *life.drafted]
        leases = [life.state, life.reserve, *(each.dst for each in rows)]
        held = [commit.lease for commit in life.pending] + [lease for lease in leases if lease is not None]
        return held if row is None else [*held, *row.checkpoints.values()]

    # --- commits ---

    def _commit(self, life: Life, position: int, lease: Lease) -> None:
        """Commits a state that stands on a boundary where a step ended, now or when its tokens are known."""
        request = life.request
        if not request.store or request.stale:
            return
        if position > len(request.tokens):
            life.pending.append(Commit(position, position, self._pool.share(lease.block)))
            return
        block_hash = request.chain[position // self._size]
        asked = self._policy.asked(self._policy.wish(life.wishes, position))
        if self._pool.lookup(block_hash) is None and not self.checkpoints.has_room(asked):
            self._ledger.refused(block_hash)
            return
        self._name(life, position, lease.block)
        previous, life.checkpoint = life.checkpoint, (position, block_hash)
        if previous is not None and self._policy.gives_up(life.wishes, previous[0], life.prefill_end):
            held = self._pool.lookup(previous[1])
            if held is not None and not self._pool.references[held] and self._pool.rank[held] is Rank.SPARE:
                self._pool.drop(previous[1])

    def _name(self, life: Life, position: int, block: int) -> None:
        block_hash = life.request.chain[position // self._size]
        rank = self._policy.rank(self._policy.wish(life.wishes, position), life.request.rank)
        exact, writer = position <= life.inexact_from, life.request.number
        if self._pool.commit(block, block_hash, exact=exact, rank=rank, born=self.num_issued, writer=writer):
            self.prefix[block] = life.request.chain, position // self._size
            self._ledger.stored("state", block_hash, position, life.request.request_id)
        if position in life.marks or self.marks.has(life.request.salt, block_hash):
            self._mark(life.request, position)

    def _mark(self, request: CachedRequest, position: int) -> None:
        """Make a mark of the state at a position, if it is cached: it ranks as SECOND at least."""
        pool, block_hash = self._pool, request.chain[position // self._size]
        if (block := pool.lookup(block_hash)) is None:
            return
        lost = self.marks.add(request.salt, block_hash, pool.rank[block])
        pool.promote(block, max(pool.rank[block], Rank.SECOND))
        held = pool.lookup(lost[0]) if lost is not None else None
        if lost is not None and held is not None and pool.rank[held] is Rank.SECOND:
            pool.lower(held, lost[1])

    def _advance(self, life: Life) -> None:
        """Commits the pages that have become full and known; who waits for these blocks, and the ledger, see them."""
        request, size = life.request, self._size
        self._ledger.computed(life.trace, life.computed)
        if life.computed < (life.published + 1) * size:
            return
        self._lookup.wrote(life, request.chain, life.computed // size)
        for depth in range(life.published + 1, min(life.computed, len(request.tokens)) // size + 1):
            life.published = depth
            self._chains.now += 1
            if not request.store or request.stale:
                continue
            block_hash = request.chain[depth]
            self._lookup.add_computed(block_hash)
            if self._pages.commit(life, depth, block_hash, self.num_issued):
                self._ledger.stored("kv", block_hash, depth * size, request.request_id)
