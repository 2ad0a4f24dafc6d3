"""Whether two mathematical answers are equal; `verify.equivalent` is the way in."""
