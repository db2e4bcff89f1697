"""Give the embedded model tokens for tools: ``python -m vlm_grpo.data_scripts.make_tool_vlm``.

The embedded model's vocabulary has bytes and a few merges, so that a call is 80 tokens and the
description of a tool 600. The sibling that this command writes has the same weights, and one new
token for each text that all episodes of a recipe have in common: the description, and what stands
before and after the arguments of a call. Models for tools have such tokens, too. A new token's
embedding, which is also that of the output, is the mean of those of the tokens that it replaces.
It has learned nothing by that; supervised steps of the recipe teach it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from os.path import commonprefix
from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import AutoModelForImageTextToText

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.config.run import Settings
from vlm_grpo.data.loading import load_split
from vlm_grpo.data.mixed_task import load_run_task
from vlm_grpo.errors import UserError
from vlm_grpo.model.loading import get_model_source, load_prompt_builder
from vlm_grpo.task.episodes import EnvironmentRunner, demonstrate
from vlm_grpo.utils.atomic_io import create_whole_folder

COUNT = 64  #: Examples of a recipe whose episodes are compared
LEAST = 8  #: The shortest text, in characters, that gets its own token
MOST_WORDS = 8  #: Different arguments that get tokens of their own
ROLES = ("system", "user", "tool", "assistant")  #: Names in the chat template


def find_texts(settings: Settings) -> list[str]:
    """Return the texts that the prompts and the demonstrated calls of a recipe have in common."""
    builder = load_prompt_builder(settings)
    task = builder.adapt(load_run_task(settings))
    prompts, calls = list[str](), list[str]()
    with EnvironmentRunner() as runner:
        for example in load_split(settings, task, "train")[:COUNT]:
            own = task.resolve(example)[1]
            if own.environment is None:
                continue
            begun, start = runner.begin(own.environment, builder.with_resized_sizes(example))
            begun = builder.with_resized_sizes(begun)
            prompts.append(builder.write(begun, task)[0].text)
            calls += [turn.text for turn in demonstrate(runner, start, own, begun)]
    return [*share(prompts), *share(calls)]


def share(texts: Sequence[str]) -> list[str]:
    """Return the first and the last part that all texts have in common, and the parts between them
    if these are a few words.

    >>> share(["please move (1, 2)", "please move (3, 2)"])
    ['please move (']
    >>> share(["the way is up again", "the way is left again"])
    ['the way is ', ' again', 'left', 'up']
    """
    first = commonprefix(texts)  # noqa: RUF071, no paths
    last = commonprefix([text[len(first) :][::-1] for text in texts])[::-1]  # noqa: RUF071
    found = [text for text in (first, last) if len(text) >= LEAST]
    words = sorted({text[len(first) : len(text) - len(last)] for text in texts})
    is_few = len(words) <= MOST_WORDS and all(map(str.isalpha, words))
    return [*found, *(words if is_few else ())]


def build_tool_vlm(recipes: Iterable[str], out: Path) -> list[str]:
    """Write the sibling of the embedded model for some recipes; return the texts of its tokens."""
    every = [load_settings(recipe, ["model=embedded", "data.train_limit=64"]) for recipe in recipes]
    found = (text for settings in every for text in find_texts(settings))
    texts = list(dict.fromkeys((*ROLES, *found)))
    source = get_model_source("embedded")
    processor = load_prompt_builder(every[0]).processor
    model = AutoModelForImageTextToText.from_pretrained(source, local_files_only=True)
    tokenizer = processor.tokenizer
    parts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in texts])
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        means = [embedding[ids].mean(dim=0) for ids in parts]
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        for text, mean in zip(texts, means, strict=True):
            model.get_input_embeddings().weight[tokenizer.convert_tokens_to_ids(text)] = mean
    with create_whole_folder(out) as folder:
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
    return texts


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the process's exit status."""
    parser = argparse.ArgumentParser(description="Give the embedded model tokens for tools.")
    parser.add_argument("recipes", nargs="+", help="recipes with an environment")
    parser.add_argument("--out", type=Path, required=True, help="folder to create")
    arguments = parser.parse_args(argv)
    try:
        texts = build_tool_vlm(arguments.recipes, arguments.out)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {arguments.out}; each of these texts is one token now:")
    for text in texts:
        print(repr(text))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
