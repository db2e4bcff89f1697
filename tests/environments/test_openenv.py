"""Sessions of an OpenEnv server: its own, where the package is installed, and one that stands in
for it, whose observations were recorded from openenv 0.10."""

import importlib.util
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from accelerate.utils.other import get_free_port
from processes import is_listening, wait_for
from small_environments import EXAMPLE, see, write

from vlm_grpo.errors import UserError
from vlm_grpo.task.episodes import EnvironmentRunner
from vlm_grpo.task.registry import load_environment, load_task
from vlm_grpo.types import EpisodeTurn
from vlm_grpo.utils import trust

HELPERS = Path(__file__).parents[1] / "helpers"
STAND_IN = '''
"""In place of openenv.core, without a network: its "server" is a folder with a file per session."""
import base64, io, os, random
from types import SimpleNamespace
from PIL import Image

SCHEMA = {"properties": {"number": {"type": "integer"}}, "required": ["number"], "type": "object"}

class GenericEnvClient:
    def __init__(self, base_url):
        self.folder, most, self.chance = base_url.removeprefix("http://").rsplit("_", 2)
        if len(os.listdir(self.folder)) >= int(most):
            raise RuntimeError("Server at capacity")
        self.file = os.path.join(self.folder, str(random.random()))
        open(self.file, "w").close()

    def sync(self):
        return self

    def close(self):
        os.path.exists(self.file) and os.remove(self.file)

    def reset(self, **row):
        self.opened, self.letters = [], f"{row['question']} {len(row.get('images', ()))}"
        shown = {"metadata": {}, "message": f"There are 4 doors. {row['seed']}"}
        return SimpleNamespace(observation=shown, reward=None)

    def step(self, action):
        if action["type"] == "list_tools":
            tool = {"name": "open_door", "description": "Open a door.", "input_schema": SCHEMA}
            return SimpleNamespace(observation={"metadata": {}, "tools": [tool]}, reward=None)
        number = action["arguments"]["number"]
        seen = {"metadata": {}, "tool_name": action["tool_name"], "result": None, "error": None}
        if not 0 <= number < 4:
            text = f"Error calling tool 'open_door': there is no door {number}"
            seen["error"] = {"error_type": "execution_error", "message": text}
            return SimpleNamespace(observation=seen, reward=0.0)
        self.opened.append(number)
        Image.new("RGB", (64, 32 * len(self.opened)), "yellow").save(data := io.BytesIO(), "PNG")
        chance = f" {random.random()}" if self.chance == "random" else ""
        text = f"doors {self.opened} of {self.letters}{chance}"
        data = base64.b64encode(data.getvalue()).decode()
        image = {"type": "image", "data": data, "mimeType": "image/png"}
        content = [{"type": "text", "text": text, "annotations": None, "meta": None}, image]
        seen["result"] = {"content": content, "structured_content": None, "is_error": False}
        return SimpleNamespace(observation=seen, reward=number / 2)
'''
NOBODY = {"name": "openenv", "url": "http://localhost:1"}
IS_INSTALLED = importlib.util.find_spec("openenv") is not None
RUNS = [
    "stand-in",
    pytest.param("openenv", marks=pytest.mark.skipif(not IS_INSTALLED, reason="needs openenv")),
]


@pytest.fixture(params=RUNS)
def serve(request, tmp_path, monkeypatch):
    """Return a context in which a server that allows some sessions runs, and gives its URL."""
    if request.param == "stand-in":
        package = tmp_path / "openenv"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "core.py").write_text(STAND_IN)
        monkeypatch.syspath_prepend(tmp_path)
        for name in [n for n in sys.modules if n.partition(".")[0] == "openenv"]:
            monkeypatch.delitem(sys.modules, name)

    @contextmanager
    def run(most: int, chance: str = "fixed"):
        if request.param == "stand-in":
            (folder := tmp_path / "sessions").mkdir(exist_ok=True)
            yield f"http://{folder}_{most}_{chance}"
            return
        port = get_free_port()
        command = [sys.executable, str(HELPERS / "openenv_server.py"), str(port), str(most), chance]
        with subprocess.Popen(command, env={**os.environ, "NO_PROXY": "*"}) as server:
            try:
                wait_for(lambda: is_listening(port))
                yield f"http://127.0.0.1:{port}"
            finally:
                server.kill()

    yield run
    if request.param == "stand-in":
        for name in ("openenv.core", "openenv"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize(("most", "sessions"), [(8, 64), (1, 64), (1, 0)])
def test_each_episode_has_its_own_session_or_repeats_its_calls(serve, most, sessions):
    with serve(most) as url, EnvironmentRunner(seconds=60.0) as runner:
        options = {"name": "openenv", "url": url, "sessions": sessions, "send_images": True}
        task = load_task("counting", environment=options)
        (described,) = task.environment.describe(EXAMPLE)
        assert described["function"]["parameters"]["properties"] == {"number": {"type": "integer"}}
        example, start = runner.begin(task.environment, EXAMPLE)
        assert example.question == "Where?\nThere are 4 doors. 3904355907"  # crc32(b"a")
        texts = [write("open_door", number=n) for n in (1, 2, 7)]
        first, second, third = runner.step([start.state] * 3, texts)
        seen, refused = see(first[2]), see(third[2])
        assert (seen.text, seen.reward) == ("doors [1] of Where? 1<image>", 0.5)
        assert seen.images[0].size == (64, 32)
        assert "there is no door 7" in refused.text
        assert refused.is_error
        # A state that goes on twice, as branches of a fork do; and one after a refused call.
        states = [first[0], first[0], second[0], third[0]]
        steps = runner.step(states, [write("open_door", number=n) for n in (3, 0, 2, 1)])
        shown = [see(observed).text.partition(" of")[0] for *_, observed in steps]
        assert shown == ["doors [1, 3]", "doors [1, 0]", "doors [2, 2]", "doors [1]"]
        turns = [EpisodeTurn("", call, see(shown)) for _, call, shown in (first, third, second)]
        assert task.score("3", example, turns=turns).rewards["server_reward"] == 1.5


def test_a_server_that_answers_by_chance_is_only_asked_once(serve):
    with serve(8, "random") as url, EnvironmentRunner(2, seconds=60.0) as runner:
        environment = load_environment({"name": "openenv", "url": url})
        _, start = runner.begin(environment, EXAMPLE)
        states, texts = [start.state] * 3, [write("open_door", number=1)] * 3
        for _ in range(2):  # sessions stay open where they are, in two processes
            states = [state for state, *_ in runner.step(states, texts)]
        with pytest.raises(UserError, match="in another way when they are repeated"):
            runner.step([states[0]] * 2, texts[:2])
        seeds = {see(environment.begin(replace(EXAMPLE, id=own))).text for own in "ab"}
    assert len(seeds) == 2  # rows with other ids get other seeds


def test_without_a_server_its_package_or_consent_there_is_one_message(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "openenv.core", None)
    with pytest.raises(UserError, match=r"pip install 'vlm-grpo\[openenv\]'"):
        load_environment(NOBODY)
    monkeypatch.setattr(trust, "_everything", False)  # a command before may have trusted all
    trust.note({"url": "http://unknown"}, "recipe.yaml")
    with pytest.raises(UserError, match=r"recipe.yaml names a server that gets the rows"):
        load_environment({"name": "openenv", "url": "http://unknown"})


@pytest.mark.skipif(not IS_INSTALLED, reason="needs openenv")
def test_a_server_that_does_not_run_is_named():
    with pytest.raises(UserError, match="http://localhost:1 does not answer"):
        load_environment(NOBODY)
