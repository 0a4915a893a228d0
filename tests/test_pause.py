"""A paused rank hears the wish to stop, its own and that of another machine."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from runtime_toy import Scene, Toy, make_engine

from odin_nerfstudio.glue.odin_trainer import STOP, OdinTrainer
from odin_nerfstudio.runtime.transport import LocalTransport


class PausedEngine:
    """An engine whose peers announce a stop, to take effect at step 9, while this rank waits."""

    def __init__(self, waits: int) -> None:
        self.waits = waits

    def busy(self, _activity: object) -> nullcontext[None]:
        return nullcontext()

    def idle(self, _seconds: float) -> None:
        self.waits -= 1
        assert self.waits > -5, "still paused after the word has come"

    def announced(self, word: str) -> bool:
        return word == STOP and self.waits <= 0

    def due(self, step: int) -> list[str]:
        return [STOP] if step >= 9 else []


def test_a_stop_announced_elsewhere_ends_a_pause() -> None:
    trainer: Any = OdinTrainer.__new__(OdinTrainer)
    said = []
    trainer.runner = SimpleNamespace(engine=PausedEngine(waits=3))
    trainer.training_state, trainer.world_size = "paused", 2
    trainer._interrupt = SimpleNamespace(requested=False)
    trainer._say_stopping = lambda: said.append(1)
    assert not trainer._stops_before(7) and trainer.runner.engine.waits == 0
    assert trainer._stops_before(9) and said == [1]


def test_a_word_is_announced_until_it_takes_effect() -> None:
    toy = Toy(primitives=50, steps=20)
    engine = make_engine(toy, Scene(toy), LocalTransport())
    assert not engine.announced(STOP)
    step = engine.announce(STOP)
    assert engine.announced(STOP) and engine.due(step - 1) == [] and engine.announced(STOP)
    assert engine.due(step) == [STOP] and not engine.announced(STOP)
