"""Environments that say when they are closed."""

import os

if imports := os.environ.get("IMPORTS"):
    with open(imports, "a") as file:
        file.write("imported\n")


class Unready:
    """An episode that does not begin."""

    def reset(self, id: str, **row: object) -> None:
        self.id = id
        raise OSError("the server is away")

    def act(self, what: str) -> str:
        return what

    def close(self) -> None:
        if hasattr(self, "id"):
            with open(os.environ["CLOSED"], "a") as file:
                file.write(f"{self.id}\n")


class Closes:
    """An episode that ends at any call of its tool; writes its number to a file when it is closed."""

    def reset(self, id: str, **row: object) -> None:
        self.id = id

    def act(self, what: str) -> str:
        if what == "exit":
            os._exit(3)
        self.what = what
        return what

    def get_reward(self) -> float:
        return 1.0

    def close(self) -> None:
        if not hasattr(self, "what"):  # it has only begun
            return
        with open(os.environ["CLOSED"], "a") as file:
            file.write(f"{self.id} {self.what}\n")
        while self.what == "hang":
            pass
