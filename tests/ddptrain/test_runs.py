"""What the process tests rely on."""

from __future__ import annotations

import socket

import pytest

from tests.processes import free_port


def test_a_port_of_a_test_is_free_for_its_server_and_for_no_other_choice() -> None:
    port = free_port()
    for _ in range(2):
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", port))
        socket.create_server(("127.0.0.1", port)).close()
