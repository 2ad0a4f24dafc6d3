"""Configuration: a dataclass per section, rules whose errors name the fix, and parsing of the command line."""
