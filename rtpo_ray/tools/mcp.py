"""The tools of a server that speaks the Model Context Protocol."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rtpo_ray.errors import ToolServerError
from rtpo_ray.tools.base import ToolError, Toolset

Address = tuple[str, tuple[str, ...], tuple[tuple[str, str], ...], str]  # command, args, env, url

_addresses: dict[str, Address] = {}  # by hash: they may hold secrets, so states hold the hash; a process makes its toolsets before it restores any


class Mcp(Toolset):
    """The tools that one MCP server lists, called over stdio or streamable HTTP.

    A server's state cannot be copied, so where an episode is snapshot its calls so far stand for it: `replay="allow"` makes them again on a
    fresh server, before the first call of the copy, and compares the results. `stateless=True` says that there is nothing to copy; all
    environments of a process then share one server, where others have one an episode.

    Args:
        command: of a server to start; `args` and `env` are its arguments and what its environment has beside HOME, PATH and the like.
        url: of a running server, instead of a command.
        seconds: that one call may take.
        start_seconds: that the server may take to start and to list its tools.
        tools: those to offer, by name; empty for all.
        replay: "refuse" or "allow".
        stateless: the server keeps nothing between calls.
        output_chars: of a result that the model reads.

    Raises ValueError, naming the field, when an option is impossible; `schemas` does when a name of `tools` is not listed. A call raises
    ToolServerError when the server does not start, dies, or does not answer in time: that costs the rollout, and the model never sees it.
    """

    _server: Any = None  # of this episode, started when it is needed; in no state
    _closed = False

    def __init__(self, command: str = "", args: Sequence[str] = (), env: Mapping[str, str] | None = None, url: str = "", seconds: float = 30.0,
                 start_seconds: float = 25.0, tools: Sequence[str] = (), replay: str = "refuse", stateless: bool = False,
                 output_chars: int = 10_000) -> None:
        if bool(command) == bool(url):
            raise ValueError(f"command is {command!r} and url is {url!r}; expected exactly one of them")
        if url and (args or env):
            raise ValueError("args and env are for a command; a server at a url has its own")
        if isinstance(args, str) or isinstance(tools, str):
            raise ValueError(f"args is {args!r} and tools is {tools!r}; expected lists")
        for name, value in {"seconds": seconds, "start_seconds": start_seconds, "output_chars": output_chars}.items():
            if not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; expected more than 0")
        if replay not in ("refuse", "allow"):
            raise ValueError(f"replay is {replay!r}; expected refuse or allow")
        address = (command, tuple(map(str, args)), tuple(sorted((name, str(value)) for name, value in (env or {}).items())), url)
        self.key = hashlib.blake2b(repr(address).encode(), digest_size=8).hexdigest()
        _addresses[self.key] = address
        self.longest_wait = start_seconds + seconds
        self.seconds, self.start_seconds, self.offered, self.output_chars = seconds, start_seconds, tuple(tools), output_chars
        self.stateless, self.on_copy = stateless, replay
        self.calls: list[tuple[str, str, str, bool]] = []  # tool, arguments as JSON, result, whether it is an error: what a stateful server has seen

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_server", "_closed")}

    def __reduce_ex__(self, protocol: Any) -> Any:  # not in __getstate__: the state hash, which every method takes, asks for that
        if why := self.branching_error():
            raise TypeError(why)
        return super().__reduce_ex__(protocol)

    @property
    def address(self) -> Address:
        """Of the server. Raises ToolServerError in a process that has not made a toolset with these options itself."""
        if self.key not in _addresses:
            raise ToolServerError(f"MCP server {self.key}: its address is in no snapshot, and this process has made no toolset with it; "
                                  "make the environment before a snapshot of it is restored")
        return _addresses[self.key]

    def branching_error(self) -> str:
        if self.stateless or self.on_copy == "allow":
            return ""
        return (f"{self._name()}: this server's state cannot be copied, so a method that branches (rtpo, treegrpo, arpo, refuel) cannot restore it; "
                "set replay=allow when replaying the calls so far on a fresh server gives the same state, or stateless=true when the server "
                "keeps no state")

    def schemas(self) -> list[dict[str, Any]]:
        listed = self._listed()
        if missing := [name for name in self.offered if name not in listed]:
            raise ValueError(f"tools is {list(self.offered)}: {self._name()} has no {', '.join(missing)}; it has {', '.join(listed)}")
        return [schema for name, schema in listed.items() if not self.offered or name in self.offered]

    def names(self) -> list[str]:
        return [schema["function"]["name"] for schema in self.schemas()]

    def misfit(self, name: str, arguments: dict[str, Any]) -> str:
        from rtpo_ray.tools.mcp_session import wrong_arguments

        return wrong_arguments(self._listed()[name]["function"]["parameters"], arguments)

    def run(self, name: str, arguments: dict[str, Any]) -> str:
        text, failed = self._connected().call(name, arguments, self.seconds)
        if len(text) > self.output_chars:
            text = f"{text[:self.output_chars]} ... ({len(text)} characters)"
        if not self.stateless:
            self.calls.append((name, json.dumps(arguments, sort_keys=True), text, failed))
        if failed:
            raise ToolError(text)
        return text

    def close(self) -> None:
        self._closed = True
        if self._server is not None:
            self._server.close()

    def _name(self) -> str:
        command, args, _, url = self.address
        return f"MCP server {url or ' '.join((command, *args))}"

    def _listed(self) -> dict[str, dict[str, Any]]:
        """The function schemas of the server's tools by name; they are asked for once a process."""
        from rtpo_ray.tools.mcp_session import LISTINGS

        if self.address not in LISTINGS:
            LISTINGS[self.address] = self._connected().schemas
        return LISTINGS[self.address]

    def _connected(self) -> Any:
        from rtpo_ray.tools.mcp_session import Server, shared_server

        if self._closed:
            raise ToolServerError(f"{self._name()}: a call after the episode was closed")
        if self.stateless:
            return shared_server(self.address, self._name(), self.start_seconds)
        if self._server is None:
            self._server = Server(self.address, self._name(), self.start_seconds)
            recorded, self.calls = self.calls, []
            for call in recorded:
                self._replay(call)
        return self._server

    def _replay(self, recorded: tuple[str, str, str, bool]) -> None:
        """Make a call of before on the fresh server."""
        name, arguments, text, failed = recorded
        try:
            self.run(name, json.loads(arguments))
        except ToolError:
            pass  # it may have been an error before; `calls` tells
        if self.calls[-1] != recorded:
            again = self.calls[-1][2]
            self._server.lose("its calls gave other results when they were replayed")
            raise ToolServerError(f"{self._name()}: replaying {name}({arguments}) gave {again[:200]!r}, but it gave {text[:200]!r} before; "
                                  "the server is not deterministic, so leave replay=refuse and use a method that does not branch")
