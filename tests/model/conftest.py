"""Fixtures for tests of live models."""

from __future__ import annotations

import pytest

from support.audited import Library


@pytest.fixture(params=["torch", "paddle"])
def library(request: pytest.FixtureRequest) -> Library:
    return Library(request.param)
