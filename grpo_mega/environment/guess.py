"""A game: a number from 0 to 31 is to be guessed; an environment with rewards for each turn."""

from math import log2


class Guess:
    """Tells whether the number is higher or lower than a guess; five guesses, or the right one, end the game.

    The reward of a turn is what it tells, in bits, over the five that tell the number.
    """

    def reset(self, answer: str, **row: object) -> None:
        """Begins a game with the problem's answer as the number."""
        self.number, self.low, self.high = int(answer), 0, 31
        self.guesses, self.done, self.found = 0, False, False

    def guess(self, number: int) -> str:
        """Guesses the number.

        Args:
            number: The guess.
        """
        before = self.high - self.low + 1
        if number <= self.number:
            self.low = max(self.low, number + (number < self.number))
        if number >= self.number:
            self.high = min(self.high, number - (number > self.number))
        self.reward = log2(before / (self.high - self.low + 1)) / 5
        self.guesses += 1
        self.found = number == self.number
        self.done = self.found or self.guesses == 5
        return "=" if self.found else "+" if number < self.number else "-"

    def get_reward(self) -> float:
        """1 if the number was found, else 0."""
        return float(self.found)
