"""A session with an MCP server. All sessions of a process live on one event loop in a thread of its own; callers wait, with deadlines."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import tempfile
import threading
import weakref
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import IO, Any

from jsonschema.exceptions import SchemaError, best_match  # type: ignore[import-untyped]
from jsonschema.validators import validator_for  # type: ignore[import-untyped]
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import INVALID_PARAMS
from referencing import Registry

from rtpo_ray.errors import ToolServerError
from rtpo_ray.tools.mcp import Address

LISTINGS: dict[Address, dict[str, dict[str, Any]]] = {}  # function schemas of a server's tools, by name
_CLOSING = 10.0  # seconds for a session to end; the server is killed before they are over
_LAST_WORDS = 500  # characters of what a server wrote to stderr, shown when it fails

_loops: dict[int, asyncio.AbstractEventLoop] = {}  # by process id: a fork has none of its parent's threads
_shared: dict[tuple[int, Address], Server] = {}
_live: dict[Future[None], asyncio.Event] = {}  # sessions, and what ends each
_starting = threading.Lock()  # of shared servers
_loop_lock = threading.Lock()


class Server:
    """A connected server. It ends with `close`, when nobody holds it any more, or when the process exits.

    Attributes:
        schemas: of its tools, by name, in the form that chat templates take.
        lost: why it cannot be used any more; empty while it can.
    """

    def __init__(self, address: Address, name: str, seconds: float) -> None:
        """Start or reach the server at `address`. Raises ToolServerError, which calls it `name`, when that fails or takes more than `seconds`."""
        self.lost = ""
        self._name, self._loop = name, _loop()
        self._stderr = tempfile.TemporaryFile("w+")
        ready: Future[tuple[Any, list[Any]]] = Future()
        closing = asyncio.Event()
        self._session = asyncio.run_coroutine_threadsafe(_serve(address, self._stderr, ready, closing), self._loop)
        _live[self._session] = closing
        self._session.add_done_callback(lambda session: _live.pop(session, None))
        self._end = weakref.finalize(self, self._loop.call_soon_threadsafe, closing.set)
        either: list[Future[Any]] = [ready, self._session]
        wait(either, timeout=seconds, return_when=FIRST_COMPLETED)
        if not ready.done():
            stopped = self._session.done()
            error = self._session.exception() if stopped else None
            self._session.cancel()
            raise self._failure(f"did not start: {_describe(error)}" if stopped else f"did not start within {seconds:g} s") from error
        self._client, tools = ready.result()
        self.schemas = {tool.name: _function_schema(tool, name) for tool in tools}

    def call(self, tool: str, arguments: dict[str, Any], seconds: float) -> tuple[str, bool]:
        """(the result as text, whether the tool says that it failed). Raises ToolServerError when there is none within `seconds`."""
        if self.lost:
            raise self._failure(f"cannot be used any more: {self.lost}")
        answer = asyncio.run_coroutine_threadsafe(self._client.call_tool(tool, arguments), self._loop)
        wait([answer, self._session], timeout=seconds, return_when=FIRST_COMPLETED)
        if not answer.done() or answer.cancelled():
            self.lost = f"{tool} was cut short: the session ended" if self._session.done() else f"{tool} gave no result within {seconds:g} s"
            answer.cancel()
            raise self._failure(self.lost)
        error = answer.exception()
        if isinstance(error, MCPError) and error.code == INVALID_PARAMS:
            return str(error), True
        if error is not None:
            self.lost = f"{tool} failed: {_describe(error)}"
            raise self._failure(self.lost) from error
        return _text(answer.result()), answer.result().is_error

    def lose(self, why: str) -> None:
        """Let no further call through."""
        self.lost = why

    def close(self) -> None:
        """End the session and the server's process; may be called twice."""
        self.lost = self.lost or "it was closed"
        self._end()
        wait([self._session], timeout=_CLOSING)

    def _failure(self, what: str) -> ToolServerError:
        file = self._stderr.fileno()
        start = max(0, os.fstat(file).st_size - _LAST_WORDS)
        last = os.pread(file, _LAST_WORDS, start).decode(errors="replace").strip()  # the server shares the file's position: leave it alone
        return ToolServerError(f"{self._name}: {what}" + (f"; its last words: {last}" if last else ""))


def shared_server(address: Address, name: str, seconds: float) -> Server:
    """The server at `address` that all of this process use; a fresh one when there is none, or when that one failed."""
    if not _starting.acquire(timeout=seconds):
        raise ToolServerError(f"{name}: another thread has been starting it for more than {seconds:g} s")
    try:
        key = (os.getpid(), address)
        if key not in _shared or _shared[key].lost:  # one that failed ends when its last caller has left it
            _shared[key] = Server(address, name, seconds)
        return _shared[key]
    finally:
        _starting.release()


def wrong_arguments(schema: dict[str, Any], arguments: dict[str, Any]) -> str:
    """Why `arguments` do not fit the JSON schema of a tool; empty when they do."""
    error = best_match(validator_for(schema)(schema, registry=Registry()).iter_errors(arguments))  # the registry keeps $ref off the network
    if error is None:
        return ""
    where = ".".join(map(str, error.absolute_path))
    return (f"argument {where!r}: " if where else "") + error.message[:_LAST_WORDS]


async def _serve(address: Address, stderr: IO[str], ready: Future[tuple[Any, list[Any]]], closing: asyncio.Event) -> None:
    """Hold a session open from its start to its end in one task, as its cancel scopes demand."""
    command, args, env, url = address
    transport = (streamable_http_client(url) if url else
                 stdio_client(StdioServerParameters(command=command, args=list(args), env=dict(env)), errlog=stderr))
    async with Client(transport) as client:
        page = await client.list_tools()
        tools = list(page.tools)
        while page.next_cursor:
            page = await client.list_tools(cursor=page.next_cursor)
            tools += page.tools
        ready.set_result((client, tools))
        await closing.wait()


def _loop() -> asyncio.AbstractEventLoop:
    with _loop_lock:
        process = os.getpid()
        if process not in _loops:
            _loops[process] = asyncio.new_event_loop()
            threading.Thread(target=_loops[process].run_forever, name="mcp sessions", daemon=True).start()
            atexit.register(_end_all, process)
        return _loops[process]


def _end_all(process: int) -> None:
    if process == os.getpid():
        for closing in list(_live.values()):
            _loops[process].call_soon_threadsafe(closing.set)
        wait(list(_live), timeout=_CLOSING)


def _function_schema(tool: Any, name: str) -> dict[str, Any]:
    try:
        validator_for(tool.input_schema).check_schema(tool.input_schema)
    except SchemaError as error:
        raise ToolServerError(f"{name}: the schema of {tool.name} is no JSON schema: {error.message[:_LAST_WORDS]}") from error
    return {"type": "function", "function": {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}}


def _text(result: Any) -> str:
    """What of a result can be read: its texts; what else there is is described."""
    shown = [_block(block) for block in result.content]
    if not shown and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(shown)


def _block(block: Any) -> str:
    if block.type == "text":
        return str(block.text)
    if block.type == "resource":
        return str(getattr(block.resource, "text", f"[resource {block.resource.uri}]"))
    if block.type == "resource_link":
        return f"[resource {block.uri}]"
    return f"[{block.type} of type {block.mime_type}]"


def _describe(error: BaseException | None) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}" if error else "the session ended"
