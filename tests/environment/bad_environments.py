"""What cannot be an environment."""


class Untyped:
    def reset(self, **row):
        pass

    def guess(self, number):
        return number


class Idle:
    def reset(self, **row):
        pass

    def get_reward(self):
        return 1.0
