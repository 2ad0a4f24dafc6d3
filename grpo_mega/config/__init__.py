"""Configuration: dataclasses per room, rules whose errors name the fix, and parsing of the command line."""
