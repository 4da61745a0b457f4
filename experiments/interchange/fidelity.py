"""Compares the prediction of a plan with that of the text that it was exported to.

An export is exact if the target says every choice and the two predictions are equal in every
figure, times and bytes of all stages, to a billionth. Its text is read back for that.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from experiments.bench.problem import Answer, fullest_words, predicted
from experiments.interchange.refitting import fitting_form
from mistlab.core.values import InputError, to_mapping
from mistlab.export.given import Remark, changes
from mistlab.export.nearest import Nearest, canonical, nearest
from mistlab.export.target import Target, read_back
from mistlab.job.job import Job
from mistlab.job.prediction import Prediction

NEAR = 1e-9
# What a prediction tells beside its figures.
_WORDS = ("predictor", "notes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A plan in a target's words: its nearest form, the text, and predictions of plan and text."""

    wanted: Job
    target: Target
    found: Nearest
    text: str
    given: Answer
    near: Answer
    is_exact: bool

    @property
    def no_longer_fits(self) -> bool:
        """Whether the plan fits and its nearest form does not."""
        return fits(self.given) is True and fits(self.near) is False

    @property
    def lacking(self) -> Sequence[str]:
        """Which stage of a form that does not fit lacks memory, and how much."""
        if isinstance(self.near, InputError) or self.near.fits:
            return ()
        return tuple(fullest_words(self.found.job, self.near))


def exported(job: Job, target: Target) -> Export:
    """The export of a job: the nearest form, or one that fits where the nearest one does not."""
    found, given = nearest(job, target), predicted(job)
    near = predicted(found.job)
    if fits(given) and isinstance(near, Prediction) and not near.fits:
        found = fitting_form(found, near, target) or found
        near = predicted(found.job)
    text = target.write(found.job)
    back = _back(target, text, found.job)
    if isinstance(back, InputError) or back != found.job:
        found = replace(found, remarks=(*found.remarks, _misread(found.job, back)))
    is_exact = found.is_exact and not isinstance(back, InputError) and costs_as(job, back, given)
    return Export(
        wanted=job,
        target=target,
        found=found,
        text=text,
        given=given,
        near=near,
        is_exact=is_exact,
    )


def fits(prediction: Answer) -> bool | None:
    """Whether a plan fits; None where it cannot be predicted."""
    return None if isinstance(prediction, InputError) else prediction.fits


def same_figures(first: Prediction, second: Prediction) -> bool:
    """Whether two predictions are equal in every figure."""
    figures = [list(_figures(to_mapping(each))) for each in (first, second)]
    names = [[name for name, _ in pairs] for pairs in figures]
    return names[0] == names[1] and all(
        math.isclose(one, other, rel_tol=NEAR, abs_tol=0.0)
        for (_, one), (_, other) in zip(*figures, strict=True)
    )


def _figures(value: object, name: str = "") -> Iterator[tuple[str, float]]:
    """All numbers of plain data, by their path."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in _WORDS:
                yield from _figures(inner, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for place, inner in enumerate(value):
            yield from _figures(inner, f"{name}[{place}]")
    elif isinstance(value, int | float):
        yield name, float(value)


def costs_as(job: Job, back: Job, given: Answer) -> bool:
    """Whether the text's job costs what a job costs; where that cannot be predicted, whether it is
    the same job."""
    if isinstance(given, InputError):
        return back == canonical(job)
    again = predicted(back)
    return isinstance(again, Prediction) and same_figures(given, again)


def _back(target: Target, text: str, job: Job) -> Job | InputError:
    try:
        return read_back(target, text, job)
    except InputError as error:
        return error


def _misread(job: Job, back: Job | InputError) -> Remark:
    """The remark on a text that ``import_plan`` does not read as the job that it was made of."""
    if isinstance(back, InputError):
        text = f"import_plan does not read it: {back}"
    else:
        others = sorted({remark.choice for remark in changes(job, back, "")})
        text = f"import_plan reads it as another plan: {', '.join(others) or 'engine'} differ"
    return Remark(kind="noted", choice="text", text=text)
