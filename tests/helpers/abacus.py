"""A taskset of verifiers v1, with images, tools that share a state, and rewards that read it."""

# pyright: reportMissingImports=false

import base64
import io

import verifiers.v1 as vf
from mcp_types import ImageContent, TextContent
from PIL import Image

__all__ = ["AbacusTaskset"]


def draw(width, color):
    """Return the base64 data of an image."""
    Image.new("RGB", (width, 64), color).save(data := io.BytesIO(), "PNG")
    return base64.b64encode(data.getvalue()).decode()


class Data(vf.TaskData):
    answer: str


class Beads(vf.State):
    pushed: int = 0


class AbacusTools(vf.Toolset[vf.ToolsetConfig, Beads]):
    TOOL_PREFIX = "abacus"

    async def setup_task(self, task):
        self.goal = task.answer

    @vf.tool
    async def push(self, count: int) -> str:
        """Push some beads."""
        if count < 0:
            raise ValueError("no bead goes back")
        self.state.pushed += count
        return f"{self.state.pushed} of {self.goal}"

    @vf.tool
    def look(self):
        """Look at the beads."""
        image = ImageContent(
            type="image", data=draw(64 * (1 + self.state.pushed), "red"), mime_type="image/png"
        )
        return [TextContent(type="text", text="here"), image]


class Config(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()
    bonus: float = 1.0


class AbacusTask(vf.Task[Data, Beads, Config]):
    @classmethod
    def toolsets(cls, config):
        return [AbacusTools(config.tools)]

    @vf.reward(weight=1.0)
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def pushed(self, task, trace):
        exact = float(trace.state.pushed == int(task.answer))
        return {"exact": exact, "some": self.config.bonus * float(trace.state.pushed > 0)}

    @vf.metric
    async def turns(self, trace) -> float:
        return trace.num_turns


class AbacusConfig(vf.TasksetConfig):
    num_tasks: int = 4
    task: Config = Config()


class AbacusTaskset(vf.Taskset[AbacusTask, AbacusConfig]):
    def load(self):
        for number in range(self.config.num_tasks):
            url = f"data:image/png;base64,{draw(64, (20 * number, 0, 0))}"
            parts = [
                {"type": "text", "text": f"Push {number} beads."},
                {"type": "image_url", "image_url": {"url": url}},
            ]
            prompt = [vf.UserMessage(content=parts)]
            data = Data(prompt=prompt, system_prompt="You push beads.", answer=str(number))
            yield AbacusTask(data, self.config.task)
