"""Generate the recall task: `where is <name> ?` asks for the place of the name's last record.

A record is `<name> went to <place> .`, and a word is a token.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

_NAMES = """
Ada Alan Alice Amos Anna Arthur Barbara Basil Bella Boris Carl Celia Clara Conrad Daniel Daphne
Edgar Edith Elias Emma Ernest Eva Felix Fiona Frank Frida George Greta Hannah Harold Hugo Ida
Irene Isaac Ivan Jacob Jane Jonas Julia Karl Kate Laura Leo Lily Louis Lucy Marie Martin
Max Mona Nadia Nathan Nora Oscar Paula Peter Quentin Rosa Ruth Samuel Sophie Thomas Vera Walter
"""
_PLACES = """
Accra Algiers Amman Amsterdam Ankara Athens Baghdad Bangkok Beijing Beirut Belgrade Berlin Bern Bogota Bratislava
Brussels Bucharest Budapest Cairo Canberra Caracas Copenhagen Dakar Damascus Delhi Dhaka Dublin Hanoi Harare
Havana Helsinki Islamabad Jakarta Kabul Kampala Khartoum Kigali Lima Lisbon Ljubljana London Luanda Lusaka
Madrid Managua Manila Minsk Montevideo Moscow Muscat Nairobi Oslo Ottawa Paris Prague Quito Riga Rome
Santiago Seoul Sofia Tallinn Tokyo Vienna
"""
NAMES: tuple[str, ...] = tuple(_NAMES.split())
PLACES: tuple[str, ...] = tuple(_PLACES.split())
EOS, UNKNOWN = "<eos>", "<unk>"
VOCABULARY: tuple[str, ...] = (EOS, UNKNOWN, "went", "to", ".", "where", "is", "?", *NAMES, *PLACES)
TOKEN_ID: dict[str, int] = {word: token for token, word in enumerate(VOCABULARY)}
FIRST_NAME = TOKEN_ID[NAMES[0]]
FIRST_PLACE = TOKEN_ID[PLACES[0]]

RECORD_TOKENS = 5
ANSWER_TOKENS = 2
BLOCK_TOKENS = 64
NO_LABEL = -100
DEMO_SEED = 3


@dataclass(frozen=True)
class Document:
    records: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        return " ".join(f"{name} went to {place} ." for name, place in self.records)

    @property
    def num_tokens(self) -> int:
        return RECORD_TOKENS * len(self.records)

    @property
    def boundary(self) -> int:
        return self.num_tokens // BLOCK_TOKENS * BLOCK_TOKENS


def question_text(name: str) -> str:
    return f"where is {name} ?"


def answer_text(place: str) -> str:
    return f"{place} ."


def encode(text: str) -> list[int]:
    return [TOKEN_ID[word] for word in text.split()]


def demo_document(seed: int, num_records: int = 822, num_names: int = 32) -> Document:
    rng = random.Random(seed)
    names = rng.sample(NAMES, num_names)
    return Document(tuple((rng.choice(names), rng.choice(PLACES)) for _ in range(num_records)))


def demo_questions(document: Document, seed: int, count: int = 20) -> list[tuple[str, str]]:
    """Return pairs of name and place without a record behind the boundary."""
    last_place = dict(document.records)
    written_late = {name for name, _ in document.records[document.boundary // RECORD_TOKENS :]}
    return random.Random(seed).sample(
        [(name, place) for name, place in last_place.items() if name not in written_late], count
    )


def training_batch(
    rng: np.random.Generator, batch_size: int, num_names: int, num_records: int, num_questions: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return random records with answered questions among them.

    A question without an earlier record of its name asks for the first record's name.

    Returns:
        tokens and labels, int64 [batch_size, 5 * num_records + 6 * num_questions]; -100 outside answers.
    """
    num_items = num_records + num_questions
    rows = np.arange(batch_size)
    first_question = rng.integers(1, num_records, size=(batch_size, 1), endpoint=True)
    order = np.where(np.arange(num_items) < first_question, 2.0, rng.random((batch_size, num_items))).argsort(axis=1)
    is_question = np.zeros((batch_size, num_items), dtype=bool)
    is_question[rows[:, None], order[:, :num_questions]] = True

    names = rng.permuted(np.tile(np.arange(len(NAMES)), (batch_size, 1)), axis=1)
    name = names[rows[:, None], rng.integers(num_names, size=(batch_size, num_items))]
    place = rng.integers(len(PLACES), size=(batch_size, num_items))
    last_place = np.full((batch_size, len(NAMES)), -1)
    for item in range(num_items):
        asks = is_question[:, item]
        unknown = asks & (last_place[rows, name[:, item]] < 0)
        name[:, item] = np.where(unknown, name[:, 0], name[:, item])
        place[:, item] = np.where(asks, last_place[rows, name[:, item]], place[:, item])
        last_place[rows, name[:, item]] = place[:, item]

    name, place = name + FIRST_NAME, place + FIRST_PLACE
    went, to, stop, where, is_, mark = (np.full_like(name, token) for token in encode("went to . where is ?"))
    absent = np.full_like(name, -1)
    question = np.stack((where, is_, name, mark, place, stop), axis=2)
    record = np.stack((name, went, to, place, stop, absent), axis=2)
    items = np.where(is_question[:, :, None], question, record)
    answered = is_question[:, :, None] & (np.arange(items.shape[2]) >= items.shape[2] - ANSWER_TOKENS)
    present = items >= 0
    tokens = items[present].reshape(batch_size, -1)
    return tokens, np.where(answered[present].reshape(batch_size, -1), tokens, NO_LABEL)
