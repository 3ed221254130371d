"""A step of some thread at which a test can hold it."""

import threading


class Gate:
    """A step of a thread that goes on only after the test has let go."""

    def __init__(self, step):
        self.step = step
        self.entered, self.let_go = threading.Event(), threading.Event()

    def __call__(self, *arguments):
        self.entered.set()
        assert self.let_go.wait(20)
        return self.step(*arguments)
