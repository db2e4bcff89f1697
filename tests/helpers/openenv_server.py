"""An OpenEnv server, for a process of its own: python openenv_server.py PORT SESSIONS [random]."""

# pyright: reportMissingImports=false

import io
import random
import sys

import uvicorn
from fastmcp import FastMCP
from fastmcp.utilities.types import Image as ShownImage
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State
from PIL import Image


class Shown(Observation):
    message: str = ""


class Doors(MCPEnvironment):
    """Doors, which are opened one after another; what is behind them is drawn."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("doors")
        self.opened, self.earned, self.letters = [], 0.0, ""

        @server.tool(output_schema=None)
        def open_door(number: int):
            """Open a door and look behind it."""
            if not 0 <= number < 4:
                raise ValueError(f"there is no door {number}")
            self.opened.append(number)
            self.earned = number / 2
            image = Image.new("RGB", (64, 32 * len(self.opened)), "yellow")
            image.save(data := io.BytesIO(), "PNG")
            chance = f" {random.random()}" if "random" in sys.argv else ""
            text = f"doors {self.opened} of {self.letters}{chance}"
            return [text, ShownImage(data=data.getvalue(), format="png")]

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, question="", images=(), **kwargs):
        self.opened, self.letters = [], f"{question} {len(images)}"
        return Shown(message=f"There are 4 doors. {seed}", done=False)

    async def step_async(self, action, **kwargs):
        self.earned = 0.0
        observation = await super().step_async(action, **kwargs)
        observation.reward = self.earned
        return observation

    def _step_impl(self, action, **kwargs):
        return Observation(done=False)

    @property
    def state(self):
        return State(step_count=len(self.opened))


if __name__ == "__main__":
    most = int(sys.argv[2])
    app = create_app(Doors, CallToolAction, CallToolObservation, max_concurrent_envs=most)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
