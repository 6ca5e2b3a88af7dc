"""A HUD environment with tools: an MCP server that it runs and publishes as a capability."""

import asyncio
import socket

import uvicorn
from fastmcp import FastMCP
from hud.capabilities import Capability
from hud.graders import EvaluationResult

from hud import Environment

env = Environment(name="cards")
tools = FastMCP("cards")
hidden = {}
looked = []


@tools.tool
def look(place: str) -> str:
    """Look at the card in a place."""
    looked.append(place)
    if place not in hidden:
        raise ValueError(f"there is no card in {place}")
    return hidden[place]


@env.initialize
async def start():
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    app = tools.http_app(path="/mcp")
    env.server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    env.serving = asyncio.create_task(env.server.serve(sockets=[listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
    env.add_capability(Capability.mcp(name="table", url=url))


@env.shutdown
async def stop():
    env.server.should_exit = True
    await env.serving


@env.template()
async def find(card: str, place: str):
    """Rewards the place of a card; each look at another place costs 0.1."""
    hidden.update({place: card})
    answer = yield f"where is {card}?"
    reward = float((answer or "").strip() == place) - 0.1 * (len(looked) - looked.count(place))
    yield EvaluationResult(reward=reward, content=answer, info={"looked": list(looked)})
