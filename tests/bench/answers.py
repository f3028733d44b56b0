"""What a generator gives without Ray, where its streams are plain asynchronous ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pyarrow as pa


def whole(stream: AsyncIterator[pa.Table]) -> pa.Table:
    """All of its parts together; there is at least one."""
    async def collect() -> pa.Table:
        return pa.concat_tables([part async for part in stream])

    return asyncio.run(collect())
