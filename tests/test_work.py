"""Fixed small steps do no more work than recorded: operations, reads, passes and bytes."""

import json

import torch
from work_counts import RECORDED, count_memory, count_work, measure_all


def test_fixed_steps_do_no_more_work_than_recorded():
    recorded = json.loads(RECORDED.read_text())
    # Without AVX-512, oneDNN reorders no weights in bfloat16, and rollouts take more products.
    has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # noqa: SLF001
    found = measure_all(("float32", "bfloat16")[: 1 + has_bfloat16])
    assert len(found) == 4 + 5 * (1 + has_bfloat16)
    more = [
        f"{step}: {name} {recorded['counts'][step][name]} → {count}"
        for step, counts in found.items()
        for name, count in counts.items()
        if count > recorded["counts"][step][name]
    ]
    remedy = (
        f"recorded with {recorded['versions']}; if this is intended, run "
        "python tests/helpers/work_counts.py and commit tests/recorded/work.json"
    )
    assert not more, "\n".join([*more, remedy])


def test_the_peak_is_of_storages_that_are_held_at_once():
    weight, counts = torch.ones(100), dict[str, int]()
    with count_memory(counts):
        first = weight.view(10, 10) + 1  # 400 bytes; the weight is not counted
        second = first.double()  # 800 more
        del first, second
        weight.add_(1)
        weight.half().mul_(2)  # 200
    assert counts == {"peak_bytes": 1200}


def test_operations_and_reads_of_the_host_are_counted():
    values = torch.arange(6.0)
    with count_work() as counts:
        torch.add(values, 1)
    assert counts == {"operations": 1, "host_reads": 0}
    for read in (
        lambda: values.sum().item(),
        lambda: bool(values.any()),
        lambda: values.tolist(),
        lambda: values[values > 2],
        lambda: values.nonzero(),
    ):
        with count_work() as counts:
            read()
        assert counts["host_reads"] == 1
