"""Multi-turn rollouts: token assembly, formats, tools, a tool loop and a chat endpoint."""

from everburn.agentic.assembly import Assembled, Call, TraceIntegrityError, assemble
from everburn.agentic.endpoint import ChatEndpoint, chat_endpoint
from everburn.agentic.formats import Format, FormatError, RendererFormat, TextFormat
from everburn.agentic.messages import Message, Reply, ToolCall
from everburn.agentic.tool_loop import Episode, Limits, run_tool_loop
from everburn.agentic.tools import Tool, ToolResult
from everburn.usercode.threads import in_thread

__all__ = [
    "Assembled",
    "Call",
    "ChatEndpoint",
    "Episode",
    "Format",
    "FormatError",
    "Limits",
    "Message",
    "RendererFormat",
    "Reply",
    "TextFormat",
    "Tool",
    "ToolCall",
    "ToolResult",
    "TraceIntegrityError",
    "assemble",
    "chat_endpoint",
    "in_thread",
    "run_tool_loop",
]
