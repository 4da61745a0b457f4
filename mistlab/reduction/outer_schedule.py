"""The schedule of outer steps (DiLoCo) if a model is divided into fragments, which are averaged one
after another at equal distances.
"""

from dataclasses import dataclass, field

from mistlab.core.values import bounded, check_fields, refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterSchedule:
    """The schedule of outer steps for ``fragments`` of a model: each takes one every ``every``
    inner steps, and its change is computed ``delay`` inner steps earlier.
    """

    every: int = field(metadata=bounded(minimum=1))
    fragments: int = field(default=1, metadata=bounded(minimum=1))
    delay: int = field(default=0, metadata=bounded(minimum=0))

    def __post_init__(self) -> None:
        check_fields(self)
        if self.every % self.fragments:
            refuse(
                "every",
                f"{self.every} is not a multiple of fragments {self.fragments}: give a multiple, "
                "so that the outer steps of fragments follow at equal distances",
            )
        if self.delay >= self.distance:
            refuse(
                "delay",
                f"{self.delay} is not below every / fragments = {self.distance}, the steps between "
                f"two exchanges: give at most {self.distance - 1}",
            )

    @property
    def distance(self) -> int:
        """The number of inner steps between the outer steps of two successive fragments."""
        return self.every // self.fragments

    def due(self, step: int) -> int | None:
        """The fragment of the model that is averaged after this inner step; None if none is."""
        turn, rest = divmod(step, self.distance)
        return None if rest or not step else (turn - 1) % self.fragments

    def starting(self, step: int) -> int | None:
        """The fragment of the model whose change of weights is computed after this inner step; None
        if none is.
        """
        return self.due(step + self.delay)
