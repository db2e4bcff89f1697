"""Single results in the formats of the evaluations of VLM-R1, R1-V and lmms-eval."""

from __future__ import annotations

from typing import Any


def vlm_r1_result(question: str, gold: list[int], output: str, **more: Any) -> dict[str, Any]:
    """Return a result as src/eval/test_rec_r1.py of VLM-R1 writes it."""
    prompt = f"Please provide the bounding box coordinate of the region this describes: {question}"
    return {
        "image": "train2014/7.jpg",
        "question": prompt,
        "ground_truth": gold,
        "model_output": output,
        "input_size": [240, 320],  # height and width, half of the original
        "image_size": [480, 640],
        "extracted_answer": [0, 0, 0, 0],
        "correct": 0,
        **more,
    }


def r1_v_result(image: str, gold: Any, output: str) -> dict[str, Any]:
    """Return a result as src/eval/test_qwen2vl_counting_superclevr.py of R1-V writes it."""
    return {
        "question": {"image_path": image, "question": "How many items?", "ground_truth": gold},
        "ground_truth": gold,
        "model_output": output,
        "extracted_answer": None,
    }


def lmms_eval_sample(number: int, question: str, **more: Any) -> dict[str, Any]:
    """Return a sample as save_results_samples of lmms-eval writes it."""
    return {
        "doc_id": number,
        "target": "['EXIT']",
        "doc_hash": "0" * 64,
        "anls": 1.0,
        "input": f"{question}\nAnswer the question using a single word or phrase.",
        **more,
    }
