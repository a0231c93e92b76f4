"""Make traffic of several kinds, as lists of prompts and answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import count

Asked = tuple[list[int], list[int]]
"""A prompt and its answer."""


class Mixes:
    """Make traffic. Tokens that are not repeated are new."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._tokens = count()

    def text(self, length: int) -> list[int]:
        return [next(self._tokens) for _ in range(length)]

    def chats(
        self, requests: int, *, prompt: int = 700, answer: int = 130, edited: float = 0, again: float = 0
    ) -> Iterator[Asked]:
        """Yield requests of twenty chats at a time; a chat goes on seven times in ten.

        A share `again` of the next turns asks for the answer once more. A share `edited` of the others replaces it.
        """
        rng, open_chats = self.rng, list[Asked]()
        for _ in range(requests):
            if len(open_chats) < 20 or rng.random() < 0.1:
                asked = self.text(prompt)
            else:
                before, said = open_chats.pop(rng.randrange(len(open_chats)))
                if rng.random() > 0.7:
                    asked = self.text(prompt)
                elif rng.random() < again:
                    asked = before
                else:
                    asked = [*before, *(self.text(answer) if rng.random() < edited else said), *self.text(100)]
            open_chats.append((asked, self.text(answer)))
            yield open_chats[-1]

    def identical(self, requests: int) -> Iterator[Asked]:
        """Yield the same sixty prompts, some of them often."""
        prompts = [self.text(1500) for _ in range(60)]
        for prompt in self.rng.choices(prompts, [1 / (i + 1) for i in range(60)], k=requests):
            yield prompt, self.text(20)

    def documents(self, requests: int, live: int | None = None) -> Iterator[Asked]:
        """Ask about twelve documents. With `live`, a new document replaces each after `live` requests."""
        documents = [self.text(3000) for _ in range(12)]
        for number in range(requests):
            if live and number % (live // 12) == live // 12 - 1:
                documents = [*documents[1:], self.text(3000)]
            [document] = self.rng.choices(documents, [1 / (i + 1) for i in range(12)])
            yield [*document, *self.text(100)], self.text(20)

    def agents(self, requests: int) -> Iterator[Asked]:
        """Grow trees: an agent continues one of the last answers, most often a very recent answer."""
        roots = [self.text(1500) for _ in range(8)]
        nodes = list(roots)
        for _ in range(requests):
            node = nodes[max(len(nodes) - 1 - int(self.rng.expovariate(1 / 15)), 0)]
            prompt = [*(node if len(node) < 6000 else self.rng.choice(roots)), *self.text(self.rng.choice((100, 300)))]
            said = self.text(100)
            nodes.append(prompt + said)
            yield prompt, said

    def rounds(self, sessions: int, rounds: int, calls: int) -> Iterator[Asked]:
        """Yield rounds of `calls` requests; each answer is thoughts and a tool call.

        The user's next message comes with the calls and their results, and without the thoughts.
        """
        system = self.text(600)
        for _ in range(sessions):
            history = system
            for _ in range(rounds):
                history = prompt = [*history, *self.text(150)]
                for left in reversed(range(calls)):
                    thoughts, call, result = self.text(130), self.text(30), self.text(600 if left else 0)
                    yield prompt, [*thoughts, *call]
                    prompt = [*prompt, *thoughts, *call, *result]
                    history = [*history, *call, *result]

    def changes(self, requests: int) -> Iterator[Asked]:
        """Yield documents for the first half, and chats for the second."""
        yield from self.documents(requests // 2)
        yield from self.chats(requests // 2)


KINDS: dict[str, Callable[[Mixes], Iterator[Asked]]] = {
    "chats": lambda mixes: mixes.chats(120),
    "long answers, never edited": lambda mixes: mixes.chats(40, answer=1500),
    "every answer edited": lambda mixes: mixes.chats(120, edited=1),
    "every answer regenerated": lambda mixes: mixes.chats(120, again=1),
    "half of them regenerated": lambda mixes: mixes.chats(120, again=0.5),
    "identical prompts": lambda mixes: mixes.identical(300),
    "a document, many questions": lambda mixes: mixes.documents(300),
    "documents that come and go": lambda mixes: mixes.documents(400, live=96),
    "a tree of agents": lambda mixes: mixes.agents(150),
    "documents, then chats": lambda mixes: mixes.changes(240),
}


def ceiling(traffic: list[Asked]) -> int:
    """Count the prompt tokens that an earlier request began with, at most the length - 1 of each prompt."""
    known: set[int] = set()
    total = 0
    for prompt, said in traffic:
        digest, digests = 0, list[int]()
        for token in [*prompt, *said]:
            digest = hash((digest, token))
            digests.append(digest)
        longest = len(prompt) - 1
        total += next((i for i, digest in enumerate(digests[:longest]) if digest not in known), longest)
        known.update(digests)
    return total
