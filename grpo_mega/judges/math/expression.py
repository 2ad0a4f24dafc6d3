"""Distinguishes expressions, which sympy can compare, from words, which equal only the same words."""

from __future__ import annotations

import re

from grpo_mega.judges.math.form import Expression, Form, Words

_FUNCTIONS = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp max min gcd lcm"
_GREEK = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau phi varphi chi "
    "psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"
)
_COMMANDS = frozenset(f"frac sqrt binom cdot pi circ infty lfloor rfloor lceil rceil {_FUNCTIONS} {_GREEK}".split())
_ALLOWED = re.compile(r"[-A-Za-z0-9+*/^_(){}\[\]|!. \\]+")
_PRODUCT_OF_LETTERS = re.compile(r"[a-z]{1,2}|[abckmnpqrstxyz]{3}|[A-Z]")
_SHORT_WORDS = re.compile("no|on|in|at|up|it|is|an|as|be|so|he|we|me|my|us|am|pm")
_CONFUSED = re.compile(r"\d \d|\s!|!!|[A-Za-z]\d|\.\.|(?<!\d)\.(?!\d)|\\[^A-Za-z]|\|\||[-+*/] ?[+*/]|[-+] ?-|[-+*/^_]$")


def expression_or_words(text: str) -> Form:
    """Parses a text as an expression if it is written wholly in known notation, else as words."""
    bare = re.sub(r"\\([A-Za-z]+)", " ", text)
    commands = re.findall(r"\\([A-Za-z]+)", text)
    known = _ALLOWED.fullmatch(text) and all(command in _COMMANDS for command in commands)
    runs = re.findall(r"[A-Za-z]+", re.sub(r"_\{[A-Za-z0-9]*\}", " ", bare))
    letters = all(_PRODUCT_OF_LETTERS.fullmatch(run) for run in runs)
    word = re.fullmatch(r"[A-Za-z]", text) or _SHORT_WORDS.fullmatch(text)
    if not known or not letters or word or _CONFUSED.search(re.sub(r"_\{[^{}]*\}", " ", text)):
        return Words(plain_words(text))
    return Expression(text)


def plain_words(text: str) -> str:
    """The text reduced to its words: without text commands, articles and quotes, and in lower case except for names."""
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).strip(' "')
    if not re.fullmatch(r"[A-Za-z][-A-Za-z0-9 .']*", text):
        return re.sub(r"\s", "", text)
    text = re.sub(r"^(?:option|choice) (?=\(?[A-Z]\)?$)", "", " ".join(text.split()), flags=re.IGNORECASE)
    text = re.sub(r"(?<=[0-9])(?:st|nd|rd|th)(?![a-z])", "", text)  # March 14th
    text = re.sub(r"^(?:the|an?) (?=[A-Za-z])", "", text, flags=re.IGNORECASE)
    name = re.fullmatch(r"[A-Z]+|[A-Za-z]", text) and text not in ("YES", "NO", "TRUE", "FALSE")
    return text if name else text.lower()
