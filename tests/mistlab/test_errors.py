import pickle

import pytest

from mistlab.core.values import FieldError, InputError, near_matches, refuse, within


@pytest.mark.parametrize(
    ("holder", "path", "text"),
    [
        ("plan", "stages", "plan.stages: wrong"),
        ("stages", "[1].zero", "stages[1].zero: wrong"),
        ("plan", "", "plan: wrong"),
        ("", "plan", "plan: wrong"),
        ("", "", "wrong"),
    ],
    ids=["field", "item", "value itself", "no holder", "neither"],
)
def test_an_error_tells_the_way_to_its_field(holder: str, path: str, text: str) -> None:
    assert str(FieldError(path, "wrong").within(holder)) == text


def test_errors_survive_the_way_between_processes() -> None:
    error = pickle.loads(pickle.dumps(FieldError("plan.stages", "is empty")))
    assert str(error) == "plan.stages: is empty"


def test_within_adds_the_holder_and_only_to_field_errors() -> None:
    with pytest.raises(FieldError, match=r"^plan\.engine: wrong$"), within("plan"):
        refuse("engine", "wrong")
    with pytest.raises(InputError, match=r"^elsewhere$"), within("plan"):
        raise InputError("elsewhere")  # noqa: EM101


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gpt", ": did you mean 'gpt3' or 'gpt2'?"),
        ("lama", ": did you mean 'llama'?"),
        ("LLAMA", ": did you mean 'llama'?"),
        ("zzz", ": give one of gpt2, gpt3, llama"),
        (7, ": give one of gpt2, gpt3, llama"),
    ],
)
def test_near_matches(name: object, text: str) -> None:
    assert near_matches(name, ["gpt2", "gpt3", "llama"]) == text


def test_of_many_names_a_few_are_listed() -> None:
    names = [f"model-{number:03}" for number in range(500)]
    told = near_matches("", names, "catalog/models")
    expected = (
        "such as model-000, model-001, model-002, model-003, model-004, or another of the 500 names"
    )
    assert told == f": give a name {expected} in catalog/models"
