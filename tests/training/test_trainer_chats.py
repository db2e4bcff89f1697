"""A run on chats: what the model is trained on is what the rows say, in training and evaluation."""

from typing import Any

from dataset_files import png, write_files
from small_runs import make_trainer, read_metrics, save_tiny_model

from vlm_grpo.eval.predict import Predictor
from vlm_grpo.training.trainer import train
from vlm_grpo.utils.jsonl import read_rows


def make_chat(number: int) -> dict[str, Any]:
    texts = ["<image>Which letter?", "A.", f"And in <image>, on line {number}?", "b"]
    roles = ["user", "assistant"] * 2
    turns = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    return {"messages": turns, "images": ["a.png", "b.png"], "hint": f"Line {number}."}


def test_a_run_is_trained_and_evaluated_on_chats(settings, tmp_path):
    rows = [make_chat(number) for number in range(4)]
    system = {"role": "system", "content": "Look twice."}
    rows[0]["messages"] = [system, *rows[0]["messages"]]
    write_files(tmp_path, {"a.png": png(56, 28), "b.png": png(28, 84), "rows.jsonl": rows})
    source = str(tmp_path / "rows.jsonl")
    data = {"train": source, "eval": source, "train_limit": None}
    prompt = {"system": "Be brief.", "template": "{{ meta.hint }} {{ question }}"}
    optim = {"max_steps": 2, "prompts_per_step": 4}
    train(run := settings(data=data, optim=optim, evaluation={"every": 2}, prompt=prompt))
    by_id = {row["id"]: row for row in read_rows(run.run_dir / "samples/step-000000.jsonl")}
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    for number in range(4):
        row = by_id[f"row-{number + 1}"]
        assert row["prompt"] == (
            f"<|im_start|>system\n{'Be brief.' if number else 'Look twice.'}<|im_end|>\n"
            f"<|im_start|>user\n{image}Which letter?<|im_end|>\n"
            "<|im_start|>assistant\nA.<|im_end|>\n"
            f"<|im_start|>user\nLine {number}. And in {image}, on line {number}?<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        assert (row["gold"], row["sizes"]) == ("b", [[56, 28], [28, 84]])
        roles = [turn["role"] for turn in row["history"]]
        assert roles == ["system"] * (not number) + ["user", "assistant"]
    metrics = read_metrics(run.run_dir)
    assert len(metrics) == 2
    assert all(row["grad_norm"] > 0 for row in metrics)
    assert "eval/letters" in metrics[-1]


def test_a_thinking_that_the_prompt_opens_is_known_to_the_whole_run(settings, tmp_path):
    model = save_tiny_model(tmp_path / "model")
    with (model / "chat_template.jinja").open("a") as template:
        template.write("{% if add_generation_prompt %}<think>\n{% endif %}")
    data = {"eval": "embedded:ocr", "eval_limit": 2}
    trainer = make_trainer(settings(model=str(model), data=data))
    predictor = Predictor(str(model), task="ocr")
    tasks = [trainer.task, trainer.sampler.task, trainer.evaluator.task, predictor.task]
    example = trainer.train_examples[0]
    assert [task.read("Let me see</think>abc", example) for task in tasks] == ["abc"] * 4
    assert [task.read("Let me see", example) for task in tasks] == [None] * 4
