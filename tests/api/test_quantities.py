"""Which texts are quantities."""

import pytest

from ddpjob.api.quantities import amount


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("1500m", 1.5),
        ("1.5Gi", 1536 * 2**20),
        ("1e3", 1000),
        ("12E6", 12e6),
        ("-1", -1),
        ("+2", 2),
        (".5", 0.5),
    ],
)
def test_a_quantity_is_a_number_with_a_suffix(text: str, number: float) -> None:
    assert amount(text) == number


@pytest.mark.parametrize("text", ["1e101", "1e-101", "1e999999999", "1E999999999999999999999"])
def test_exponent_too_large_to_compute_with_is_refused_at_once(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        amount(text)


@pytest.mark.parametrize("text", ["", "x", "1x", "1 Gi", "Gi", "1KiB", True])
def test_other_values_are_not_quantities(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        amount(text)
