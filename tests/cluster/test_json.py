"""JSON of requests and responses: what msgspec refuses is read and written as by ``json``."""

import json
import math
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpjob_operator.cluster.base import Invalid, NotFound, NotServed, Unavailable
from ddpjob_operator.cluster.kubernetes import decode, encode, error_of

NUMBERS = st.integers() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.characters(exclude_categories=[]))  # with lone surrogates
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
    max_leaves=20,
)


@pytest.fixture
def reads_deep_json() -> Iterator[None]:
    """Let Python read as many levels as in the operator's process."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(50_000)
    yield
    sys.setrecursionlimit(limit)


@given(VALUES)
def test_any_object_is_encoded_and_decoded_without_a_change(value: Any) -> None:
    assert json.loads(encode({"key": value})) == {"key": value}
    text = json.dumps({"key": value}).encode()
    assert repr(decode(text)) == repr(json.loads(text))  # repr: 1 and 1.0 are equal, but have different hashes


@pytest.mark.parametrize("number", [2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**20, 10**21])
def test_an_integer_of_any_size_stays_an_integer(number: int) -> None:
    text = b'{"number":%d}' % number
    assert repr(decode(text)["number"]) == str(number)
    assert json.loads(encode({"number": number})) == {"number": number}


@pytest.mark.parametrize("levels", [254, 255, 1_024, 1_025, 9_999])
@pytest.mark.usefixtures("reads_deep_json")
def test_the_deepest_object_that_an_api_server_stores_is_read_and_written(levels: int) -> None:
    text = b'{"a":' * levels + b"1" + b"}" * levels
    assert encode(decode(text)).replace(b" ", b"") == text


def test_of_duplicate_keys_the_last_counts() -> None:
    assert decode(b'{"a":1,"a":2}') == {"a": 2}


@pytest.mark.parametrize("body", [b"", b"<html>", b"[1]", b'{"a":', b'{"a":"\xff"}', b'{"a":1}{"a":2}'])
def test_a_response_that_is_no_json_object_is_unavailable(body: bytes) -> None:
    with pytest.raises(Unavailable, match="response is not"):
        decode(body)


def test_a_number_beyond_the_range_of_a_float_is_read_as_infinity() -> None:
    assert math.isinf(decode(b'{"a":1e999}')["a"])


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (404, {"kind": "Status", "reason": "NotFound", "details": {"name": "mnist", "kind": "ddpjobs"}}, NotFound),
        (404, {"kind": "Status", "reason": "NotFound", "details": {}}, NotServed),
        (404, "404 page not found", NotServed),
        (404, "<html>no such cluster</html>", NotServed),
        (405, "create not allowed while custom resource definition is terminating", Invalid),
    ],
)
def test_404_says_that_an_object_is_gone_only_if_it_names_the_object(status: int, body: object, expected: type) -> None:
    """The API server sends the second and third for a kind that is not installed, a proxy may send anything."""
    text = body if isinstance(body, str) else json.dumps(body)
    assert type(error_of(status, {}, text.encode())) is expected
