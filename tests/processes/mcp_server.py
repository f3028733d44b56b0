"""An MCP server for tests: `python mcp_server.py`, or `python mcp_server.py PORT` for streamable HTTP on 127.0.0.1."""

import os
import sys
import time

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ImageContent, TextContent

server = MCPServer("test")
counted = 0


@server.tool()
def count(by: int = 1) -> str:
    """Count further."""
    global counted
    counted += by
    return str(counted)


@server.tool()
def echo(text: str, times: int = 1) -> str:
    """Say it again."""
    return text * times


@server.tool()
def fail(text: str) -> str:
    """Fail."""
    raise ToolError(text)


@server.tool()
def hang() -> str:
    """Give no answer."""
    time.sleep(600)
    return "late"


@server.tool()
def crash() -> str:
    """Die."""
    print("that was too much", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
def process() -> str:
    """The server's process."""
    return str(os.getpid())


@server.tool()
def variable(name: str) -> str:
    """One of its environment."""
    return os.environ.get(name, "not set")


@server.tool()
def picture() -> list[TextContent | ImageContent]:
    """A text and a picture."""
    return [TextContent(text="look"), ImageContent(data="AAAA", mime_type="image/png")]


if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run("stdio")
