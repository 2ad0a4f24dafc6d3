r"""Normalises the many spellings of an answer to one, in text steps, before `parse.py` reads the structure.

Every step maps text to text and keeps the meaning; texts are short (`verify.MAX_CHARACTERS`). Unknown notation stays
unchanged and then equals only the same text. Look-alikes (full-width digits, Cyrillic letters) are not folded.
"""

from __future__ import annotations

import re

SYMBOLS = {
    **dict.fromkeys("\u2212\u2013\u2010\u2011", "-"),
    **dict.fromkeys("\u00a0\u2009\u202f", " "),
    **{
        "\u00d7": r"\cdot ",
        "\u00b7": r"\cdot ",
        "\u22c5": r"\cdot ",
        "\u00f7": "/",
        "\u00b1": r"\pm ",
        "\u2213": r"\mp ",
    },
    **{
        "\u03c0": r"\pi ",
        "\u221e": r"\infty ",
        "\u00b0": r"^{\circ}",
        "\u2205": r"\emptyset ",
        "\u211d": r"\mathbb{R}",
    },
    **{
        "\u2264": r"\le ",
        "\u2265": r"\ge ",
        "\u2260": r"\ne ",
        "\u2208": r"\in ",
        "\u222a": r"\cup ",
        "\u221a": r"\sqrt ",
    },
    **{"\u00bd": r"\frac{1}{2}", "\u00bc": r"\frac{1}{4}", "\u00be": r"\frac{3}{4}", "\u2153": r"\frac{1}{3}"},
    **{
        "\u2154": r"\frac{2}{3}",
        "\u00a3": r"\pounds ",
        "\u00a2": r"\text{ cents}",
        "\u20ac": r"\euro ",
        "\u2019": "'",
        "\u2032": "'",
        "\u2033": "''",
        "\u201c": '"',
        "\u201d": '"',
    },
    **{"\u2a7d": r"\le ", "\u2a7e": r"\ge ", "\u2248": r"\approx ", "\u2229": r"\cap ", "\u2124": r"\mathbb{Z}"},
    **{"\u2026": r"\ldots ", "\u22ef": r"\ldots ", "\u2220": r"\angle ", "\u25b3": r"\triangle "},
    **{"\u00c5": r"\text{Angstrom}", "\u212b": r"\text{Angstrom}"},
    **{"\u00b5": r"\mu ", "\u03bc": r"\mu ", "\u03a9": r"\Omega ", "\u2126": r"\Omega "},
    **{"\u00a5": r"\yen ", "\uffe5": r"\yen ", "\u20b9": r"\rupee "},
    **{"\u00ba": r"^{\circ}", "\u2103": r"^{\circ}\text{C}", "\u2109": r"^{\circ}\text{F}"},
    **{
        sign: rf"\{name} "
        for sign, name in zip(
            "\u03b1\u03b2\u03b3\u03b8\u03bb\u03c6", ["alpha", "beta", "gamma", "theta", "lambda", "phi"], strict=True
        )
    },
    **dict(
        zip(
            "\uff0c\u3001\uff1b\uff1a\uff08\uff09\uff1d\uff0b\uff0d\uff1c\uff1e\uff05\u3002",
            ",,;:()=+-<>%.",
            strict=True,
        )
    ),
}
"""Typographic signs with one mathematical meaning -> LaTeX."""

COMMANDS = {
    **dict.fromkeys(["dfrac", "tfrac", "cfrac"], r"\frac"),
    **dict.fromkeys(["dbinom", "tbinom"], r"\binom"),
    **dict.fromkeys(["leq", "leqslant", "leqq"], r"\le"),
    **dict.fromkeys(["geq", "geqslant", "geqq"], r"\ge"),
    **{"neq": r"\ne", "times": r"\cdot", "lt": "<", "gt": ">", "varnothing": r"\emptyset", "degree": r"^{\circ}"},
    **{"lbrace": r"\{", "rbrace": r"\}", "lvert": "|", "rvert": "|", "vert": "|", "backslash": r"\setminus"},
    **{"langle": "(", "rangle": ")", "vee": " or ", "lor": " or ", "colon": ":"},
    **dict.fromkeys(["displaystyle", "textstyle", "scriptstyle", "limits", "left", "right", "middle"], ""),
    **dict.fromkeys(["big", "Big", "bigg", "Bigg", "bigl", "bigr", "Bigl", "Bigr", "biggl", "biggr"], ""),
    **dict.fromkeys(["tiny", "small", "normalsize", "large", "Large", "LARGE", "huge", "Huge", "bf", "rm", "it"], ""),
    **dict.fromkeys(["quad", "qquad", "thinspace", "hspace", "enspace"], " "),
    **dict.fromkeys(["dots", "cdots", "dotsc", "dotsb"], r"\ldots"),
    **dict.fromkeys(["doteq", "simeq", "thickapprox", "approxeq"], r"\approx"),
    **{"bigcup": r"\cup", "bigcap": r"\cap", "land": " and ", "wedge": " and ", "top": "T"},
    **{"tg": r"\tan", "ctg": r"\cot", "arctg": r"\arctan", "lg": r"\log_{10}"},
    **{
        "sh": r"\sinh",
        "ch": r"\cosh",
        "th": r"\tanh",
        "R": r"\mathbb{R}",
        "Z": r"\mathbb{Z}",
        "AA": r"\text{Angstrom}",
    },
}
r"""LaTeX commands that are synonyms of another command, or only change the layout -> replacement."""

UPRIGHT = "text|textbf|textit|textrm|textnormal|textsf|texttt|textup|emph|mbox|hbox|mathrm|mathit|rm"
r"""Font commands of words and units; `\mathrm{e}` and `\mathrm{i}` are the constants."""
BOLD = r"mathbf|boldsymbol|bm|mathsf|underline|pmb|boldmath|(?:hat|vec|overrightarrow)(?=\s*\{+\\?[ijk](?:math)?\}+)"
"""Font and line commands that may surround any formula."""

SUPERSCRIPTS = dict(
    zip("\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079", "-0123456789", strict=True)
)
"""Superscript digits and the superscript minus sign."""

_RAISED = re.compile(f"(?<=[0-9A-Za-z)}}\\]])\u207b?[{''.join(SUPERSCRIPTS)[1:]}]+")
_SYMBOLS = {ord(sign): latex for sign, latex in SYMBOLS.items()}
# "The final answer is: ..." at the start of an answer, in English or Chinese.
_ANSWER_IS = re.compile(
    r"^(?:\\text[a-z]{0,2}\{\s*)?(?:(?:the\s+)?(?:final\s+|correct\s+)?(?:answer|result)(?:\s+is)?\s*(?::|(?<=is))"
    r"|\u7b54\u6848?(?:[\u662f\u4e3a]:?|:))\s*(?:\}\s*)?",
    re.IGNORECASE,
)
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_UPRIGHT = re.compile(rf"\\(?:{UPRIGHT})\s*\{{((?:[^{{}}]|\{{[^{{}}]*\}})*)\}}")
_BOLD = re.compile(rf"\\(?:{BOLD})\s*(?=\{{)")
_HAN = "\u4e00-\u9fff"
_JOINS = {
    **dict.fromkeys(["\u6216", "\u6216\u8005"], " or "),
    **dict.fromkeys("\u548c\u4e0e\u53ca\u4e14", " and "),
    "\u5e76\u4e14": " and ",
}
# Chinese "or" and "and" join values only where no other Chinese character touches them; elsewhere they are parts of
# words.
_JOIN = re.compile(f"(?<![{_HAN}])(?:{'|'.join(_JOINS)})(?![{_HAN}])")
_ARGUMENT = r"([0-9A-Za-z]|\\[A-Za-z]+)"
_BARE_FIRST = re.compile(rf"\\(frac|binom|sqrt)(\[[^\[\]]*\])?\s*{_ARGUMENT}(?!\w*\()")
_TWO_ARGUMENTS = re.compile(r"\\(?:frac|binom)\s*(?=\{)")
_POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12, "\u4e07": 4, "\u4ebf": 8}
_MAGNITUDE = re.compile(rf"(?<![0-9\\^{{])([0-9][0-9.,]*) ?(\\text\{{ ?)?({'|'.join(_POWERS)})(?![a-z])(\}}?)")
_ABOUT = re.compile(
    r"(?<=[0-9A-Za-z})]) ?(?:\\text\{)? ?\(?,? ?(?:\\text\{)? ?(?:or |which is |that is )?"
    r"(?:\\approx|about|approximately|approx\.?|roughly) ?\}? ?([0-9.,]+) ?(?:\})? ?\)?\}?$"
)
# All spellings of a modulus: `\pmod{5}`, `(\mod 5)`, `(\text{mod } 5)`. Possessive quantifiers keep long runs of spaces
# from taking quadratic time.
_MODULUS = re.compile(
    r"[\s~]*+\(?+[\s~]*+(?:\\[pb]?mod|\\(?:text|mathrm|operatorname)\{ ?mod ?\})(?![a-z])(?:[\s~]|\\ )*"
    r"\{?([0-9]+|[a-z])\}?[\s~]*\)?"
)
_OVER = re.compile(r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}")
_CHOOSE = re.compile(r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}")
_PLAIN_FUNCTION = re.compile(r"(?<![\\A-Za-z])(arc(?:sin|cos|tan)|sin|cos|tan|cot|sec|csc|log|ln|exp)(?=[(^_])")


def normalize(text: str) -> str:
    """The text after all `STEPS`, in order."""
    for step in STEPS:
        text = step(text)
    return text


def fold_symbols(text: str) -> str:
    r"""Turns typographic signs into LaTeX: `π/2` is `\pi /2`, `x²` is `x^{2}`; `√` takes the `12` or `(x)` after it.

    Chinese "or" and "and" between formulas become the English words.
    """
    # Before the translation below, because a LaTeX command would not show how far its argument reaches: the
    # superscripts of a run are one exponent, and a root takes the whole number after it.
    text = _RAISED.sub(lambda match: "^{" + "".join(SUPERSCRIPTS[sign] for sign in match[0]) + "}", text)
    text = re.sub("\u221a\\s*([0-9]+|[A-Za-z])", r"\\sqrt{\1}", text)
    text = re.sub("\u221a\\s*(?=\\()", "sqrt", text)
    text = _JOIN.sub(lambda match: _JOINS[match[0]], text)
    return re.sub(r"\.{3}", r"\\ldots ", text.translate(_SYMBOLS))


def unwrap_delimiters(text: str) -> str:
    r"""Removes delimiters around a text: `$...$`, `\(...\)`, `**...**`, quotes, a final full stop, "answer:"."""
    text = _ANSWER_IS.sub("", text.strip())
    text = re.sub(r"(?<=[^.\s])\s*\.$", "", text)
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ('"', '"')):
        inner = text[len(opening) : len(text) - len(closing)]
        # `$1$ or $2$` also starts and ends with the delimiter, but the delimiters do not surround the whole text.
        framed = len(text) > len(opening + closing) and text.startswith(opening) and text.endswith(closing)
        if framed and opening not in inner and closing not in inner:
            text = re.sub(r"(?<=[^.\s])\s*\.$", "", inner.strip())
    # A `$` that is still left before a number is the currency.
    return re.sub(r"(?<!\\)\$(?=\s*[0-9.])", r"\\$", text)


def unify_commands(text: str) -> str:
    r"""Removes layout commands and replaces synonyms: `\left(\dfrac12\right)` is `(\frac12)`, `70\,000` is `70 000`."""
    # `\\[2pt]` ends a row of a matrix and adds space below it.
    text = re.sub(r"\\\\\s*\[[0-9.]+ *(?:pt|ex|em|mm|cm)\]", r"\\\\", text)
    text = text.replace(r"\%", "%").replace("{,}", ",")
    text = re.sub(r"(?<![A-Za-z])\{:\}", ":", text)
    text = _MODULUS.sub(lambda match: rf" \pmod{{{match[1]}}}", text)
    text = re.sub(r",\\!\s*", ",", text).replace(r"\!", "")
    text = re.sub(r"(?<!\\)\\[,;:> ]|~", " ", text)
    text = re.sub(r"\\(?:text)?color\s*\{[a-z]*\}", "", text)
    text = re.sub(r"\\operatorname\*?\s*\{([A-Za-z]+)\}", r"\\\1 ", text)
    text = re.sub(r"\\mathbb\s*([A-Z])", r"\\mathbb{\1}", text)
    text = _COMMAND.sub(lambda match: COMMANDS.get(match[1], match[0]), text)
    return text.replace("<=", r"\le ").replace(">=", r"\ge ").replace("!=", r"\ne ")


def unify_fonts(text: str) -> str:
    r"""Unites fonts: `\mathrm{~cm}` and `\mbox{ cm}` become `\text{ cm}`; `\mathbf{64}` and `\text{64}` become `64`."""
    # Each pass removes one level of nested fonts.
    for _ in range(3):
        text = _UPRIGHT.sub(lambda match: _upright(match[1]), text)
        text = _BOLD.sub("", text)
        if whole := re.fullmatch(r"\s*\\text\{([^{}]*)\}\s*", text):
            text = re.sub(r"(?<=[A-Za-z]{2})[.!]\s*$", "", whole[1])
    text = re.sub(r"\\text\{ ?(\\(?:yen|rupee|euro|pounds|\$)|Rs\.?|INR|USD|CNY|RMB|EUR|GBP) ?\}", r"\1 ", text)
    # `42^{\text{nd}}` is `42nd`.
    text = re.sub(r"(?<=[0-9]) ?(?:\^ ?)?\{? ?\\text\{ ?-?(st|nd|rd|th) ?\} ?\}?$", r"\1", text)
    text = re.sub(r"(?<=[0-9]) ?\^ ?\{(st|nd|rd|th)\}$", r"\1", text)
    text = re.sub(r"\\text\{ ?\^\{\\circ\} ?([CF]) ?\}", r"^{\\circ}\\text{\1}", text)
    text = re.sub(r"(?<=[^.\s])\s*\.$", "", text)
    return re.sub(r"\\text\{[\s,]*(and|or|to)\s*\}", r" \1 ", text)


def repeating_decimals(text: str) -> str:
    r"""Unites the notations of a period: `0.\dot{3}`, `0.(3)` and `0.\bar{3}` are `0.\overline{3}`."""
    text = re.sub(r"\\dot\s*\{?([0-9])\}?([0-9]*)\\dot\s*\{?([0-9])\}?", r"\\overline{\1\2\3}", text)
    text = re.sub(r"(?<=[.0-9])\\(?:dot|bar)\s*\{?([0-9]+)\}?", r"\\overline{\1}", text)
    return re.sub(r"(?<![0-9])([0-9]*\.[0-9]*)\(([0-9]+)\)", r"\1\\overline{\2}", text)


def _upright(content: str) -> str:
    r"""The content in `\text{}` if it is words or a unit, bare if it is a number, a formula, `e` or `i`."""
    formula = re.search(r"\\(?:[dt]?frac|sqrt|pi|binom)(?![A-Za-z])", content)
    if content in ("e", "i") or formula or not re.search(r"[A-Za-z]", content):
        return content
    return rf"\text{{{content}}}"


def large_numbers(text: str) -> str:
    r"""Turns the words of powers of ten after a number into the power: `2.5\text{ million}` is `2.5 \cdot 10^{6}`."""
    return _MAGNITUDE.sub(
        lambda match: (
            rf"{match[1]} \cdot 10^{{{_POWERS[match[3]]}}}" + (r"\text{" if match[2] and match[4] != "}" else "")
        ),
        text,
    )


def approximations(text: str) -> str:
    r"""Turns words that announce an approximation after a value into `\approx`: `\sqrt{7}\text{ (about 2.65)}`."""
    return _ABOUT.sub(r" \\approx \1", text)


def spell_out(text: str) -> str:
    r"""Turns plain-text mathematics into LaTeX: `2*sqrt(3)`, `x**2`, `pi/2`, `sin(x)`, `infinity`."""
    # A regular expression cannot find the parenthesis that closes a root, as the argument may have its own.
    start = text.find("sqrt(")
    while start >= 0:
        end = closing(text, start + 4)
        if end < 0:
            break
        command = "sqrt{" if text[start - 1 : start] == "\\" else r"\sqrt{"
        text = text[:start] + command + text[start + 5 : end] + "}" + text[end + 1 :]
        start = text.find("sqrt(", start)
    text = re.sub(r"(?<![\\A-Za-z])(pi)(?![A-Za-z])", r"\\pi ", text)
    text = re.sub(r"(?<![\\A-Za-z])infinity(?![A-Za-z])", r"\\infty ", text, flags=re.IGNORECASE)
    text = _PLAIN_FUNCTION.sub(r"\\\1", text).replace("**", "^")
    return re.sub(r"(?<!^)\*", r"\\cdot ", text)


def complete_arguments(text: str) -> str:
    r"""Puts every argument in braces: `\frac12`, `\sqrt3`, `x^10`, `x_1`, `{1 \over 2}`."""
    text = _CHOOSE.sub(r"\\binom{\1}{\2}", _OVER.sub(r"\\frac{\1}{\2}", text))
    text = re.sub(r"\\frac ?([0-9]) ?([0-9])(?![0-9])", r"\\frac{\1}{\2}", text)
    text = _BARE_FIRST.sub(lambda match: f"\\{match[1]}{match[2] or ''}{{{match[3]}}}", text)
    # From the last match to the first, so that a replacement does not shift the positions of those still to come.
    for match in reversed(list(_TWO_ARGUMENTS.finditer(text))):
        end = closing(text, match.end()) + 1
        if end and (second := re.compile(rf"\s*{_ARGUMENT}").match(text, end)):
            text = f"{text[:end]}{{{second[1]}}}{text[second.end() :]}"
    text = re.sub(r"\^\s*(-?[0-9]+|[A-Za-z]|\\circ|\\prime)(?![0-9])", r"^{\1}", text)
    text = re.sub(r"_\s*([0-9]+|[A-Za-z])", r"_{\1}", text)
    text = re.sub(r"\^\{\s*(?:\\circ|o|\\text\{o\})\s*\}", r"^{\\circ}", text)
    return re.sub(r"\\(frac|sqrt|binom)\s+(?=[\[{])", r"\\\1", re.sub(r"\}\s+\{", "}{", text))


def standard_interval(text: str) -> str:
    r"""Rewrites the French `]-\infty, 2]` as `(-\infty, 2]`."""
    if match := re.fullmatch(r"\s*([\[\]])([^\[\]()]*,[^\[\]()]*)([\[\]])\s*", text):
        return f"{'[' if match[1] == '[' else '('}{match[2]}{']' if match[3] == ']' else ')'}"
    return text


def single_spaces(text: str) -> str:
    """Replaces runs of white space by one space."""
    return " ".join(text.split())


# The order matters. Signs, delimiters and synonyms come first, so that later patterns meet one spelling of each
# command; magnitudes and approximations look for the `\text{}` of `unify_fonts`; `complete_arguments` puts the
# exponents for which `spell_out` wrote `^` in braces; replaced commands leave spaces, which go last.
STEPS = (
    fold_symbols,
    unwrap_delimiters,
    unify_commands,
    unify_fonts,
    repeating_decimals,
    large_numbers,
    approximations,
    spell_out,
    complete_arguments,
    standard_interval,
    single_spaces,
)


def closing(text: str, opening: int) -> int:
    """Index of the bracket that closes the one at `opening`, or -1; brackets of all kinds match: `[0, 1)`."""
    depth = 0
    for index in range(opening, len(text)):
        depth += (text[index] in "([{") - (text[index] in ")]}")
        if depth == 0:
            return index
    return -1
