"""The schedule of outer steps (DiLoCo) for fragments of a model, which are averaged in turn at
equal distances.
"""

from dataclasses import dataclass, field

from mistlab.core.values import bounded, check_fields, refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterSchedule:
    """The schedule of ``fragments``: each takes an outer step once in ``every`` inner steps, and
    its change is computed ``delay`` inner steps before.
    """

    every: int = field(metadata=bounded(minimum=1))
    fragments: int = field(default=1, metadata=bounded(minimum=1))
    delay: int = field(default=0, metadata=bounded(minimum=0))

    def __post_init__(self) -> None:
        check_fields(self)
        if self.every % self.fragments:
            refuse(
                "every",
                f"{self.every} steps are no multiple of {self.fragments} fragments: give a "
                "multiple, so that fragments follow at equal distances",
            )
        if self.delay >= self.distance:
            refuse(
                "delay",
                f"{self.delay} reaches to the exchange before, {self.distance} steps earlier: give "
                "less",
            )

    @property
    def distance(self) -> int:
        """The number of inner steps between the exchanges of two fragments."""
        return self.every // self.fragments

    def due(self, step: int) -> int | None:
        """The fragment whose outer step comes after this inner step; None if there is none."""
        turn, rest = divmod(step, self.distance)
        return None if rest or not step else (turn - 1) % self.fragments

    def starting(self, step: int) -> int | None:
        """The fragment whose change is computed after this inner step; None if there is none."""
        return self.due(step + self.delay)
