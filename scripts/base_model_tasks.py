"""The training examples of the shipped base model: a list of diagnoses, and random tasks made of them.

Examples are texts in the chat format of the model. This module knows only the special tokens, no model and no chapter
of any classification. Next: `scripts/make_base_model.py`.
"""

import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

PAD, END, SYSTEM, USER, ASSISTANT = SPECIAL = (
    "<|pad|>",
    "<|end|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
)
VOCABULARY = 3072
# The kinds of question about a group, with the number of groups of that kind.
GROUPINGS = {"group": 40, "narrow group": 160, "smallest group": 600}
LATENT_DIMENSIONS = 128

# 1. The diagnoses


class Corpus:
    """The diagnoses, their words, and the diagnoses that contain each word or stem."""

    def __init__(self, diagnoses: Sequence[str]) -> None:
        self.diagnoses = list(diagnoses)
        self.vocabulary = sorted({word for text in self.diagnoses for word in words(text)})
        holders: defaultdict[str, list[int]] = defaultdict(list)
        for index, text in enumerate(self.diagnoses):
            for key in keys(text):
                holders[key].append(index)
        self.holders = {
            key: indices for key, indices in holders.items() if 2 <= len(indices) <= 400
        }
        matrix = KeyMatrix.of(self.diagnoses)
        self.groupings = {kind: group(matrix, count) for kind, count in GROUPINGS.items()}

    def draw(self, rng: random.Random) -> str:
        return rng.choice(self.diagnoses)

    def related(self, text: str, rng: random.Random) -> str | None:
        """Another diagnosis that shares one of the rarer words or stems; None when it shares none."""
        known = [key for key in keys(text) if key in self.holders]
        if not known:
            return None
        weights = [1 / len(self.holders[key]) ** 0.5 for key in known]
        key = rng.choices(known, weights)[0]
        other = self.diagnoses[rng.choice(self.holders[key])]
        return other if other != text else None


def words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


def keys(text: str) -> list[str]:
    """The words of a text and the first and last letters of its longer words, each once, in a fixed order.

    Medical words share stems: `nephr-` and `-pathy` relate diagnoses that have no word in common.
    """
    found = dict.fromkeys(words(text))
    for word in list(found):
        if len(word) > 6:
            found.update({word[:5] + "-": None, "-" + word[-5:]: None})
    return list(found)


@dataclass(frozen=True)
class KeyMatrix:
    """Diagnoses (rows) by keys (columns), sparse; rows have length 1, and rare keys weigh more."""

    names: list[str]
    rows: torch.Tensor
    columns: torch.Tensor
    values: torch.Tensor
    diagnoses: int

    @classmethod
    def of(cls, diagnoses: Sequence[str]) -> "KeyMatrix":
        held = [keys(text) for text in diagnoses]
        counts = Counter(key for found in held for key in found)
        names = [key for key, count in counts.items() if count > 1]
        column = {name: index for index, name in enumerate(names)}
        places = [
            (row, column[key]) for row, found in enumerate(held) for key in found if key in column
        ]
        rows, columns = torch.tensor(places).T
        rarity = torch.tensor([math.log(len(diagnoses) / counts[name]) for name in names])
        values = rarity[columns]
        lengths = torch.zeros(len(diagnoses)).index_add_(0, rows, values**2).sqrt()
        return cls(names, rows, columns, values / lengths[rows], len(diagnoses))

    def latent(self) -> torch.Tensor:
        """Latent semantic vectors of length 1, shape (diagnoses, LATENT_DIMENSIONS)."""
        shape = (self.diagnoses, len(self.names))
        places = torch.stack([self.rows, self.columns])
        matrix = torch.sparse_coo_tensor(
            places, self.values, shape, check_invariants=True
        ).coalesce()
        directions = torch.svd_lowrank(matrix, q=LATENT_DIMENSIONS, niter=2)[2]
        return torch.nn.functional.normalize(torch.sparse.mm(matrix, directions), dim=1)


def group(matrix: KeyMatrix, count: int) -> list[str]:
    """The name of each diagnosis' group: k-means over latent vectors, named by three typical words."""
    points = matrix.latent()
    centres = points[torch.randperm(len(points))[:count]]
    nearest = torch.zeros(len(points), dtype=torch.long)
    for _ in range(20):
        nearest = (points @ centres.T).argmax(dim=1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, points)
        centres = torch.nn.functional.normalize(sums, dim=1)
    weights = torch.zeros(count, len(matrix.names))
    weights.index_put_((nearest[matrix.rows], matrix.columns), matrix.values, accumulate=True)
    weights[:, [not name.isalpha() or len(name) < 4 for name in matrix.names]] = 0
    titles = [" ".join(matrix.names[int(i)] for i in top) for top in weights.topk(3).indices]
    return [titles[int(index)] for index in nearest]


# 2. Tasks


@dataclass(frozen=True)
class Piece:
    """A piece of an example: text or token ids, and whether they are learnt."""

    content: str | tuple[int, ...]
    learnt: bool


Example = list[Piece]
Task = Callable[[random.Random, Corpus], "Example | None"]

PHRASES = {
    "repeat": ("Repeat this:", "Copy the text:", "Say it again:", "Echo this text exactly:"),
    "lower": ("Write in lower case:", "Make this lower case:"),
    "upper": ("Write in capital letters:", "Make this upper case:"),
    "fill": ("Fill in the blank:", "Which words are missing here?", "What belongs in the gap?"),
    "complete": ("Complete this diagnosis:", "Continue:", "How does this text go on?"),
    "first": ("What is the first word?", "Which word comes first?"),
    "last": ("What is the last word?", "Which word comes last?"),
    "related": (
        "Which other diagnosis is related to this diagnosis?",
        "Name a diagnosis that belongs to the same group as this one:",
        "What is similar to this diagnosis?",
    ),
    "choose": (
        "Which of these does this diagnosis belong to?",
        "Choose the one that is related to this diagnosis.",
        "Answer with one of the listed texts.",
    ),
    "words": (
        "Which ICD-10-CM words go with this diagnosis?",
        "List words that are often used with this diagnosis:",
    ),
    "group": ("Which group does this diagnosis belong to?",),
    "narrow group": ("Which narrow group does this diagnosis belong to?",),
    "smallest group": ("Which ICD-10-CM words name the smallest group this diagnosis belongs to?",),
    "look_up": ("Look it up:", "What is the value of", "Find this in the list:"),
    "list": ("List these items in order:", "Read the list back:"),
    "reverse": ("List these in reverse order:", "Say the words backwards:"),
}
SYSTEMS = (
    "You are a helpful assistant.",
    "You answer questions about diagnoses.",
    "Answer with the text only.",
    "You are a careful medical coder. Answer briefly.",
)


def chat(
    kind: str, question: str, answer: str, rng: random.Random, *, learn_question: bool = True
) -> Example:
    """One user turn and its answer. Questions are learnt too unless they are random: more signal for each pass."""
    opening = rng.choice(PHRASES[kind])
    system = [Piece(SYSTEM + rng.choice(SYSTEMS), learnt=False)] if rng.random() < 0.1 else []
    return [
        *system,
        Piece(USER + opening, learnt=False),
        Piece(rng.choice((" ", " ", "\n\n")) + question, learnt=learn_question),
        Piece(ASSISTANT, learnt=False),
        Piece(answer + END, learnt=True),
    ]


def document(rng: random.Random, corpus: Corpus) -> Example:
    return [Piece(rng.choice((" ", "")) + corpus.draw(rng) + END, learnt=True)]


def neighbours(rng: random.Random, corpus: Corpus) -> Example:
    """Several diagnoses, each related to the first."""
    first = corpus.draw(rng)
    texts = [first, *(corpus.related(first, rng) for _ in range(3))]
    return [Piece(" " + "; ".join(dict.fromkeys(t for t in texts if t)) + END, learnt=True)]


def repeat(rng: random.Random, corpus: Corpus) -> Example:
    text = corpus.draw(rng)
    return chat("repeat", text, text, rng)


def repeat_words(rng: random.Random, corpus: Corpus) -> Example:
    """Words in random order: only copying predicts the next one."""
    count = rng.choice((2, 3, 4, 5, 6, 8, 12, 40))
    text = " ".join(random_case(word, rng) for word in rng.choices(corpus.vocabulary, k=count))
    return chat("repeat", text, text, rng, learn_question=False)


def repeat_tokens(rng: random.Random, _corpus: Corpus) -> Example:
    """Repeat random tokens, so that every embedding is trained: LoRA cannot change the tied embeddings later."""
    ids = tuple(
        rng.randrange(len(SPECIAL), VOCABULARY) for _ in range(rng.choice((2, 4, 8, 16, 40)))
    )
    return [
        Piece(USER + rng.choice(PHRASES["repeat"]) + " ", learnt=False),
        Piece(ids, learnt=False),
        Piece(ASSISTANT, learnt=False),
        Piece(ids, learnt=True),
        Piece(END, learnt=True),
    ]


def lower_case(rng: random.Random, corpus: Corpus) -> Example:
    text = corpus.draw(rng)
    return chat("lower", text, text.lower(), rng)


def upper_case(rng: random.Random, corpus: Corpus) -> Example:
    text = " ".join(rng.choices(corpus.vocabulary, k=rng.randint(1, 3)))
    return chat("upper", text, text.upper(), rng, learn_question=False)


def fill(rng: random.Random, corpus: Corpus) -> Example:
    """Fill in one to three missing words, from the words before and after the gap."""
    parts = corpus.draw(rng).split(" ")
    size = rng.randint(1, min(3, len(parts)))
    start = rng.randint(0, len(parts) - size)
    question = " ".join([*parts[:start], "___", *parts[start + size :]])
    return chat("fill", question, " ".join(parts[start : start + size]), rng)


def complete(rng: random.Random, corpus: Corpus) -> Example | None:
    parts = corpus.draw(rng).split(" ")
    if len(parts) < 2:
        return None
    cut = rng.randint(1, len(parts) - 1)
    return chat("complete", " ".join(parts[:cut]), " ".join(parts[cut:]), rng)


def first_word(rng: random.Random, corpus: Corpus) -> Example:
    text = corpus.draw(rng)
    return chat("first", text, text.split(" ")[0], rng)


def last_word(rng: random.Random, corpus: Corpus) -> Example:
    text = corpus.draw(rng)
    return chat("last", text, text.split(" ")[-1], rng)


def related(rng: random.Random, corpus: Corpus) -> Example | None:
    text = corpus.draw(rng)
    other = corpus.related(text, rng)
    return chat("related", text, other, rng) if other else None


def choose(rng: random.Random, corpus: Corpus) -> Example | None:
    """Find the related diagnosis among others and copy it: comparing meanings, and answering from a list."""
    text = corpus.draw(rng)
    other = corpus.related(text, rng)
    if other is None:
        return None
    options = [other, *(corpus.draw(rng) for _ in range(rng.randint(1, 4)))]
    rng.shuffle(options)
    return chat("choose", f"{text}\n" + "\n".join(options), other, rng, learn_question=False)


def word_neighbours(rng: random.Random, corpus: Corpus) -> Example | None:
    """List words of related diagnoses that this one does not contain."""
    text = corpus.draw(rng)
    related_texts = [corpus.related(text, rng) for _ in range(3)]
    own = set(words(text))
    others = [w for t in related_texts if t for w in words(t) if len(w) > 4 and w not in own]
    others = list(dict.fromkeys(others))
    if not others:
        return None
    return chat("words", text, ", ".join(rng.sample(others, min(4, len(others)))), rng)


def grouped(rng: random.Random, corpus: Corpus) -> Example:
    """Name the group of a diagnosis, which depends on the whole text before the first word of the answer."""
    kind, titles = rng.choice(list(corpus.groupings.items()))
    index = rng.randrange(len(titles))
    return chat(kind, corpus.diagnoses[index], titles[index], rng)


def look_up(rng: random.Random, corpus: Corpus) -> Example:
    names = rng.sample(corpus.vocabulary, rng.choice((2, 4, 8, 16)))
    table = {name: rng.choice(corpus.vocabulary) for name in names}
    name = rng.choice(names)
    question = f"{name}\n" + "\n".join(f"{key}: {value}" for key, value in table.items())
    return chat("look_up", question, table[name], rng, learn_question=False)


def read_list(rng: random.Random, corpus: Corpus) -> Example:
    items = [corpus.draw(rng) for _ in range(rng.choice((2, 3, 5, 12)))]
    return chat("list", "\n".join(items), ", ".join(items), rng, learn_question=False)


def reverse_list(rng: random.Random, corpus: Corpus) -> Example:
    items = rng.choices(corpus.vocabulary, k=rng.randint(2, 6))
    return chat("reverse", " ".join(items), " ".join(reversed(items)), rng, learn_question=False)


def random_case(word: str, rng: random.Random) -> str:
    return rng.choice((word, word, word.capitalize(), word.upper()))


MIX: dict[Task, float] = {  # the share of examples, not of tokens
    document: 28,
    neighbours: 6,
    repeat: 2,
    repeat_words: 4,
    repeat_tokens: 5,
    lower_case: 5,
    upper_case: 1,
    fill: 20,
    complete: 2,
    first_word: 1,
    last_word: 1,
    related: 7,
    choose: 3,
    word_neighbours: 7,
    grouped: 24,
    look_up: 1,
    read_list: 0.5,
    reverse_list: 1,
}


def examples(corpus: Corpus, rng: random.Random, count: int) -> list[Example]:
    tasks, weights = list(MIX), list(MIX.values())
    made: list[Example] = []
    while len(made) < count:
        for task in rng.choices(tasks, weights, k=count - len(made)):
            example = task(rng, corpus)
            if example is not None:
                made.append(example)
    return made
