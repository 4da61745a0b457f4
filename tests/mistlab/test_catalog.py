import pytest

from mistlab import catalog
from mistlab.values.errors import InputError

SIZES = {
    "gpt3": "1.3b 2.7b 7b 8b 13b 20b 22b 40b 175b",
    "llama": "350m 1.3b 2.7b 7b 13b 20b 22b 40b 65b 70b",
    "llama3": "8b 70b 405b",
    "falcon": "1.3b 2.7b 7b 13b 20b 22b 40b",
}
MODELS = {f"{family}-{size}" for family, sizes in SIZES.items() for size in sizes.split()}
HARDWARE = {
    "l4-24gb",
    "a100-40gb",
    "a100-80gb",
    "a10g-24gb",
    "v100-16gb",
    "v100-32gb",
    "h100-80gb",
    "h200-141gb",
}


def test_the_catalogue_has_the_models_of_the_design() -> None:
    assert set(catalog.model_names()) == MODELS


def test_the_catalogue_has_the_hardware_of_the_design() -> None:
    assert set(catalog.hardware_names()) == HARDWARE


def billions(name: str) -> float:
    """Parameters as counted by hand: attention, feed-forward, embedding and head."""
    spec = catalog.model(name)
    attention = spec.hidden * spec.head_dim * 2 * (spec.heads + spec.kv_heads)
    products = 3 if spec.mlp_type == "gated_mlp" else 2
    block = attention + products * spec.hidden * spec.ffn
    return (spec.layers * block + 2 * spec.vocab * spec.hidden) / 1e9


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_model_has_the_size_in_its_name(name: str) -> None:
    number, unit = name.split("-")[1][:-1], name[-1]
    nominal = float(number) / (1000 if unit == "m" else 1)
    assert catalog.model(name).name == name
    assert billions(name) == pytest.approx(nominal, rel=0.2)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_llama_3_turns_channels_more_slowly(name: str) -> None:
    # Grattafiori et al. 2024 (arXiv 2407.21783), table 3; all others as LLaMA.
    assert catalog.model(name).rotary_base == (500_000 if name.startswith("llama3") else 10_000)


@pytest.mark.parametrize("name", sorted(HARDWARE))
def test_hardware_bears_its_name_and_memory(name: str) -> None:
    hardware = catalog.hardware(name)
    nominal_gb = int(name.split("-")[1].removesuffix("gb"))
    assert hardware.name == name
    assert 0.9 * nominal_gb < hardware.gpu.memory_gib < nominal_gb
    assert hardware.node.gpus == 8


@pytest.mark.parametrize("name", ["gpt3-20b", "llama-22b", "falcon-20b"])
def test_64_heads_share_6144_channels(name: str) -> None:
    assert (catalog.model(name).hidden, catalog.model(name).head_dim) == (6144, 96)


def test_an_unknown_model_is_refused_with_near_names() -> None:
    with pytest.raises(
        InputError, match=r"^model: 'gpt3-2.7' is unknown: did you mean 'gpt3-2.7b'"
    ):
        catalog.model("gpt3-2.7")


def test_an_unknown_hardware_is_refused_with_near_names() -> None:
    with pytest.raises(InputError, match=r"^hardware: 'l4' is unknown: did you mean 'l4-24gb'"):
        catalog.hardware("l4")
    with pytest.raises(InputError, match=r"'a100-80' is unknown: did you mean 'a100-80gb'"):
        catalog.hardware("a100-80")
    with pytest.raises(InputError, match=r"'tpu' is unknown: give one of a100-40gb, a100-80gb"):
        catalog.hardware("tpu")
