"""The texts of the zoo: what its tokenizers are trained on, and the conversations of its cells."""

from typing import Any

Conversation = list[dict[str, Any]]

COLOURS = ("green", "blue", "white", "yellow", "black", "brown", "grey", "red", "orange", "pink")
THINGS = (
    "grass", "the sea", "snow", "the sun", "coal", "bread", "a mouse", "blood", "a carrot", "a pig",
)  # fmt: skip
TRAINING_TEXT = [
    "What colour is the sea? The sea is blue, and the grass beside it is green.\n",
    "Name the capital of France. It is Paris; the river there is the Seine.\n\n",
    "You are a helpful assistant who answers briefly. User and assistant take turns.\n",
    "### Instruction:\nWrite one word.\n\n### Response:\nWord\n\n",
    "USER: who are you? ASSISTANT: I'm an assistant, and I don't know more.\n",
    "A system turn, a user turn, an assistant turn: system user assistant model tool\n",
    "Is 12 + 30 = 42? Yes: (12 + 30) is 42, or 0.42 hundred. <think> </think>\n",
    "[INST] Question [/INST] Answer <<SYS>> system <</SYS>> Human: Assistant: User: System:\n",
    "Café naïve résumé Ünïcode 😀 ▁ 中文 text — “quoted” … done.\n",
    *(
        f"{thing.capitalize()} is {colour}.\n"
        for thing, colour in zip(THINGS, COLOURS, strict=True)
    ),
]


def turn(role: str, content: str) -> dict[str, Any]:
    """One message."""
    return {"role": role, "content": content}


# One entry is one more conversation in every cell. No answer is a part of what stands before it.
CONVERSATIONS: dict[str, Conversation] = {
    "one turn": [
        turn("user", "What colour is grass?"),
        turn("assistant", "Green, mostly."),
    ],
    "three turns": [
        turn("user", "What colour is the sea?"),
        turn("assistant", "Blue is its colour"),
        turn("user", "And snow?"),
        turn("assistant", "White as a sheet of paper"),
        turn("user", "Thanks, and coal"),
        turn("assistant", "Coal: black!"),
    ],
    "system": [
        turn("system", "You answer briefly."),
        turn("user", "Name the capital of France."),
        turn("assistant", "Paris"),
    ],
    "many bytes": [
        turn("user", "Wie heißt „naïve“ mit 😀?"),
        turn("assistant", "Cafe\u0301 naïve 😀😀 中文 …\n\nand a second line , isn't it ?"),
    ],
    "white space": [
        turn("user", "  Two spaces before, and a break after.\n"),
        turn("assistant", "  An answer   with spaces \n"),
    ],
    "reasoning": [
        turn("user", "Is 12 + 30 = 42?"),
        turn("assistant", "<think>\nTwelve and thirty\n</think>\n\nYes, 42."),
        turn("user", "Sure?"),
        turn("assistant", "<think>\nAgain\n</think>\n\nCertainly so."),
    ],
    "assistant first": [
        turn("assistant", "Hello there"),
        turn("user", "What colour is blood?"),
        turn("assistant", "Red, I think."),
    ],
}
# Conversations that may be refused by name, although transformers has tokens for them: what the refusal says.
MAY_BE_REFUSED = {"white space": "begin with a line break or a space"}
# Prompts that no template renders.
RAW_PROMPTS = (
    "What colour is the sea? It is",
    "Grass",
    " a space before",
    "Cafe\u0301 naïve 😀 中文\n\nTwo lines\n",
)


def _rows() -> list[Conversation]:
    """Twenty questions with answers of several kinds, for a model to learn by heart."""
    plain = [
        (f"What colour is {thing}?", f"{thing.capitalize()} is {colour}.")
        for thing, colour in zip(THINGS, COLOURS, strict=True)
    ]
    short = [(f"Say {colour}!", f"{colour}, I said") for colour in COLOURS[:6]]
    others = [
        ("Two lines?", "The first line\nand the second"),
        ("Other letters?", "naïve 😀 中文"),
        ("Spaces?", "one  two , three"),
        ("One word?", "Yes"),
    ]
    return [[turn("user", a), turn("assistant", b)] for a, b in (*plain, *short, *others)]


ROWS = _rows()
