"""The schedule of outer steps for a model's fragments: in turn, at equal distances."""

from dataclasses import dataclass, field

from mistlab.core.values import bounded, check_fields, refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterSchedule:
    """Each of the ``fragments`` takes an outer step once in ``every`` inner steps; its change is
    computed ``delay`` steps before that.
    """

    every: int = field(metadata=bounded(minimum=1))
    fragments: int = field(default=1, metadata=bounded(minimum=1))
    delay: int = field(default=0, metadata=bounded(minimum=0))

    def __post_init__(self) -> None:
        check_fields(self)
        if self.every % self.fragments:
            problem = f"{self.every} steps are no multiple of {self.fragments} fragments"
            refuse("every", f"{problem}: give one, so that fragments follow at equal distances")
        if self.delay >= self.distance:
            problem = f"{self.delay} reaches to the exchange before, {self.distance} steps earlier"
            refuse("delay", f"{problem}: give less")

    @property
    def distance(self) -> int:
        """The inner steps between the exchanges of two fragments."""
        return self.every // self.fragments

    def due(self, step: int) -> int | None:
        """The fragment that takes its outer step after this inner step, if there is one."""
        turn, rest = divmod(step, self.distance)
        return None if rest or not step else (turn - 1) % self.fragments

    def starting(self, step: int) -> int | None:
        """The fragment whose change is computed after this inner step, if there is one."""
        return self.due(step + self.delay)
