"""Quantities: which texts are one, and how the API server writes each."""

import pytest

from ddpjob.api.quantities import amount
from tests.worlds.memory.quantities import canonical

QUANTITIES = {
    **{"0": "0", "1": "1", "1000": "1k", "1500m": "1500m", "0.5": "500m", "1000m": "1", "1.5Gi": "1536Mi"},
    **{"1024Mi": "1Gi", "1023": "1023", "1024": "1024", "512Ki": "512Ki", "0.5Ki": "512", "1e3": "1e3", "12e6": "12e6"},
    **{"100u": "100u", "1000000": "1M", "-1": "-1", "+2": "+2", ".5": "500m", "5.": "5.", "1.1Ki": "1126400m"},
}


@pytest.mark.parametrize("text", QUANTITIES)
def test_a_quantity_is_written_as_the_api_server_writes_it(text: str) -> None:
    assert canonical(text) == QUANTITIES[text]


@pytest.mark.parametrize("text", ["1e101", "1e-101", "1e999999999", "1E999999999999999999999"])
def test_exponent_too_large_to_compute_with_is_refused_at_once(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        amount(text)


@pytest.mark.parametrize("text", ["", "x", "1x", "1 Gi", "Gi", "1KiB", True])
def test_other_values_are_not_quantities(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        canonical(text)
