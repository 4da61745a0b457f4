import pytest
from hypothesis import given
from hypothesis import strategies as st

from mistlab.core.values import InputError
from mistlab.schedule.slots import KINDS, SWAP_KINDS, Action

ACTIONS = st.sampled_from(KINDS).flatmap(
    lambda kind: st.builds(
        Action,
        stage=st.integers(0, 999),
        kind=st.just(kind),
        direction=st.sampled_from("<>") if kind in SWAP_KINDS else st.none(),
        layer=st.none() | st.integers(0, 999),
        micro_batch=st.integers(0, 999),
    )
)


@given(action=ACTIONS)
def test_an_action_comes_back_from_its_text(action: Action) -> None:
    assert Action.parse(str(action)) == action


@given(text=st.from_regex(r"\A[0-9]{1,2}[FPQ][<>]?(\.[0-9]{1,2})?m[0-9]{1,2}\Z"))
def test_a_text_that_parses_comes_back_from_its_action(text: str) -> None:
    try:
        action = Action.parse(text)
    except InputError as error:
        assert repr(text) in str(error)  # noqa: PT017 (either outcome is right)
    else:
        assert str(action) == text


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F.7m0", Action(stage=2, kind="F", layer=7, micro_batch=0)),
        ("2O<.8m0", Action(stage=2, kind="O", direction="<", layer=8, micro_batch=0)),
        ("0A>.11m12", Action(stage=0, kind="A", direction=">", layer=11, micro_batch=12)),
        ("3Xm1", Action(stage=3, kind="X", micro_batch=1)),
    ],
)
def test_texts_mean_what_the_design_says(text: str, action: Action) -> None:
    assert str(action) == text
    assert Action.parse(text) == action


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is not stage, kind, layer and micro-batch: write it like 2F.7m0"),
        ("2F7m0", "is not stage, kind, layer and micro-batch: write it like"),
        ("2F.7", "is not stage, kind, layer and micro-batch: write it like"),
        ("02F.7m0", "is not stage, kind, layer and micro-batch: write it like"),
        ("2F.7m0 ", "is not stage, kind, layer and micro-batch: write it like"),
        ("2Q.7m0", "kind: 'Q' is unknown: give one of F, B"),
        ("2O.8m0", "direction: missing for the swap O: give < (in) or > (out)"),
        ("2F<.7m0", "direction: '<' given for F, which is not a swap: leave it out"),
    ],
)
def test_a_bad_text_is_refused(text: str, problem: str) -> None:
    with pytest.raises(InputError) as caught:
        Action.parse(text)
    assert repr(text) in str(caught.value)
    assert problem in str(caught.value)
