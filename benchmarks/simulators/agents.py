"""Generate traffic of chats and agents, with a fixed seed for each setting.

Sessions share instructions and tools. After each user message a round of tool calls follows. Thoughts may vanish at the
next user message. Sub-agents have instructions of their own. Histories are cut at the front or summarised. Some
requests are sent twice, and some sessions ask many questions about one document.

Even settings are for tuning, and odd settings for reports.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np
from trace_tokens import Request

from simulators.radix import Tree

REQUESTS = 2000
"""Requests of a setting."""

FIRST_TOKEN = 3 << 29
"""Least token, above all tokens of a trace."""

SPEED = 50
"""Tokens of an answer in a second."""

Pieces = list[np.ndarray]
Session = Iterator[float | tuple[Pieces, Pieces]]
"""Yields prompts with their answers, and waits in seconds."""


@dataclass(frozen=True)
class Setting:
    """Describes traffic. Lengths are means, in tokens; times are means, in seconds; shares are 0 to 1.

    Attributes:
        applications: Sets of instructions.
        instructions: Length of a set, with its tools.
        every: Time between sessions.
        documents: Share of sessions that ask about a document of `document` tokens, `endings` times.
        rounds: User messages in a session.
        calls: Tool calls in a round.
        think: Time between an answer and the next user message.
        tool: Time of a tool call.
        forgets: Thoughts vanish at the next user message.
        sub_agents: Share of tool calls that start a sub-agent.
        window: Tokens at which a history is shortened.
        summarises: A history is replaced by its summary, else cut at the front.
        retries: Share of requests that are sent twice.
    """

    seed: int
    applications: int
    instructions: float
    every: float
    documents: float
    document: float
    endings: float
    rounds: float
    calls: float
    think: float
    tool: float
    message: float
    thought: float
    call: float
    result: float
    answer: float
    forgets: bool
    sub_agents: float
    window: int
    summarises: bool
    retries: float


def setting(number: int) -> Setting:
    """Draw a setting; the same number gives the same setting."""
    draw = np.random.default_rng([59, number])

    def between(low: float, high: float) -> float:
        return float(np.exp(draw.uniform(np.log(low), np.log(high))))

    return Setting(
        seed=number,
        applications=int(between(1, 20)),
        instructions=between(200, 15_000),
        every=between(2, 60),
        documents=draw.choice([0, 0, 0.1, 0.5]),
        document=between(2_000, 40_000),
        endings=between(2, 20),
        rounds=between(1.3, 10),
        calls=draw.choice([0, between(0.5, 3), between(3, 20)]),
        think=between(15, 300),
        tool=between(0.5, 20),
        message=between(30, 600),
        thought=between(50, 1_500),
        call=between(30, 200),
        result=between(100, 3_000),
        answer=between(100, 800),
        forgets=bool(draw.integers(2)),
        sub_agents=draw.choice([0, 0, 0.05, 0.2]),
        window=int(between(16_000, 128_000)),
        summarises=bool(draw.integers(2)),
        retries=draw.choice([0, 0.02, 0.1]),
    )


class Traffic:
    """Runs the sessions of a setting."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._draw = np.random.default_rng([60, setting.seed])
        self._next_token = FIRST_TOKEN
        self._instructions = [self._tokens(setting.instructions) for _ in range(setting.applications)]
        self._helpers = [self._tokens(setting.instructions / 2) for _ in range(setting.applications)]
        shares = 1 / np.arange(1, setting.applications + 1)
        self._popularity = shares / shares.sum()
        self._seen = Tree()

    def run(self, most: int = REQUESTS) -> list[Request]:
        """Return the first `most` requests, by arrival."""
        requests: list[Request] = []
        begins, chats = 0.0, count(1)
        waiting: list[tuple[float, int, Session]] = []
        while True:
            while not waiting or begins <= waiting[0][0]:
                heapq.heappush(waiting, (begins, next(chats), self._session()))
                begins += self._draw.exponential(self._setting.every)
            now, chat, session = heapq.heappop(waiting)
            for event in session:
                if not isinstance(event, tuple):
                    heapq.heappush(waiting, (now + event, chat, session))
                    break
                requests.append(self._request(*event, chat, now))
                if len(requests) == most:
                    return requests

    def _request(self, prompt: Pieces, answer: Pieces, chat: int, arrival: float) -> Request:
        asked, answered = np.concatenate(prompt), np.concatenate(answer)
        _, _, ceiling = self._seen.walk(asked[:-1])
        self._seen.insert(np.concatenate([asked, answered]), 0)
        return Request(asked, answered, ceiling, ceiling > 0, chat, arrival)

    def _session(self) -> Session:
        application = int(self._draw.choice(len(self._popularity), p=self._popularity))
        if self._draw.random() < self._setting.documents:
            return self._document(self._instructions[application])
        return self._agent(self._instructions[application], self._helpers[application])

    def _document(self, instructions: np.ndarray) -> Session:
        start = [instructions, self._tokens(self._setting.document)]
        for _ in range(self._count(self._setting.endings)):
            prompt = [*start, self._tokens(self._setting.message)]
            yield from self._ask(prompt, [self._tokens(self._setting.answer)])
            yield self._time(self._setting.think)

    def _agent(self, instructions: np.ndarray, helper: np.ndarray) -> Session:
        history = [instructions]
        for _ in range(self._count(self._setting.rounds)):
            history.append(self._tokens(self._setting.message))
            yield from self._round(history, helper)
            yield self._time(self._setting.think)

    def _round(self, history: Pieces, helper: np.ndarray) -> Session:
        """Answer the last message, after tool calls; `history` grows by all that the next round repeats."""
        setting = self._setting
        thoughts: list[np.ndarray] = []
        for _ in range(self._count(setting.calls + 1) - 1 if setting.calls else 0):
            thought, call = self._tokens(setting.thought), self._tokens(setting.call)
            yield from self._shorten(history)
            yield from self._ask(history, [thought, call])
            if self._draw.random() < setting.sub_agents:
                task = [helper, self._tokens(setting.message)]
                yield from self._round(task, helper)
            else:
                yield self._time(setting.tool)
            thoughts.append(thought)
            history += [thought, call, self._tokens(setting.result)]
        yield from self._shorten(history)
        thought, answer = self._tokens(setting.thought), self._tokens(setting.answer)
        thinks = [thought] if setting.calls else []
        yield from self._ask(history, [*thinks, answer])
        history += [*thinks, answer]
        if setting.forgets:
            gone = set(map(id, [*thoughts, *thinks]))
            history[:] = [piece for piece in history if id(piece) not in gone]

    def _shorten(self, history: Pieces) -> Session:
        if sum(map(len, history)) <= self._setting.window:
            return
        if self._setting.summarises:
            summary = self._tokens(self._setting.answer)
            yield from self._ask([*history, self._tokens(50)], [summary])
            history[1:] = [summary, history[-1]]
        else:
            while len(history) > 2 and sum(map(len, history)) > self._setting.window / 2:
                del history[1]

    def _ask(self, prompt: Pieces, answer: Pieces) -> Session:
        pieces = list(prompt)
        yield pieces, answer
        yield sum(map(len, answer)) / SPEED
        if self._draw.random() < self._setting.retries:
            again = [self._tokens(self._setting.answer)]
            yield pieces, again
            yield sum(map(len, again)) / SPEED

    def _tokens(self, mean: float) -> np.ndarray:
        """Return new tokens, of a log-normal length."""
        count = max(int(self._draw.lognormal(np.log(mean) - 0.32, 0.8)), 1)
        self._next_token += count
        return np.arange(self._next_token - count, self._next_token, dtype=np.int32)

    def _count(self, mean: float) -> int:
        return int(self._draw.geometric(1 / max(mean, 1)))

    def _time(self, mean: float) -> float:
        return float(self._draw.lognormal(np.log(mean) - 0.5, 1))
