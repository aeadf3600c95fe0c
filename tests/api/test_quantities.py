"""Quantities: which texts are none."""

import pytest

from ddpjob.api.quantities import amount


@pytest.mark.parametrize("text", ["1e101", "1e-101", "1e999999999", "1E999999999999999999999"])
def test_exponent_too_large_to_compute_with_is_refused_at_once(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        amount(text)


@pytest.mark.parametrize("text", ["", "x", "1x", "1 Gi", "Gi", "1KiB", True])
def test_other_values_are_not_quantities(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        amount(text)
