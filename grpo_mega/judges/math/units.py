r"""Names of units, currencies and counted things, which may follow a value without changing it."""

from __future__ import annotations

import re

_SPELLINGS = {
    "%": "percent percents pct percentage",
    "degree": "degrees deg \u5ea6",
    "dollar": "dollars usd buck bucks",
    "cent": "cents",
    "euro": "euros eur",
    "pound sterling": "gbp",
    "yuan": "rmb cny \u5143 \u4eba\u6c11\u5e01 \u5757\u94b1",
    "rupee": "rupees rs inr",
    "m": "meter meters metre metres \u7c73",
    "cm": "centimeter centimeters centimetre centimetres cms \u5398\u7c73",
    "mm": "millimeter millimeters millimetre millimetres \u6beb\u7c73",
    "km": "kilometer kilometers kilometre kilometres kms \u5343\u7c73 \u516c\u91cc",
    "in": "inch inches",
    "ft": "foot feet",
    "yd": "yard yards",
    "mi": "mile miles",
    "g": "gram grams \u514b",
    "kg": "kilogram kilograms kilo kilos kgs \u5343\u514b \u516c\u65a4",
    "milligram": "milligrams",
    "lb": "lbs",
    "oz": "ounce ounces",
    "L": "l liter liters litre litres \u5347",
    "mL": "ml milliliter milliliters \u6beb\u5347",
    "gal": "gallon gallons",
    "s": "sec secs second seconds \u79d2",
    "min": "mins minute minutes \u5206\u949f \u5206",
    "h": "hr hrs hour hours \u5c0f\u65f6 \u65f6",
    "day": "days \u5929 \u65e5",
    "week": "weeks",
    "month": "months \u6708 \u4e2a\u6708",
    "year": "years yr yrs \u5e74 \u5c81",
    "mph": "mi/h",
    "km/h": "kmh kph",
    "unit": "units",
    "Hz": "hz hertz",
    "N": "newton newtons",
    "J": "joule joules",
    "W": "watt watts",
    "V": "volt volts",
    "A": "amp amps ampere amperes",
    "kelvin": "kelvins",
    "C": "coulomb coulombs",
    "Pa": "pascal pascals",
    "mol": "mole moles",
    "rad": "radian radians",
    "Angstrom": "angstrom angstroms",
    "atm": "atmosphere atmospheres",
    "mmHg": "torr",
    "rpm": "",
    "ton": "tons tonne tonnes",
    "acre": "acres",
    "hectare": "hectares ha",
    "kW": "kilowatt kilowatts",
    "kWh": "kilowatt-hour kilowatt-hours",
    "kJ": "kilojoule kilojoules",
    "MB": "megabyte megabytes",
    "GB": "gigabyte gigabytes",
    "am": "a.m. a.m",
    "pm": "p.m. p.m",
}
_PREFIXES = ("Y", "Z", "E", "P", "T", "G", "M", "k", "h", "da", "d", "c", "m", "\u00b5", "u", "n", "p", "f")
_SYMBOLS = "m g s A K mol cd Hz N Pa J W C V F ohm S Wb T H L eV bar Bq Gy Sv cal lm lx Wh"
_SI = frozenset(_SYMBOLS.split())
"""Symbols of units that take the prefixes of the SI."""
UNITS = {spelling: unit for unit, spellings in _SPELLINGS.items() for spelling in (unit, *spellings.split())}
"""Spelling -> canonical name of the unit."""

MEASURES = (
    "\u4e2a\u4eba\u53ea\u4ef6\u672c\u5f20\u53f0\u8f86\u5934\u6761\u68f5\u5757\u652f\u540d\u79cd\u6b21\u5957\u4f4d"
    "\u888b\u76d2\u7bb1\u9875\u9053\u9898\u6735\u9897\u53cc\u6839\u7c92\u679d\u6240\u95f4\u5ea7\u5c42\u6bb5\u4efd"
    "\u7ec4\u6876\u74f6\u676f\u73ed\u5708\u6b65"
)
"""Chinese measure words, which follow the number of counted things."""
SIGNS = {
    **{
        r"\yen": "yuan",
        r"\rupee": "rupee",
        "Rs.": "rupee",
        "Rs": "rupee",
        "INR": "rupee",
        "CNY": "yuan",
        "RMB": "yuan",
    },
    r"\$": "dollar",
    r"\pounds": "pound sterling",
    r"\euro": "euro",
    "USD": "dollar",
    r"US\$": "dollar",
    r"HK\$": "Hong Kong dollar",
    "EUR": "euro",
    "GBP": "pound sterling",
}
"""Currency signs that stand before a value -> unit."""

_NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand dozen score gross grand "
    "lakh crore myriad googol half halve halves third quarter first fraction infinite infinity once twice thrice "
    "double triple treble kilo mega giga milli micro nano pico deci deca semi demi hemi mil bil nil null nought "
    "naught"
)
_OPERATIONS = (
    "root power squared cubed factorial inverse reciprocal negative negation minus plus over divided multiplied times "
    "added subtracted negated opposite modulo mod remainder logarithm log exponent exponential radical conjugate "
    "complement derivative integral absolute sum difference product quotient imaginary equal equals divide exceed "
    "multiply multiplies surd subtract add doubled tripled halved quartered rounded truncated"
)
_HEDGES = (
    "about again almost around approx approximate circa perhaps maybe guess estimate estimated unsure likely odd "
    "tentative doubtful wrong incorrect false fake invalid mistaken error untrue true yes fail err seem appear ish "
    "etc"
)
_FUNCTION_WORDS = (
    "all and any are aren't as at be because been before after below beneath beside besides between both but by can "
    "can't cannot could did do does don't each either else ever every except few fewer for from greater had has have "
    "he hence her him his how however if in instead into is isn't it its just least less many may might more most "
    "much must my neither never no nobody none nor not nothing nowhere of off on only or other otherwise our out "
    "perchance quite rather same several shall she should since so some somewhat sometimes such than that the their "
    "them then there these they this those though thus till to too toward towards under unless until up upon us "
    "versus very via was wasn't we were what whatever when whenever where whereas whether which while who whose why "
    "will with without won't would yet you your always per wait beyond above hers ours theirs yours others backwards "
    "upwards downwards afterwards forwards nowadays past also near being something anything nothing everything"
)
_CHANGING = frozenset(f"{_NUMBERS} {_OPERATIONS} {_HEDGES} {_FUNCTION_WORDS}".split())
"""Words that turn the value before them into another value, a guess or a sentence. These are closed word classes."""

_CHANGING_FORMS = re.compile(
    r".*(?:th|milliard|illion|uple|upled|upling|fold|ly|n't)"
    r"|half[a-z]*|(?:twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety)[a-z]*"
)
"""Pattern of fractions and ordinals, magnitudes, multipliers, adverbs."""
_LOOKALIKES = (
    "month path moth cloth tablecloth booth bath tooth teeth youth mouth broth length depth width math "
    "health wealth north south earth family jelly belly fly butterfly lily daily weekly monthly yearly elderly"
)
_EXCEPTIONS = frozenset(_LOOKALIKES.split())
"""Words that match `_CHANGING_FORMS` but change nothing."""
_FUNCTIONS = re.compile(
    "arc[a-z]+|sin|cos|tan|cot|sec|csc|log|exp|sqrt|abs|max|det|lim|arg|alpha|beta|gamma|delta|epsilon|zeta|eta|theta|"
    "iota|kappa|lambda|rho|sigma|tau|phi|chi|psi|omega"
)
_PRODUCT = re.compile("[abckmnpqrstxyz]{3}|[^aeiouy]+")
"""Pattern of letters that are variables: `3 xyz` is not a number of things."""

_PLURAL = re.compile(r"[a-z]+[^siu']s")
_COMMON_NOUNS = (
    "people children men women kids policemen firemen salesmen geese mice teeth dice sheep fish goldfish deer shrimp "
    "moose oxen cattle feet buses gases menus taxis skis cacti person child man woman boy girl student friend apple "
    "orange egg cookie cake pizza slice piece candy fruit book page ticket box bag pack bottle car truck bike bus "
    "trip dog cat tv tshirt bird cow horse chicken rabbit flower tree rock stone toy game card coin bill mark vote "
    "item way solution integer digit number triangle circle side face edge vertex vertices value letter word money "
    "change profit map pan cap can ant bat rat tax art feed water milk juice rice flour sugar butter bread homework "
    "laundry luggage meat beef paper paint gold silver gas gasoline soda soup tea coffee food clothing furniture "
    "equipment"
)
_NOUNS = frozenset(_COMMON_NOUNS.split())
"""Countable nouns that do not look like a plural."""

_LAST_WORDS = (
    "old tall long wide high deep away apart ago later left leftover remaining total altogether overall each taller "
    "shorter longer older younger heavier lighter faster slower farther further sold needed used earned spent saved"
)
_TAILS = frozenset(_LAST_WORDS.split())
"""Words that may end a phrase: `35 years old`, `5 apples left`."""
_TIMES = re.compile(
    r"times(?: (?:more|as (?:many|much|large|big|long|fast|tall|old|heavy|high)|bigger|larger|longer|faster|slower"
    r"|taller|older|younger|heavier|higher|smaller|greater))?"
)


def unit_name(text: str, counted: bool) -> str | None:
    r"""Canonical name of a unit: `cm^2` for ` \text{ square centimeters}`; None when the text is not a unit.

    `counted`: the text follows a plain number, so that it may also name counted things, as in `18 wooden chairs`. "" is
    returned for words that name nothing, like `more` and `left`.
    """
    text = text.replace(r"\mu", "\u00b5").replace(r"\Omega", "ohm").replace(r"\cdot", "\u00b7")
    text = re.sub(r"\b([kM])(?:\}| )+(?=ohm)", r"\1", text)
    text = re.sub(r"(?<=\u00b5) +", "", re.sub(r"\\text|[{}()~]", " ", text)).strip(" .,")
    text = re.sub(r"(?<=[A-Za-z0-9]) *\^ *(?=-? ?[0-9])", "^", " ".join(text.split())).replace("^- ", "^-")
    if text in UNITS or (text and counted and text in MEASURES):
        return UNITS.get(text, text)
    # The Chinese prefixes for square and cubic; U+7ACB is the latter.
    if chinese := re.fullmatch("([\u5e73\u7acb])\u65b9(.+)", text):
        return f"{UNITS[chinese[2]]}^{'23'[chinese[1] == chr(0x7ACB)]}" if chinese[2] in UNITS else None
    text = re.sub(r"\bper cent\b", "percent", text)
    text = re.sub(r" ?(?:/|\bper\b|(?:^|(?<=[a-z]) )(?:an?|each|every) (?=[a-z])) ?", "/", text)
    text = re.sub(r"\b(?:square|sq\.?) ([A-Za-z]+)", r"\1^2", text)
    text = re.sub(r"\b(?:cubic|cu\.?) ([A-Za-z]+)", r"\1^3", text)
    if (name := _product(text)) is not None:
        return UNITS.get(name, name)
    # After a currency sign only the denominator is left: `$5 an hour` comes here as `/hour`.
    rate = "/" if text.startswith("/") else ""
    parts = text.removeprefix("/").split("/")
    names = [_known(part) for part in parts]
    # Units must be known, but counted things may be any noun, and what they are divided among any harmless word.
    if counted and text:
        for index, part in enumerate(parts):
            if names[index] is None:
                names[index] = _share(part) if rate or index else _things(part.lower())
    if None in names:
        return None
    name = "/".join(map(str, names))
    return rate + UNITS.get(name, name)


def _product(text: str) -> str | None:
    r"""Canonical name of a product of units: `kg m/s^2` for `m\cdot kg s^-2`; None if a factor is not a unit."""
    powers: dict[str, int] = {}
    sign = 1
    for factor in re.split(r"([ \u00b7*/]+)", text):
        if not factor.strip(" \u00b7*"):
            continue
        # All factors after a slash divide, as in `J/kg K`.
        if "/" in factor:
            sign = -1
            continue
        word, _, exponent = factor.partition("^")
        unit = _known(word)
        # A unit of the SI with a prefix, such as `kPa`, is its own name.
        if not unit and _SI & {word, *(word.removeprefix(prefix) for prefix in _PREFIXES)}:
            unit = word
        if unit is None or unit in powers or not re.fullmatch(r"(?:-?[1-4])?", exponent):
            return None
        powers[unit] = sign * int(exponent or 1)
    over, under = (
        [unit if sign * n == 1 else f"{unit}^{sign * n}" for unit, n in sorted(powers.items()) if sign * n > 0]
        for sign in (1, -1)
    )
    return " ".join(over) + ("/" + " ".join(under) if under else "") if over else None


def _known(part: str) -> str | None:
    """Canonical name of one unit with its power, like `cm^2`, or None; case matters only in units such as `mL`."""
    word, power, exponent = part.partition("^")
    unit = UNITS.get(word) or (UNITS.get(word.lower()) if len(word) > 1 else None)
    return None if unit is None else unit + power + exponent


def _share(part: str) -> str | None:
    """Name of the denominator of a rate: `person` in `3 apples per person`; a noun in the singular can be any word."""
    words = part.lower().split()
    return _join(words) if 0 < len(words) <= 3 and all(map(_harmless, words)) else None


def _things(text: str) -> str | None:
    """Name of counted things, or None: nouns in the plural or well-known ones, with adjectives and comparisons.

    Nouns are an open word class, so a word must look like a noun, and no word before it may belong to the closed
    classes that count, calculate, hedge or negate.
    """
    if _TIMES.fullmatch(text):
        return "times"
    # `40 dollars more` is `40 more dollars`. `fewer` stays in the name, so that 10 fewer does not equal 10 more.
    text = re.sub(r"^(.+) (more|fewer|less)$", r"\2 \1", text)
    compared = re.match(r"(more|fewer|less)(?: |$)", text)
    fewer = "fewer" if compared and compared[1] != "more" else ""
    if compared:
        text, _, others = text[compared.end() :].partition(" than ")
        if others and not all(map(_harmless, others.removeprefix("the ").split())):
            return None
    text = re.sub(r"(?:^| )in (?:total|all)$", "", text)
    words = text.replace("left over", "left").replace("t-shirt", "tshirt").split()
    while words and words[-1] in _TAILS:
        words.pop()
    if not words:
        return fewer
    thing, _, content = " ".join(words).partition(" of ")
    name = _known(thing)
    if not name:
        *described, noun = thing.replace("-", " ").split() or [""]
        plural = noun in _NOUNS or noun in UNITS or _PLURAL.fullmatch(noun)
        # `wooden chairs` are of the kind `wooden chair`; any word that is not harmless may change the number.
        if not plural or len(described) > 3 or not all(map(_harmless, [*described, noun])):
            return None
        name = _join([*described, noun])
    inside = re.sub(r"\b(?:for|the|all) (?=[a-z])", "", content).split()
    if not all(map(_harmless, inside)):
        return None
    return " ".join([*fewer.split(), name, *_join(inside).split()])


def _harmless(word: str) -> bool:
    """Whether a word, in singular or plural, leaves the number before it unchanged."""
    if "-" in word:
        return all(map(_harmless, word.split("-")))
    forms = {word, word.removesuffix("s"), word.removesuffix("es"), word.removesuffix("'s")}
    # Well-known nouns win over the tests below, which would take `map` or `tax` for a product of variables.
    if forms & _NOUNS:
        return True
    if not re.fullmatch(r"[a-z']{3,}", word) or _PRODUCT.fullmatch(word) or forms & _CHANGING:
        return False
    looks = {form for form in forms if _CHANGING_FORMS.fullmatch(form) or _FUNCTIONS.fullmatch(form)}
    return not looks or bool(forms & _EXCEPTIONS)


def _join(words: list[str]) -> str:
    """The words as one name, made singular where only an s makes the difference."""
    return " ".join(word.removesuffix("s") for word in words)
